"""All of these tests load the machine themselves, and none is about its speed."""

from __future__ import annotations

from tests.pace import timeout

__all__ = ["timeout"]
