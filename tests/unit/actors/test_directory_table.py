"""The packed table of a directory shard: its bounds, its growth, and what an attacker may try."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

from peercache.actors.directory.table import SLOTS_MIN, DirectoryTable
from peercache.model.records import RECORD, RECORD_BYTES, Records, from_bytes
from sims.tables import header_of
from tests.unit.actors.record_cluster import drops_of, key_of, records_of
from tests.unit.actors.table_check import check_table

SEED = bytes(range(16))
A, B, C = 11, 12, 13
MESSAGE = 4096
"""Records of the longest message."""
LISTED_MAX = 1024
"""Holders of one key that a lookup looks at, as `_table.h` has it."""


def table_of(*holders: int, rows_max: int = 10**6, slots_min: int = 512) -> DirectoryTable:
    """Return a table whose entries 0, 1, … are these holders."""
    table = DirectoryTable(SEED, answer_max=4096, rows_max=rows_max, slots_min=slots_min)
    for expected, holder in enumerate(holders):
        assert table.begin(holder, is_served=True) == expected
    return table


def random_records(rng: np.random.Generator, count: int, holder: int = A) -> Records:
    made = np.zeros(count, RECORD)
    made["key"] = np.frombuffer(rng.bytes(16 * count), "V16")
    made["holder"] = holder
    made["generation"] = 2
    made["offset"] = np.arange(count) * 4096
    return made


def holders_of(table: DirectoryTable, name: int, asker: int = 0, holders_max: int = 8) -> list[int]:
    _, found = table.locate(key_of(name), asker, holders_max)
    holders: list[int] = from_bytes(found)["holder"].tolist()
    return holders


def put(table: DirectoryTable, entry: int, holder: int, names: list[int], generation: int) -> None:
    change = table.put(entry, records_of(holder, names, generation).tobytes())
    assert change.refused == 0


# --- the order of holders -----------------------------------------------------------------------


def test_holders_are_notified_oldest_first_wherever_their_rows_lie() -> None:
    """A holder that let its page go and stored it again is the youngest, in a freed slot or not."""
    table = table_of(A, B, C)
    for entry, holder in enumerate((A, B, C)):
        put(table, entry, holder, [1], 10)

    table.drop(0, drops_of([1], [10]).tobytes())
    put(table, 0, A, [1], 12)
    put(table, 1, B, [1], 12)

    assert holders_of(table, 1) == [B, C, A]


def test_a_holder_that_comes_back_before_it_is_swept_keeps_its_place() -> None:
    """Its old records are served no more, and its new ones are as old as they were."""
    table = table_of(A, B)
    put(table, 0, A, [1, 2], 10)
    put(table, 1, B, [1, 2], 10)
    table.serve(0, is_served=False)
    again = table.begin(A, is_served=True)
    assert again is not None

    gone = holders_of(table, 1)
    put(table, again, A, [1], 4)
    back = holders_of(table, 1)
    while table.sweep(0, 1):
        pass
    put(table, again, A, [2], 4)

    assert (gone, back) == ([B], [A, B])
    assert (holders_of(table, 1), holders_of(table, 2)) == ([A, B], [B, A])


def test_holders_are_notified_oldest_first_though_the_count_of_births_begins_again() -> None:
    """It has 32 bits, and records come and go for years."""
    table = table_of(A, B, C)
    # It stands behind the first free row and the first free entry.
    at = table.place[0] + type(header_of(table)).moved.offset + 8 + 8
    ctypes.c_uint32.from_address(at).value = 2**32 - 2
    for entry, holder in ((2, C), (0, A), (1, B)):
        put(table, entry, holder, [1], 10)

    assert ctypes.c_uint32.from_address(at).value == 1
    assert holders_of(table, 1) == [C, A, B]


def test_of_a_page_that_all_nodes_hold_a_bounded_number_is_looked_at() -> None:
    """Some holders are not notified then; nothing is written beyond the list of those that are."""
    table, record = table_of(), records_of(1, [1], 10)
    for holder in range(1, LISTED_MAX + 41):
        entry = table.begin(holder, is_served=True)
        assert entry is not None
        record["holder"] = holder
        table.put(entry, record.tobytes())

    assert holders_of(table, 1, asker=LISTED_MAX + 5) == list(range(6, 14))
    assert table.overlap(key_of(1), LISTED_MAX + 5, 8)[0] == tuple(range(6, 14))


def test_a_record_is_held_if_it_is_this_very_one() -> None:
    """Another holder's, another place or another commit is not it."""
    table = table_of(A)
    put(table, 0, A, [1], 10)
    asked = np.repeat(records_of(A, [1], 10), 4)
    asked["holder"][1], asked["offset"][2], asked["generation"][3] = B, 4096, 12

    assert table.has(0, asked.tobytes()) == [True, False, False, False]


