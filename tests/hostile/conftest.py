"""Clients of these tests wait for nodes that are slow because the machine is."""

from tests.pace import stalls, timeout

__all__ = ["stalls", "timeout"]
