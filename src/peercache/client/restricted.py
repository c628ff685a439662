"""The fabric of a client whose certificate names namespaces: its home node's memory, and no other.

Mapped memory is open as a whole, so such a client reads other nodes over tcp, which serves pages of
its namespaces only. Its home node's memory it writes, so that is mapped anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from peercache.fabric.port import Fabric
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead


@final
class HomeOnly:
    """Reads through a fabric from the home node only. Implements `Fabric`."""

    def __init__(self, fabric: Fabric, is_home: Callable[[int], bool]) -> None:
        """Use `fabric` for incarnations that are `is_home`."""
        self.name = fabric.name
        self._fabric = fabric
        self._is_home = is_home

    def reaches(self, member: Member) -> bool:
        """Return whether the member is the home node, and can be read."""
        return self._is_home(member.incarnation) and self._fabric.reaches(member)

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Read pages of the home node."""
        return self._fabric.read(read, deadline)

    def close(self) -> None:
        """Close the fabric."""
        self._fabric.close()
