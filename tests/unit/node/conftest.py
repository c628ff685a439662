"""Clients of these tests wait for nodes that are slow because the machine is."""

from tests.pace import patience, stalls

__all__ = ["patience", "stalls"]
