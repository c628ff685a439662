"""A pool with everything around it: page memory, generation words, clients that write, records.

The world is as unkind as the rules allow. A client that is granted a slot writes rubbish into all
of it at once, before any later effect is performed; every record ever published is remembered, and
after every single effect it is tried: if its word still equals its generation, its bytes must be
those that were committed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import numpy as np

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPublisher,
    Send,
    StoreWords,
)
from peercache.actors.mailboxes import (
    ClientGone,
    PagesCommitted,
    PoolGrew,
    RecordsChanged,
    RemovalDone,
    ReserveAhead,
)
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.reservations import Reservation
from peercache.actors.pool.slots import UNITS_ABOUT, SlotAllocator
from peercache.model.ids import Incarnation
from peercache.model.records import DROP, RECORD, RESIDENT
from peercache.model.room import QuotaRule
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    COMMITTED,
    RESERVED,
    Abort,
    Clear,
    Commit,
    Granted,
    LiveReservations,
    Remove,
    Reserve,
    Touched,
)
from peercache.wire.messages.session import Refused

GRANULE = 4096
INCARNATION = Incarnation(77)
NODE = Origin(0)


def key(number: int) -> bytes:
    """Return the page key that tests call by a number."""
    return number.to_bytes(16, "big")


def packed(numbers: Sequence[int]) -> bytes:
    """Return n × u64."""
    return np.array(numbers, "<u8").tobytes()


class World:
    """One pool, its memory and its clients."""

    def __init__(
        self,
        *,
        granules: int,
        usable: int | None = None,
        uncommitted_max: int | None = None,
        units_about: int = UNITS_ABOUT,
        metrics: Metrics | None = None,
        seed: int = 1,
        quotas: Sequence[QuotaRule] = (),
    ) -> None:
        """Make a pool of `granules` granules. uncommitted_max: of a client; None: half of them."""
        self.pool = Pool(
            incarnation=INCARNATION,
            granule=GRANULE,
            page_bytes=granules * GRANULE,
            usable_bytes=(granules if usable is None else usable) * GRANULE,
            client_uncommitted_max=(
                granules * GRANULE // 2 if uncommitted_max is None else uncommitted_max
            ),
            rng=random.Random(seed),
            metrics=metrics,
            quotas=quotas,
        )
        # Few units make extents of several slots in a pool small enough to be checked in full.
        self.pool._slots = SlotAllocator(
            granules=granules,
            usable=granules if usable is None else usable,
            units_about=units_about,
            tenants=self.pool.tenants,
        )
        self.words = [0] * granules
        self.ever: list[set[int]] = [{0} for _ in range(granules)]
        """All values that each word has had."""
        self.memory: list[object] = [None] * granules
        self.published: dict[int, tuple[np.void, list[object]]] = {}
        """Every record there ever was, by generation, with what its granules held then."""
        self.here: dict[bytes, np.void] = {}
        """The records in force, as directory and publisher know them."""
        self.writing: dict[tuple[int, int], tuple[Reserve, Granted]] = {}
        """What clients may still write to."""
        self.sequences: dict[int, int] = {}
        self.drop_batches: list[np.ndarray] = []
        self.now = 0.0
        self._reported: dict[str, list[RecordsChanged]] = {"directory": [], "publisher": []}
        self._rubbish = 0

    # --- what clients and peers say ------------------------------------------------------------

    def reserve(
        self,
        client: int,
        keys: Sequence[int],
        lengths: Sequence[int] | int,
        *,
        sequence: int | None = None,
        namespace: int = 1,
    ) -> Granted | Refused:
        """Reserve pages; lengths in bytes, or one for all."""
        if isinstance(lengths, int):
            lengths = [lengths] * len(keys)
        if sequence is None:
            sequence = self.sequences.get(client, 0) + 1
        self.sequences[client] = max(sequence, self.sequences.get(client, 0))
        message = Reserve(9, sequence, namespace, b"".join(map(key, keys)), packed(lengths))
        return self.reserve_again(client, message)

    def reserve_again(self, client: int, message: Reserve) -> Granted | Refused:
        """Deliver a Reserve, be it for the first time or not."""
        effects = self.say(client, message)
        answer = effects[-1]
        assert isinstance(answer, Send), "the answer comes last"
        return answer.message

    def write(self, client: int, sequence: int, pages: Sequence[int] | None = None) -> None:
        """Write the true bytes of pages (all that were granted) of a reservation."""
        reserve, granted = self.writing[client, sequence]
        for index, state in enumerate(granted.states):
            if state == RESERVED and (pages is None or index in pages):
                first, count = self.extent_of(reserve, granted, index)
                for granule in range(count):
                    self.memory[first + granule] = ("page", client, sequence, index, granule)
        self.check_reads()

    def commit(
        self,
        client: int,
        sequence: int | None = None,
        *,
        written: bytes | None = None,
        checksums: Sequence[int] | None = None,
        count: int | None = None,
        named: Sequence[int] = (),
        ahead: tuple[int, ...] = (),
    ) -> PagesCommitted | Refused:
        """Commit a reservation; by default all of it, as written. named: pages of one ahead.

        ahead: numbers under which as many slots are to be reserved for later ones.
        """
        sequence = self.sequences[client] if sequence is None else sequence
        open_now = self.writing.get((client, sequence))
        if count is None:
            count = len(named) or (len(open_now[1].states) if open_now else 1)
        written = b"\1" * count if written is None else written
        sums = packed(checksums if checksums is not None else [0] * len(written))
        if open_now and self._fits(open_now[0], len(written), len(sums) // 8, len(named)):
            # From the moment of a Commit that fits, the client writes no more.
            del self.writing[client, sequence]
        names = b"".join(map(key, named))
        effects = self.say(client, Commit(11, sequence, written, sums, 0.5, names, ahead))
        if isinstance(effects[-1], Send):
            return effects[-1].message
        assert isinstance(effects[-1], NotifyPublisher)
        return effects[-1].fact

    def _fits(self, reserve: Reserve, written: int, sums: int, named: int) -> bool:
        slots = len(reserve.lengths) // 8
        if reserve.keys:
            return slots == written == sums and not named
        return 0 < named <= slots and named == written == sums

    def reserve_ahead(
        self, client: int, lengths: Sequence[int], *, sequence: int | None = None
    ) -> Granted:
        """Reserve slots for pages that have no names yet."""
        if sequence is None:
            sequence = self.sequences.get(client, 0) + 1
        self.sequences[client] = max(sequence, self.sequences.get(client, 0))
        answer = self.reserve_again(client, Reserve(9, sequence, 1, b"", packed(lengths)))
        assert isinstance(answer, Granted)
        return answer

    def store(self, client: int, keys: Sequence[int], length: int, **more: int) -> bytes:
        """Reserve, write and commit; return the final states."""
        granted = self.reserve(client, keys, length, **more)
        assert isinstance(granted, Granted)
        if (client, granted.sequence) not in self.writing:
            return granted.states
        self.write(client, granted.sequence)
        done = self.commit(client, granted.sequence)
        assert isinstance(done, PagesCommitted)
        return done.states

    def abort(self, client: int, sequence: int) -> None:
        """Abort a reservation."""
        self.writing.pop((client, sequence), None)
        self.say(client, Abort(sequence))

    def list_live(self, client: int, newest: int, sequences: Sequence[int]) -> None:
        """Say which reservations a client may still write to."""
        for owner, sequence in list(self.writing):
            if owner == client and sequence <= newest and sequence not in sequences:
                del self.writing[owner, sequence]
        self.say(client, LiveReservations(newest, tuple(sequences)))

    def exit(self, client: int) -> None:
        """Let a client's process exit."""
        for owner, sequence in list(self.writing):
            if owner == client:
                del self.writing[owner, sequence]
        self.perform(self.pool.on_message(NODE, ClientGone(client), 0.0), client)

    def touch(self, *numbers: int, stale: bool = False) -> None:
        """Report that these pages were read, under their generation or an older one."""
        drops = np.zeros(len(numbers), DROP)
        for index, number in enumerate(numbers):
            record = self.here.get(key(number))
            generation = 2 if record is None or stale else int(record["generation"])
            drops[index] = (np.void(key(number)), generation)
        self.say(1, Touched(drops.tobytes()))

    def remove(self, *numbers: int, namespace: int = 1) -> int:
        """Remove pages of a namespace; return the count that the pool reports."""
        return self._removed(self.say(1, Remove(13, namespace, b"".join(map(key, numbers)))))

    def clear(self, namespace: int) -> int:
        """Clear a namespace; return the count that the pool reports."""
        return self._removed(self.say(1, Clear(13, namespace)))

    def grow(self, granules: int) -> None:
        """Populate more of the page memory."""
        self.perform(self.pool.on_message(NODE, PoolGrew(granules * GRANULE), 0.0), 0)

    # --- what is to be seen --------------------------------------------------------------------

    def holds(self, *numbers: int) -> list[bool]:
        """Return which pages are here."""
        return [key(number) in self.here for number in numbers]

    def record(self, number: int) -> np.void:
        """Return the record in force of a page."""
        return self.here[key(number)]

    def is_readable(self, record: np.void) -> bool:
        """Return whether a read under this record would be a hit."""
        return self.words[int(record["offset"]) // GRANULE] == int(record["generation"])

    def figure(self, name: str) -> int:
        """Return one of the pool's figures."""
        return self.pool.figures()[name]

    def extent_of(self, reserve: Reserve, granted: Granted, index: int) -> tuple[int, int]:
        """Return the first granule and the number of granules of a granted page."""
        offset = int(np.frombuffer(granted.offsets, "<u8")[index])
        length = int(np.frombuffer(reserve.lengths, "<u8")[index])
        assert offset % GRANULE == 0
        return offset // GRANULE, -(-length // GRANULE)

    # --- the machinery -------------------------------------------------------------------------

    def say(self, client: int, message: object) -> list[Effect]:
        """Hand a message over and do what the pool wants, in its order."""
        effects = self.pool.on_message(Origin(client, 3), message, self.now)
        self.pool.check()
        self.perform(effects, client, message)
        return effects

    def perform(self, effects: list[Effect], client: int, message: object = None) -> None:
        """Perform effects one after the other, and try every record after each."""
        ahead: list[ReserveAhead] = []
        for effect in effects:
            match effect:
                case StoreWords(indices, values):
                    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
                        self._store_word(index, value)
                case NotifyDirectory(RecordsChanged() as changed):
                    self._reported["directory"].append(changed)
                    self._apply(changed)
                case NotifyPublisher(RecordsChanged() as changed):
                    self._reported["publisher"].append(changed)
                case NotifyPublisher(PagesCommitted() as committed):
                    ahead.extend(committed.then)
                    self._committed(committed)
                    if committed.ahead:
                        _, granted = self.writing[client, committed.ahead]
                        assert granted.offsets == committed.offsets
                        assert set(granted.states) == {RESERVED}, "an offset of no slot"
                case Send(Origin(identity), Granted() as granted):
                    assert identity == client
                    assert isinstance(message, Reserve)
                    self._granted(client, message, granted)
                case NotifyPublisher(RemovalDone(origin)):
                    assert origin.identity == client
                case Send(Origin(identity), Refused()):
                    assert identity == client
                case _:
                    raise AssertionError(f"an unexpected effect: {effect}")
            self.check_reads()
        if isinstance(message, Reserve) and (client, message.sequence) not in self.writing:
            known = self.pool._reservations.find(client, message.sequence)
            if isinstance(known, Reservation):
                # The client learns of it later, and might write there from now on all the same.
                reported = Granted(0, message.sequence, known.states, known.offsets)
                self._granted(client, message, reported)
        drops = [
            len(changed.drops) for changed in self._reported["directory"] if len(changed.drops)
        ]
        same = [len(changed.drops) for changed in self._reported["publisher"] if len(changed.drops)]
        assert drops == same, "directory and publisher learn of the same drops"
        self.check_sums()
        for fact in ahead:
            assert fact.origin.identity == client
            assert self.pool.on_message(NODE, fact, 0.0) == []
            granting = self.pool.on_tick(self.pool.deadline())
            assert self.pool.deadline() == inf
            self.pool.check()
            self.perform(granting, client, fact.reserve)

    def _store_word(self, index: int, value: int) -> None:
        if value != self.words[index]:
            assert value not in self.ever[index], f"word {index} has had the value {value} before"
        self.ever[index].add(value)
        self.words[index] = value

    def _apply(self, changed: RecordsChanged) -> None:
        if len(changed.drops):
            self.drop_batches.append(changed.drops)
        for drop in changed.drops:
            record = self.here.pop(bytes(drop["key"]))
            assert record["generation"] == drop["generation"]
            assert not self.is_readable(record), "a record is withdrawn after its word went odd"
        for record in changed.records:
            generation = int(record["generation"])
            assert generation not in self.published, f"generation {generation} comes twice"
            assert generation % 2 == 0
            assert bytes(record["key"]) not in self.here, "a page has one record"
            assert int(record["flags"]) & RESIDENT
            assert record["holder"] == INCARNATION
            first = int(record["offset"]) // GRANULE
            count = -(-int(record["length"]) // GRANULE)
            content = self.memory[first : first + count]
            self.published[generation] = (record, content)
            self.here[bytes(record["key"])] = record
            assert self.is_readable(record), "the word comes before the record"

    def _committed(self, committed: PagesCommitted) -> None:
        assert committed.states.count(COMMITTED) in {0, len(committed.records)} or (
            len(committed.records) == 0
        )
        for record in [*committed.records, *committed.here]:
            assert self.here[bytes(record["key"])] == record
        assert committed.records.dtype == committed.here.dtype == RECORD

    def _granted(self, client: int, reserve: Reserve, granted: Granted) -> None:
        """Scribble over every granted slot: from here on its bytes may change at any time."""
        assert len(granted.states) == len(reserve.lengths) // 8 == len(granted.offsets) // 8
        if RESERVED not in granted.states:
            return
        known = self.writing.get((client, granted.sequence))
        assert known is None or known[1] == granted, "asked twice, granted the same"
        if known is not None:
            return
        self.writing[client, granted.sequence] = (reserve, granted)
        for index, state in enumerate(granted.states):
            if state == RESERVED:
                first, count = self.extent_of(reserve, granted, index)
                assert first + count <= len(self.memory)
                for granule in range(count):
                    self._rubbish += 1
                    self.memory[first + granule] = self._rubbish

    def _removed(self, effects: list[Effect]) -> int:
        answer = effects[-1]
        assert isinstance(answer, NotifyPublisher)
        assert isinstance(answer.fact, RemovalDone)
        return answer.fact.removed.count

    # --- invariants ----------------------------------------------------------------------------

    def check_reads(self) -> None:
        """Try every record ever published: what its word admits has the bytes committed."""
        for index, word in enumerate(self.words):
            if word % 2 == 0 and word != 0:
                record, content = self.published.get(word, (None, []))
                # Between the word and the answer of a commit no node knows the record yet.
                if record is not None:
                    assert int(record["offset"]) == index * GRANULE, f"word {index} of another page"
                    held = self.memory[index : index + len(content)]
                    assert held == content, f"page at granule {index} reads {held}"

    def check_sums(self) -> None:
        """Check slots, words and figures against a slow count."""
        owner: dict[int, object] = {}
        used = reserved = 0
        for name, record in self.here.items():
            first, count = int(record["offset"]) // GRANULE, -(-int(record["length"]) // GRANULE)
            used += count
            for granule in range(first, first + count):
                assert owner.setdefault(granule, name) is name, f"granule {granule} has two owners"
        for reservation, (reserve, granted) in self.writing.items():
            for index, state in enumerate(granted.states):
                if state == RESERVED:
                    first, count = self.extent_of(reserve, granted, index)
                    reserved += count
                    assert self.words[first] % 2 == 1, f"word {first} is even under a writer"
                    for granule in range(first, first + count):
                        mine = owner.setdefault(granule, (reservation, index))
                        assert mine == (reservation, index), f"granule {granule} has two owners"
        figures = self.pool.figures()
        assert figures["pool_pages"] == len(self.here)
        assert figures["pool_bytes_used"] == used * GRANULE
        assert figures["pool_bytes_reserved"] == reserved * GRANULE
        free = figures["pool_bytes_usable"] - (used + reserved) * GRANULE
        assert figures["pool_bytes_free"] == free
        assert figures["pool_bytes_stored"] == sum(int(r["length"]) for r in self.here.values())


def kinds(effects: list[object]) -> list[str]:
    """Return what effects are, in order."""
    return [
        f"{type(effect).__name__}:{type(effect.fact).__name__}"
        if isinstance(effect, (NotifyDirectory, NotifyPublisher))
        else type(getattr(effect, "message", effect)).__name__
        for effect in effects
    ]


def count_of(states: bytes, *wanted: int) -> int:
    """Return how many pages are in one of these states."""
    return sum(state in wanted for state in states)
