"""What a node takes: the offers of other nodes that wait here, and those that are read; and the
figures of placement: between which nodes pages moved, and why other pages did not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, NotifyPool, Pull, Send
from peercache.actors.mailboxes import (
    CopiesMade,
    PullDone,
    SpilledPages,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.offers import (
    COPY_COLDER_FACTOR,
    HANDING_OVER,
    bytes_of,
    drops_of,
    reasons_of,
)
from peercache.model.keys import space_of
from peercache.model.member import Member
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT, Records, keys_of
from peercache.model.status import MovedPages
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import DRAINING, MALFORMED, NOT_A_MEMBER, NOT_DRAINING
from peercache.wire.messages.membership import (
    OfferPages,
    OfferSpill,
    PagesTaken,
    ReportDrainState,
    RequestDrainState,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Reserve,
)

PEERS_MAX: Final = 64
"""Peers that have a row: the one with the fewest pages leaves its row to a new one."""

OTHERS: Final = ""
"""The name of the row of all peers that have none of their own."""

Count = Callable[[str, int], None]
"""Counts pages, by a reason."""


@final
@attrs.define(eq=False)
class PlacementFigures:
    """What moved between this node and each peer since it began, in drains and spills.

    count_taken: counts pages, and their bytes, that this node took from others.
    not_moved: counts pages that were offered ahead of their eviction and not taken.
    not_taken: counts pages that others offered and this node did not take.
    """

    count_taken: Callable[[int, int], None] = lambda _, __: None
    not_moved: Count = lambda _, __: None
    not_taken: Count = lambda _, __: None
    _peers: dict[str, MovedPages] = attrs.field(factory=dict)
    """By HOST:PORT, which a restart of the peer does not change."""
    _others: MovedPages = attrs.field(factory=MovedPages)

    def show(self, metrics: Metrics) -> None:
        """Count in metrics from now on."""

        def count_taken(pages: int, size: int) -> None:
            metrics.pages_taken_over.inc(pages)
            metrics.bytes_taken_over.inc(size)

        self.count_taken = count_taken
        self.not_moved = lambda reason, pages: metrics.pages_not_moved.labels(reason).inc(pages)
        self.not_taken = lambda reason, pages: metrics.pages_not_taken_over.labels(reason).inc(
            pages
        )

    def gave(self, peer: Member | None, pages: int, size: int) -> None:
        """Count pages that a peer took."""
        if peer is not None and pages:
            self._add(MovedPages(name=peer.control, given=pages, given_bytes=size))

    def took(self, peer: Member, pages: int, size: int) -> None:
        """Count pages that this node took from a peer."""
        self.count_taken(pages, size)
        if pages:
            self._add(MovedPages(name=peer.control, taken=pages, taken_bytes=size))

    def peers(self) -> tuple[MovedPages, ...]:
        """Return a row for each peer, the one with the most pages first; then one for the rest."""
        rows = sorted(self._peers.values(), key=lambda row: -row.pages)
        return (*rows, self._others) if self._others.pages else tuple(rows)

    def _add(self, more: MovedPages) -> None:
        known = self._peers.get(more.name)
        if known is None and len(self._peers) >= PEERS_MAX:
            least = min(self._peers.values(), key=lambda row: row.pages)
            self._others = self._others.plus(self._peers.pop(least.name))
        self._peers[more.name] = more if known is None else known.plus(more)


TAKINGS_MAX: Final = 4
"""Offers that are taken at once, each read by a thread of its own: few nodes are drained at a time,
and the others wait."""

OFFERED_MAX: Final = 256
"""Pages of an offer that are looked at."""

PULL_BASE_S: Final = 1.0
"""How long the reading of an offer may take whatever its size: a connection is made for it."""

PULL_RATE: Final = 2**23
"""Bytes a second, at least: a tenth of what a network of 1 Gbit/s carries. So the largest offer of
an honest node (OFFER_BYTES) is given up after 5 s."""

PULL_MAX_S: Final = 5.0
"""The most, for one page that is larger than that: shorter than OFFER_S."""


def pull_s(records: Records) -> float:
    """Return how long the reading of these pages may take."""
    size = int(records["length"].sum(dtype=np.uint64))
    return min(PULL_BASE_S + size / PULL_RATE, PULL_MAX_S)


@attrs.define(eq=False)
class Taking:
    """An offer, waiting or being taken.

    ages: of pages that are spilled, in seconds; None: their node is drained.
    is_copy: whether their node keeps them.
    is_due: whether it may be taken; of a drained node, whether it has confirmed that it is.
    states: of its pages, as granted.
    """

    origin: Origin
    number: int
    namespace: int
    records: Records
    member: Member
    arrived_at: float
    ages: npt.NDArray[np.float64] | None = None
    is_copy: bool = False
    is_due: bool = False
    states: bytes = b""

    @property
    def source(self) -> tuple[int, bool]:
        """Return who offers it, and whether for a copy: of each there is one at a time."""
        return self.origin.identity, self.is_copy

    @property
    def spilled(self) -> bool:
        """Return whether its node stays, and its memory with it."""
        return self.ages is not None


@final
@attrs.define(eq=False)
class Takings:
    """The offers that wait and those that are being taken; each has a number of this node's.

    While it waits, that is the number of the question to its offerer. When it begins it gets a new
    one, that of its reservation.
    """

    figures: PlacementFigures = attrs.field(factory=PlacementFigures)
    min_age_s: float = 0.0
    """No page that was touched within this time is evicted for an offer."""
    begun: dict[int, Taking] = attrs.field(factory=dict)
    """What is being taken, by number."""
    waiting: dict[int, Taking] = attrs.field(factory=dict)
    """By number, the one that has waited for longest first; one a `source`, all of them members."""
    _last: int = 0

    def offered(
        self,
        origin: Origin,
        message: OfferPages | OfferSpill,
        member: Member | None,
        refusal: str,
        now: float,
    ) -> list[Effect]:
        """Begin with an offer; of OfferPages, ask the offerer whether it drains.

        member: who offers; refusal: why nothing is taken of it, "" if it may be.
        """
        records = np.frombuffer(message.records, RECORD)
        refusal = NOT_A_MEMBER if member is None else refusal
        if member is None or refusal:
            return [self._full(origin, message.number, len(records), refusal)]
        ages = np.frombuffer(message.ages, "<f8") if isinstance(message, OfferSpill) else None
        is_sane = ages is None or (len(ages) == len(records) and bool(np.isfinite(ages).all()))
        is_bounded = 0 < len(records) <= OFFERED_MAX
        if not is_sane or not is_bounded or (records["flags"] & RESIDENT == 0).any():
            self.figures.not_taken(MALFORMED, len(records))
            return [Send(origin, PagesTaken(message.number, bytes((ABORTED,)) * len(records)))]
        is_copy = isinstance(message, OfferSpill) and message.is_copy
        # An honest node sends its next offer when it has no answer to hope for.
        self._drop([t for t in self.waiting.values() if t.source == (origin.identity, is_copy)])
        self._last += 1
        namespace = space_of(message.namespace)
        taking = Taking(origin, message.number, namespace, records, member, now, ages, is_copy)
        self.waiting[self._last] = taking
        taking.is_due = taking.spilled
        return self._begin() if taking.is_due else [Send(origin, RequestDrainState(self._last))]

    def drain_state(self, sender: int, report: ReportDrainState) -> list[Effect]:
        """Take the answer of an offerer: only who drains hands pages over."""
        taking = self.waiting.get(report.request)
        if taking is None or taking.origin.identity != sender:
            return []
        if report.figures.get("state") != HANDING_OVER:
            del self.waiting[report.request]
            return [self._full(taking.origin, taking.number, len(taking.records), NOT_DRAINING)]
        taking.is_due = True
        return self._begin()

    def follow(self, members: Collection[int]) -> None:
        """Forget what waits of offerers that are no members any more."""
        self._drop([t for t in self.waiting.values() if t.origin.identity not in members])

    def turn_away(self) -> list[Effect]:
        """Take nothing more: this node is drained itself."""
        refused, self.waiting = self.waiting, {}
        return [self._full(t.origin, t.number, len(t.records), DRAINING) for t in refused.values()]

    def granted(self, granted: Granted) -> list[Effect]:
        """Read what has room."""
        taking = self.begun[granted.sequence]
        taking.states = granted.states
        chosen = np.frombuffer(granted.states, np.uint8) == RESERVED
        if not chosen.any():
            if taking.spilled and HERE in granted.states:
                # The owners of its record may not know of it yet: a commit waits for them.
                return self.pulled(PullDone(granted.sequence, b""))
            self._count_rest(granted.states)
            return self._answer(granted.sequence, granted.states)
        offsets = np.frombuffer(granted.offsets, "<u8")[chosen].astype(np.uint64)
        records = taking.records[chosen]
        within_s = pull_s(records)
        return [
            Pull(
                granted.sequence,
                taking.member,
                taking.namespace,
                records,
                offsets,
                within_s,
                is_leaving=not taking.spilled,
            )
        ]

    def pulled(self, done: PullDone) -> list[Effect]:
        """Commit what has arrived, with the checksums that its records had."""
        taking = self.begun[done.job]
        chosen = np.frombuffer(taking.states, np.uint8) == RESERVED
        written = np.zeros(len(chosen), np.uint8)
        written[chosen] = np.frombuffer(done.arrived, np.uint8)
        has = (taking.records["flags"] & HAS_CHECKSUM) != 0
        checksums = np.where(has & (written == 1), taking.records["checksum"], np.uint64(0))
        commit = Commit(0, done.job, written.tobytes(), checksums.astype("<u8").tobytes(), 0.0)
        return [NotifyPool(TakenOver(commit, taking.ages, taking.is_copy))]

    def committed(self, committed: Committed, others: Collection[int]) -> list[Effect]:
        """Report to the offerer which pages this node holds now. others: the other members."""
        taking = self.begun[committed.sequence]
        is_new = np.frombuffer(committed.states, np.uint8) == COMMITTED
        self.figures.took(taking.member, int(is_new.sum()), bytes_of(taking.records[is_new]))
        states = _kept(taking, committed) if taking.spilled else committed.states
        # What the owners of the records may not know of is here all the same.
        self._count_rest(np.frombuffer(states, np.uint8)[~is_new].tobytes())
        holder = taking.origin.identity
        noted: list[Effect] = []
        if taking.is_copy:
            # It may have died in the meantime, and the pool have noted that before these pages.
            noted = _noted(taking, committed, states, holder if holder in others else 0)
        return [*noted, *self._answer(committed.sequence, states)]

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self.begun) <= TAKINGS_MAX, f"{len(self.begun)} offers are being taken"
        offerers = {taking.origin.identity for taking in self.begun.values()}
        assert len(offerers) == len(self.begun), "two offers of one node are read"
        sources = {taking.source for taking in self.waiting.values()}
        assert len(sources) == len(self.waiting), "two offers of one kind and node wait"

    def _begin(self) -> list[Effect]:
        """Ask the pool for free room for the offers whose turn it is."""
        effects: list[Effect] = []
        busy = {taking.origin.identity for taking in self.begun.values()}
        for number, taking in list(self.waiting.items()):
            if len(self.begun) >= TAKINGS_MAX:
                break
            if taking.is_due and taking.origin.identity not in busy:
                busy.add(taking.origin.identity)
                # Its number may be so old by now that the pool takes it for one that has ended.
                self._last += 1
                self.begun[self._last] = self.waiting.pop(number)
                keys = taking.records["key"].tobytes()
                lengths = taking.records["length"].astype("<u8").tobytes()
                reserve = Reserve(0, self._last, taking.namespace, keys, lengths)
                spilled = None
                if taking.ages is not None:
                    # Of a copy its node loses nothing, and what goes for it may have to be copied.
                    times = COPY_COLDER_FACTOR if taking.is_copy else 1.0
                    spilled = SpilledPages(taking.ages, self.min_age_s, times)
                effects.append(NotifyPool(TakeOver(reserve, spilled, taking.arrived_at)))
        return effects

    def _answer(self, sequence: int, states: bytes) -> list[Effect]:
        taking = self.begun.pop(sequence)
        return [Send(taking.origin, PagesTaken(taking.number, states)), *self._begin()]

    def _count_rest(self, states: bytes) -> None:
        """Count the pages that were not taken."""
        for reason, pages in reasons_of(states):
            self.figures.not_taken(reason, pages)

    def _full(self, origin: Origin, number: int, pages: int, reason: str) -> Effect:
        """Return the answer with which the offerer goes to another node at once."""
        self.figures.not_taken(reason, pages)
        return Send(origin, PagesTaken(number, bytes((REFUSED_FULL,)) * pages))

    def _drop(self, gone: Sequence[Taking]) -> None:
        self.waiting = {number: t for number, t in self.waiting.items() if t not in gone}


def _kept(taking: Taking, committed: Committed) -> bytes:
    """Return the states of spilled pages, so that their holder may evict what this node has.

    That is what the owners of the records know to be here, with the bytes that were offered.
    """
    states = np.frombuffer(committed.states, np.uint8).copy()
    records = np.frombuffer(committed.records, RECORD)
    if committed.published < len(records):
        states[(states == COMMITTED) | (states == HERE)] = ABORTED
        return states.tobytes()
    checksums = dict(zip(keys_of(records), records["checksum"].tolist(), strict=True))
    offered = taking.records["checksum"].tolist()
    for index in np.flatnonzero(states == HERE).tolist():
        key = taking.records["key"][index].tobytes()
        if not offered[index] or checksums.get(key) != offered[index]:
            states[index] = REFUSED_SIZE
    return states.tobytes()


def _noted(taking: Taking, committed: Committed, states: bytes, holder: int) -> list[Effect]:
    """Notify the pool which pages the offerer keeps too: those that it learns to be here.

    holder: the offerer; 0 if it is no member any more.
    """
    given = np.frombuffer(states, np.uint8)
    kept = taking.records["key"][(given == COMMITTED) | (given == HERE)]
    records = np.frombuffer(committed.records, RECORD)
    both = np.isin(records["key"], kept)
    return [
        NotifyPool(CopiesMade(drops_of(records[both]), holder)),
        NotifyPool(CopiesMade(drops_of(records[~both]), 0)),
    ]
