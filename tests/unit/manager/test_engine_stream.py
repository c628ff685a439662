"""The events of an engine: nothing is reported of it that was not followed without a gap."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.events.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode,
)
from peercache.manager.engine_stream import AWAY, JOINED_LATE, Batch, EngineStream
from peercache.manager.gpu_blocks import GpuBlocks

BLOCK = 2


def batch(*events: BlockEvent) -> bytes:
    return encode(EventBatch(0.5, events))


def stored(at: int) -> bytes:
    """Return the batch that stores the block of this number behind the one before."""
    return batch(BlockStored((at,), at - 1 if at else None, (at,) * BLOCK, BLOCK))


CLEARED = batch(AllBlocksCleared())


class Engine:
    """An engine that stores one more block with each batch, and can send some of them again."""

    def __init__(self, *, kept: int = 0, has_replay: bool = True) -> None:
        self.blocks = GpuBlocks(["e"])
        self.published = 0
        self.kept = kept
        self.answers = True
        self.stream = EngineStream("e", self.blocks, replay=self.replay if has_replay else None)

    def replay(self, first: int) -> Sequence[Batch] | None:
        if not self.answers:
            return None
        begin = max(first, self.kept)
        return [(at, stored(at)) for at in range(begin, self.published)]

    def publish(self, count: int = 1, *, arrives: bool = True) -> None:
        for _ in range(count):
            at, self.published = self.published, self.published + 1
            if arrives:
                self.stream.take(at, stored(at))

    @property
    def found(self) -> tuple[str, int]:
        tokens = [at for at in range(self.published) for _ in range(BLOCK)]
        reported = self.blocks.find(np.array(tokens, np.uint32))[0]
        return reported.why, reported.prefix_tokens // BLOCK


@pytest.fixture
def engine() -> Engine:
    return Engine(has_replay=False)


def test_an_engine_is_followed_from_its_first_event(engine: Engine) -> None:
    """Without a replay endpoint, too, if it is connected before it publishes anything."""
    engine.stream.connected()
    assert engine.found == (JOINED_LATE, 0)
    engine.publish(3)
    assert engine.found == ("", 3)


def test_an_engine_that_has_begun_is_unknown_until_it_clears(engine: Engine) -> None:
    engine.publish(2, arrives=False)
    engine.stream.connected()
    engine.publish(2)
    assert engine.found == (JOINED_LATE, 0)
    engine.stream.take(engine.published, CLEARED)
    assert engine.found == ("", 0)


def test_what_was_published_before_is_sent_again() -> None:
    """Both that of before the connection, and what was missed; nothing is applied twice."""
    engine = Engine()
    engine.publish(2, arrives=False)
    engine.stream.connected()
    assert engine.found == ("", 2)
    engine.stream.take(1, b"1")
    engine.publish(2, arrives=False)
    engine.publish()
    assert engine.found == ("", 5)
    # What comes again behind a replay is no new beginning, nor asked for once more.
    engine.kept = 2
    engine.stream.take(3, b"3")
    engine.stream.take(4, b"4")
    assert engine.found == ("", 5)


@pytest.mark.parametrize("way", ["no endpoint", "no answer", "too old"])
def test_a_gap_that_nothing_fills_makes_it_unknown(way: str) -> None:
    engine = Engine(has_replay=way != "no endpoint")
    engine.stream.connected()
    engine.publish(2)
    engine.answers = way != "no answer"
    engine.publish(3, arrives=False)
    engine.kept = 4 if way == "too old" else 0
    engine.publish()
    assert engine.found == ("its events 2 to 4 were missed: known once it clears its cache", 0)
    assert len(engine.blocks) == 0
    engine.publish(2)
    assert engine.found[1] == 0
    engine.stream.take(engine.published, CLEARED)
    assert engine.found == ("", 0)


def test_a_dead_engine_has_nothing_and_begins_again(engine: Engine) -> None:
    engine.publish(3)
    engine.stream.disconnected()
    assert engine.found == (AWAY, 0)
    engine.published = 0
    engine.stream.connected()
    engine.publish(2)
    assert engine.found == ("", 2)


def test_a_restart_without_an_end_of_the_connection(engine: Engine) -> None:
    """A number that goes back is another process: what it had before is gone."""
    engine.publish(4)
    engine.published = 0
    engine.publish(1)
    assert engine.found == ("", 1)
    assert len(engine.blocks) == 1


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"spoilt", "a batch of its events cannot be read"),
        (msgspec.msgpack.encode([0.5, [["BlockRemoved"]]]), "an event of it cannot be read"),
        (msgspec.msgpack.encode([0.5, [["BlockMoved", [1]]]]), "an event of it cannot be read"),
    ],
)
def test_what_cannot_be_read_makes_it_unknown(engine: Engine, payload: bytes, why: str) -> None:
    """It may have removed a block."""
    engine.publish(2)
    engine.stream.take(2, payload)
    assert engine.found[0].startswith(why)
    assert engine.found[1] == 0


def test_only_gpu_memory_counts(engine: Engine) -> None:
    engine.publish(2)
    elsewhere = [
        BlockStored((2,), 1, (2, 2), BLOCK, medium="CPU_PINNED"),
        BlockStored((3,), 1, (2, 2), BLOCK, medium="CPU_PINNED", group=1),
        BlockRemoved((0,), medium="CPU_PINNED"),
    ]
    engine.stream.take(2, batch(*elsewhere))
    engine.published = 3
    assert engine.found == ("", 2)
    engine.stream.take(3, batch(BlockRemoved((1,), group=0)))
    assert engine.found == ("", 1)


def test_blocks_of_an_offloading_connector_do_not_make_an_engine_unknown(engine: Engine) -> None:
    """VLLM sends them without tokens and with a block size of 0: they are in host memory."""
    engine.publish(2)
    offloaded = {
        "type": "BlockStored", "block_hashes": [b"chunk"], "parent_block_hash": None,
        "token_ids": [], "block_size": 0, "lora_id": None, "medium": "CPU", "lora_name": None,
    }  # fmt: skip
    gone = {"type": "BlockRemoved", "block_hashes": [b"chunk"], "medium": "CPU"}
    engine.stream.take(2, msgspec.msgpack.encode([0.5, [offloaded, gone]]))
    assert engine.found == ("", 2)


FULL, WINDOW = "full_attention", "sliding_window"


def of_group(group: int, kind: str, window: int, first: int, *kept: int, until: int) -> BlockStored:
    """Return an event of blocks `first` to `until` of which a group keeps some."""
    tokens = [at for at in range(first, until) for _ in range(BLOCK)]
    return BlockStored(
        kept, first - 1 if first else None, tuple(tokens), BLOCK,
        group=group, kind=kind, window=window,
    )  # fmt: skip


def test_a_hybrid_engine_has_a_prefix_once_all_its_groups_have_what_it_needs(
    engine: Engine,
) -> None:
    """The window's group is reported first, without its early blocks: the other has its place."""
    engine.published = 4
    window = of_group(0, WINDOW, 5, 0, 2, 3, until=4)
    whole = of_group(1, FULL, 0, 0, 0, 1, 2, 3, until=4)
    engine.stream.take(0, batch(window, whole))
    assert engine.found == ("", 4)

    engine.stream.take(1, batch(BlockRemoved((2,), group=0)))
    assert engine.found == ("", 0)
    engine.stream.take(2, batch(of_group(0, WINDOW, 5, 2, 2, until=3)))
    assert engine.found == ("", 4)
    engine.stream.take(3, batch(BlockRemoved((3,), group=1)))
    assert engine.found == ("", 0)


