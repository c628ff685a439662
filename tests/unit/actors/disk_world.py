"""Pool, disk and promote actor, a memory, a store that works when it is asked to, and records.

The store is the simulations' own. Clients set pages whose bytes are a function of key and version;
whatever is read under a record in force must be the bytes of a version that was set.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import numpy as np

from peercache.actors.disk.actor import DiskTier
from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyDisk,
    NotifyPool,
    NotifyPromote,
    NotifyPublisher,
    Send,
    StoreWords,
)
from peercache.actors.mailboxes import (
    PagesCommitted,
    PoolGrew,
    RecordsChanged,
    RemovalDone,
    RequestLoad,
)
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.ports import (
    DISK_LATE,
    DISK_UNTRIED,
    DiskEnded,
    DiskOpened,
    Forget,
    ForgetDone,
    LateEnded,
    Load,
    LoadDone,
    NoteUse,
    Write,
    WriteDone,
)
from peercache.actors.promote.actor import Promoter
from peercache.actors.runtime import SELF
from peercache.model.ids import Incarnation
from peercache.model.records import DROP, ON_DISK, RESIDENT
from peercache.model.records import from_bytes as records_from_bytes
from peercache.model.room import QuotaRule
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    RESERVED,
    Clear,
    Commit,
    Granted,
    Promote,
    Promoted,
    Remove,
    Removed,
    Reserve,
    Retain,
    Retained,
    Touched,
)
from sims.content import content_of, version_of
from sims.store import Image, Store

GRANULE = 4096
SLAB = 64 * 1024
INCARNATION = Incarnation(77)
CLIENT = Origin(5, 3)
LENGTH = 3000


def key(number: int) -> bytes:
    """Return the page key that tests call by a number."""
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> bytes:
    """Return packed page keys."""
    return b"".join(key(number) for number in numbers)


@attrs.define(eq=False)
class Working:
    """A job of the store that is under way.

    reserved: lengths of the pages whose slots the pool keeps until a load ends.
    """

    effect: Write | Load
    pages: list[Generator[None, None, Any] | None]
    outcomes: list[Any]
    reserved: list[int]


@attrs.define(eq=False)
class Memory:
    """Page memory and words."""

    pages: np.ndarray
    words: list[int]

    def word_at(self, offset: int) -> int:
        """Return a slot's word."""
        return self.words[offset // GRANULE]

    def read(self, offset: int, size: int) -> np.ndarray:
        """Return bytes as they are."""
        return self.pages[offset : offset + size].copy()

    def load(self, offset: int, slot_offset: int, data: np.ndarray) -> None:
        """Store bytes of a page from disk."""
        assert self.word_at(slot_offset) & 1, "a load wrote under an even word"
        self.pages[offset : offset + len(data)] = data


class DiskWorld:
    """One node's pool and disk tier; time and the store go on when they are asked to."""

    def __init__(
        self,
        *,
        granules: int = 8,
        slabs: int = 4,
        image: Image | None = None,
        queue_bytes: int = 10**6,
        wish_rate: int = 10**6,
        on_evict: bool = False,
        ttl_s: float = 0.0,
        quotas: Sequence[QuotaRule] = (),
        pool_quotas: Sequence[QuotaRule] = (),
        unix_s: int = 1_000_000,
        is_open: bool = True,
        seed: int = 1,
        order: random.Random | None = None,
    ) -> None:
        """Make a node over an image; `slabs` slabs of seven pages of one granule.

        unix_s: the wall clock of now.
        order: draws which actor takes its next message; without it they go in order of arrival.
        """
        self.now = 100.0
        self.unix_s = unix_s
        self.metrics = Metrics()
        self.pool = Pool(
            incarnation=INCARNATION,
            granule=GRANULE,
            page_bytes=granules * GRANULE,
            usable_bytes=0,
            client_uncommitted_max=granules * GRANULE,
            rng=random.Random(seed),
            metrics=self.metrics,
            has_disk=True,
            quotas=pool_quotas,
        )
        self.tier = DiskTier(
            writes_through=not on_evict,
            queue_bytes_max=queue_bytes,
            report_rate=40,
            ttl_s=ttl_s,
            metrics=self.metrics,
            quotas=tuple(quotas),
        )
        self.promote = Promoter(wish_rate=wish_rate, metrics=self.metrics)
        self.actors: dict[str, Any] = {
            "pool": self.pool,
            "disk": self.tier,
            "promote": self.promote,
        }
        self.order = order
        self.image = image or Image()
        self.memory = Memory(np.zeros(granules * GRANULE, np.uint8), [1] * granules)
        self.store = Store(self.image, self.memory)
        self.slabs = slabs
        self.working: dict[int, Working] = {}
        self.late: dict[int, list[int]] = {}
        self.forgets: list[int] = []
        self.records: dict[bytes, np.void] = {}
        self.answers: list[Promoted | Removed | PagesCommitted] = []
        self.versions: dict[bytes, set[int]] = {}
        self.noted: list[NoteUse] = []
        self.waiting: list[tuple[str, Origin, object]] = []
        self._sequence = 0
        self.version = 0
        self.notify("pool", PoolGrew(granules * GRANULE))
        if is_open:
            self.open()

    # --- what people do ---------------------------------------------------------------------------

    def open(self) -> None:
        """Let the store find the image."""
        entries = self.image.entries()
        self.notify("disk", DiskOpened(self.slabs * SLAB, SLAB, entries, self._wall_clock()))

    def _wall_clock(self) -> int:
        return self.unix_s + int(self.now - 100.0)

    def end(self) -> None:
        """Let the disk end: its jobs are answered first."""
        for job in [job for job in self.working if job > 0]:
            self.answer(job, DISK_UNTRIED)
        self.notify("disk", DiskEnded("stuck"))

    def set(self, *numbers: int, length: int = LENGTH, namespace: int = 1) -> None:
        """Reserve, write and commit pages, each in a new version."""
        self._sequence += 1
        names = keys(*numbers)
        sizes = np.full(len(numbers), length, "<u8").tobytes()
        self.notify("pool", Reserve(1, self._sequence, namespace, names, sizes), CLIENT)
        granted = self._granted
        offsets = np.frombuffer(granted.offsets, "<u8").tolist()
        for number, state, offset in zip(numbers, granted.states, offsets, strict=True):
            if state == RESERVED:
                self.version += 1
                page = content_of(key(number), self.version, length)
                self.memory.pages[offset : offset + length] = page
                self.versions.setdefault(key(number), set()).add(self.version)
        written, sums = b"\1" * len(numbers), bytes(8 * len(numbers))
        self.notify("pool", Commit(2, self._sequence, written, sums, 0.1), CLIENT)

    def ask(self, *numbers: int, timeout_s: float = 0.1, asker: int = 5) -> None:
        """Ask for pages on disk."""
        self.notify("promote", Promote(asker, keys(*numbers), timeout_s), Origin(asker, 3))

    def touch(self, *numbers: int) -> None:
        """Report that pages in memory were read."""
        drops = np.zeros(len(numbers), DROP)
        for index, number in enumerate(numbers):
            drops[index] = np.void(key(number)), self.records[key(number)]["generation"]
        self.notify("pool", Touched(drops.tobytes()), CLIENT)

    def retain(self, *numbers: int, seconds: float, namespace: int = 1) -> None:
        """Retain pages in memory."""
        self.notify("pool", Retain(9, namespace, keys(*numbers), seconds), CLIENT)

    def remove(self, *numbers: int, namespace: int = 1) -> None:
        """Remove pages everywhere at this node."""
        self.notify("pool", Remove(7, namespace, keys(*numbers)), CLIENT)

    def clear(self, namespace: int) -> None:
        """Clear a namespace."""
        self.notify("pool", Clear(8, namespace), CLIENT)

    def wait(self, span_s: float) -> None:
        """Let time pass, tick by tick."""
        until = self.now + span_s
        while (due := min(actor.deadline() for actor in self.actors.values())) <= until:
            self.now = max(self.now, due)
            for actor in self.actors.values():
                if actor.deadline() <= self.now:
                    effects = actor.on_tick(self.now)
                    assert actor.deadline() > self.now, f"{actor} ticks without end"
                    self.perform(effects)
        self.now = until

    # --- the store --------------------------------------------------------------------------------

    def step(self, job: int) -> None:
        """Let a job do one step; it is answered after the last."""
        working = self.working[job]
        for at, page in enumerate(working.pages):
            if page is not None:
                try:
                    next(page)
                except StopIteration as end:
                    working.pages[at] = None
                    working.outcomes[at] = end.value
                break
        if not any(working.pages):
            self.answer(job)

    def answer(self, job: int, outcome: int | None = None) -> None:
        """Answer a job, with an outcome for what is not done yet."""
        working = self.working.pop(job)
        found = [outcome if o is None else o for o in working.outcomes]
        if outcome == DISK_LATE:
            self.late[job] = [at for at, o in enumerate(found) if o == DISK_LATE]
            self.working[-job] = working
        states = bytes(o[0] if isinstance(o, tuple) else o for o in found)
        sums = np.array([o[1] if isinstance(o, tuple) else 0 for o in found], np.uint64)
        done = WriteDone if isinstance(working.effect, Write) else LoadDone
        self.notify("disk", done(job, states, sums))

    def late_ends(self, job: int) -> None:
        """Let the late pages of a job return, after they have done the worst."""
        working = self.working.pop(-job)
        indices = self.late.pop(job)
        for at in indices:
            for _ in working.pages[at] or ():
                pass
        self.notify("disk", LateEnded(job, tuple(indices)))

    def finish(self) -> None:
        """Let the store do all it has, and whatever follows."""
        while jobs := [job for job in self.working if job > 0]:
            self.step(jobs[0])
        self.image.sync()
        for job in self.forgets[:]:
            self.forgets.remove(job)
            self.notify("disk", ForgetDone(job))
        if any(job > 0 for job in self.working):
            self.finish()

    # --- the machinery ----------------------------------------------------------------------------

    def notify(self, actor: str, message: object, sender: Origin = SELF) -> None:
        """Hand over a message, and all that follows from it."""
        self.post(actor, message, sender)
        self.drain()

    def post(self, actor: str, message: object, sender: Origin = SELF) -> None:
        """Put a message into a mailbox."""
        self.waiting.append((actor, sender, message))

    def drain(self) -> None:
        """Let the actors take what waits; each actor's messages stay in order."""
        while self.waiting:
            actor, sender, message = self.waiting.pop(self._next())
            if isinstance(message, RequestLoad):
                # A Load has those of its pages that are still on disk: the others have slots too.
                self._reserved = message.lengths.tolist()
            taker = self.actors[actor]
            effects = taker.on_message(sender, message, self.now)
            taker.check()
            self.perform(effects, drain=False)

    def _next(self) -> int:
        """Return the position of the message that is taken next."""
        if self.order is None:
            return 0
        names = [name for name, _, _ in self.waiting]
        return names.index(self.order.choice(names))

    def perform(self, effects: Sequence[Effect], *, drain: bool = True) -> None:
        """Do effects in their order."""
        for effect in effects:
            match effect:
                case StoreWords(indices, values):
                    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
                        self.memory.words[index] = value
                case NotifyDirectory(RecordsChanged() as changed):
                    self._apply(changed)
                case NotifyPublisher(PagesCommitted() as committed):
                    self.answers.append(committed)
                case NotifyPublisher(RemovalDone(_, removed)):
                    self.answers.append(removed)
                case NotifyPublisher():
                    pass
                case NotifyPool(fact):
                    self.post("pool", fact)
                case NotifyDisk(fact):
                    self.post("disk", fact)
                case NotifyPromote(fact):
                    self.post("promote", fact)
                case Write() | Load():
                    self._begin(effect)
                case Forget(places, job):
                    self.store.forget(places.tolist())
                    if job:
                        self.forgets.append(job)
                case NoteUse(places, unix_s):
                    self.noted.append(effect)
                    self.store.note_use(places.tolist(), unix_s.tolist())
                case Send(_, Granted() as granted):
                    self._granted = granted
                case Send(_, Retained()):
                    pass
                case Send(_, message):
                    assert isinstance(message, Promoted), message
                    self.answers.append(message)
                case _:
                    raise AssertionError(f"unexpected effect {effect}")
        if drain:
            self.drain()

    def _begin(self, effect: Write | Load) -> None:
        self.store.unix_s = self._wall_clock()
        run = self.store.write if isinstance(effect, Write) else self.store.load
        count = len(effect.places)
        pages = [run(effect, at) for at in range(count)]
        assert effect.job not in self.working, "a job number came twice"
        reserved = self._reserved if isinstance(effect, Load) else []
        self.working[effect.job] = Working(effect, list(pages), [None] * count, reserved)

    def _apply(self, changed: RecordsChanged) -> None:
        for record in changed.records:
            known = self.records.get(record["key"].tobytes())
            assert known is None or known["generation"] < record["generation"], "an older record"
            self.records[record["key"].tobytes()] = record
        for drop in changed.drops:
            known = self.records.get(drop["key"].tobytes())
            if known is not None and known["generation"] <= drop["generation"]:
                del self.records[drop["key"].tobytes()]

    # --- what is to be seen -----------------------------------------------------------------------

    def where(self, number: int) -> str:
        """Return where a page is by the record in force: memory, disk, or nowhere."""
        record = self.records.get(key(number))
        if record is None:
            return ""
        return "memory" if record["flags"] & RESIDENT else "disk"

    def places(self, *numbers: int) -> list[str]:
        """Return where pages are, as the directory has it."""
        return [self.where(number) for number in numbers]

    def read(self, record: np.void) -> int:
        """Return the version under a resident record; its word must be right."""
        assert record["flags"] & RESIDENT
        offset, length = int(record["offset"]), int(record["length"])
        assert self.memory.word_at(offset) == int(record["generation"])
        version = version_of(record["key"].tobytes(), self.memory.read(offset, length))
        assert version is not None, "wrong bytes"
        assert version in self.versions[record["key"].tobytes()], "bytes that were never set"
        return version

    def promoted(self) -> tuple[list[int], list[bytes]]:
        """Return the last answer to a Promote: states, and the keys it has records of."""
        answer = self.answers[-1]
        assert isinstance(answer, Promoted), answer
        found = records_from_bytes(answer.records)
        for record in found:
            self.read(record)
        return list(answer.states), [record["key"].tobytes() for record in found]

    def count(self, name: str, **labels: str) -> float:
        """Return a metric."""
        return self.metrics.registry.get_sample_value(f"peercache_{name}", labels) or 0.0

    def check_records(self) -> None:
        """Demand that the records in force are what is there, once all has been reported."""
        index = self.tier.index
        reported: dict[bytes, str] = {
            page.key: "memory" for page in self.pool.pages.of_namespace(1)
        }
        if index is not None:
            for row in index.entries(index.hottest_first()):
                reported.setdefault(row["key"].tobytes(), "disk")
        assert {k: self.where(int.from_bytes(k, "big")) for k in self.records} == reported
        for record in self.records.values():
            if record["flags"] & RESIDENT:
                self.read(record)
            else:
                assert record["flags"] == ON_DISK


POOL = 8
"""Pages that the pool holds."""


def filled(**options: object) -> DiskWorld:
    """Return a world whose first eight pages are on disk only."""
    world = DiskWorld(**options)  # type: ignore[arg-type]
    world.set(*range(POOL))
    world.finish()
    world.set(*range(100, 100 + POOL))
    return world


def reserve(count: int, sequence: int = 1000) -> object:
    from peercache.wire.messages.pool import Reserve

    names = keys(*range(sequence * 10, sequence * 10 + count))
    return Reserve(1, sequence, 1, names, np.full(count, GRANULE, "<u8").tobytes())


def abort(sequence: int) -> object:
    from peercache.wire.messages.pool import Abort

    return Abort(sequence)
