"""The port that every fabric implements: it reads bytes from a peer's published memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead


class Fabric(Protocol):
    """Reads bytes from a peer's published memory. Called from any thread."""

    name: str

    def reaches(self, member: Member) -> bool:
        """Return whether this fabric can read from that peer; may try, never raises."""

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Fill the destinations in page order by `deadline` (time.monotonic seconds).

        Never raises for external failures. After it returns nothing writes to a destination.
        """

    def close(self) -> None:
        """Release connections and mappings, after the reads in flight."""


@runtime_checkable
class RegistersMemory(Protocol):
    """A fabric that reads faster into memory that was registered before."""

    def register(self, name: str, address: int, length: int, owner: object) -> Callable[[], None]:
        """Start to register memory, in the background; return a function that ends that.

        name: a description of the memory, for operators.
        owner: kept alive until then: the memory must not be freed before.
        """
