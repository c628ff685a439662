"""The index of a directory table: how it grows, shrinks, and is cleaned up."""

from __future__ import annotations

import numpy as np

from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import Records
from sims.tables import header_of
from tests.unit.actors.record_cluster import drops_of
from tests.unit.actors.table_check import check_table
from tests.unit.actors.test_directory_table import SEED, A, random_records, table_of, tags_of

CAPACITY = 512


def drop(table: DirectoryTable, gone: Records) -> None:
    drops = drops_of([0] * len(gone), [2] * len(gone))
    drops["key"] = gone["key"]
    assert table.drop(0, drops.tobytes()).gone == len(gone)
    check_table(table)


def put(table: DirectoryTable, records: Records) -> None:
    assert table.put(0, records.tobytes()) == (len(records), 0, 0)
    check_table(table)


def test_a_batch_larger_than_the_next_index_loses_nothing() -> None:
    """A growth for fewer records is under way: it ends first, and another one follows at once."""
    rng = np.random.default_rng(12)
    for first, then in ((380, 500), (380, 700), (700, 700)):
        table = table_of(A, slots_min=CAPACITY)
        made = random_records(rng, first + then)

        put(table, made[:first])
        assert table.is_growing
        put(table, made[first:])

        for at in range(0, len(made), 64):
            part = made[at : at + 64]
            assert table.locate(part["key"].tobytes(), 0, 8)[1] == part.tobytes()


def test_an_index_is_never_smaller_than_at_first() -> None:
    """A node's first pages need no growth, whatever was there before."""
    table = table_of(A, slots_min=4 * CAPACITY)
    made = random_records(np.random.default_rng(13), 20_000)
    put(table, made)
    while table.tend(2**20):
        pass
    drop(table, made)
    while table.tend(2**20):
        pass

    assert table.figures().slots == 4 * CAPACITY
    check_table(table)


def test_tombstones_are_cleaned_up_across_the_end_of_the_index() -> None:
    """The last slots and the first ones are neighbours."""
    made = random_records(np.random.default_rng(14), 20_000)
    tags = tags_of(np.frombuffer(made["key"].tobytes(), np.uint64).reshape(-1, 2), SEED)
    at_the_end = made[(tags * np.uint64(CAPACITY)) >> np.uint64(32) == CAPACITY - 1][:4]
    table = table_of(A, slots_min=CAPACITY)
    put(table, at_the_end)
    index = header_of(table).index

    drop(table, at_the_end[[0, 2]])
    used = index[2]
    drop(table, at_the_end[[3, 1]])

    assert used == 4
    assert index[2] == 0, "slots that no search needs are in use"


def test_a_slot_that_is_used_again_is_counted_once() -> None:
    """Else a new index would be made for pages that come and go."""
    table = table_of(A, slots_min=CAPACITY)
    made = random_records(np.random.default_rng(15), 300)
    put(table, made)
    epoch = table.figures().epoch

    for _ in range(20):
        drop(table, made[:20])
        put(table, made[:20])

    assert table.figures().epoch == epoch


def test_an_old_index_is_given_back_in_parts() -> None:
    """The memory of an index of a million records takes the kernel 2 to 3 ms."""
    table = table_of(A, slots_min=CAPACITY)
    made = random_records(np.random.default_rng(16), 150_000)
    for at in range(0, len(made), 1000):
        assert table.put(0, made[at : at + 1000].tobytes()).refused == 0
    while table.tend(2**20):
        pass
    header = header_of(table)
    size = header.index_ready[header.current]
    old = header.current
    assert size > 6 * 2**18
    # The next index is of the same size: it begins, and counts.
    header.moved, header.next_capacity = 0, size // 8
    while not header.index_ready[1 - header.current] or header.index[4 * (1 - old) + 1] == 0:
        table.tend(2**12)
    while header.index[4 * old + 1]:
        table.tend(2**12)

    parts = []
    while header.index_ready[old]:
        before = header.index_ready[old]
        table.tend(2 * 8192)
        parts.append(before - header.index_ready[old])

    assert sum(parts) > 4 * 2**18
    assert max(parts) <= 2 * 2**18, "16,384 slots take as long as two pieces"


def test_a_new_row_takes_the_first_free_slot_of_a_long_search() -> None:
    """Else slots that were used once would fill the index of a shard whose pages come and go."""
    made = random_records(np.random.default_rng(17), 20_000)
    tags = tags_of(np.frombuffer(made["key"].tobytes(), np.uint64).reshape(-1, 2), SEED)
    of_one_home = made[(tags * np.uint64(CAPACITY)) >> np.uint64(32) == 100][:20]
    table = table_of(A, slots_min=CAPACITY)
    put(table, of_one_home[:19])
    index = header_of(table).index

    drop(table, of_one_home[[1]])
    assert index[2] == 19, "searches lead on from here"
    put(table, of_one_home[[19]])

    assert index[2] == 19


def test_a_row_that_moves_to_a_slot_that_was_used_leaves_the_count() -> None:
    """Else an index would seem fuller than it is, and grow again at once."""
    made = random_records(np.random.default_rng(18), 20_000)
    tags = tags_of(np.frombuffer(made["key"].tobytes(), np.uint64).reshape(-1, 2), SEED)
    of_one_home = made[(tags * np.uint64(CAPACITY)) >> np.uint64(32) == 400][:4]
    table = table_of(A, slots_min=CAPACITY)
    put(table, of_one_home[:1])
    header = header_of(table)
    header.moved, header.next_capacity = 0, CAPACITY
    assert table.tend(CAPACITY)
    assert header.index[4 * (1 - header.current) + 1] == CAPACITY, "both indices count"

    put(table, of_one_home[1:])
    drop(table, of_one_home[[1]])
    assert header.index[4 * header.current + 2] == 3
    while table.tend(64):
        check_table(table)

    assert header.index[4 * header.current + 2] == 3
    check_table(table)
