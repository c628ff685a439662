"""Block events: both encodings that engines have used, and batches that are damaged in part."""

from __future__ import annotations

import contextlib

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.errors import RemoteProtocolError
from peercache.events.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode,
    encode,
    frames_of,
    sequence_of,
)

packed = msgspec.msgpack.encode
STORED = BlockStored((11, 22), None, (1, 2, 3, 4), 2)

hashes = st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=32), max_size=4).map(tuple)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    """Blocks with tokens that fit them."""
    names, size = draw(hashes), draw(st.integers(1, 4))
    count = len(names) * size
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    parent = draw(st.none() | st.integers(0, 2**64 - 1))
    group = draw(st.none() | st.integers(0, 3))
    lora = draw(st.sampled_from(["", "adapter"]))
    kind, window = draw(st.sampled_from([("", 0), ("mamba", 0), ("sliding_window", 128)]))
    width = draw(st.integers(0, 2)) if names else 0
    row = st.lists(st.integers(0, 9), min_size=width, max_size=width).map(tuple)
    ahead = tuple(draw(row) for _ in names) if width else ()
    return BlockStored(
        names, parent, tuple(tokens), size, "GPU", lora, (), group, kind, window, ahead
    )


removed = st.builds(BlockRemoved, hashes, st.sampled_from(["GPU", "CPU"]), st.none() | st.just(1))


@given(st.lists(stored() | removed | st.just(AllBlocksCleared())), st.none() | st.integers(0, 9))
def test_what_is_encoded_is_decoded(events: list[BlockEvent], rank: int | None) -> None:
    """Every event, hashes of both kinds, and the rank."""
    batch = EventBatch(1.5, tuple(events), rank)
    assert decode(encode(batch)) == batch


@pytest.mark.parametrize(
    ("extra", "reported"),
    [
        (("a", "a"), {"cache_salt": "a"}),
        (("a", None), {"extra_keys": [["a"], None]}),
        (("a", "b"), {"extra_keys": [["a"], ["b"]]}),
    ],
)
def test_what_blocks_depend_on_is_reported(
    extra: tuple[str | None, ...], reported: dict[str, object]
) -> None:
    """One salt of all of them as such, for Dynamo; a reader distinguishes all of them."""
    payload = encode(EventBatch(1.0, (attrs.evolve(STORED, extra=extra),)))

    event = msgspec.msgpack.decode(payload)[1][0]
    assert {name: event[name] for name in ("cache_salt", "extra_keys") if name in event} == reported
    (read,) = decode(payload).events
    assert isinstance(read, BlockStored)
    assert [one is None for one in read.extra] == [one is None for one in extra]
    assert len(set(read.extra)) == len(set(extra))


def test_events_may_be_arrays() -> None:
    """Earlier versions of vLLM leave the names of fields out, and fields at the end."""
    array = ["BlockStored", [11, 22], None, [1, 2, 3, 4], 2, None, "GPU", None, None]
    batch = decode(packed([1.0, [array, ["BlockRemoved", [11], "GPU"], ["AllBlocksCleared"]], 3]))

    assert batch == EventBatch(1.0, (STORED, BlockRemoved((11,)), AllBlocksCleared()), 3)
    assert decode(packed([1.0, [array[:6]]])) == EventBatch(1.0, (STORED,))


def test_fields_of_later_versions_are_passed_over() -> None:
    """And an adapter's number stands for its name where there is no name."""
    event = {
        "type": "BlockStored", "block_hashes": [11, 22], "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": 7, "novelty": {"a": [1]},
    }  # fmt: skip
    assert decode(packed([1, [event], None])).events[0] == BlockStored(
        (11, 22), None, (1, 2, 3, 4), 2, lora="7"
    )


def test_what_else_a_block_depends_on_distinguishes_it_from_others() -> None:
    """VLLM reports it by block, SGLang a salt for all; blocks without it stay as they are."""
    event = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": [5, 6], "block_size": 1, "lora_id": None,
    }  # fmt: skip

    def extra(**more: object) -> tuple[str | None, ...]:
        (one,) = decode(packed([1.0, [event | more]])).events
        assert isinstance(one, BlockStored)
        return one.extra

    assert extra(extra_keys=[None, None]) == () == extra(cache_salt=None)
    image = extra(extra_keys=[["image", 0], None])
    assert image[0]
    assert image[1] is None
    salts = {extra(cache_salt="a"), extra(cache_salt="b"), extra(extra_keys=[["a"], ["a"]])}
    assert len(salts) == 3


