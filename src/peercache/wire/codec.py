"""Envelopes to bytes and back.

An envelope is one CBOR array: [envelope version, cluster, sender, target, tag, field, field, …].
The decoder accepts integers, floats, booleans, strings, byte strings, arrays and one flat map, each
where a message declares it, and no other CBOR: no tags, no indefinite lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from operator import attrgetter
from typing import Any, NoReturn

import attrs
import cbor2

from peercache.errors import LocalProtocolError, RemoteProtocolError
from peercache.model.keys import TAG_BYTES, Tag, packed_tag
from peercache.model.member import Member
from peercache.wire.envelope import (
    ENVELOPE_VERSION,
    MESSAGES,
    UNKNOWN_CLUSTER,
    Envelope,
    versions_spoken,
)
from peercache.wire.messages.declared import Message

MESSAGE_BYTES_MAX = 256 * 1024
"""Largest control message, in both directions: 150 connections with incomplete messages hold 40 MB,
and decoding one takes at most a few milliseconds. Senders split larger content into several
messages."""

TEXT_MAX = 4096
"""Longest string: a path."""

LIST_MAX = 8192
"""Longest array: the reservations that a client lists."""

MEMBER_TEXT_MAX = 4096
"""Characters in all texts of one member together: one path, some addresses."""

ITEMS_MAX = 20_000
"""Most CBOR items of one message: a thousand members have 12,000. The 260,000 that fit into a
message of the largest size would take a tenth of a second to decode."""

_U64_MAX = 2**64 - 1


@attrs.define(eq=False)
class WrongVersion(RemoteProtocolError):
    """The envelope has a wire version that this process does not speak."""

    version: int = 0


@attrs.define(eq=False)
class WrongCluster(RemoteProtocolError):
    """The envelope belongs to another cluster. is_question: its sender asks for our cluster."""

    cluster: str = ""
    sender: int = 0
    is_question: bool = False


def encode(envelope: Envelope, *, cluster: str, request: int = 0) -> bytes:
    """Return the bytes of an envelope; raise LocalProtocolError if it is too large for peers.

    request: the number of the request, in place of that in the message; 0: no change.
    """
    message = envelope.message
    tag, fields_of = _FIELDS[type(message)]
    head = [ENVELOPE_VERSION, cluster, envelope.sender, envelope.target, tag, *fields_of(message)]
    if request:
        head[_REQUEST_PLACE[type(message)]] = request
    raw = cbor2.dumps(head)
    if len(raw) > MESSAGE_BYTES_MAX:
        what = type(message).__name__
        raise LocalProtocolError(
            f"a {what} of {len(raw)} bytes: its sender cuts at {MESSAGE_BYTES_MAX}"
        )
    return raw


def decode(raw: bytes, *, cluster: str) -> Envelope:
    """Return the envelope, or raise RemoteProtocolError with the problem."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a message of {len(raw)} bytes")
    if len(raw) > ITEMS_MAX:  # An item takes at least a byte, so shorter messages need no check.
        _count_items(raw)
    try:
        decoder = cbor2.CBORDecoder(
            BytesIO(raw),
            tag_hook=_no_tags,
            semantic_decoders=_NO_SEMANTICS,
            max_depth=5,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
        parts = decoder.decode()
        # `loads` would ignore bytes after the envelope.
        end = decoder.fp.tell()
    except RemoteProtocolError:
        raise
    except Exception as error:  # every way in which CBOR can be broken is the peer's fault
        raise RemoteProtocolError(f"not CBOR: {error}") from error
    if end != len(raw) or not isinstance(parts, list) or len(parts) < _HEAD_ITEMS:
        raise RemoteProtocolError("not an envelope")
    version, theirs, sender, target, tag = parts[:_HEAD_ITEMS]
    if version != ENVELOPE_VERSION or isinstance(version, bool):
        number = version if isinstance(version, int) else 0
        raise WrongVersion(
            f"wire version {version!r}, this build speaks {versions_spoken()}: "
            "upgrade the older side",
            version=number,
        )
    if theirs != cluster:
        name = theirs[:TEXT_MAX] if isinstance(theirs, str) else ""
        raise WrongCluster(
            f"cluster {name!r}, ours is {cluster!r}: name the same one with cluster",
            cluster=name,
            sender=_u64(sender),
            is_question=theirs == UNKNOWN_CLUSTER,
        )
    if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag < len(MESSAGES):
        raise RemoteProtocolError(f"no message has the tag {tag!r}")
    return Envelope(_u64(sender), _u64(target), _build(MESSAGES[tag], parts[_HEAD_ITEMS:]))


def _count_items(raw: bytes) -> None:
    """Walk over the heads of all items, without creating objects; raise if there are too many.

    The decoder detects all other damage; the walk always ends.
    """
    at = count = 0
    while at < len(raw):
        count += 1
        if count > ITEMS_MAX:
            raise RemoteProtocolError(f"more than {ITEMS_MAX} items")
        kind, length = raw[at] >> 5, raw[at] & 31
        at += 1
        if length >= 24:
            size = 1 << (length & 3)
            length = int.from_bytes(raw[at : at + size], "big")
            at += size
        if kind in (2, 3):  # Strings: their bytes are not items.
            at += length


def _build(kind: type[Any], values: list[Any]) -> Any:
    checks = _CHECKS[kind]
    if len(values) != len(checks):
        raise RemoteProtocolError(f"{kind.__name__} with {len(values)} fields, not {len(checks)}")
    return kind(*[check(value) for check, value in zip(checks, values, strict=True)])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Member):
        return _MEMBER_FIELDS(value)
    return value


