"""Block events of stored pages: what a router reads, and when blocks are withdrawn."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from peercache.connector import followed_blocks
from peercache.connector.block_events import block_stored
from peercache.connector.followed_blocks import FollowedBlocks
from peercache.connector.metadata import StoredPages
from peercache.content.chain import Chain, page_keys_of, token_ids
from peercache.events.blocks import (
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode,
    encode,
)
from peercache.events.following import NodeChanges
from peercache.model.records import CHANGE, GONE, IN_FILES, IN_MEMORY

CHAIN = Chain("m", "int8", 2, {})
DIGESTS = CHAIN.digests(range(20))
KEYS: list[bytes] = page_keys_of(DIGESTS).tolist()


def pages(first: int, end: int) -> StoredPages:
    """Return pages of one prompt, as a connector reports them."""
    parent = DIGESTS[first - 1].tobytes() if first else None
    chosen, ids = DIGESTS[first:end], token_ids(range(first * 2, end * 2))
    return StoredPages(chosen, parent, ids, 2, {}, page_keys_of(chosen))


def named(*numbers: int) -> list[Any]:
    """Return the names of these blocks."""
    return [followed_blocks.block_stored(pages(at, at + 1)).hashes[0] for at in numbers]


class Nodes:
    """Nodes that report what a test defines."""

    def __init__(self) -> None:
        """Report nothing yet."""
        self._batches: queue.Queue[NodeChanges] = queue.Queue()
        self._is_given = False

    def next(self, timeout_s: float) -> NodeChanges | None:
        """Return what is reported next."""
        if self._is_given:
            self._is_given = False
            self._batches.task_done()  # A second question means that it was applied.
        try:
            batch = self._batches.get(timeout=min(timeout_s, 0.01))
        except queue.Empty:
            return None
        self._is_given = True
        return batch

    def report(
        self,
        node: str,
        *changes: tuple[int, int],
        again: bool = False,
        is_gone: bool = False,
        is_whole: bool = True,
    ) -> None:
        """Report (page, tier) changes, and wait until they are applied."""
        rows = np.array([(KEYS[page], 1, tier) for page, tier in changes], CHANGE)
        self._batches.put(
            NodeChanges(node=node, again=again, is_gone=is_gone, is_whole=is_whole, changes=rows)
        )
        self._batches.join()


class Router:
    """A publisher that keeps what is published, and knows what a router would."""

    def __init__(self, *_: Any, present: Any, **__: Any) -> None:
        """Keep the source of a resync."""
        self.present = present
        self.removed: list[Any] = []
        self.known: set[Any] = set()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Apply events."""
        for event in events:
            assert isinstance(event, (BlockStored, BlockRemoved))
            if isinstance(event, BlockStored):
                self.known |= set(event.hashes)
            else:
                self.removed += event.hashes
                self.known -= set(event.hashes)

    def close(self) -> None:
        """Keep everything."""


class Rig:
    """Followed blocks between nodes and a router, with a clock of their own."""

    def __init__(self, blocks_max: int) -> None:
        """Begin."""
        self.nodes, self.now = Nodes(), 100.0
        self.blocks = FollowedBlocks(
            "", self.nodes, blocks_max=blocks_max, unseen_s=10.0, clock=lambda: self.now
        )
        self.router: Any = self.blocks.publisher


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return a rig; its parameter: blocks_max."""
    monkeypatch.setattr(followed_blocks, "BlockPublisher", Router)
    rig = Rig(getattr(request, "param", 1000))
    with rig.blocks:
        yield rig


def test_a_block_goes_with_the_last_node_that_holds_it(rig: Rig) -> None:
    """Wherever it is, and with one event for those that go together."""
    rig.blocks.stored(pages(0, 4))
    rig.nodes.report("a", *[(page, IN_MEMORY) for page in range(4)], again=True)
    rig.nodes.report("b", (1, IN_FILES), again=True)
    rig.nodes.report("a", (0, IN_FILES), (1, GONE), (2, GONE), (3, GONE))
    assert rig.router.removed == named(2, 3) or rig.router.removed == named(3, 2)

    rig.nodes.report("b", (1, GONE))
    assert rig.router.known == set(named(0))


def test_a_dead_node_takes_its_blocks_along(rig: Rig) -> None:
    """But not those that another node holds, or that come back."""
    rig.blocks.stored(pages(0, 3))
    rig.nodes.report("a", (0, IN_MEMORY), (1, IN_MEMORY), (2, IN_MEMORY), again=True)
    rig.nodes.report("b", (1, IN_MEMORY), again=True)
    rig.nodes.report("a", again=True, is_gone=True, is_whole=False)
    assert rig.router.known == set(named(1))

    # Restarted from its disk: routers learn of them again.
    rig.nodes.report("a", (0, IN_FILES), again=True)
    assert rig.router.known == set(named(0, 1))


def test_a_node_that_begins_again_is_believed_when_it_has_reported_all(rig: Rig) -> None:
    """Until then what it held may still be there; another node's drop does not decide it."""
    rig.blocks.stored(pages(0, 3))
    rig.nodes.report("a", (0, IN_MEMORY), (1, IN_MEMORY), (2, IN_MEMORY), again=True)
    rig.nodes.report("b", (2, IN_MEMORY), again=True)

    rig.nodes.report("a", (0, IN_MEMORY), again=True, is_whole=False)
    rig.nodes.report("b", (2, GONE))
    assert rig.router.removed == []

    rig.nodes.report("a", (2, IN_MEMORY))
    assert rig.router.removed == named(1)
    assert rig.router.known == set(named(0, 2))


