"""A scripted cluster for the sans-IO paths: owners with records, holders with bytes and words.

Time is virtual: an answer takes its node's `latency_s`, a page `page_s`, silence lasts until the
asker gives up. `between` and `before` run during the read of each page, as another process would.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

from peercache.client.bridge import checksums_of
from peercache.model.keys import KEY_BYTES
from peercache.model.member import ALIVE, Member
from peercache.model.reads import Fetched, Looked, PeerRead
from peercache.model.records import HAS_CHECKSUM, ON_DISK, RECORD, RESIDENT, Records
from peercache.model.records import from_bytes as records_from_bytes
from peercache.model.runs import U64
from peercache.model.seal import SEAL, Seals, unread_seals
from peercache.net.breaker import Breakers, data_port
from peercache.observability import reasons
from peercache.paths.cluster import Cluster
from peercache.paths.costs import ReadCosts
from peercache.paths.lookup import LocationCache, Locator
from peercache.paths.mirror import Mirrorer, MirrorHome
from peercache.paths.read import Leading, Reader
from peercache.paths.steps import (
    Ask,
    Checksum,
    Collect,
    Drain,
    Fetch,
    Place,
    Post,
    ReadTable,
    Step,
    Submit,
)
from peercache.paths.write import PORTION_BYTES, ClientReservations, Writer
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup, ReportStale
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    LATER,
    LOST,
    PROMOTED,
    RESERVED,
    Abort,
    Commit,
    Committed,
    Granted,
    Promote,
    Promoted,
    Reserve,
    ReserveMirror,
)
from tests.unit.paths.pages import PAGE, Got, Page, content_of, named, runs_of, scatter

GRANULE, SLOTS, SPACE = 4096, 512, 7
"""SPACE: of the one namespace of all pages."""

Result = TypeVar("Result")


@attrs.define(eq=False)
class Node:
    """One node: published memory, a directory shard, and how it behaves.

    mood: "up"; "silent", which accepts and sends nothing; "away", which refuses connections.
    data_mood: the same of the data port, or "refusing", which will not serve us.
    is_behind: it reports that its shard lacks records.
    is_at_work: its table shows that it was active recently.
    table:     "" is one that clients cannot open, "lost" one that they cannot read any more; "hint"
               lacks authority, "final" has it.
    """

    member: Member
    memory: Page = attrs.field(factory=lambda: np.zeros(SLOTS * GRANULE, np.uint8))
    seals: Seals = attrs.field(factory=lambda: np.zeros(SLOTS, SEAL))
    shard: dict[bytes, list[bytes]] = attrs.field(factory=dict)
    mood: str = "up"
    data_mood: str = "up"
    is_behind: bool = False
    table: str = ""
    is_at_work: bool = True
    latency_s: float = 0.001
    sequence: int = 1000
    taken: int = 0
    script: deque[Callable[[Message], Message | None]] = attrs.field(factory=deque)
    """What it answers to the next messages, instead of what a correct node would."""
    received: list[Message] = attrs.field(factory=list)
    late: deque[Granted] = attrs.field(factory=deque)
    """Its messages that are not received yet."""

    @property
    def words(self) -> U64:
        """Return the words of its seals, a view."""
        return self.seals["word"]

    @property
    def number(self) -> int:
        """Return its incarnation."""
        return self.member.incarnation

    def slot(self) -> int:
        """Return a slot that was never used."""
        self.taken += 1
        return self.taken - 1

    def hold(self, name: str, *, content: Page | None = None, **fields: int) -> Records:
        """Commit a page; return its record, which is not published yet."""
        content = content_of(name) if content is None else content
        slot = self.slot()
        self.memory[slot * GRANULE : slot * GRANULE + len(content)] = content
        self.sequence += 2
        self.seal(slot, named(name)[0], len(content))
        record = np.zeros(1, RECORD)
        record["key"], record["holder"] = named(name), self.number
        record["offset"], record["length"] = slot * GRANULE, len(content)
        record["generation"], record["flags"] = self.sequence, RESIDENT
        for field, value in fields.items():
            record[field] = value
        return record

    def seal(self, slot: int, key: Any, length: int) -> None:
        """Commit what is in a slot under the present sequence, word last."""
        self.seals["key"][slot], self.seals["length"][slot] = key, length
        self.seals["space"][slot] = SPACE
        self.words[slot] = self.sequence

    def evict(self, record: Records, instead: Page) -> None:
        """Give a record's slot to another page, word first, as every holder does."""
        slot = int(record["offset"][0]) // GRANULE
        self.words[slot] |= np.uint64(1)
        self.memory[slot * GRANULE : slot * GRANULE + len(instead)] = instead
        self.sequence += 2
        self.seal(slot, named("another")[0], len(instead))

    def know(self, *records: Records) -> None:
        """Take records into the shard."""
        for record in records:
            self.shard.setdefault(record["key"].tobytes(), []).append(record.tobytes())

    def forget(self, name: str) -> None:
        """Drop what the shard knows of a page."""
        self.shard.pop(named(name).tobytes(), None)

    def answer(self, message: Message) -> Message | None:
        """Return what this node answers to a message; None: nothing."""
        self.received.append(message)
        return self.script.popleft()(message) if self.script else self.serve(message)

    def send_report(self, keys: bytes) -> bytes:
        """Return the records of these keys that the shard has."""
        known = [self.shard.get(keys[i : i + 16], []) for i in range(0, len(keys), 16)]
        return b"".join(record for records in known for record in records)

    def serve(self, message: Message) -> Message | None:
        """Return what a correct node answers."""
        match message:
            case Lookup(request, keys):
                return Located(request, self.send_report(keys), self.is_behind)
            case ReportStale(records):
                for record in records_from_bytes(records):
                    kept = self.shard.get(record["key"].tobytes(), [])
                    if record.tobytes() in kept:
                        kept.remove(record.tobytes())
            case Promote():
                return self.promote(message)
            case Reserve():
                return self.grant(message)
            case ReserveMirror(request, sequence, namespace, keys, lengths):
                return self.grant(Reserve(request, sequence, namespace, keys, lengths))
            case Commit():
                return self.commit(message)
        return None

    # --- as a holder with a disk ------------------------------------------------------------------

    disk: dict[bytes, tuple[str, Page]] = attrs.field(factory=dict)
    portion: int = 1000
    """Pages that it loads for one question."""
    loaded: dict[bytes, bytes] = attrs.field(factory=dict)

    def keep(self, name: str, *, content: Page | None = None) -> Records:
        """Have a page on disk; return its record."""
        content = content_of(name) if content is None else content
        self.disk[named(name).tobytes()] = (name, content)
        self.sequence += 2
        record = np.zeros(1, RECORD)
        record["key"], record["holder"], record["length"] = named(name), self.number, len(content)
        record["generation"], record["flags"] = self.sequence, ON_DISK
        return record

    def promote(self, message: Promote) -> Promoted | None:
        """Load the first of what is asked for; a wish is received, and not answered."""
        keys = [message.keys[at : at + 16] for at in range(0, len(message.keys), 16)]
        states, records, room = bytearray(), b"", self.portion
        for key in keys:
            if key not in self.loaded and key in self.disk and room:
                name, content = self.disk[key]
                self.loaded[key] = self.hold(name, content=content).tobytes()
                room -= 1
            if key in self.loaded:
                states.append(PROMOTED)
                records += self.loaded[key]
            else:
                states.append(LATER if key in self.disk else LOST)
        return Promoted(0, bytes(states), records) if message.timeout_s else None

    # --- as a home node ---------------------------------------------------------------------------

    reserved: dict[int, tuple[Reserve, Granted]] = attrs.field(factory=dict)
    held_back: list[Granted] = attrs.field(factory=list)
    """Slots ahead that the answer to the next Commit names."""

    def grant(self, reserve: Reserve, states: Sequence[int] | None = None) -> Granted:
        """Grant a Reserve, page by page as `states` specifies; the same again to a repeated one."""
        if reserve.sequence not in self.reserved:
            count = len(reserve.lengths) // 8
            states = [RESERVED] * count if states is None else states
            offsets = np.array([self.slot() * GRANULE for _ in range(count)], np.uint64)
            granted = Granted(0, reserve.sequence, bytes(states), offsets.tobytes())
            self.reserved[reserve.sequence] = (reserve, granted)
        return self.reserved[reserve.sequence][1]

    def commit(self, commit: Commit) -> Committed:
        """Commit what was written."""
        reserve, granted = self.reserved[commit.sequence]
        states = bytearray(granted.states[: len(commit.written)])
        assert bool(reserve.keys) != bool(commit.keys), "pages are named once"
        keys = np.frombuffer(reserve.keys or commit.keys, "V16")
        lengths = np.frombuffer(reserve.lengths, np.uint64)
        offsets = np.frombuffer(granted.offsets, np.uint64)
        checksums = np.frombuffer(commit.checksums, np.uint64)
        made = []
        for i, written in enumerate(commit.written):
            if granted.states[i] != RESERVED:
                continue
            if not written:
                states[i] = ABORTED
                continue
            states[i] = COMMITTED
            self.sequence += 2
            self.seal(int(offsets[i]) // GRANULE, keys[i], int(lengths[i]))
            record = np.zeros(1, RECORD)
            record["key"], record["holder"], record["offset"] = keys[i], self.number, offsets[i]
            record["length"], record["generation"] = lengths[i], self.sequence
            record["flags"] = RESIDENT | (HAS_CHECKSUM if checksums[i] else 0)
            record["checksum"] = checksums[i]
            made.append(record.tobytes())
        reported = self.held_back.pop(0) if self.held_back else Granted(0, 0, b"", b"")
        for place, number in enumerate(commit.ahead):
            asked = self.grant(Reserve(0, number, reserve.namespace, b"", reserve.lengths))
            # The client needs one at once, unless this answer has one.
            (self.held_back if place or reported.sequence else self.late).append(asked)
        return Committed(
            0, commit.sequence, bytes(states), b"".join(made), len(made),
            reported.sequence, reported.offsets,
        )  # fmt: skip


class World:
    """Nodes 1, 2, … as one client sees them; the client's home is node 1."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        replicas: int | str = 2,
        verify: str = "generation",
        handover_until: float = -1.0,
        cache_entries: int = 1000,
        home: int = 1,
        remote: frozenset[int] = frozenset(),
        mirror_pulls: str = "",
        portion_bytes: int = PORTION_BYTES,
        op_timeout_s: float = 2.0,
        cost_of: Callable[[int], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        """Start them; those in `remote` are on another host. cost_of: as of the locator."""
        self.removals = 0
        self.renewed = 0
        self.cluster_of_now: Cluster | None = None
        """The view that is the answer to a request for it, if not the client's."""
        self.now, self.fabric, self.answered_by = 100.0, "world", ""
        self.page_s = 0.0
        self.checksum_s = 0.0
        self.before: Callable[[Node, int], None] = _nothing
        self.between: Callable[[Node, int], None] = _nothing
        self.posted: list[tuple[int, Message]] = []
        self.steps: list[Step] = []
        self.hedged: list[int] = []
        """Whom the Lookups went to that followed others in the same step."""
        self.nodes = {
            number: Node(_member(number, "there" if number in remote else "here"))
            for number in range(1, nodes + 1)
        }
        self.breakers = Breakers(op_timeout_s=op_timeout_s)
        self.cache = LocationCache(entries_max=cache_entries)
        self.locator = Locator(
            cache=self.cache,
            breakers=self.breakers,
            clock=self.clock,
            cost_of=cost_of,
            tables=lambda: [node.number for node in self.nodes.values() if node.table],
            removals=lambda _: self.removals,
        )
        self.mirrorer = (
            Mirrorer(
                pulls=mirror_pulls,
                cache=self.cache,
                breakers=self.breakers,
                namespace_tag=SPACE,
                clock=self.clock,
            )
            if mirror_pulls
            else None
        )
        self.costs = ReadCosts(salt=0, clock=self.clock)
        self.reader = Reader(
            locator=self.locator,
            cache=self.cache,
            verify=verify,
            space=SPACE,
            clock=self.clock,
            mirrorer=self.mirrorer,
            costs=self.costs,
        )
        self.writer = Writer(
            cache=self.cache,
            breakers=self.breakers,
            verify=verify,
            namespace_tag=SPACE,
            clock=self.clock,
            portion_bytes=portion_bytes,
        )
        self.sent: list[tuple[int, float, Message | None]] = []
        """What was sent with Submit: to which peer and when, and the answer that is on its way."""
        self.reservations = ClientReservations()
        self.home = home
        self.replicas = replicas
        self.handover_until = handover_until
        self.cluster = self.seen({node.number: node.member for node in self.nodes.values()})

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now

    def seen(self, view: dict[int, Member], newcomer: Member | None = None) -> Cluster:
        """Return the cluster as the client sees it with this view, and perhaps a new home node."""
        return Cluster.of(
            view,
            home=self.home,
            boot_id="here",
            replicas=self.replicas,
            virtual_nodes=16,
            handover_until=self.handover_until,
            newcomer=newcomer,
        )

    def owners(self, name: str) -> list[Node]:
        """Return the nodes that own a page's record, as they are asked, the old one last."""
        members = self.cluster.ring.members
        arc = self.cluster.ring.arcs(named(name))[0]
        return [self.nodes[members[place]] for place in self.cluster.query_order[arc]]

    def page_owned_by(self, *numbers: int) -> str:
        """Return a name whose first owners are these, in this order."""
        for i in range(10_000):
            name = f"page-{i}"
            if [node.number for node in self.owners(name)[: len(numbers)]] == list(numbers):
                return name
        raise AssertionError(f"no page is owned by {numbers}")

    def publish(self, *records: Records) -> None:
        """Notify the owners of each record about it."""
        for record in records:
            owners = self.cluster.ring.owners(np.ascontiguousarray(record["key"]))[0]
            for number in owners[: self.cluster.replicas]:
                self.nodes[int(number)].know(record)

    # --- the calls --------------------------------------------------------------------------------

    def get(self, *names: str, timeout_s: float = 2.0, size: int = PAGE) -> Got:
        """Get pages; return what came of it, and what is in the destinations."""
        pages = [np.full(size, 0xEE, np.uint8) for _ in names]
        return self.get_into(names, pages, timeout_s)

    def get_into(self, names: Sequence[str], pages: list[Page], timeout_s: float = 2.0) -> Got:
        """Get pages into these buffers."""
        outcome = self.run(
            self.reader.get(
                named(*names),
                runs_of(pages),
                self.cluster,
                self.now + timeout_s,
                MirrorHome(self.home, self.reservations),
            )
        )
        return Got(
            outcome.hits.tolist(),
            outcome.reasons,
            pages,
            outcome.pages_by_fabric,
            outcome.mirrored,
            outcome.tier,
        )

    def exists(self, *names: str, timeout_s: float = 0.1, touch: bool = False) -> list[bool]:
        """Ask which pages exist."""
        until = self.now + timeout_s
        path = self.reader.exists(named(*names), self.cluster, until, touch=touch)
        found, _, self.answered_by = self.run(path)
        known: list[bool] = found.tolist()
        return known

    def leading(self, *names: str, timeout_s: float = 0.1, touch: bool = False) -> Leading:
        """Ask how many leading pages exist."""
        until = self.now + timeout_s
        found: Leading = self.run(
            self.reader.leading(named(*names), self.cluster, until, touch=touch)
        )
        return found

    def set(
        self, names: Sequence[str], pages: Sequence[Page] | None = None, timeout_s: float = 2.0
    ) -> Any:
        """Set pages at home; return the outcome."""
        pages = [content_of(name) for name in names] if pages is None else pages
        path = self.writer.set(
            named(*names),
            runs_of(pages),
            home=self.home,
            reservations=self.reservations,
            until=self.now + timeout_s,
        )
        return self.run(path)

    # --- the driver -------------------------------------------------------------------------------

    def run(self, path: Generator[Step, Any, Result]) -> Result:
        """Drive a path to its end; no path takes more than a few steps."""
        answer: Any = None
        for _ in range(200):
            try:
                step = path.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
            self.steps.append(step)
            answer = self.do(step)
        raise AssertionError("the path does not end")

    def asked(self, kind: type[Message] | None = None) -> list[list[int]]:
        """Return whom each Ask went to, in order."""
        return [
            [peer for peer, message in step.questions if kind is None or type(message) is kind]
            for step in self.steps
            if isinstance(step, Ask)
        ]

    def fetched_from(self) -> list[list[int]]:
        """Return which holders each Fetch read from, in order."""
        return [
            [read.member.incarnation for read in step.reads]
            for step in self.steps
            if isinstance(step, Fetch)
        ]

    def posts(self, kind: type[Message]) -> list[tuple[int, Any]]:
        """Return the messages of a kind that were posted, with their addressees."""
        return [(peer, message) for peer, message in self.posted if type(message) is kind]

    def do(self, step: Step) -> Any:
        match step:
            case Ask():
                return self._ask(step)
            case ReadTable():
                return self._read_table(step)
            case Post(messages):
                self.posted.extend(messages)
                for peer, message in messages:
                    if self.nodes[peer].mood == "up":
                        self.nodes[peer].answer(message)
                return None
            case Submit(peer, message):
                return self._send(peer, message)
            case Collect():
                return self._collect(step)
            case Drain(peer):
                while self.nodes[peer].late:
                    self.reservations.granted(self.nodes[peer].late.popleft())
                return None
            case Fetch():
                return [self._read(read, step.until) for read in step.reads]
            case Place():
                return self._place(step)
            case Checksum(runs, pages):
                self.now += self.checksum_s
                return checksums_of(runs, pages)
            case _:  # Renew
                self.renewed += 1
                return self.cluster if self.cluster_of_now is None else self.cluster_of_now

    def _send(self, peer: int, message: Message) -> int:
        node = self.nodes[peer]
        if node.mood == "away":
            self.breakers.failed(peer, self.now)
        answer = node.answer(message) if node.mood == "up" else None
        if answer is not None:
            self.breakers.answered(peer)
        self.sent.append((peer, self.now, answer))
        return len(self.sent)

    def _collect(self, step: Collect) -> Message | None:
        peer, sent_at, answer = self.sent[step.number - 1]
        if self.nodes[peer].mood == "away":
            return None
        arrives_at = sent_at + self.nodes[peer].latency_s
        if answer is not None and max(self.now, arrives_at) <= max(self.now, step.until):
            self.now = max(self.now, arrives_at)
            return answer
        self.now = max(self.now, step.until)
        self.breakers.waited(peer, self.now - sent_at, self.now)
        return None

    def _read_table(self, step: ReadTable) -> Looked | None:
        node = self.nodes[step.peer]
        assert step.ring == self.cluster.ring.version
        if node.table == "lost":
            return None
        reported = node.send_report(step.keys)
        asked = [step.keys[at : at + KEY_BYTES] for at in range(0, len(step.keys), KEY_BYTES)]
        places = [asked.index(key) for key in records_from_bytes(reported)["key"].tolist()]
        return Looked(reported, np.array(places, np.uint32), node.table == "final", node.is_at_work)

    def _ask(self, step: Ask) -> list[Message | None]:
        questions: list[tuple[int, Message]] = []
        answers: list[Message | None] = []
        asked_at: list[float] = []
        arrivals: dict[int, float] = {}
        """By the index of a question that is not answered yet; inf for a silent node."""
        hedge_at, hedge = step.hedge or (math.inf, None)
        is_over = is_hedged = False

        def send(more: Sequence[tuple[int, Message]]) -> None:
            for peer, message in more:
                node = self.nodes[peer]
                if node.mood == "away":
                    self.breakers.failed(peer, self.now)
                else:
                    is_up = node.mood == "up"
                    arrivals[len(questions)] = self.now + node.latency_s if is_up else math.inf
                questions.append((peer, message))
                answers.append(None)
                asked_at.append(self.now)

        send(step.questions)
        while arrivals and not is_over:
            place = min(arrivals, key=arrivals.__getitem__)
            if hedge is not None and hedge_at < min(arrivals[place], step.until):
                self.now, is_hedged = max(self.now, hedge_at), True
                more, hedge_at = hedge(answers)
                self.hedged += [peer for peer, _ in more]
                send(more)
            elif arrivals[place] > step.until:
                self.now, is_over = max(self.now, step.until), True
            else:
                peer, message = questions[place]
                answers[place] = self.nodes[peer].answer(message)
                if answers[place] is None:
                    arrivals[place] = math.inf
                    continue
                self.now = max(self.now, arrivals.pop(place))
                self.breakers.answered(peer)
                if hedge is not None:
                    self.breakers.times.answered(peer, self.now - asked_at[place])
            if step.enough and (any(answers) or is_hedged) and step.enough(answers):
                if not is_hedged:
                    return answers
                is_over = True
        for late in arrivals:
            peer = questions[late][0]
            self.breakers.waited(peer, self.now - asked_at[late], self.now)
        return answers

    def _read(self, read: PeerRead, until: float) -> Fetched:
        node = self.nodes[read.member.incarnation]
        seals = unread_seals(len(read.offsets))
        breaker = data_port(node.number)
        if node.data_mood == "refusing":
            return Fetched(seals, reasons.REFUSED, "world")
        if node.data_mood != "up" or not self.breakers.available(breaker, self.now):
            if node.data_mood == "silent":
                self.now = min(until, self.now + 0.25)
            self.breakers.failed(breaker, self.now)
            return Fetched(seals, reasons.PEER_UNREACHABLE, "world")
        for page in range(len(seals)):
            if self.now >= until:
                return Fetched(seals, reasons.DEADLINE, "world")
            self.now += self.page_s
            offset, size = int(read.offsets[page]), int(read.lengths[page])
            if node.words[offset // GRANULE] != read.generations[page]:
                seals[page] = node.seals[offset // GRANULE]
                continue
            self.before(node, page)
            scatter(read.runs, page, node.memory[offset : offset + size])
            self.between(node, page)
            seals[page] = node.seals[offset // GRANULE]
        self.breakers.answered(breaker)
        return Fetched(seals, "", self.fabric)

    def _place(self, step: Place) -> int:
        home = self.nodes[self.home]
        for page, begin in enumerate(step.offsets.tolist()):
            if self.now + self.page_s > step.until:
                self.now = step.until
                return page
            self.now += self.page_s
            offset = begin
            for run in range(int(step.runs.starts[page]), int(step.runs.starts[page + 1])):
                address, size = int(step.runs.addresses[run]), int(step.runs.sizes[run])
                piece = np.frombuffer(ctypes.string_at(address, size), np.uint8)
                home.memory[offset : offset + size] = piece
                offset += size
        return len(step.offsets)


def _member(number: int, boot_id: str) -> Member:
    return Member(number, 1, ALIVE, 255, f"n{number}", f"h:{number}", f"h:{number}", boot_id, "")


def _nothing(_node: Node, _page: int) -> None:
    return


__all__ = ["PAGE", "Abort", "Got", "Node", "World", "content_of", "named", "runs_of"]