def test_askers_turn_among_the_holders_that_are_served() -> None:
    """One that ended takes no place in an answer that is bounded."""
    table = table_of(*range(20, 30))
    for entry, holder in enumerate(range(20, 30)):
        put(table, entry, holder, [1], 10)
    for entry in range(2, 10, 2):
        table.serve(entry, is_served=False)

    answers = [holders_of(table, 1, asker, holders_max=4) for asker in range(6)]

    assert [len(set(each)) for each in answers] == [4] * 6
    assert {each[0] for each in answers} == {20, 21, 23, 25, 27, 29}


# --- growth -------------------------------------------------------------------------------------


def test_all_is_found_at_each_step_of_a_growth() -> None:
    """While rows are named by two indices, and after each part that is moved."""
    rng, table = np.random.default_rng(5), table_of(A, slots_min=SLOTS_MIN)
    made = random_records(rng, 30_000)
    table.put(0, made[:20_000].tobytes())
    while table.tend(1000):
        pass
    slots, epochs = table.figures().slots, {table.figures().epoch}

    steps = 0
    for begin in range(20_000, len(made), 10):
        table.put(0, made[begin : begin + 10].tobytes())
        steps += table.tend(512)
        epochs.add(table.figures().epoch)
        known = made[rng.integers(0, begin + 10, 300)]
        _, found = table.locate(known["key"].tobytes(), 0, 8)
        assert found == known.tobytes()

    assert steps > 20
    assert len(epochs) > 2
    assert table.figures().slots > slots


def test_a_batch_knows_what_only_the_old_index_names() -> None:
    rng = np.random.default_rng(8)
    table = table_of(A)
    written = random_records(rng, 5000)
    steps = 0
    for begin in range(0, len(written), 50):
        table.put(0, written[begin : begin + 50].tobytes())
        steps += table.is_growing

        assert table.put(0, written[: begin + 50].tobytes()).fresh == 0
    assert steps, "the table never grew: nothing was tried"


def test_no_part_of_a_growth_is_long() -> None:
    """An index of a quarter million slots is moved in parts of no more than their budget."""
    rng, table = np.random.default_rng(6), table_of(A, slots_min=2**18)
    for _ in range(200):
        table.put(0, random_records(rng, 1000).tobytes())
        if table.is_growing:
            break
    epoch = table.figures().epoch

    parts = 1
    while table.tend(2**13):
        parts += 1

    # 360,000 slots are loaded, 8 Ki a part; 260,000 are moved, 4 Ki a part.
    assert 44 + 64 < parts < 150
    assert table.figures().epoch == epoch + 2


def test_a_table_takes_less_than_80_bytes_a_record() -> None:
    """Whatever the number of records: rows of 64 bytes, and an index that is half full."""
    rng, table = np.random.default_rng(7), table_of(A)
    used = []
    for _ in range(60):
        table.put(0, random_records(rng, MESSAGE).tobytes())
        while table.tend(2**20):
            pass
        figures = table.figures()
        used.append(figures.size_bytes / figures.records)

    assert max(used[10:]) < 80
    assert min(used) > 64


def test_pages_that_come_and_go_leave_the_table_as_large_as_it_was() -> None:
    """Rows are used again, and tombstones are cleaned up by a new index of the same size."""
    rng, table = np.random.default_rng(8), table_of(A)
    alive = random_records(rng, 5000)
    table.put(0, alive.tobytes())
    while table.tend(2**20):
        pass
    before, epoch = table.figures(), table.figures().epoch

    for _ in range(100):
        fresh = random_records(rng, 1000)
        drops = np.zeros(1000, [("key", "V16"), ("generation", "<u8")])
        drops["key"], drops["generation"] = alive["key"][:1000], 2
        assert table.drop(0, drops.tobytes()).gone == 1000
        assert table.put(0, fresh.tobytes()).fresh == 1000
        alive = np.concatenate([alive[1000:], fresh])
    while table.tend(2**20):
        pass

    after = table.figures()
    assert after.records == 5000
    assert after.epoch > epoch
    assert after.size_bytes < 1.3 * before.size_bytes
    _, found = table.locate(alive["key"][:4000].tobytes(), 0, 8)
    assert found == alive[:4000].tobytes()


