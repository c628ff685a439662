"""Block events: batches of KV events as vLLM and SGLang publish them, encoded and decoded.

A batch travels as three frames of ZeroMQ: topic, sequence (8 bytes, big-endian), and msgpack
`[seconds, [event, …], rank]`. An event is a map with its name under "type" (vLLM and SGLang of
today), or an array that begins with its name (earlier versions). Unknown fields are ignored, and so
are events of an unknown kind: one event never makes a batch invalid. Needs the extra `events`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import msgspec

from peercache.content.chain import TOKEN_MAX, token_ids
from peercache.errors import InvalidRequest, RemoteProtocolError

GPU: Final = "GPU"
"""The medium of blocks in GPU memory; also the default of events that name no medium."""

SEQUENCE: Final = struct.Struct(">q")
SEQUENCE_END: Final = -1
"""Marks the end of a replay, in place of a sequence."""

Hash: TypeAlias = int | bytes | str
"""An engine's own name of a block: it only has a meaning for other events of this engine."""


@attrs.frozen
class BlockStored:
    """Consecutive blocks that hold the KV of tokens.

    hashes:       names of the blocks, in the order of the tokens.
    parent:       name of the block before the first one; None if they begin a prompt.
    tokens:       the token ids of all blocks. For a group of layers that keeps only some blocks,
                  those of all blocks; then the event does not show which blocks are kept.
    block_tokens: tokens in a block; 0 for blocks that are not on a GPU and come without tokens, as
                  vLLM's offloading connectors send them.
    medium:       the engine's name of the place where the blocks are; "" if it names none.
    lora:         the LoRA adapter, "" for none.
    extra:        for each block, what else it depends on (images, a salt), or None; empty if no
                  block has any.
    group:        the group of layers, in an engine with several groups; None: it has one.
    kind:         the kind of that group, as vLLM names it ("sliding_window"); "" if it is not
                  given.
    window:       tokens of a sliding window; 0: there is no window.
    ahead:        for each block, the following tokens that its hash also covers, the same number
                  for each; empty for none. With a draft model like EAGLE the last position of a
                  block depends on them.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_tokens: int
    medium: str = GPU
    lora: str = ""
    extra: tuple[str | None, ...] = ()
    group: int | None = None
    kind: str = ""
    window: int = 0
    ahead: tuple[tuple[int, ...], ...] = ()


@attrs.frozen
class BlockRemoved:
    """Blocks that are no longer in this medium. group: as in BlockStored; None: all groups."""

    hashes: tuple[Hash, ...]
    medium: str = GPU
    group: int | None = None


@attrs.frozen
class AllBlocksCleared:
    """The engine has no block any more."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@attrs.frozen
class EventBatch:
    """The events of one message, in their order.

    at:      seconds since 1970, by the publisher's clock.
    rank:    of the data-parallel rank; None: there is one.
    skipped: the reason for each event of the message that is not in `events`.
    """

    at: float
    events: tuple[BlockEvent, ...]
    rank: int | None = None
    skipped: tuple[str, ...] = ()


def encode(batch: EventBatch) -> bytes:
    """Return the third frame of a batch: events as maps, which all current readers accept."""
    return _encoded([batch.at, [_map_of(event) for event in batch.events], batch.rank])


def check(event: BlockEvent) -> None:
    """Raise InvalidRequest for an event that readers would reject, and its batch with it."""
    if isinstance(event, AllBlocksCleared):
        return
    if not isinstance(event, (BlockStored, BlockRemoved)):
        raise InvalidRequest(f"{event!r:.60} is no block event")
    hashes = list(event.hashes)
    if isinstance(event, BlockStored):
        tokens, size = len(token_ids(event.tokens)), event.block_tokens
        is_size = type(size) is int and size > 0
        if not is_size or not _fits(tokens, size, len(hashes), event.group):
            raise InvalidRequest(f"{tokens} tokens in {len(hashes)} blocks of {size!r:.40}")
        widths = {len(token_ids(one)) for one in event.ahead}
        if event.ahead and (len(event.ahead) != len(hashes) or len(widths) != 1):
            raise InvalidRequest("ahead has no row of equally many tokens for each block")
        hashes += [] if event.parent is None else [event.parent]
    for one in hashes:
        if type(one) is int and not -(2**63) <= one < 2**64:
            raise InvalidRequest(f"a block's hash has 64 bits, not the value {one:#x}"[:120])
        if type(one) not in (int, bytes, str):
            raise InvalidRequest(f"{one!r:.60} is no hash of a block")