def test_a_group_is_remembered_when_the_cache_is_cleared_and_not_when_the_engine_starts_again(
    engine: Engine,
) -> None:
    engine.published = 1
    whole = of_group(0, FULL, 0, 0, 0, until=1)
    window = of_group(1, WINDOW, 9, 0, 0, until=1)
    engine.stream.take(0, batch(whole, window))
    engine.stream.take(1, batch(AllBlocksCleared(), whole))
    assert engine.found == ("", 0)
    engine.stream.take(0, batch(whole))
    assert engine.found == ("", 1)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([of_group(0, "chunked_local_attention", 0, 0, 0, until=1)], "of the kind 'chunked_local"),
        ([of_group(0, WINDOW, 0, 0, 0, until=1)], "of the kind 'sliding_window'"),
        ([of_group(0, FULL, 0, 0, 0, until=1), of_group(1, "", 0, 0, 0, until=1)], "which kind"),
        ([of_group(0, WINDOW, 9, 0, 1, until=2)], "which blocks"),
        (
            [attrs.evolve(of_group(0, FULL, 0, 0, 0, until=1), group=at) for at in range(65)],
            "more than 64 groups",
        ),
    ],
)
def test_an_engine_whose_groups_cannot_be_followed_is_unknown(
    engine: Engine, events: list[BlockEvent], why: str
) -> None:
    """And again after it has cleared its cache."""
    engine.published = 1
    for at, more in enumerate([[], [AllBlocksCleared()]]):
        engine.stream.take(at, batch(*more, *events))
        reported, blocks = engine.found
        assert (why in reported, blocks) == (True, 0), reported


