"""Client locks: what the kernel shows about a client's process, without files."""

from __future__ import annotations

from peercache.errors import Rejected
from sims.places import Place


class SimLock:
    """A probe of one client's lock: held while its process is alive, paused or not."""

    def __init__(self, place: Place, name: str) -> None:
        """Probe a process."""
        self._place = place
        self._name = name

    def secret(self) -> bytes:
        """Return what the client has written into its file."""
        return secret_of(self._name)

    def is_held(self) -> bool:
        """Return whether the process is alive."""
        return self._place.alive

    def close(self, *, remove: bool) -> None:
        """Do nothing: there is no file."""


class Locks:
    """The lock files of all clients, by name."""

    def __init__(self) -> None:
        """Start without locks."""
        self._holders: dict[str, Place] = {}

    def hold(self, name: str, place: Place) -> None:
        """Lock a name as long as a process is alive."""
        self._holders[name] = place

    def probe(self, home: str, name: str) -> SimLock:
        """Open a lock file; Rejected if there is none."""
        holder = self._holders.get(name)
        if holder is None:
            raise Rejected("lock", f"cannot open {home}/{name}")
        return SimLock(holder, name)


def secret_of(name: str) -> bytes:
    """Return the secret of the client with this lock; no process of a run guesses one."""
    return name.encode()
