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