@pytest.mark.parametrize("joins", ["before the next batch", "with it", "after a gap"])
def test_a_replay_that_clears_the_cache_is_a_beginning(joins: str) -> None:
    """`BlockPublisher` numbers its batches by the clock, and clears the cache first."""
    first = 1_700_000_000_000_000
    sent = [(first, CLEARED), *((first + 1 + at, stored(at)) for at in range(3))]
    blocks = GpuBlocks(["e"])
    kept = sent[:3] if joins == "before the next batch" else sent
    stream = EngineStream("e", blocks, replay=lambda number: [x for x in kept if x[0] >= number])
    if joins == "after a gap":
        stream.take(7, CLEARED)
        stream.take(9, stored(0))
    elif joins == "before the next batch":
        stream.connected()
        assert blocks.is_known("e")
    stream.take(*sent[3])
    (found,) = blocks.find(np.array([0, 0, 1, 1, 2, 2], np.uint32))
    assert (found.why, found.prefix_tokens) == ("", 6)


def test_a_replay_from_later_on_without_a_clear_is_no_beginning() -> None:
    sent = [(4 + at, stored(at)) for at in range(3)]
    blocks = GpuBlocks(["e"])
    stream = EngineStream("e", blocks, replay=lambda _: sent)
    stream.connected()
    stream.take(7, stored(3))
    (found,) = blocks.find(np.array([0, 0], np.uint32))
    assert (found.why, found.prefix_tokens) == (JOINED_LATE, 0)


@given(st.lists(st.sampled_from(["arrives", "lost", "ends", "forgets", "answers", "silent"])))
def test_what_is_known_is_right(steps: list[str]) -> None:
    """Whatever is lost, an engine that is called known has exactly what it published."""
    engine = Engine()
    engine.stream.connected()
    for step in steps:
        if step in ("arrives", "lost"):
            engine.publish(arrives=step == "arrives")
        elif step == "ends":
            engine.stream.disconnected()
            engine.stream.connected()
        elif step == "forgets":
            # An engine keeps its last batches, however old they are.
            engine.kept = max(0, engine.published - 1)
        else:
            engine.answers = step == "answers"
        why, found = engine.found
        # What was lost last shows with the next batch.

        assert (found == 0) if why else found >= engine.published - steps.count("lost")
    engine.publish()
    why, found = engine.found
    assert found == (0 if why else engine.published)
