"""Block events of a connector, removals among them: a block that no node holds is withdrawn.

    with follow_cluster(target) as follower:
        blocks = FollowedBlocks("tcp://0.0.0.0:5557", follower, readers=["10.0.0.0/16"])
        metadata = ConnectorMetadata(…, on_stored=blocks.stored)

Needs the extra `events`.

Owns    the pages that connectors of this process have stored, and whether routers know them. Takes
stored pages, on threads of the connectors; changes of the nodes, on a thread of its own.
Keeps   routers know a block while a followed node holds its page, and for UNSEEN_S after the store;
        a node that restarts is trusted after a full resync.
Limits  blocks_max.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, final

import attrs
import numpy as np

from peercache.connector.block_events import MEDIUM, block_stored
from peercache.connector.metadata import StoredPages
from peercache.events.blocks import BlockRemoved, BlockStored, Hash
from peercache.events.following import ClusterFollower, Index, NodeChanges
from peercache.events.publishing import BlockPublisher
from peercache.model.records import GONE

BLOCKS_MAX: Final = 200_000
"""Remembered blocks, the latest ones: with 64 tokens each about 120 MB."""

UNSEEN_S: Final = 10.0
"""How long after its store a page may be missing at all followed nodes."""

TURN_S: Final = 0.2
"""How soon a close is noticed, or a page that no node reported."""


@attrs.define(eq=False)
class _Block:
    """One page as a block. tokens: uint32, packed. is_published: whether routers have it."""

    name: Hash
    parent: Hash | None
    tokens: bytes
    lora: str
    extra: tuple[str | None, ...]
    is_published: bool = True

    def stored(self) -> BlockStored:
        """Return the event that reports it."""
        tokens = tuple(np.frombuffer(self.tokens, np.uint32).tolist())
        return BlockStored(
            (self.name,), self.parent, tokens, len(tokens), MEDIUM, self.lora, self.extra
        )


@final
class FollowedBlocks:
    """Publishes stored pages, and pages that no node holds any more. A context manager."""

    def __init__(
        self,
        endpoint: str,
        changes: ClusterFollower,
        replay: str = "",
        *,
        topic: str = "",
        blocks_max: int = BLOCKS_MAX,
        unseen_s: float = UNSEEN_S,
        clock: Callable[[], float] = time.monotonic,
        readers: Sequence[str] = (),
    ) -> None:
        """Bind, and start to follow.

        endpoint, replay, topic, readers: as in `BlockPublisher`, which also raises the same
                                          exceptions.
        changes: only this object reads it; its owner closes it.
        """
        self._changes = changes
        self._blocks_max, self._unseen_s, self._clock = blocks_max, unseen_s, clock
        self._lock = threading.Lock()
        self._index = Index()
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        """By page key, in the order of their stores."""
        self._unseen: dict[bytes, float] = {}
        """Stored pages that no node has reported yet, and since when: oldest first."""
        self._partial: dict[str, set[bytes]] = {}
        """By node with an unfinished resync: the blocks that it held before."""
        self._publisher = BlockPublisher(
            endpoint, replay, topic=topic, present=self._present, readers=readers
        )
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peercache-blocks", daemon=True)
        self._thread.start()

    def __enter__(self) -> FollowedBlocks:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @property
    def publisher(self) -> BlockPublisher:
        """The publisher, for its endpoints and figures."""
        return self._publisher

    def stored(self, stored_pages: StoredPages) -> None:
        """Publish pages that were stored; never waits for a router."""
        event, now = block_stored(stored_pages), self._clock()
        rows = np.ascontiguousarray(stored_pages.tokens, np.uint32).reshape(
            -1, stored_pages.page_tokens
        )
        parents = (event.parent, *event.hashes[:-1])
        keys: list[bytes] = stored_pages.keys.tolist()
        with self._lock:
            for at, key in enumerate(keys):
                self._blocks.pop(key, None)
                self._blocks[key] = _Block(
                    event.hashes[at], parents[at], rows[at].tobytes(), event.lora, event.extra[:1]
                )
                self._unseen.pop(key, None)
                if not self._index.holders(key):
                    self._unseen[key] = now
            forgotten = []
            while len(self._blocks) > self._blocks_max:
                key, block = self._blocks.popitem(last=False)
                self._unseen.pop(key, None)
                if block.is_published:
                    forgotten.append(block.name)
            self._publisher.publish([event, *_removed(forgotten)])

    def close(self) -> None:
        """Send what is queued, and end both threads; bounded, may be repeated."""
        self._is_closing.set()
        self._thread.join()
        self._publisher.close()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing.is_set():
            batch = self._changes.next(TURN_S)
            with self._lock:
                if batch is not None:
                    self._take(batch)
                self._withdraw_unseen()

    def _take(self, batch: NodeChanges) -> None:
        """Apply the changes of a node, and publish the consequences."""
        if batch.again:
            before = self._index.pages(batch.node).keys() & self._blocks.keys()
            self._partial.setdefault(batch.node, set()).update(before)
        self._index.apply(batch)
        keys: list[bytes] = batch.changes["key"].tolist()
        perhaps_gone: set[bytes] = set()
        back: list[BlockStored] = []
        for key, tier in zip(keys, batch.changes["tier"].tolist(), strict=True):
            block = self._blocks.get(key)
            if block is None:
                continue
            if tier == GONE:
                perhaps_gone.add(key)
                continue
            self._unseen.pop(key, None)
            if not block.is_published and self._index.holders(key):
                block.is_published = True
                back.append(block.stored())
        if batch.is_gone or batch.is_whole:
            perhaps_gone |= self._partial.pop(batch.node, set())
        if back:
            self._publisher.publish(back)
        self._withdraw(perhaps_gone)

    def _withdraw(self, keys: Collection[bytes]) -> None:
        """Publish the removal of those of these blocks that no node holds, or may still hold."""
        names = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.is_published or key in self._unseen:
                continue
            if self._index.holders(key) or any(key in held for held in self._partial.values()):
                continue
            block.is_published = False
            names.append(block.name)
        self._publisher.publish(_removed(names))

    def _withdraw_unseen(self) -> None:
        """Withdraw pages that were stored a while ago, and that no node reports any more."""
        nodes = self._index.nodes()
        if not nodes or self._partial:
            return  # The state of the nodes is not known completely yet.
        until = self._clock() - self._unseen_s
        late = []
        for key, since in self._unseen.items():
            if since > until:
                break
            late.append(key)
        for key in late:
            del self._unseen[key]
        if late:
            self._withdraw(late)

    def _present(self) -> Iterable[BlockStored]:
        """Return the blocks that routers should know, each after its parent."""
        with self._lock:
            stored_pages = [block for block in self._blocks.values() if block.is_published]
        return _parents_first(stored_pages)


def _removed(names: Collection[Hash]) -> list[BlockRemoved]:
    return [BlockRemoved(tuple(names), MEDIUM)] if names else []


def _parents_first(blocks: Collection[_Block]) -> Iterator[BlockStored]:
    """Yield the blocks by their depth: a router drops one whose parent it has not learned of."""
    names = {block.name for block in blocks}
    children: dict[Hash | None, list[_Block]] = {}
    for block in blocks:
        children.setdefault(block.parent if block.parent in names else None, []).append(block)
    layer = children.pop(None, [])
    while layer:
        yield from (block.stored() for block in layer)
        layer = [child for block in layer for child in children.pop(block.name, [])]
