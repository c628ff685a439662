"""Every exception that PeerCache raises.

    PeerCacheError
    ├── DefiniteError          did not happen and will not
    │   ├── ConfigError        a configuration name or value is wrong
    │   ├── PoolTooLarge       the memory for the pool is missing
    │   ├── AddressTaken       a configured address is in use
    │   ├── BrokenInstallation a part is missing or stale, or another project mixes in
    │   ├── InvalidRequest     invalid tokens, shape or buffers
    │   └── Rejected           the peer refuses: version, cluster, granule, lock
    ├── IndefiniteError        may have happened
    │   ├── PeerUnreachable    no connection, or no answer
    │   └── DeadlineExceeded   the time was up first
    └── ProtocolError          a rule of the wire was broken
        ├── LocalProtocolError    by PeerCache: a bug
        └── RemoteProtocolError   by the peer: dropped and counted

No batch call of a `Client` raises them: there every error is a miss with a counted reason.
Constructors and commands raise them, for users to read the message.
"""

from __future__ import annotations

import attrs


class PeerCacheError(Exception):
    """Base of all exceptions of this package."""


class DefiniteError(PeerCacheError):
    """The operation did not happen and will not."""


class IndefiniteError(PeerCacheError):
    """The operation may or may not have happened."""


class ProtocolError(PeerCacheError):
    """A rule of the wire was broken."""


class LocalProtocolError(ProtocolError):
    """PeerCache broke a rule of the wire: a bug."""


@attrs.define(eq=False)
class RemoteProtocolError(ProtocolError):
    """A peer sent a message that no correct peer sends."""

    what: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"the peer broke the protocol: {self.what}"


class InvalidRequest(DefiniteError, ValueError):
    """Invalid tokens, shapes or buffers; a closed connector; a client in a forked process."""


@attrs.define(eq=False)
class ConfigError(DefiniteError):
    """A configuration name or value that cannot be used."""

    name: str
    problem: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"configuration '{self.name}': {self.problem}"


@attrs.define(eq=False)
class PoolTooLarge(DefiniteError):
    """The file system of `shm_dir` cannot hold the pool."""

    path: str
    wanted_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        """Return the message for users."""
        return (
            f"the pool needs {self.wanted_bytes} bytes in {self.path}, which has "
            f"{self.free_bytes} free: lower pool_size, or name another shm_dir"
        )


@attrs.define(eq=False)
class AddressTaken(DefiniteError):
    """Another process listens on an address that the configuration names."""

    name: str
    address: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"{self.name} = {self.address} is in use: stop its owner, or choose another"


@attrs.define(eq=False)
class BrokenInstallation(DefiniteError):
    """The package cannot work: a part is missing or stale, or another project mixes in."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"{self.problem}: {self.remedy}"


@attrs.define(eq=False)
class Rejected(DefiniteError):
    """The peer refuses this process, with a reason."""

    reason: str
    detail: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"refused ({self.reason}): {self.detail}"


@attrs.define(eq=False)
class PeerUnreachable(IndefiniteError):
    """No connection to a peer, or no answer from it."""

    peer: str

    def __str__(self) -> str:
        """Return the message for users."""
        return f"no answer from {self.peer}"


@attrs.define(eq=False)
class DeadlineExceeded(IndefiniteError):
    """The caller's deadline passed first."""

    what: str
    timeout_s: float

    def __str__(self) -> str:
        """Return the message for users."""
        return f"{self.what} did not finish within {self.timeout_s} s"