def _no_tags(*_: object) -> NoReturn:
    raise RemoteProtocolError("a CBOR tag")


_NO_SEMANTICS = dict.fromkeys(
    [*range(6), *range(21, 40), 43000, 100, 256, 258, 260, 261, 1004, 55799], _no_tags
)


def _u64(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _U64_MAX:
        raise RemoteProtocolError(f"not an unsigned 64-bit number: {str(value)[:40]}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise RemoteProtocolError("not a boolean")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise RemoteProtocolError("not a finite number")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > TEXT_MAX:
        raise RemoteProtocolError("not a string, or too long")
    return value


def _blob(value: Any) -> bytes:
    if type(value) is not bytes:
        raise RemoteProtocolError("not a byte string")
    return value


def _blob_of(unit: int) -> Callable[[Any], bytes]:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) % unit:
            raise RemoteProtocolError(f"not a byte string of whole {unit}-byte items")
        return value

    return check


def _tag(value: Any) -> Tag:
    if type(value) is not bytes or len(value) != TAG_BYTES:
        raise RemoteProtocolError("not the tag of a namespace")
    return int.from_bytes(value, "little")


def _tuple_of(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def check_all(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > LIST_MAX:
            raise RemoteProtocolError("not an array, or too long")
        return tuple([check(item) for item in value])

    return check_all


def _member(value: Any) -> Member:
    if type(value) is not list:
        raise RemoteProtocolError("not a member")
    member: Member = _build(Member, value)
    if member.incarnation == 0 or member.state > 3:
        raise RemoteProtocolError("a member without incarnation, or in no known state")
    if sum([len(text) for text in value if type(text) is str]) > MEMBER_TEXT_MAX:
        raise RemoteProtocolError("a member with texts that are too long")
    return member


def _figures(value: Any) -> dict[str, int | float | str]:
    if type(value) is not dict or len(value) > LIST_MAX:
        raise RemoteProtocolError("not a map of figures")
    if not all(type(item) in (int, float, str) for item in value.values()):
        raise RemoteProtocolError("a figure that is no number and no string")
    return {_text(name): item for name, item in value.items()}


_BY_ANNOTATION: dict[str, Callable[[Any], Any]] = {
    "int": _u64,
    "bool": _flag,
    "float": _number,
    "str": _text,
    "bytes": _blob,
    "Tag": _tag,
    "Member": _member,
    "tuple[int, ...]": _tuple_of(_u64),
    "tuple[Member, ...]": _tuple_of(_member),
    "dict[str, int | float | str]": _figures,
}

# Packed byte strings are checked here for whole items, so that no actor has to.
_BY_NAME: dict[str, Callable[[Any], bytes]] = {
    "keys": _blob_of(16),
    "records": _blob_of(56),
    "drops": _blob_of(24),
    "lengths": _blob_of(8),
    "offsets": _blob_of(8),
    "checksums": _blob_of(8),
    "ages": _blob_of(8),
    "calls": _blob_of(5),
    "regions": _blob_of(24),
    "changes": _blob_of(24),
    "held": _blob_of(24),
}


def _check_for(field: attrs.Attribute[Any]) -> Callable[[Any], Any]:
    if field.name in _BY_NAME and str(field.type) == "bytes":
        return _BY_NAME[field.name]
    return _BY_ANNOTATION[str(field.type)]


def _reader_of(kind: type[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that returns the fields of a message in their CBOR form."""
    names = [field.name for field in attrs.fields(kind)]
    types = [str(field.type) for field in attrs.fields(kind)]
    if "Tag" in types:
        assert not any("tuple" in each or "Member" in each for each in types), kind
        place, values_of = types.index("Tag"), attrgetter(*names)

        def read(message: Any) -> list[Any]:
            values = list(values_of(message))
            values[place] = packed_tag(values[place])
            return values

        return read
    if len(names) < 2 or any("tuple" in each or "Member" in each for each in types):
        return lambda message: [_plain(getattr(message, name)) for name in names]
    # Nothing to convert: that applies to all messages of a node for a set.
    return attrgetter(*names)


_MEMBER_FIELDS = attrgetter(*(field.name for field in attrs.fields(Member)))
"""The fields of a member as a tuple: a view has a thousand of them."""

_HEAD_ITEMS = 5
"""Items of an envelope before the fields of its message."""

_FIELDS: dict[type[Message], tuple[int, Callable[[Any], Sequence[Any]]]] = {
    kind: (tag, _reader_of(kind)) for tag, kind in enumerate(MESSAGES)
}
"""The tag of each message class, and the function that returns its encoded fields."""

_REQUEST_PLACE: dict[type[Message], int] = {
    kind: _HEAD_ITEMS + names.index("request")
    for kind in MESSAGES
    if "request" in (names := [field.name for field in attrs.fields(kind)])
}
"""By request class: the index of its number among the items of the envelope."""

_CHECKS: dict[type[Any], tuple[Callable[[Any], Any], ...]] = {
    kind: tuple(_check_for(field) for field in attrs.fields(kind)) for kind in (*MESSAGES, Member)
}
