"""Location records: their bytes, and the digests that holder and owner compare."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.publisher.streams import RecordTable, RingHandover
from peercache.model import records
from peercache.model.hash_ring import HashRing
from peercache.model.records import (
    BUCKETS,
    DROP,
    ON_DISK,
    RECORD,
    RECORD_BYTES,
    RESIDENT,
    Content,
    Records,
    keys_of,
)
from tests.record_digests import digest_of, flip

M64 = 2**64 - 1

record_tuples = st.tuples(
    st.binary(min_size=16, max_size=16), st.integers(0, M64), st.integers(0, 7)
)


def records_from(rows: list[tuple[bytes, int, int]]) -> Records:
    made = np.zeros(len(rows), RECORD)
    for row, (key, generation, flags) in zip(made, rows, strict=True):
        row["key"], row["generation"], row["flags"] = np.void(key), generation, flags
    return made


def slow_mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & M64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & M64
    return word ^ (word >> 31)


def slow_digest(key: bytes, generation: int, flags: int) -> int:
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    return slow_mix(low ^ slow_mix(high ^ slow_mix(generation)) ^ flags)


def test_record_is_56_bytes_in_a_fixed_order() -> None:
    """The wire's layout: a reader of another version must find the same fields."""
    record = np.zeros(1, RECORD)
    record["key"] = np.void(bytes(range(16)))
    record["holder"], record["offset"], record["generation"] = 1, 2, 3
    record["length"], record["flags"], record["checksum"] = 4, 5, 6

    packed = record.tobytes()

    assert packed == bytes(range(16)) + b"".join(
        number.to_bytes(size, "little")
        for number, size in ((1, 8), (2, 8), (3, 8), (4, 4), (5, 4), (6, 8))
    )
    assert len(packed) == RECORD_BYTES


@given(st.lists(record_tuples, max_size=20))
def test_records_survive_packing(rows: list[tuple[bytes, int, int]]) -> None:
    """What was packed comes back."""
    made = records_from(rows)

    assert np.array_equal(records.from_bytes(made.tobytes()), made)
    assert records.keys_of(made) == [key for key, _, _ in rows]


@given(st.lists(record_tuples, max_size=20))
def test_digest_is_that_of_plain_arithmetic(rows: list[tuple[bytes, int, int]]) -> None:
    """Every node computes the same number, whatever its processor does with overflow."""
    made, table = records_from(rows), RecordTable()
    stored = table.store(keys_of(made), np.full(len(rows), -1), made)

    assert table.digests[stored].tolist() == [slow_digest(*row) for row in rows]
    assert table.buckets[stored].tolist() == [key[0] for key, _, _ in rows]
    assert digest_of(made).tolist() == table.digests[stored].tolist()


@given(record_tuples, record_tuples)
def test_digest_distinguishes_records(
    one: tuple[bytes, int, int], other: tuple[bytes, int, int]
) -> None:
    """Another key, generation or tier is another digest."""
    first, second = digest_of(records_from([one, other])).tolist()

    assert (first == second) == (one == other)


@given(
    st.lists(record_tuples, min_size=1, max_size=30, unique_by=lambda row: row[0]),
    st.data(),
)
def test_content_is_that_of_the_set(
    rows: list[tuple[bytes, int, int]], data: st.DataObject
) -> None:
    """However a set came about, in whatever order, its content is one and the same."""
    gone = data.draw(st.sets(st.integers(0, len(rows) - 1)))
    order = data.draw(st.permutations(range(len(rows))))
    step_by_step, at_once = Content(), Content()

    for at in [*order, *sorted(gone)]:
        flip(step_by_step, records_from([rows[at]]))
    flip(at_once, records_from([row for at, row in enumerate(rows) if at not in gone]))

    assert np.array_equal(step_by_step.buckets, at_once.buckets)
    assert step_by_step.digest() == at_once.digest()
    assert len(at_once.buckets) == BUCKETS


def test_drops_have_keys_too() -> None:
    """A drop is read with the same function as a record."""
    drops = np.zeros(2, DROP)
    drops["key"] = np.frombuffer(random.Random(1).randbytes(32), "V16")

    assert records.keys_of(drops) == [bytes(drops["key"][0]), bytes(drops["key"][1])]


@given(st.lists(st.integers(0, M64), max_size=5), st.integers(0, M64))
def test_records_of_one_holder_are_notified_from_others(holders: list[int], holder: int) -> None:
    """One record of another holder is enough, at any place; of no records all are everyone's."""
    made = np.zeros(len(holders), RECORD)
    made["holder"] = holders

    assert records.are_of(made.tobytes(), holder) == all(one == holder for one in holders)
    made["holder"] = holder
    assert records.are_of(made.tobytes(), holder)


def test_rows_of_new_records_are_the_lowest_free_ones() -> None:
    """Also where the table has to grow for them: what is free is used up first."""
    table = RecordTable()
    most = len(table.live)
    made = np.zeros(2 * most, RECORD)
    made["key"] = np.frombuffer(random.Random(1).randbytes(16 * len(made)), "V16")
    first, rest = made[: most - 3], made[most - 3 :]
    assert len(table.add([], b"")) == 0

    rows = [*table.add(keys_of(first), first.tobytes()), *table.add(keys_of(rest), rest.tobytes())]

    assert rows == list(range(2 * most))
    assert table.live[rows].all()
    assert np.array_equal(table.records[rows], made)
    assert table.find(keys_of(made)).tolist() == rows
    assert not table.are_new(keys_of(rest)[:1])


def test_a_key_that_is_there_already_is_not_added() -> None:
    """Nor one that comes twice: two rows of one page would be reported as two."""
    table = RecordTable()
    made = np.zeros(2, RECORD)

    with pytest.raises(AssertionError, match="twice"):
        table.add(keys_of(made), made.tobytes())


def test_pages_in_memory_come_before_those_on_disk_whatever_their_numbers() -> None:
    """A demoted page has a newer number than a hot one, and is of less use."""
    table = RecordTable()
    made = np.zeros(4, RECORD)
    made["key"] = np.frombuffer(b"".join(bytes([n]) * 16 for n in range(4)), "V16")
    made["generation"] = [2, 4, 6, 8]
    made["flags"] = [RESIDENT, RESIDENT, ON_DISK, ON_DISK]
    table.store(keys_of(made), np.full(4, -1), made)
    turning = RingHandover(table)
    turning.begin(None)
    turning.look(HashRing([1], virtual_nodes=1, replicas=1))

    hottest = table.records["generation"][turning.take(4)]

    assert hottest.tolist() == [4, 2, 8, 6]
