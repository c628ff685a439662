"""Requests to members: for their status, which of them hold the pages of a prompt, and which pages
of a namespace one holds.

`MemberBroker` sends this node's requests to members, and handles their answers.

Owns    the numbers of this node's requests to members, with the only member that may answer each
        one; and the requests of others that wait for such answers. It has no records: each overlap
        is read from directory shards when it is requested.
Takes   RequestCluster from operators; RequestOverlap, from clients, operators and nodes;
        RequestKeys, from operators and nodes; answers, from links to members.
Sends   requests, to members and owners; answers or Refused, to others over their connections.
Keeps   the answer to a request is the first one of its member with that number. An overlap states
        whether a page without a holder is certainly absent. Nodes ask each other only about their
        own shards, so that no request goes in a circle.
Limits  the timeouts of each request; at a time ASKERS_MAX requests about the cluster and
        OVERLAPS_MAX about pages, OVERLAP_KEYS_MAX keys, ROUNDS owners of a key and OWNER_ANSWER_S
        for each; SCANS_MAX parts of scans, SCAN_TURNS turns of each.

Members are only asked for their status when an operator asks. The collected answers serve all
requests within a second.

The removal actor asks members itself: it is a state machine that never awaits, it adds up answers
as they arrive, and it stops waiting for a member that has left the view.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.disk.index import DiskIndex
from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.actors.pool.page_table import PageTable
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY, KEY_BYTES, PageKeys, from_bytes
from peercache.model.member import ALIVE, Member
from peercache.model.prefix import ANYWHERE, HOLDERS_MAX, Overlap
from peercache.model.records import CHANGE, IN_FILES, IN_MEMORY, Changes
from peercache.model.status import (
    UNAVAILABLE,
    MemberStatus,
    Status,
    decoded_status,
    encoded,
    unanswered,
)
from peercache.model.view import STATE_NAMES, is_live
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import (
    CHANGES_A_MESSAGE_MAX,
    OVERLAP_KEYS_MAX,
    SCANNED,
    ReportKeys,
    ReportOverlap,
    RequestKeys,
    RequestOverlap,
    overlap_of,
)
from peercache.wire.messages.membership import (
    ReportCluster,
    ReportStatus,
    RequestCluster,
    RequestStatus,
)
from peercache.wire.messages.session import Refused

BUSY = "busy"

Answer: TypeAlias = ReportStatus | ReportOverlap | ReportKeys
"""The answers of other nodes to requests of the node itself."""


@attrs.define(eq=False)
class _Asked:
    """A request that waits for the answer of this member."""

    member: int
    reply: Answer | None = None
    answered: trio.Event = attrs.field(factory=trio.Event)


@final
class MemberBroker:
    """Sends requests to members, on the node's loop."""

    def __init__(self, perform: Callable[[Effect], None]) -> None:
        """Send with `perform`."""
        self._perform = perform
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        self._askers: Counter[type[Message]] = Counter()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Answer the requests of others until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def ask(
        self,
        member: int,
        question: RequestStatus | RequestOverlap | RequestKeys,
        *timeouts_s: float,
    ) -> Answer | None:
        """Return the answer of a member, None without one in time.

        The request is sent once for each timeout.
        """
        number, asked = next(self._numbers), _Asked(member)
        self._waiting[number] = asked
        try:
            for timeout_s in timeouts_s:
                self._perform(Send(member, attrs.evolve(question, request=number)))
                with trio.move_on_after(timeout_s):
                    await asked.answered.wait()
                if asked.reply is not None:
                    break
        finally:
            del self._waiting[number]
        return asked.reply

    def take(self, sender: int, reply: Answer) -> None:
        """Handle an answer; ignore other senders, and answers to other requests."""
        asked = self._waiting.get(reply.request)
        if asked is not None and asked.member == sender and asked.reply is None:
            asked.reply = reply
            asked.answered.set()

    def answer_later(
        self,
        sender: Origin,
        question: RequestCluster | RequestOverlap | RequestKeys,
        answer: Callable[[], Awaitable[Message]],
        *,
        at_once_max: int,
        what: str,
    ) -> Refused | None:
        """Answer another's request with the result of `answer`, or refuse it.

        at_once_max: requests of this kind that may wait at the same time.
        what: the subject of the request, for the refusal.
        """
        kind = type(question)
        if self._nursery is None or self._askers[kind] >= at_once_max:
            return Refused(question.request, BUSY, f"too many ask this node {what}")
        self._askers[kind] += 1

        async def reply_to_it() -> None:
            try:
                self._perform(Send(sender, await answer()))
            finally:
                self._askers[kind] -= 1

        self._nursery.start_soon(reply_to_it)
        return None