def frames_of(sequence: int, payload: bytes, topic: bytes = b"") -> list[bytes]:
    """Return the three frames of a message."""
    return [topic, SEQUENCE.pack(sequence), payload]


def sequence_of(frame: bytes) -> int:
    """Return the sequence in a second frame; raise RemoteProtocolError."""
    if len(frame) != SEQUENCE.size:
        raise RemoteProtocolError(f"a sequence of {len(frame)} bytes, not {SEQUENCE.size}")
    number: int = SEQUENCE.unpack(frame)[0]
    return number


def decode(payload: bytes) -> EventBatch:
    """Return the batch in a third frame; raise RemoteProtocolError if it is invalid.

    An event that is invalid, or of an unknown kind, is left out, with a reason in `skipped`.
    """
    try:
        parts = _decoded(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"no msgpack: {error}") from None
    if not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[1], list):
        raise RemoteProtocolError("no array of a time and events")
    at, raw = parts[:2]
    rank = parts[2] if len(parts) > 2 else None
    if type(at) not in (int, float) or not (rank is None or type(rank) is int):
        raise RemoteProtocolError("a time that is no number, or a rank that is no integer")
    events: list[BlockEvent] = []
    skipped: list[str] = []
    for one in raw:
        event = _event_of(one)
        if isinstance(event, str):
            skipped.append(event)
        else:
            events.append(event)
    return EventBatch(float(at), tuple(events), rank, tuple(skipped))


class _NoEvent(Exception):
    """An event cannot be read."""


_STORED: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED: Final = ("block_hashes", "medium", "group_idx")
"""The fields of an event that is an array, after its name."""


def _event_of(raw: Any) -> BlockEvent | str:
    """Return an event, or why it is not one."""
    try:
        kind, fields = _named(raw)
        if kind == "BlockStored":
            return _stored_of(fields)
        if kind == "BlockRemoved":
            hashes = _hashes(fields.get("block_hashes"))
            return BlockRemoved(hashes, _medium(fields), _group(fields))
    except _NoEvent as problem:
        return str(problem)
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    return f"an event of the kind {str(kind)[:40]!r}"


def _named(raw: Any) -> tuple[Any, Mapping[Any, Any]]:
    """Return the kind and the fields of an event."""
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if isinstance(raw, list) and raw:
        names = _STORED if raw[0] == "BlockStored" else _REMOVED
        return raw[0], dict(zip(names, raw[1:], strict=False))
    raise _NoEvent("an event that is neither a map nor an array")


def _stored_of(fields: Mapping[Any, Any]) -> BlockStored:
    hashes, parent = _hashes(fields.get("block_hashes")), fields.get("parent_block_hash")
    tokens, block_tokens = fields.get("token_ids"), fields.get("block_size")
    if parent is not None:
        (parent,) = _hashes([parent])
    if not isinstance(tokens, list) or not _are_tokens(tokens):
        raise _NoEvent("token ids that are no integers of 32 bits")
    if type(block_tokens) is not int or block_tokens < 0:
        raise _NoEvent("a block size that is no number of tokens")
    medium, group = _medium(fields), _group(fields)
    is_bare = not tokens and not block_tokens and medium != GPU
    if not is_bare and not _fits(len(tokens), block_tokens, len(hashes), group):
        raise _NoEvent(f"{len(tokens)} tokens in {len(hashes)} blocks of {block_tokens}")
    lora_id, lora_name = fields.get("lora_id"), fields.get("lora_name")
    lora = lora_name if lora_name is not None else "" if lora_id is None else lora_id
    return BlockStored(
        hashes,
        parent,
        tuple(tokens),
        block_tokens,
        medium,
        str(lora),
        _extra(fields, len(hashes), lora_name),
        group,
        *_kind(fields),
        _ahead(fields, len(hashes)),
    )