def test_an_index_that_is_nearly_empty_shrinks() -> None:
    """What one large holder took is given back after its sweep."""
    rng, table = np.random.default_rng(9), table_of(A, B)
    table.put(0, random_records(rng, 40_000).tobytes())
    kept = random_records(rng, 100, holder=B)
    table.put(1, kept.tobytes())
    while table.tend(2**20):
        pass
    before = table.figures().slots

    table.serve(0, is_served=False)
    while table.sweep(0, 1000):
        pass
    while table.tend(2**20):
        pass

    assert table.figures().slots < before / 20
    assert table.locate(kept["key"].tobytes(), 0, 8) == (100, kept.tobytes())


# --- bounds -------------------------------------------------------------------------------------


def test_a_full_table_refuses_a_batch_whole_and_has_room_again_later() -> None:
    """No record of the batch is taken, and none of those that were there is lost."""
    table = table_of(A, rows_max=100)
    put(table, 0, A, list(range(90)), 10)

    refused = table.put(0, records_of(A, list(range(90, 101)), 10).tobytes())
    replaced = table.replace(0, bytes(256), records_of(A, list(range(11)), 300).tobytes())
    table.drop(0, drops_of([0], [10]).tobytes())
    put(table, 0, A, list(range(90, 101)), 10)

    assert refused == (0, 0, 11)
    assert replaced == (0, 0, 11)
    assert table.count(0) == 100
    assert [holders_of(table, name) for name in (0, 1, 100)] == [[], [A], [A]]


def test_a_swept_entry_is_no_holders() -> None:
    """Nothing is taken for it, and while it is swept nothing of it is found."""
    table = table_of(A)
    put(table, 0, A, [1, 2, 3], 10)
    assert table.sweep(0, 1) == 1
    holders = [holders_of(table, name) for name in (1, 2, 3)]
    while table.sweep(0, 2):
        pass

    assert holders == [[], [], []]
    for change in (table.put, table.drop, table.has):
        with pytest.raises(ValueError, match="no such entry"):
            change(0, b"")
    with pytest.raises(ValueError, match="no such entry"):
        table.serve(0, is_served=True)


def test_entries_are_bounded() -> None:
    """More holders than a row can name are refused."""
    table = table_of()
    entries = [table.begin(holder, is_served=True) for holder in range(2**14)]

    assert entries == list(range(2**14))
    assert table.begin(7, is_served=True) is None


def test_what_a_caller_may_not_say_changes_nothing() -> None:
    """Bytes that are no whole records, and entries that are not in use."""
    table = table_of(A)
    put(table, 0, A, [1], 10)
    whole = records_of(A, [2], 10).tobytes()
    wrong = [
        lambda: table.put(0, whole[:-1]),
        lambda: table.put(0, whole + b"\0"),
        lambda: table.drop(0, whole),
        lambda: table.replace(0, b"\0", whole[1:]),
        lambda: table.has(0, whole[:-8]),
        lambda: table.locate(bytes(15), 0, 8),
        lambda: table.overlap(bytes(17), 0, 8),
        lambda: table.read(0, 256),
        *(
            lambda entry=entry, call=call: call(entry)  # type: ignore[misc]
            for entry in (-1, 1, 2**14, 2**62)
            for call in (
                lambda entry: table.put(entry, whole),
                lambda entry: table.drop(entry, b""),
                lambda entry: table.replace(entry, b"", b""),
                lambda entry: table.has(entry, whole),
                lambda entry: table.sweep(entry, 1),
                lambda entry: table.serve(entry, is_served=True),
                table.count,
                table.content,
                table.read,
            )
        ),
    ]

    for each in wrong:
        with pytest.raises(ValueError, match="no such entry"):
            each()

    assert table.figures().records == table.count(0) == 1