ANSWER_S = 1.0
"""How long a member may take; a serving node answers in milliseconds."""

ASK_AGAIN_S = 0.4
"""A request may be lost, for example on a new link."""

AT_ONCE = 64
"""Members asked at the same time."""

FRESH_S = 1.0
"""How long collected answers are used."""

FRESH_STARTING_S = 0.1
"""The same with a member that does not serve: usually it is starting, and serves soon."""

ASKERS_MAX = 64
"""Requests of operators that wait at the same time; further ones are refused."""

ANSWER_BYTES_MAX = 128 * 1024
"""Bytes of statuses in one message; the others follow."""


@attrs.define(eq=False)
class _Gathered:
    at: float = float("-inf")
    fresh_s: float = FRESH_S
    members: tuple[MemberStatus, ...] = ()
    incarnations: tuple[int, ...] = ()
    lock: trio.Lock = attrs.field(factory=trio.Lock)


@final
@attrs.frozen(eq=False, kw_only=True)
class Gathering:
    """Asks members for their status, on the node's loop.

    own:     this node; `status(detail=…)` is its status.
    members: the view, ended ones included.
    refusal: returns why this node refuses a member's certificate, "" if it does not.
    """

    _own: int
    _status: Callable[..., Status]
    _members: Callable[[], Sequence[Member]]
    _broker: MemberBroker
    _refusal: Callable[[Member], str] = lambda _: ""
    _kept: defaultdict[bool, _Gathered] = attrs.field(
        factory=lambda: defaultdict(_Gathered), init=False
    )
    """The collected answers, without and with details."""
    _limit: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(AT_ONCE), init=False
    )

    def ask(self, sender: Origin, asked: RequestCluster) -> Message | None:
        """Handle an operator's request: answer it after the members have answered, or refuse it."""

        async def answer() -> ReportCluster:
            gathered = await self._gathered(detail=asked.detail)
            behind = [
                member
                for incarnation, member in zip(gathered.incarnations, gathered.members, strict=True)
                if incarnation > asked.after
            ]
            return ReportCluster(asked.request, *portion(behind))

        return self._broker.answer_later(
            sender, asked, answer, at_once_max=ASKERS_MAX, what="how the cluster is"
        )

    async def statuses(self, *, detail: bool = False) -> tuple[MemberStatus, ...]:
        """Return every member of the view, by incarnation; at most FRESH_S old."""
        return (await self._gathered(detail=detail)).members

    async def _gathered(self, *, detail: bool) -> _Gathered:
        kept = self._kept[detail]
        async with kept.lock:  # One task collects, and the others wait for its result.
            if trio.current_time() - kept.at >= kept.fresh_s:
                members = sorted(self._members(), key=lambda member: member.incarnation)
                found: dict[int, MemberStatus] = {}
                async with trio.open_nursery() as nursery:
                    for member in members:
                        if member.incarnation != self._own and is_live(member):
                            nursery.start_soon(self._look, member, detail, found)
                # The own status is read last: it needs time of this loop, while nothing waits.
                found[self._own] = MemberStatus(
                    seen="alive", answers=True, status=self._status(detail=detail)
                )
                members = _without_replaced(members, found)
                kept.incarnations = tuple([member.incarnation for member in members])
                kept.members = tuple(
                    [found.get(m.incarnation) or unanswered(m, self._refusal(m)) for m in members]
                )
                starts = any(each.status.state == UNAVAILABLE for each in kept.members)
                kept.fresh_s = FRESH_STARTING_S if starts else FRESH_S
                kept.at = trio.current_time()
        return kept

    async def _look(self, member: Member, detail: bool, found: dict[int, MemberStatus]) -> None:  # noqa: FBT001 - nursery
        """Ask one member, twice if needed."""
        async with self._limit:
            question = RequestStatus(0, detail)
            reply = await self._broker.ask(
                member.incarnation, question, ASK_AGAIN_S, ANSWER_S - ASK_AGAIN_S
            )
        if not isinstance(reply, ReportStatus):
            return
        # Invalid bytes do not count as an answer.
        with suppress(ValueError):
            found[member.incarnation] = MemberStatus(
                seen=STATE_NAMES[member.state], answers=True, status=decoded_status(reply.status)
            )