def test_a_page_that_no_node_ever_reports_goes_after_a_while(rig: Rig) -> None:
    """It was evicted before it was reported as stored, or is at no node that is followed."""
    rig.nodes.report("a", (0, IN_MEMORY), again=True)
    rig.blocks.stored(pages(0, 3))
    rig.now += 9.0
    # That an earlier copy went shows nothing of the one that was just stored.
    rig.nodes.report("a", (1, GONE))
    assert rig.router.removed == []

    rig.nodes.report("a", (1, IN_MEMORY))
    rig.now += 2.0
    rig.nodes.report("a")
    assert rig.router.removed == named(2)

    rig.nodes.report("a", (2, IN_MEMORY))
    assert rig.router.known == set(named(0, 1, 2))


def test_nothing_is_withdrawn_before_any_node_has_reported_something(rig: Rig) -> None:
    """A cluster that cannot be followed yet reports nothing of its pages."""
    rig.blocks.stored(pages(0, 2))
    rig.now += 60.0
    rig.nodes.report("gone", again=True, is_gone=True, is_whole=False)
    rig.nodes.report("a", (0, IN_MEMORY), again=True, is_whole=False)
    assert rig.router.removed == []

    rig.nodes.report("a")
    assert rig.router.removed == named(1)


@pytest.mark.parametrize("rig", [3], indirect=True)
def test_what_is_remembered_is_bounded(rig: Rig) -> None:
    """The blocks that were stored longest ago are withdrawn: a router cannot rely on them."""
    rig.blocks.stored(pages(0, 2))
    rig.blocks.stored(pages(5, 7))
    assert rig.router.removed == named(0)

    rig.blocks.stored(pages(1, 2))
    rig.blocks.stored(pages(8, 9))
    assert rig.router.removed == named(0, 5)


def test_a_resync_reports_parents_first_and_only_what_is_there(rig: Rig) -> None:
    """A parent that was stored again after its child is reported before it."""
    rig.blocks.stored(pages(0, 3))
    rig.blocks.stored(pages(0, 1))
    rig.nodes.report("a", *[(page, IN_MEMORY) for page in range(3)], again=True)
    rig.nodes.report("a", (2, GONE))

    events = list(rig.router.present())

    assert [event.hashes[0] for event in events] == named(0, 1)
    assert events[0].tokens == (0, 1)
    assert (events[0].parent, events[1].parent) == (None, events[0].hashes[0])


def reported_of(first: int, pages: int, salts: dict[str, str]) -> StoredPages:
    chain = Chain("m", "int8", 2, salts)
    digests, ids = chain.digests(range(10)), token_ids(range(10))
    parent = digests[first - 1].tobytes() if first else None
    end = first + pages
    chosen = digests[first:end]
    return StoredPages(
        chosen, parent, ids[first * 2 : end * 2], 2, chain.salts, page_keys_of(chosen)
    )


def test_events_chain_and_travel() -> None:
    """A later event's parent is the last block of the one before, and every field is read again."""
    events = [block_stored(reported_of(0, 3, {})), block_stored(reported_of(3, 2, {}))]

    assert events[0].parent is None
    assert events[1].parent == events[0].hashes[-1]
    assert (events[0].tokens, events[1].tokens) == ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9))
    assert all(0 <= number < 2**63 for event in events for number in event.hashes)
    assert len({number for event in events for number in event.hashes}) == 5
    read = decode(encode(EventBatch(1.0, tuple(events))))
    assert (read.events, read.skipped) == (tuple(events), ())


def test_salts_are_reported() -> None:
    """An adapter has a field of its own; other salts keep blocks of the same tokens apart."""
    event = block_stored(reported_of(0, 2, {"lora": "x", "tenant": "t"}))

    assert (event.lora, event.extra) == ("x", ("tenant=t", "tenant=t"))
    assert not set(event.hashes) & set(block_stored(reported_of(0, 2, {})).hashes)