def _fits(tokens: int, block_tokens: int, hashes: int, group: int | None) -> bool:
    """Return whether these numbers of blocks and tokens fit together.

    A group of layers leaves out blocks that it does not keep, but not their tokens.
    """
    if not block_tokens:
        return False
    blocks, rest = divmod(tokens, block_tokens)
    return not rest and (hashes == blocks or (hashes < blocks and group is not None))


def _are_tokens(raw: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one <= TOKEN_MAX for one in raw)


def _hashes(raw: Any) -> tuple[Hash, ...]:
    if not isinstance(raw, list) or not all(type(one) in (int, bytes, str) for one in raw):
        raise _NoEvent("invalid block hashes")
    return tuple(raw)


def _medium(fields: Mapping[Any, Any]) -> str:
    medium = fields.get("medium")
    if not isinstance(medium, (str, type(None))):
        raise _NoEvent("a medium that is no text")
    return GPU if medium is None else medium


def _group(fields: Mapping[Any, Any]) -> int | None:
    group = fields.get("group_idx")
    if not isinstance(group, (int, type(None))):
        raise _NoEvent("a group that is no number")
    return group


def _kind(fields: Mapping[Any, Any]) -> tuple[str, int]:
    """Return the kind of a group of layers, and its window in tokens."""
    kind = fields.get("kv_cache_spec_kind") or ""
    window = fields.get("kv_cache_spec_sliding_window") or 0
    if type(kind) is not str or type(window) is not int:
        raise _NoEvent("a kind of layers that is no text, or a window that is no number of tokens")
    return kind, window


def _extra(fields: Mapping[Any, Any], blocks: int, lora: Any) -> tuple[str | None, ...]:
    """Return what each block depends on in addition to its tokens, as a unique text.

    lora: the adapter's name or None. vLLM repeats it as the first of a block's keys.
    """
    salt, keys = fields.get("cache_salt"), fields.get("extra_keys")
    if keys is not None and (not isinstance(keys, list) or len(keys) != blocks):
        raise _NoEvent("extra keys that are not one a block")
    if keys and lora is not None:
        keys = [one[1:] if isinstance(one, list) and one[:1] == [lora] else one for one in keys]
    if not salt and not any(keys or ()):
        return ()
    raw = keys or [None] * blocks
    return tuple(repr((salt, one)) if salt or one else None for one in raw)


def _ahead(fields: Mapping[Any, Any], blocks: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens after each block that its hash covers."""
    raw = fields.get("lookahead_token_ids")
    if raw is None:
        return ()
    if (
        not isinstance(raw, list)
        or len(raw) != blocks
        or not all(isinstance(one, list) and len(one) == len(raw[0]) for one in raw)
        or not all(map(_are_tokens, raw))
    ):
        raise _NoEvent("lookahead tokens that are not equally many a block")
    return tuple(map(tuple, raw))


def _map_of(event: BlockEvent) -> dict[str, Any]:
    raw: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, BlockStored):
        # Current readers require these six fields, even with default values.
        raw |= {
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.tokens,
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": event.lora or None,
        }
        if event.extra:
            raw |= _extra_fields(event.extra)
    elif isinstance(event, BlockRemoved):
        raw |= {"block_hashes": event.hashes, "medium": event.medium}
    if not isinstance(event, AllBlocksCleared) and event.group is not None:
        raw["group_idx"] = event.group
    if isinstance(event, BlockStored) and event.kind:
        raw["kv_cache_spec_kind"] = event.kind
        raw["kv_cache_spec_sliding_window"] = event.window or None
    if isinstance(event, BlockStored) and event.ahead:
        raw["lookahead_token_ids"] = event.ahead
    return raw


def _extra_fields(extra: tuple[str | None, ...]) -> dict[str, Any]:
    """Return the field for what blocks depend on: a salt if all blocks have the same one.

    Dynamo's indexer separates salts and ignores lists of keys; for keys that are not lists it
    rejects the whole batch.
    """
    if None not in extra and len(set(extra)) == 1:
        return {"cache_salt": extra[0]}
    return {"extra_keys": [None if one is None else [one] for one in extra]}


_encoded: Callable[[Sequence[Any]], bytes] = msgspec.msgpack.Encoder().encode
_decoded: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
