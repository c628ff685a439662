"""The cost of placement in a large cluster: messages, bytes and pages that a node sends a second.

Each node is its production pool and its production placement actor, on one virtual clock. Messages
are encoded to count their bytes and take LATENCY_S; a page takes the time of its bytes; the shards
acknowledge records at once. No view changes meanwhile.

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
from peercache.model.records import DROP, keys_of
from peercache.wire.codec import encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.membership import RequestRoom
from peercache.wire.messages.pool import RESERVED, Commit, Committed, Granted, Reserve, Touched

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


@attrs.define(eq=False)
class Nodes:
    """Production pools and placement actors on one virtual clock; all know each other.

    rooms: blocks that each has room for. rate: of `placement_rate`; 0: nothing is offered.
    latency_s: of a message. read_s: how long so many bytes are read.
    """

    rooms: Sequence[int]
    block_bytes: int = BLOCK_BYTES
    rate: int = RATE
    min_age_s: float = 0.0
    latency_s: float = LATENCY_S
    read_s: Callable[[int], float] = lambda size: 2 * LATENCY_S + size / NETWORK
    seed: int = 1
    now: float = 0.0
    nodes: list[Node] = attrs.field(factory=list)
    _due: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list)
    _number: int = 0

    def __attrs_post_init__(self) -> None:
        """Make the nodes, and let them know each other."""
        members = tuple(map(_member, range(len(self.rooms))))
        for number, room in enumerate(self.rooms):
            self.nodes.append(self._node(number, room))
        for number in range(len(self.rooms)):
            self._place(number, SELF, ViewChanged(members))

    def at(self, at: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        self._number += 1
        heappush(self._due, (at, self._number, act))

    def run(self, until: float) -> None:
        """Do what is due until then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heappop(self._due)
            act()
        self.now = until

    def store(self, number: int, keys: Sequence[bytes]) -> None:
        """Let a client of a node store blocks of these keys; the checksum follows from the key."""
        self._number += 1
        packed = b"".join(keys)
        lengths = np.full(len(keys), self.block_bytes, "<u8").tobytes()
        reserve = Reserve(1, self._number, 1, packed, lengths)
        *effects, answer = self.nodes[number].pool.on_message(CLIENT, reserve, self.now)
        assert isinstance(answer, Send), answer
        assert isinstance(answer.message, Granted), answer
        sequence = self._number
        self._perform(number, effects)
        written = bytes(state == RESERVED for state in answer.message.states)
        checksums = (np.frombuffer(packed, "<u8").reshape(-1, 2).sum(axis=1) | 1).tobytes()
        self._pool(number, CLIENT, Commit(2, sequence, written, checksums, 0.5))

    def touch(self, number: int, read: Sequence[tuple[bytes, int]]) -> None:
        """Let a node learn that a client has read pages, by key and generation."""
        drops = np.array([(np.void(key), generation) for key, generation in read], DROP)
        self._pool(number, CLIENT, Touched(drops.tobytes()))

    def note(self, number: int, changed: RecordsChanged) -> None:
        """Take the records that a node publishes: its shards acknowledge them at once."""
        held, made = self.nodes[number].held, changed.records
        held.update(zip(keys_of(made), made["generation"].tolist(), strict=True))
        for key in keys_of(changed.drops):
            held.pop(key, None)

    def count(self, node: Node, envelope: Envelope) -> None:
        """Take note of a message of a node."""

    def _node(self, number: int, room: int) -> Node:
        rng = random.Random(f"{self.seed}/{number}")
        size = room * self.block_bytes
        pool = Pool(
            incarnation=Incarnation(number + 1),
            granule=self.block_bytes,
            page_bytes=size,
            usable_bytes=size,
            client_uncommitted_max=0,
            rng=rng,
        )
        return Node(pool, Placement(number + 1, spilling=Offers(self.rate, self.min_age_s, rng)))

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

        self.at(at, tick)

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
                    self.note(number, changed)
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
        message, sender = effect.message, Origin(number + 1)
        # Incarnations are random, so each takes eight bytes.
        self.count(self.nodes[number], Envelope(number + IDS, to + IDS, message))
        receive = self._pool if isinstance(message, RequestRoom) else self._place
        self.at(self.now + self.latency_s, lambda: receive(to - 1, sender, message))

    def _read(self, number: int, pull: Pull) -> None:
        """Read pages while their holder has them."""
        size = int(pull.records["length"].sum())

        def arrive() -> None:
            holder = self.nodes[pull.member.incarnation - 1].held
            here = np.array([holder.get(key, 0) for key in keys_of(pull.records)], np.uint64)
            arrived = (here == pull.records["generation"]).astype(np.uint8).tobytes()
            self._place(number, SELF, PullDone(pull.job, arrived))

        self.at(self.now + self.read_s(size), arrive)


def _member(number: int) -> Member:
    return Member(number + 1, 1, ALIVE, 255, f"h{number}", f"a:{number}", f"b:{number}", "", "")


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
class Placing(Nodes):
    """A cluster of so many nodes, some of which store all the time."""

    def __init__(self, count: int, storing: str = HALF, seed: int = 1) -> None:
        """Make the nodes."""
        super().__init__((POOL_BLOCKS,) * count, seed=seed)
        self.storing, self.stored = storing, 0

    def play(self) -> Cost:
        """Store for a while, and return the cost of the end of it."""
        count = len(self.nodes)
        busy = count if self.storing == ALL else count // 2
        rng = random.Random(self.seed)
        for number in range(busy):
            self.at(rng.uniform(0.0, 1 / BATCHES_A_SECOND), partial(self._store, number))
        self.run(BEGIN_S)
        before = [(n.sent, n.sent_bytes, n.placement.spilling.progress.moved) for n in self.nodes]
        stored = self.stored
        self.run(BEGIN_S + WATCHED_S)
        spent = [
            (n.sent - sent, n.sent_bytes - size, n.placement.spilling.progress.moved - moved)
            for n, (sent, size, moved) in zip(self.nodes, before, strict=True)
        ]
        messages, size, moved = np.array(spent).sum(axis=0) / (count * WATCHED_S)
        stored_each = (self.stored - stored) / count / WATCHED_S
        most = max(sent for sent, _, _ in spent) / WATCHED_S
        return Cost(count, self.storing, messages, most, size / 1000, moved, moved / stored_each)

    def count(self, node: Node, envelope: Envelope) -> None:
        """Add up the messages and their bytes."""
        node.sent += 1
        node.sent_bytes += len(encode(envelope, cluster="sims"))

    def _store(self, number: int) -> None:
        """Store a batch of new blocks, and the next one later."""
        first = self.stored
        self.stored += BATCH
        self.store(number, [n.to_bytes(16, "little") for n in range(first, self.stored)])
        self.at(self.now + 1 / BATCHES_A_SECOND, partial(self._store, number))


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
