"""A codec for whatever actors say to each other: messages, facts and effects as bytes.

Production hands facts over inside one loop and encodes none of them (ADR 0010). This codec exists
to show that nothing but values passes between actors: messages of the wire travel as on the wire,
everything else as the name of its class and its fields.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import attrs
import cbor2
import numpy as np

from peercache.actors import effects, mailboxes, origin, ports
from peercache.actors.channels import actor as channels
from peercache.model.hash_ring import HashRing
from peercache.model.member import Member
from peercache.wire import codec
from peercache.wire.envelope import MESSAGES, Envelope

CLUSTER = "contract"

_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for module in (channels, effects, mailboxes, origin, ports)
    for kind in vars(module).values()
    if isinstance(kind, type) and attrs.has(kind)
} | {"Member": Member}


class ActorCodec:
    """Encodes and decodes values; a ring travels as its members, and is made again."""

    def __init__(self, *, virtual_nodes: int, replicas: int | str) -> None:
        """Make rings with these settings."""
        self._virtual_nodes = virtual_nodes
        self._replicas = replicas

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        return cbor2.dumps(self._plain(value))

    def decode(self, raw: bytes) -> Any:
        """Return the value of these bytes: equal to what was encoded, and shared with nothing."""
        return self._value(cbor2.loads(raw))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, (int, float, str, bytes)) or value is None:
            return value
        if isinstance(value, (tuple, list)):
            return ["tuple", *map(self._plain, value)]
        if isinstance(value, np.ndarray):
            file = BytesIO()
            # What is between fields (of a seal, which takes a cache line) has no value.
            whole = np.zeros(value.shape, value.dtype)
            for field in value.dtype.names or (...,):
                whole[field] = value[field]
            np.save(file, whole, allow_pickle=False)
            return ["array", file.getvalue()]
        if isinstance(value, HashRing):
            return ["ring", list(value.members), list(value.hosts)]
        if type(value) in MESSAGES:
            return ["message", codec.encode(Envelope(0, 0, value), cluster=CLUSTER)]
        name = type(value).__name__
        assert _CLASSES.get(name) is type(value), f"{value!r} is no value that actors may say"
        return [name, *[self._plain(getattr(value, f.name)) for f in attrs.fields(type(value))]]

    def _value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        name, *parts = plain
        if name == "tuple":
            return tuple(map(self._value, parts))
        if name == "array":
            return np.load(BytesIO(parts[0]), allow_pickle=False)
        if name == "ring":
            members = dict(zip(*parts, strict=True))
            return HashRing(members, virtual_nodes=self._virtual_nodes, replicas=self._replicas)
        if name == "message":
            return codec.decode(parts[0], cluster=CLUSTER).message
        return _CLASSES[name](*map(self._value, parts))