def _without_replaced(members: Sequence[Member], answers: Container[int]) -> list[Member]:
    """Return the members without those that another one has replaced at their address.

    One process listens at an address: if one answers there, an earlier one has ended. So a node
    that was killed and started again is one node, not two.
    """
    taken = {member.control for member in members if member.incarnation in answers}
    return [each for each in members if each.incarnation in answers or each.control not in taken]


def portion(members: Sequence[MemberStatus]) -> tuple[bytes, bool]:
    """Return the first of these, encoded, as many as fit; and whether there are more."""
    parts: list[bytes] = []
    size = 2
    for member in members:
        part = encoded((member,))[1:-1]
        size += len(part) + 1
        if parts and size > ANSWER_BYTES_MAX:
            return b"[" + b",".join(parts) + b"]", True
        parts.append(part)
    return b"[" + b",".join(parts) + b"]", False


TURN_KEYS = 512
"""Keys of one lookup in the table, between two turns of the loop: 0.2 ms if each page has 16
holders, and a millisecond if it has HOLDERS_MAX."""

OVERLAPS_MAX = 16
"""Requests of others that are answered at the same time; further ones are refused."""

ROUNDS = 2
"""Owners of a key that are asked one after another: the first may be dead, or behind."""

OWNER_ANSWER_S = 0.25
"""How long an owner may take; a serving one answers in milliseconds."""

Places = npt.NDArray[np.intp]