def test_an_adapter_is_notified_once() -> None:
    """VLLM repeats its name before the keys of each block, which stay as they are without it."""
    event = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": [5, 6], "block_size": 1, "lora_id": 7, "lora_name": "french",
    }  # fmt: skip

    def extra(*keys: object) -> tuple[str | None, ...]:
        (one,) = decode(packed([1.0, [event | {"extra_keys": keys}]])).events
        assert isinstance(one, BlockStored)
        assert one.lora == "french"
        return one.extra

    assert extra(["french"], ["french"]) == ()
    image, none = extra(["french", "image"], ["french"])
    assert (image, none) == (extra(["image"], None)[0], None)


def test_a_group_of_layers_may_leave_blocks_out() -> None:
    """And report the tokens of all, also if it keeps no block at all."""
    for kept in ([], [1]):
        event = ["BlockStored", kept, None, [1, 2, 3, 4], 2, None, "GPU", None, None, 1, "mamba"]
        (one,) = decode(packed([1.0, [event]])).events
        reported = BlockStored(tuple(kept), None, (1, 2, 3, 4), 2, group=1, kind="mamba")
        assert one == reported


AHEAD = {
    "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
    "token_ids": [1, 2], "block_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (["BlockMoved", [1]], "BlockMoved"),
        (7, "neither a map nor an array"),
        ([], "neither a map nor an array"),
        (["BlockStored", [1.5], None, [1], 1], "hashes"),
        (["BlockStored", [1], None, [1, 2], 1], "2 tokens in 1 blocks of 1"),
        (["BlockStored", [1], None, [1, 2, 3], 2], "3 tokens in 1 blocks of 2"),
        (["BlockStored", [1, 2], None, [1], 1], "1 tokens in 2 blocks of 1"),
        (["BlockStored", [1], None, ["a"], 1], "token ids"),
        (["BlockStored", [1], None, [True], 1], "token ids"),
        (["BlockStored", [1], None, [-1], 1], "token ids"),
        (["BlockStored", [1], None, [2**32], 1], "token ids"),
        (["BlockStored", [1], None, [1], -1], "block size"),
        (["BlockStored", [1], None, [1], 0], "1 tokens in 1 blocks of 0"),
        (["BlockStored", [1], None, [1], 0, None, "CPU"], "1 tokens in 1 blocks of 0"),
        (["BlockStored", [1], None, [], 0], "0 tokens in 1 blocks of 0"),
        (["BlockStored", [1], {}, [1], 1], "hashes"),
        (["BlockRemoved", None], "hashes"),
        (["BlockRemoved", [1], 5], "medium"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, [None, None]], "extra keys"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, None, "x"], "group"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, None, 0, 5], "kind"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, None, 0, "x", "y"], "window"),
        (AHEAD | {"lookahead_token_ids": 5}, "lookahead"),
        (AHEAD | {"lookahead_token_ids": [[3]]}, "lookahead"),
        (AHEAD | {"lookahead_token_ids": [[3], 4]}, "lookahead"),
        (AHEAD | {"lookahead_token_ids": [[3], [4, 5]]}, "lookahead"),
        (AHEAD | {"lookahead_token_ids": [[3], ["4"]]}, "lookahead"),
        (AHEAD | {"lookahead_token_ids": [[3], [-4]]}, "lookahead"),
    ],
)
def test_a_damaged_event_costs_no_other(event: object, why: str) -> None:
    """A router that loses a batch for one event believes in blocks that are gone."""
    batch = decode(packed([1.0, [["AllBlocksCleared"], event, ["BlockRemoved", [1], "GPU"]]]))

    assert batch.events == (AllBlocksCleared(), BlockRemoved((1,)))
    assert len(batch.skipped) == 1
    assert why in batch.skipped[0]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        packed(7),
        packed([1.0]),
        packed([1.0, {}]),
        packed(["now", []]),
        packed([1.0, [], "0"]),
        packed([True, []]),
        b"\x91" * 3000,
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """With one kind of error, whatever is wrong."""
    with pytest.raises(RemoteProtocolError):
        decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    """A stranger may publish at an endpoint that is followed."""
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode(payload), EventBatch)


def test_a_sequence_has_eight_bytes() -> None:
    """Big-endian, as vLLM sends it."""
    frames = frames_of(258, b"payload", b"topic")

    assert frames == [b"topic", bytes(6) + b"\x01\x02", b"payload"]
    assert sequence_of(frames[1]) == 258
    with pytest.raises(RemoteProtocolError, match="7 bytes"):
        sequence_of(bytes(7))