def test_a_table_without_address_space_is_refused_or_smaller() -> None:
    """What the links of a row cannot name is no size; a seed of another length is no seed."""
    with pytest.raises(MemoryError):
        DirectoryTable(SEED, answer_max=8, rows_max=0, slots_min=512)
    with pytest.raises(ValueError, match="seed"):
        DirectoryTable(SEED[1:], answer_max=8)
    large = DirectoryTable(SEED, answer_max=8, rows_max=2**28, slots_min=512)
    assert large.begin(A, is_served=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("slots_min", [0, 2**27 + 1])
def test_a_size_that_no_table_has_is_refused(slots_min: int) -> None:
    """An index without slots, or one larger than rows can be named by."""
    with pytest.raises(MemoryError, match="no address space"):
        DirectoryTable(SEED, answer_max=1, rows_max=1000, slots_min=slots_min)


def test_a_table_has_no_more_rows_than_a_link_can_name() -> None:
    """One bit of it is a repair's mark."""
    table = DirectoryTable(SEED, answer_max=1, rows_max=2**27 + 2, slots_min=512)

    assert header_of(table).rows_max == 2**26 + 1


def test_tables_that_are_gone_give_their_address_space_back() -> None:
    """Each reserves more than 8 GB of it: 128 TB are soon gone."""
    for _ in range(12_000):
        DirectoryTable(SEED, answer_max=1)


def test_one_answer_reports_no_more_than_its_room() -> None:
    """The count shows how many there would be."""
    table = DirectoryTable(SEED, answer_max=3, rows_max=100, slots_min=512)
    assert table.begin(A, is_served=True) == 0
    put(table, 0, A, [1, 2, 3, 4, 5], 10)

    count, found = table.locate(b"".join(map(key_of, (5, 4, 3, 2, 1))), 0, 8)

    assert (count, len(found)) == (5, 3 * RECORD_BYTES)


# --- keys that are chosen -----------------------------------------------------------------------


def _rotated(words: np.ndarray, by: int) -> np.ndarray:
    return (words << np.uint64(by)) | (words >> np.uint64(64 - by))


def tags_of(keys: np.ndarray, seed: bytes) -> np.ndarray:
    """Return the high 32 bits of SipHash-1-3 of 16 bytes, without a length: (n, 2) to (n,)."""
    first, second = np.frombuffer(seed, np.uint64)
    v = [
        np.full(len(keys), word ^ np.uint64(constant), np.uint64)
        for word, constant in (
            (first, 0x736F6D6570736575),
            (second, 0x646F72616E646F6D),
            (first, 0x6C7967656E657261),
            (second, 0x7465646279746573),
        )
    ]

    def turn() -> None:
        v[0] += v[1]
        v[1] = _rotated(v[1], 13) ^ v[0]
        v[0] = _rotated(v[0], 32)
        v[2] += v[3]
        v[3] = _rotated(v[3], 16) ^ v[2]
        v[0] += v[3]
        v[3] = _rotated(v[3], 21) ^ v[0]
        v[2] += v[1]
        v[1] = _rotated(v[1], 17) ^ v[2]
        v[2] = _rotated(v[2], 32)

    for half in (0, 1):
        v[3] ^= keys[:, half]
        turn()
        v[0] ^= keys[:, half]
    v[2] ^= np.uint64(0xFF)
    for _ in range(3):
        turn()
    tags: np.ndarray = (v[0] ^ v[1] ^ v[2] ^ v[3]) >> np.uint64(32)
    return tags


def test_keys_with_equal_hashes_are_distinguished() -> None:
    """A slot's 32 bits are a hint: the key in the row decides."""
    made = random_records(np.random.default_rng(1), 300_000)
    tags = tags_of(np.frombuffer(made["key"].tobytes(), np.uint64).reshape(-1, 2), SEED)
    _, first, counts = np.unique(tags, return_index=True, return_counts=True)
    twins = np.flatnonzero(np.isin(tags, tags[first[counts > 1]]))
    assert len(twins) >= 6
    kept, absent = made[twins[::2]], made[twins[1::2]]
    table = table_of(A)

    table.put(0, kept.tobytes())
    without = table.locate(absent["key"].tobytes(), 0, 8)
    table.put(0, absent.tobytes())

    assert without == (0, b"")
    assert table.locate(made[twins]["key"].tobytes(), 0, 8)[1] == made[twins].tobytes()


def test_keys_chosen_to_collide_do_not_where_the_seed_is_another() -> None:
    """An attacker with all records that it may have, which collide under a seed that it knows.

    Its keys are in a 512th part of the hash: with that seed each would be searched among
    thousands of others.
    """
    halves = np.random.default_rng(2).integers(0, 2**63, (2**19, 2), np.uint64)
    chosen = halves[tags_of(halves, SEED) < 2**23]
    assert len(chosen) > 900
    made = np.zeros(len(chosen), RECORD)
    made["key"] = np.frombuffer(chosen.tobytes(), "V16")
    made["generation"] = 2

    def lookup_s(seed: bytes) -> float:
        table = DirectoryTable(seed, answer_max=4096, rows_max=10**5, slots_min=2**15)
        assert table.begin(0, is_served=True) == 0
        table.put(0, made.tobytes())
        began = time.thread_time()
        for _ in range(5):
            assert table.locate(made["key"].tobytes(), 0, 8) == (len(made), made.tobytes())
        return time.thread_time() - began

    assert lookup_s(bytes(16)) * 5 < lookup_s(SEED)


# --- authority ----------------------------------------------------------------------------------


def test_authority_stands_until_it_is_revoked() -> None:
    """A new table has none: it lacks what holders are still to publish."""
    table = table_of(A)
    at_first = table.authority

    table.grant(b"ring-one")
    table.tick(12.5)
    granted, ticked = table.authority, table.figures().tick_ns
    table.revoke()

    assert (at_first, granted, table.authority) == (None, b"ring-one", None)
    assert ticked == 12_500_000_000


def test_what_is_no_version_of_a_ring_is_refused() -> None:
    """It could be taken for another ring's."""
    table = table_of(A)

    with pytest.raises(ValueError, match="7 bytes"):
        table.grant(b"ring-on")

    assert table.authority is None


CAPACITY = 512


def drop_all(table: DirectoryTable, gone: Records) -> None:
    drops = drops_of([0] * len(gone), [2] * len(gone))
    drops["key"] = gone["key"]
    assert table.drop(0, drops.tobytes()).gone == len(gone)
    check_table(table)


def put_all(table: DirectoryTable, records: Records) -> None:
    assert table.put(0, records.tobytes()) == (len(records), 0, 0)
    check_table(table)


def test_a_batch_larger_than_the_next_index_loses_nothing() -> None:
    """A growth for fewer records is under way: it ends first, and another one follows at once."""
    rng = np.random.default_rng(12)
    for first, then in ((380, 500), (380, 700), (700, 700)):
        table = table_of(A, slots_min=CAPACITY)
        made = random_records(rng, first + then)

        put_all(table, made[:first])
        assert table.is_growing
        put_all(table, made[first:])

        for at in range(0, len(made), 64):
            part = made[at : at + 64]
            assert table.locate(part["key"].tobytes(), 0, 8)[1] == part.tobytes()


def test_an_index_is_never_smaller_than_at_first() -> None:
    """A node's first pages need no growth, whatever was there before."""
    table = table_of(A, slots_min=4 * CAPACITY)
    made = random_records(np.random.default_rng(13), 20_000)
    put_all(table, made)
    while table.tend(2**20):
        pass
    drop_all(table, made)
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
    put_all(table, at_the_end)
    index = header_of(table).index

    drop_all(table, at_the_end[[0, 2]])
    used = index[2]
    drop_all(table, at_the_end[[3, 1]])

    assert used == 4
    assert index[2] == 0, "slots that no search needs are in use"


def test_a_slot_that_is_used_again_is_counted_once() -> None:
    """Else a new index would be made for pages that come and go."""
    table = table_of(A, slots_min=CAPACITY)
    made = random_records(np.random.default_rng(15), 300)
    put_all(table, made)
    epoch = table.figures().epoch

    for _ in range(20):
        drop_all(table, made[:20])
        put_all(table, made[:20])

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
    put_all(table, of_one_home[:19])
    index = header_of(table).index

    drop_all(table, of_one_home[[1]])
    assert index[2] == 19, "searches lead on from here"
    put_all(table, of_one_home[[19]])

    assert index[2] == 19


def test_a_row_that_moves_to_a_slot_that_was_used_leaves_the_count() -> None:
    """Else an index would seem fuller than it is, and grow again at once."""
    made = random_records(np.random.default_rng(18), 20_000)
    tags = tags_of(np.frombuffer(made["key"].tobytes(), np.uint64).reshape(-1, 2), SEED)
    of_one_home = made[(tags * np.uint64(CAPACITY)) >> np.uint64(32) == 400][:4]
    table = table_of(A, slots_min=CAPACITY)
    put_all(table, of_one_home[:1])
    header = header_of(table)
    header.moved, header.next_capacity = 0, CAPACITY
    assert table.tend(CAPACITY)
    assert header.index[4 * (1 - header.current) + 1] == CAPACITY, "both indices count"

    put_all(table, of_one_home[1:])
    drop_all(table, of_one_home[[1]])
    assert header.index[4 * header.current + 2] == 3
    while table.tend(64):
        check_table(table)

    assert header.index[4 * header.current + 2] == 3
    check_table(table)