@final
@attrs.frozen(eq=False, kw_only=True)
class Overlaps:
    """Finds out which members hold which pages, on the node's loop.

    shard: that of this node; ring: the ring of the other owners to ask.
    """

    _shard: DirectoryShard
    _ring: Callable[[], HashRing]
    _member_of: Callable[[int], Member | None]
    _broker: MemberBroker

    def ask(self, sender: Origin, asked: RequestOverlap) -> Message | None:
        """Handle a request: answer it later, or refuse it."""
        count = len(asked.keys) // KEY_BYTES
        if count > OVERLAP_KEYS_MAX:
            detail = f"{count} keys in one RequestOverlap, {OVERLAP_KEYS_MAX} at most"
            return Refused(asked.request, "malformed", detail)

        async def answer() -> ReportOverlap:
            keys = from_bytes(asked.keys)
            reply = await (self.of_shard(keys) if asked.shard_only else self.overlap(keys))
            return ReportOverlap(asked.request, reply.holders, reply.flags.tobytes(), reply.whole)

        return self._broker.answer_later(
            sender, asked, answer, at_once_max=OVERLAPS_MAX, what="which nodes hold pages"
        )

    async def overlap(self, keys: PageKeys) -> Overlap:
        """Return which members hold these pages; ask others what this node's shard does not know.

        keys: (n,) V16. Each OVERLAP_KEYS_MAX of them take ROUNDS × OWNER_ANSWER_S at most.
        """
        step = OVERLAP_KEYS_MAX
        if len(keys) <= step:
            return await self._part(keys)
        parts = [await self._part(keys[at : at + step]) for at in range(0, len(keys), step)]
        return Overlap.joined(parts)

    async def _part(self, keys: PageKeys) -> Overlap:
        own = await self.of_shard(keys)
        everything: Places = np.arange(len(keys))
        parts: list[tuple[Places, Overlap]] = [(everything, own)]
        ring = self._ring()
        certain, tried = np.zeros(len(keys), np.bool_), np.zeros((len(keys), len(ring)), np.bool_)
        if len(ring) and len(keys):
            owners = ring.table[:, : ring.replicas][ring.arcs(keys)]
            me = self._shard.incarnation
            if me in ring.members:
                at = ring.members.index(me)
                tried[:, at] = True
                if own.whole:
                    certain = (owners == at).any(axis=1)
            for _ in range(ROUNDS):
                left = (~certain).nonzero()[0]
                targets = self._targets(ring, owners, left, tried)
                if not targets:
                    break
                found: dict[int, Overlap] = {}
                async with trio.open_nursery() as nursery:
                    for owner, places in targets.items():
                        nursery.start_soon(self._look, owner, keys[places], found)
                for owner, reply in found.items():
                    parts.append((targets[owner], reply))
                    if reply.whole:
                        certain[targets[owner]] = True
        merged = own if len(parts) == 1 else Overlap.merged(len(keys), parts)
        return attrs.evolve(merged, whole=merged.whole and bool(certain.all()))

    async def of_shard(self, keys: PageKeys) -> Overlap:
        """Return which members hold these pages, according to this node's shard."""
        parts = []
        table, asker = self._shard.table, self._shard.incarnation
        whole = not self._shard.authority.is_behind(trio.current_time())
        for begin in range(0, max(1, len(keys)), TURN_KEYS):
            if begin:
                await trio.lowlevel.checkpoint()
            some = keys[begin : begin + TURN_KEYS].tobytes()
            holders, flags = table.overlap(some, asker, HOLDERS_MAX)
            parts.append(Overlap(holders, flags & np.uint8(ANYWHERE), whole))
        return Overlap.joined(parts)

    def _targets(
        self, ring: HashRing, owners: Places, left: Places, tried: npt.NDArray[np.bool_]
    ) -> Mapping[int, Places]:
        """Return the remaining pages to ask each owner about, and mark them as tried.

        Prefers the owners with the most pages, so that few are asked.
        """
        targets: dict[int, Places] = {}
        live = [self._is_alive(node) for node in ring.members]
        while len(left):
            open_to = np.take_along_axis(~tried[left], owners[left], axis=1)
            open_to &= np.array(live)[owners[left]]
            counts = np.bincount(owners[left][open_to], minlength=len(ring))
            if not counts.any():
                break
            best = int(counts.argmax())
            its = ((owners[left] == best) & open_to).any(axis=1)
            targets[ring.members[best]] = left[its]
            tried[left[its], best] = True
            left = left[~its]
        return targets

    def _is_alive(self, node: int) -> bool:
        member = self._member_of(node)
        return member is not None and member.state == ALIVE

    async def _look(self, owner: int, keys: PageKeys, found: dict[int, Overlap]) -> None:
        """Ask one owner, which may not answer."""
        question = RequestOverlap(0, keys.tobytes(), shard_only=True)
        reply = await self._broker.ask(owner, question, OWNER_ANSWER_S)
        if reply is not None:
            found[owner] = overlap_of(reply, len(keys))


SCANS_MAX = 16
"""Parts of scans that are read at the same time; further ones are refused."""

TURN_PAGES = 512
"""Pages, or entries of the disk, that one turn of the loop examines: 0.3 ms."""

