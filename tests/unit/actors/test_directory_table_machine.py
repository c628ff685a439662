"""The packed table does what dictionaries did, whatever comes in whichever order."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import BUCKETS, DROP_BYTES, RECORD_BYTES, from_bytes
from tests.examples import examples
from tests.record_digests import buckets_of, digest_of
from tests.unit.actors.record_cluster import drops_of, key_of, records_of
from tests.unit.actors.table_check import check_table


def split(packed: bytes, unit: int = RECORD_BYTES) -> list[bytes]:
    return [packed[at : at + unit] for at in range(0, len(packed), unit)]


def generation_of(record: bytes) -> int:
    return int.from_bytes(record[32:40], "little")


@attrs.define(eq=False)
class Entry:
    """The records of a holder, by key."""

    holder: int
    is_served: bool
    records: dict[bytes, bytes] = attrs.field(factory=dict)


@attrs.define(eq=False)
class ModelTable:
    """What DirectoryTable does, by the same names."""

    entries: dict[int, Entry] = attrs.field(factory=dict)
    listed: dict[bytes, list[int]] = attrs.field(factory=dict)
    """The holders of each key, oldest first."""

    def begin(self, entry: int, holder: int, *, is_served: bool) -> None:
        self.entries[entry] = Entry(holder, is_served)

    def put(self, entry: int, packed: bytes) -> int:
        """Return how many records are new."""
        own, fresh = self.entries[entry], 0
        for record in split(packed):
            key = record[:16]
            held = own.records.get(key)
            if held is not None and generation_of(held) >= generation_of(record):
                continue
            fresh += held is None
            own.records[key] = record
            holders = self.listed.setdefault(key, [])
            if own.holder not in holders:
                holders.append(own.holder)
        return fresh

    def drop(self, entry: int, packed: bytes) -> int:
        """Return how many records are gone."""
        own, gone = self.entries[entry], 0
        for drop in split(packed, DROP_BYTES):
            held = own.records.get(drop[:16])
            if held is not None and generation_of(held) <= int.from_bytes(drop[16:], "little"):
                del own.records[drop[:16]]
                self._unlist(drop[:16], own.holder)
                gone += 1
        return gone

    def replace(self, entry: int, buckets: bytes, packed: bytes) -> int:
        """Return how many records there are more."""
        own = self.entries[entry]
        before = {key for key in own.records if key[0] in buckets}
        for key in before:
            del own.records[key]
        self.put(entry, b"".join(row for row in split(packed) if row[0] in buckets))
        for key in before - own.records.keys():
            self._unlist(key, own.holder)
        now = {key for key in own.records if key[0] in buckets}
        return len(now) - len(before)

    def keep(self, entry: int, keys: set[bytes]) -> None:
        """Sweep: let all other records of an entry go; without keys the entry ends."""
        own = self.entries[entry]
        for key in own.records.keys() - keys:
            del own.records[key]
            self._unlist(key, own.holder)
        if not own.records:
            del self.entries[entry]

    def locate(self, keys: list[bytes], asker: int, holders_max: int) -> list[bytes]:
        found: list[bytes] = []
        for key in keys:
            # Of a holder that ended and came back, the entry that is served counts.
            served = {
                own.holder: own.records[key]
                for own in self.entries.values()
                if own.is_served and key in own.records
            }
            rows = [served[holder] for holder in self.listed.get(key, ()) if holder in served]
            if len(rows) > holders_max:
                first = asker % len(rows)
                rows = (rows[first:] + rows[:first])[:holders_max]
            found += rows
        return found

    def content(self, entry: int) -> tuple[list[int], npt.NDArray[np.uint64]]:
        """Return how many records each bucket has, and the XOR of their digests."""
        digests = np.zeros(BUCKETS, np.uint64)
        held = from_bytes(b"".join(self.entries[entry].records.values()))
        buckets = buckets_of(held)
        np.bitwise_xor.at(digests, buckets, digest_of(held))
        return np.bincount(buckets, minlength=BUCKETS).tolist(), digests

    def _unlist(self, key: bytes, holder: int) -> None:
        if any(own.holder == holder and key in own.records for own in self.entries.values()):
            return
        self.listed[key].remove(holder)
        if not self.listed[key]:
            del self.listed[key]


HOLDERS = (11, 12, 13, 2**64 - 1)
REPORTED_MAX = 64

FEW = st.lists(st.integers(0, 40), max_size=8)
MANY = st.tuples(st.integers(0, 900), st.integers(1, 300)).map(
    lambda run: list(range(run[0], run[0] + run[1]))
)
"""So many that the index grows, and shrinks."""
NAMES = FEW | MANY
GENERATION = st.integers(1, 6).map(lambda half: 2 * half)


class TableMachine(RuleBasedStateMachine):
    """Does the same to a table and to its model, and compares what they report."""

    @initialize(seed=st.binary(min_size=16, max_size=16))
    def new(self, seed: bytes) -> None:
        """Begin with a small index, so that it grows often."""
        self.model = ModelTable()
        self.table = DirectoryTable(seed, answer_max=REPORTED_MAX, rows_max=5000, slots_min=512)
        self.current: dict[int, int] = {}
        self.ended: list[int] = []

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "table"):
            check_table(self.table)

    def entry(self, data: st.DataObject) -> tuple[int, int]:
        """Choose a holder, and give it an entry if it has none."""
        holder = data.draw(st.sampled_from(HOLDERS))
        if holder not in self.current:
            entry = self.table.begin(holder, is_served=True)
            assert entry is not None
            assert entry not in self.model.entries, "an entry is given twice"
            self.model.begin(entry, holder, is_served=True)
            self.current[holder] = entry
        return holder, self.current[holder]

    @rule(data=st.data(), names=NAMES, generation=GENERATION)
    def put(self, data: st.DataObject, names: list[int], generation: int) -> None:
        holder, entry = self.entry(data)
        records = records_of(holder, names, [generation] * len(names))
        records["flags"] = [1 + name % 3 for name in names]
        # One of an equal generation is distinguished from the one that is held.
        records["checksum"] = data.draw(st.integers(0, 3))
        packed = records.tobytes()

        change = self.table.put(entry, packed)

        assert change == (self.model.put(entry, packed), 0, 0)

    @rule(data=st.data(), names=NAMES, generation=GENERATION)
    def drop(self, data: st.DataObject, names: list[int], generation: int) -> None:
        _, entry = self.entry(data)
        packed = drops_of(names, [generation] * len(names)).tobytes()

        assert self.table.drop(entry, packed) == (0, self.model.drop(entry, packed), 0)

    @rule(data=st.data(), names=NAMES, generation=GENERATION, named=FEW)
    def replace(
        self, data: st.DataObject, names: list[int], generation: int, named: list[int]
    ) -> None:
        """The buckets of some records, of which it may bring none, and others that it names."""
        holder, entry = self.entry(data)
        packed = records_of(holder, names, [generation] * len(names)).tobytes()
        buckets = bytes(key_of(name)[0] for name in [*names[::2], *named])

        change = self.table.replace(entry, buckets, packed)

        assert change.fresh - change.gone == self.model.replace(entry, buckets, packed)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.current)))
        entry = self.current.pop(holder)
        self.table.serve(entry, is_served=False)
        self.model.entries[entry].is_served = False
        self.ended.append(entry)

    @precondition(lambda self: self.current)
    @rule(data=st.data(), is_served=st.booleans())
    def serve(self, data: st.DataObject, is_served: bool) -> None:
        entry = self.current[data.draw(st.sampled_from(sorted(self.current)))]
        self.table.serve(entry, is_served=is_served)
        self.model.entries[entry].is_served = is_served

    @precondition(lambda self: self.ended)
    @rule(budget=st.sampled_from((1, 7, 100, 1000)))
    def sweep(self, budget: int) -> None:
        """Which records go first is the table's own affair; it reports when none is left."""
        entry = self.ended[0]
        before = len(self.model.entries[entry].records)

        swept = self.table.sweep(entry, budget)

        assert swept == min(budget, before)
        is_over = swept < budget
        left = set() if is_over else {row[:16] for row in split(self.table.read(entry))}
        assert len(left) == before - swept
        self.model.keep(entry, left)
        if is_over:
            self.ended.pop(0)
        elif not left:
            self.model.begin(entry, 0, is_served=False)

    @rule(slots=st.sampled_from((1, 100, 2000)))
    def tend(self, slots: int) -> None:
        assert self.table.tend(slots) == self.table.is_growing

    @rule(names=NAMES, asker=st.integers(0, 9), holders_max=st.integers(1, 5))
    def locate(self, names: list[int], asker: int, holders_max: int) -> None:
        keys = [key_of(name) for name in names]

        count, reported = self.table.locate(b"".join(keys), asker, holders_max)

        expected = self.model.locate(keys, asker, holders_max)
        assert count == len(expected)
        assert split(reported) == expected[:REPORTED_MAX]

    @rule(names=NAMES, asker=st.integers(0, 9), holders_max=st.integers(1, 5))
    def overlap(self, names: list[int], asker: int, holders_max: int) -> None:
        """Keys that come twice, too: each place is reported."""
        keys = [key_of(name) for name in names]

        holders, flags = self.table.overlap(b"".join(keys), asker, holders_max)

        reported = {
            (holder, place): bits
            for holder, row in zip(holders, flags.tolist(), strict=True)
            for place, bits in enumerate(row)
            if bits
        }
        expected = {
            (record["holder"], place): record["flags"]
            for place, key in enumerate(keys)
            for record in from_bytes(b"".join(self.model.locate([key], asker, holders_max)))
        }
        assert reported == expected
        assert set(holders) == {holder for holder, _ in expected}

    @rule(data=st.data(), names=FEW, generation=GENERATION)
    def has(self, data: st.DataObject, names: list[int], generation: int) -> None:
        holder, entry = self.entry(data)
        packed = records_of(holder, names, [generation] * len(names)).tobytes()
        held = self.model.entries[entry].records

        reported = self.table.has(entry, packed)

        rows = [(held.get(row[:16]) or b"")[:40] == row[:40] for row in split(packed)]
        assert reported == rows

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def look_at_a_holder(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.model.entries)))
        self.compare(entry)

    def compare(self, entry: int) -> None:
        counts, digests = self.table.content(entry)
        expected_counts, expected_digests = self.model.content(entry)
        assert counts.tolist() == expected_counts
        assert digests.tolist() == expected_digests.tolist()
        packed = self.table.read(entry)
        assert self.table.count(entry) == len(from_bytes(packed))
        assert sorted(split(packed)) == sorted(self.model.entries[entry].records.values())

    def teardown(self) -> None:
        """In the end the table holds what the model holds, and finds all of it."""
        if not hasattr(self, "table"):
            return
        for entry in self.model.entries:
            self.compare(entry)
        for key in self.model.listed:
            _, reported = self.table.locate(key, 0, 8)
            assert split(reported) == self.model.locate([key], 0, 8)
        held = sum(len(entry.records) for entry in self.model.entries.values())
        assert self.table.figures().records == held


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=examples(60), stateful_step_count=40)
