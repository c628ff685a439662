"""Every exception that PeerCache raises.

    PeerCacheError
    ├── DefiniteError          it did not and will not happen
    │   ├── ConfigError        a configuration name or value is wrong
    │   ├── PoolTooLarge       the memory for the pool is not there
    │   ├── AddressTaken       an address asked for by name is in use
    │   └── Rejected           the other side refused us: version, cluster, granule, geometry
    ├── IndefiniteError        it may have happened
    │   ├── PeerUnreachable    no connection, or no answer
    │   └── DeadlineExceeded   the time was up first
    └── ProtocolError          somebody broke the rules of the wire
        ├── LocalProtocolError    we did: a bug
        └── RemoteProtocolError   the peer did: dropped and counted

None of them crosses a batch call of a `Client`: there every error is a miss with a counted reason.
They do come out of constructors, where a person reads them.
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
    """We broke a rule of the wire: a bug of ours."""


@attrs.define(eq=False)
class RemoteProtocolError(ProtocolError):
    """A peer sent what no correct peer sends."""

    what: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"the peer broke the protocol: {self.what}"


@attrs.define(eq=False)
class ConfigError(DefiniteError):
    """A configuration name or value that cannot be used."""

    name: str
    problem: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"configuration '{self.name}': {self.problem}"


@attrs.define(eq=False)
class PoolTooLarge(DefiniteError):
    """The file system of `shm_dir` cannot hold the pool."""

    path: str
    wanted_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return (
            f"the pool needs {self.wanted_bytes} bytes in {self.path}, which has "
            f"{self.free_bytes} free: lower pool_size, or name another shm_dir"
        )


@attrs.define(eq=False)
class AddressTaken(DefiniteError):
    """Somebody else listens on an address that the configuration names."""

    name: str
    address: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"{self.name} = {self.address} is in use: stop its owner, or choose another"


@attrs.define(eq=False)
class Rejected(DefiniteError):
    """The other side refuses to work with us."""

    reason: str
    detail: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"refused ({self.reason}): {self.detail}"


@attrs.define(eq=False)
class PeerUnreachable(IndefiniteError):
    """No connection to a peer, or no answer from it."""

    peer: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"no answer from {self.peer}"


@attrs.define(eq=False)
class DeadlineExceeded(IndefiniteError):
    """The time that the caller gave was up."""

    what: str
    timeout_s: float

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return f"{self.what} did not finish within {self.timeout_s} s"