TURN_GRANULES = 32 * 1024
"""Granules that one turn examines: half a gigabyte of memory without pages takes 0.1 ms."""

SCAN_TURNS = 16
"""Turns of one part of a scan; the next request continues."""

DISK_ROWS = 2**48
"""Rows of a scan from here on are entries of the disk; those before are granules of the pool."""

UNREACHABLE = "unreachable"
"""Refusal: the member with the pages does not answer."""


@final
@attrs.frozen(eq=False, kw_only=True)
class Scans:
    """Lists which pages of a namespace this node holds, or another member, on the node's loop.

    The node keeps no state between two requests. The rows of a scan are the granules of the pool,
    then the entries of the disk: a page keeps its row as long as it stays in memory, or on disk. So
    a page that a node holds during the whole scan is listed at least once: if it was loaded from
    disk into a row that was passed, its record is newer than the scan, and its entry on disk is
    listed too.
    """

    _own: int
    _pages: PageTable
    _disk: Callable[[], DiskIndex | None]
    _broker: MemberBroker

    def ask(self, sender: Origin, asked: RequestKeys) -> Message | None:
        """Handle a request: answer it later, or refuse it."""

        async def answer() -> Message:
            if asked.member in (0, self._own):
                return await self._part(asked)
            reply = await self._broker.ask(asked.member, asked, ANSWER_S)
            if isinstance(reply, ReportKeys):
                return attrs.evolve(reply, request=asked.request)
            return Refused(asked.request, UNREACHABLE, "the member does not answer")

        return self._broker.answer_later(
            sender, asked, answer, at_once_max=SCANS_MAX, what="which pages nodes hold"
        )

    async def _part(self, asked: RequestKeys) -> ReportKeys:
        """Return the next part of the scan of this node."""
        row, newest = asked.row, asked.newest if asked.row else self._pages.newest
        wanted = max(1, min(asked.count, CHANGES_A_MESSAGE_MAX))
        parts: list[Changes] = []
        for _ in range(SCAN_TURNS):
            if row < self._pages.granules:
                part, row = self._in_memory(row, asked.namespace, wanted)
            else:
                part, row = self._on_disk(row, asked.namespace, wanted, newest)
            parts.append(part)
            wanted -= len(part)
            if not wanted or row == SCANNED:
                break
            await trio.lowlevel.checkpoint()
        return ReportKeys(asked.request, np.concatenate(parts).tobytes(), row, newest)

    def _in_memory(self, row: int, namespace: int, count: int) -> tuple[Changes, int]:
        pages, end = self._pages.scan(
            row, namespace, pages_max=TURN_PAGES, granules_max=TURN_GRANULES
        )
        if len(pages) > count:
            pages = pages[:count]
            end = pages[-1].slot.first + 1
        held = np.zeros(len(pages), CHANGE)
        held["key"] = np.frombuffer(b"".join([page.key for page in pages]), KEY)
        held["length"], held["tier"] = [page.length for page in pages], IN_MEMORY
        return held, end if end < self._pages.granules else DISK_ROWS

    def _on_disk(self, row: int, namespace: int, count: int, newest: int) -> tuple[Changes, int]:
        """Return pages on disk, without those that have been in memory since the scan began."""
        index = self._disk()
        if index is None:
            return np.zeros(0, CHANGE), SCANNED
        entries, end = index.scan(max(0, row - DISK_ROWS), namespace, count=TURN_PAGES)
        if len(entries) > count:
            entries = entries[:count]
            end = int(entries[-1]) + 1
        held = np.zeros(len(entries), CHANGE)
        held["key"] = np.frombuffer(index.keys(entries), KEY)
        held["length"], held["tier"] = index.lengths(entries), IN_FILES
        pages = [self._pages.find(key) for key in held["key"].tolist()]
        is_unlisted = [page is None or page.generation > newest for page in pages]
        return held[is_unlisted], DISK_ROWS + end if end < index.end else SCANNED
