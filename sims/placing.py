"""The cost of placement in a large cluster: messages, bytes and pages that a node sends a second.

Each node is its production pool and its production placement actor, on one virtual clock. Messages
are encoded to count their bytes and take LATENCY_S; a page takes the time of its bytes; the shards
acknowledge records at once. All nodes know each other, as no view changes meanwhile.

Some nodes store blocks all the time, at full pools; the others store nothing (`half`), or there are
no others (`all`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, final

import attrs
import numpy as np

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPlacement,
    NotifyPool,
    NotifyPublisher,
    Pull,
    Send,
)
from peercache.actors.mailboxes import (
    TAKER,
    PagesCommitted,
    PullDone,
    RecordsChanged,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import Placement
from peercache.actors.placement.offers import Offers
from peercache.actors.pool.actor import Pool
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.records import keys_of
from peercache.wire.codec import encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.membership import RequestRoom
from peercache.wire.messages.pool import RESERVED, Commit, Committed, Granted, Reserve

HALF, ALL = "half", "all"

BLOCK_BYTES: Final = 2**16
POOL_BLOCKS: Final = 256
BATCH: Final = 8
BATCHES_A_SECOND: Final = 4
"""A node that stores fills its pool in eight seconds."""

LATENCY_S: Final = 0.0005
NETWORK: Final = 25e9 / 8
RATE: Final = 2**30
"""Of `placement_rate`: far more than is stored."""

BEGIN_S: Final = 20.0
"""By then the pools of those that store are full, and pages have moved to the others."""

WATCHED_S: Final = 10.0

IDS: Final = 2**63
CLIENT: Final = Origin(2**32, 1)
SELF: Final = Origin(0)


@final
@attrs.define(eq=False)
class Node:
    """One node. due: when its placement actor ticks next. sent: messages and bytes of placement."""

    pool: Pool
    placement: Placement
    held: dict[bytes, int] = attrs.field(factory=dict)
    """The generation of each page that it holds."""
    due: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    stored: int = 0


@attrs.frozen
class Cost:
    """What placement costs a node a second, on average; most: the busiest node's messages.

    moved: pages that were taken by another node; part: of those that were stored.
    """

    nodes: int
    storing: str
    messages: float
    most: float
    kilobytes: float
    moved: float
    part: float

    def cells(self) -> tuple[str, ...]:
        """Return the figures as cells of a table."""
        return (
            f"{self.nodes:,}",
            self.storing,
            f"{self.messages:.1f}",
            f"{self.most:.1f}",
            f"{self.kilobytes:.2f} KB",
            f"{self.moved:.1f}",
            f"{100 * self.part:.0f} %",
        )


@final
@attrs.define(eq=False)
class Placing:
    """A cluster of so many nodes."""

    count: int
    storing: str = HALF
    seed: int = 1
    now: float = 0.0
    nodes: list[Node] = attrs.field(factory=list)
    _due: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list)
    _number: int = 0

    def play(self) -> Cost:
        """Store for a while, and return the cost of the end of it."""
        members = tuple(_member(number) for number in range(self.count))
        for number in range(self.count):
            self.nodes.append(_node(number, random.Random(f"{self.seed}/{number}")))
            self._place(number, SELF, ViewChanged(members))
        busy = self.count if self.storing == ALL else self.count // 2
        rng = random.Random(self.seed)
        for number in range(busy):
            self._at(rng.uniform(0.0, 1 / BATCHES_A_SECOND), partial(self._store, number))
        self._run(BEGIN_S)
        before = [(n.sent, n.sent_bytes, n.placement.spilling.progress.moved) for n in self.nodes]
        stored = sum(node.stored for node in self.nodes)
        self._run(BEGIN_S + WATCHED_S)
        spent = [
            (n.sent - sent, n.sent_bytes - size, n.placement.spilling.progress.moved - moved)
            for n, (sent, size, moved) in zip(self.nodes, before, strict=True)
        ]
        messages, size, moved = np.array(spent).sum(axis=0) / (self.count * WATCHED_S)
        stored_each = (sum(node.stored for node in self.nodes) - stored) / self.count / WATCHED_S
        most = max(sent for sent, _, _ in spent) / WATCHED_S
        return Cost(
            self.count, self.storing, messages, most, size / 1000, moved, moved / stored_each
        )

    # --- time -------------------------------------------------------------------------------------

    def _at(self, at: float, act: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._due, (at, self._number, act))

    def _run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heappop(self._due)
            act()
        self.now = until

    def _wait(self, number: int) -> None:
        """Tick the placement actor of a node when it is due."""
        node = self.nodes[number]
        at = max(node.placement.deadline(), self.now)
        if at in (node.due, np.inf):
            return
        node.due = at

        def tick() -> None:
            if node.due == at and node.placement.deadline() <= self.now:
                self._perform(number, node.placement.on_tick(self.now))
                node.due = 0.0
                self._wait(number)

        self._at(at, tick)

    # --- nodes ------------------------------------------------------------------------------------

    def _store(self, number: int) -> None:
        """Store a batch of new blocks, and the next one later."""
        node = self.nodes[number]
        self._number += 1
        node.stored += BATCH
        keys = b"".join(
            (self._number << 16 | place).to_bytes(16, "little") for place in range(BATCH)
        )
        lengths = np.full(BATCH, BLOCK_BYTES, "<u8").tobytes()
        reserve = Reserve(1, self._number, 1, keys, lengths)
        *effects, answer = node.pool.on_message(CLIENT, reserve, self.now)
        assert isinstance(answer, Send), answer
        assert isinstance(answer.message, Granted), answer
        self._perform(number, effects)
        written = bytes(state == RESERVED for state in answer.message.states)
        checksums = np.frombuffer(keys, "<u8")[::2].tobytes()
        self._pool(number, CLIENT, Commit(2, self._number, written, checksums, 0.5))
        self._at(self.now + 1 / BATCHES_A_SECOND, lambda: self._store(number))

    def _pool(self, number: int, sender: Origin, message: Any) -> None:
        self._perform(number, self.nodes[number].pool.on_message(sender, message, self.now))

    def _place(self, number: int, sender: Origin, message: Any) -> None:
        placement = self.nodes[number].placement
        self._perform(number, placement.on_message(sender, message, self.now))
        self._wait(number)

    def _perform(self, number: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(number, effect)
                case NotifyPool(fact):
                    self._pool(number, SELF, fact)
                case NotifyPlacement(fact):
                    self._place(number, SELF, fact)
                case NotifyDirectory(RecordsChanged() as changed):
                    held = self.nodes[number].held
                    made = changed.records
                    held.update(zip(keys_of(made), made["generation"].tolist(), strict=True))
                    for key in keys_of(changed.drops):
                        held.pop(key, None)
                case NotifyPublisher(PagesCommitted(origin) as notice) if origin == TAKER:
                    records = np.concatenate((notice.records, notice.here))
                    packed = records.tobytes()
                    answer = Committed(0, notice.sequence, notice.states, packed, len(records))
                    self._place(number, SELF, answer)
                case Pull():
                    self._read(number, effect)

    def _send(self, number: int, effect: Send) -> None:
        to = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if to == CLIENT.identity:
            return
        node, message = self.nodes[number], effect.message
        node.sent += 1
        sender = Origin(number + 1)
        # Incarnations are random, so each takes eight bytes.
        envelope = Envelope(number + IDS, to + IDS, message)
        node.sent_bytes += len(encode(envelope, cluster="sims"))
        receive = self._pool if isinstance(message, RequestRoom) else self._place
        self._at(self.now + LATENCY_S, lambda: receive(to - 1, sender, message))

    def _read(self, number: int, pull: Pull) -> None:
        """Read pages while their holder has them."""
        size = int(pull.records["length"].sum())

        def arrive() -> None:
            holder = self.nodes[pull.member.incarnation - 1].held
            here = np.array([holder.get(key, 0) for key in keys_of(pull.records)], np.uint64)
            arrived = (here == pull.records["generation"]).astype(np.uint8).tobytes()
            self._place(number, SELF, PullDone(pull.job, arrived))

        self._at(self.now + 2 * LATENCY_S + size / NETWORK, arrive)


def _node(number: int, rng: random.Random) -> Node:
    pool = Pool(
        incarnation=Incarnation(number + 1),
        granule=BLOCK_BYTES,
        page_bytes=POOL_BLOCKS * BLOCK_BYTES,
        usable_bytes=POOL_BLOCKS * BLOCK_BYTES,
        client_uncommitted_max=0,
        rng=rng,
    )
    return Node(pool, Placement(number + 1, spilling=Offers(RATE, 0.0, rng)))


def _member(number: int) -> Member:
    return Member(number + 1, 1, ALIVE, 255, f"h{number}", f"a:{number}", f"b:{number}", "", "")


def cost_table(costs: Iterable[Cost]) -> Iterator[str]:
    """Yield costs as lines of Markdown."""
    head = (
        "nodes", "of which store", "messages a node and second", "busiest node", "bytes",
        "pages moved", "of those stored",
    )  # fmt: skip
    for line in (head, ("--:", "---", *["--:"] * 5)):
        yield f"| {' | '.join(line)} |"
    for cost in costs:
        yield f"| {' | '.join(cost.cells())} |"
