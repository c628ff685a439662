"""The location cache: bounded, exact in what it drops, safe from several threads."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.records import ON_DISK, RECORD, RESIDENT, Records
from peercache.paths.lookup import HOLDERS_MAX, WAYS, LocationCache
from tests.unit.paths.world import named


def record(name: str, generation: int = 2, *, holder: int = 1, flags: int = RESIDENT) -> Records:
    made = np.zeros(1, RECORD)
    made["key"], made["generation"] = named(name), generation
    made["holder"], made["flags"] = holder, flags
    return made


def packed_in(cache: LocationCache, names: str) -> dict[str, bytes]:
    """Return the record of each of these names that is remembered; to look is to use."""
    records, known = cache.find(named(*names))
    return {name: records[at].tobytes() for at, name in enumerate(names) if known[at]}


@pytest.mark.parametrize("entries_max", [1, 15, 16, 17, 100, 1000])
def test_a_cache_is_bounded(entries_max: int) -> None:
    """It is filled to its last whole set, and what is there is right."""
    cache = LocationCache(entries_max=entries_max)
    names = [f"p{i}" for i in range(20 * entries_max)]
    batch = np.concatenate([record(name, 2 + 2 * i) for i, name in enumerate(names)])

    cache.store(batch, 0.0)
    records, known = cache.find(batch["key"])

    whole = entries_max if entries_max < WAYS else entries_max - entries_max % WAYS
    assert len(cache) == whole == np.count_nonzero(known)
    assert (records[known] == batch[known]).all()
    assert not records[~known].view(np.uint8).any()


def test_half_a_cache_lacks_next_to_nothing() -> None:
    """Keys spread over the sets: few have more than their ways while half of all are in use."""
    cache = LocationCache(entries_max=4096)
    batch = np.concatenate([record(f"p{i}") for i in range(2048)])

    cache.store(batch, 0.0)

    assert len(cache) > 2048 * 0.99


def test_a_cache_of_nothing_remembers_nothing() -> None:
    """entries_max = 0 asks the directory for every page."""
    cache = LocationCache(entries_max=0)

    cache.store(record("a"), 0.0)
    cache.drop(record("a"))
    cache.forget(named("a"))

    assert len(cache) == 0
    assert packed_in(cache, "a") == {}
    assert cache.holders(named("a"), not_before=0.0) is None
    assert not cache.has_any_at(0, named("a"))


def test_find_knows_how_old_a_record_is() -> None:
    """not_before is when it was stored, not when it was used."""
    cache = LocationCache(entries_max=3)
    cache.store(record("a"), 10.0)
    cache.find(named("a"))

    assert cache.find(named("a"), not_before=10.0)[1].all()
    assert not cache.find(named("a"), not_before=10.5)[1].any()
    # It is still good for a get.
    assert cache.find(named("a"))[1].all()


def test_a_key_that_is_repeated_is_found_at_each_place() -> None:
    """Next to an unknown one, too, which has zeros."""
    cache = LocationCache(entries_max=3)
    cache.store(record("a"), 0.0)

    records, known = cache.find(named(*"axa"))

    assert known.tolist() == [True, False, True]
    a = record("a").tobytes()
    assert [one.tobytes() for one in records] == [a, bytes(len(a)), a]


def test_holders_are_named_once_if_all_pages_are_in_memory() -> None:
    """A page on a disk, an unknown one and an old record are no answer; nor is an empty batch."""
    cache = LocationCache(entries_max=100)
    for name, holder in (("a", 7), ("b", 8), ("c", 7)):
        cache.store(record(name, holder=holder, flags=RESIDENT), 10.0)
    cache.store(record("d", holder=7, flags=ON_DISK), 10.0)

    assert cache.holders(named(*"abca"), not_before=10.0) == [7, 8]
    assert cache.holders(named(*"abc"), not_before=10.5) is None
    assert cache.holders(named(*"abd"), not_before=10.0) is None
    assert cache.holders(named(*"abx"), not_before=10.0) is None
    assert cache.holders(named(), not_before=10.0) is None


def test_holders_may_have_to_be_notified() -> None:
    """A record that is stored again states if its holder was notified, and nothing of before."""
    cache = LocationCache(entries_max=100)
    reported = record("a", holder=7, flags=RESIDENT)

    cache.store(reported, 10.0, are_touched=True)
    assert cache.holders(named("a"), not_before=0.0, are_touched=True) == [7]
    cache.store(reported, 10.0)
    assert cache.holders(named("a"), not_before=0.0, are_touched=True) is None
    assert cache.holders(named("a"), not_before=0.0) == [7]


def test_more_holders_than_a_batch_may_have_are_no_answer() -> None:
    """The search that follows takes any number."""
    cache = LocationCache(entries_max=1000)
    names = [f"p{i}" for i in range(HOLDERS_MAX + 1)]
    for holder, name in enumerate(names):
        cache.store(record(name, holder=holder + 1, flags=RESIDENT), 0.0)

    assert len(cache.holders(named(*names[:-1]), not_before=0.0) or []) == HOLDERS_MAX
    assert cache.holders(named(*names), not_before=0.0) is None


def test_pages_at_a_holder_are_those_in_its_memory() -> None:
    """What it has only on its disk is copied into its memory as any other page."""
    cache = LocationCache(entries_max=100)
    cache.store(record("a", holder=7, flags=RESIDENT), 0.0)
    cache.store(record("d", holder=8, flags=ON_DISK), 0.0)

    assert cache.has_any_at(7, named(*"xa"))
    assert not cache.has_any_at(8, named(*"xad"))


def test_a_cleared_cache_is_empty_and_as_large_as_before() -> None:
    """`clear` of a namespace forgets all that this client knows."""
    cache = LocationCache(entries_max=100)
    cache.store(record("a"), 0.0)

    cache.clear()

    assert len(cache) == 0
    assert packed_in(cache, "a") == {}
    cache.store(record("a"), 0.0)
    assert len(cache) == 1


def test_a_closed_cache_has_no_memory_and_stays_empty() -> None:
    """A call that is still in progress stores nothing into what is released."""
    tracemalloc.start()
    try:
        cache = LocationCache(entries_max=2**18)
        cache.store(record("a"), 0.0)
        held = tracemalloc.get_traced_memory()[0]
        cache.close()
        released = held - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert released > 2**24
    cache.store(record("b"), 0.0)
    assert len(cache) == 0
    assert packed_in(cache, "ab") == {}


@given(
    st.lists(st.tuples(st.sampled_from("sfdc"), st.sampled_from("abcdef"), st.integers(1, 3))),
    st.integers(1, 4),
)
def test_cache_behaves_like_an_ordered_list(
    steps: list[tuple[str, str, int]], entries_max: int
) -> None:
    """Store, find, drop and forget, compared with an obvious slow cache."""
    cache = LocationCache(entries_max=entries_max)
    slow: list[tuple[str, int]] = []
    for action, name, generation in steps:
        there = [entry for entry in slow if entry[0] == name]
        if action == "s":
            cache.store(record(name, 2 * generation), 0.0)
            slow = [e for e in slow if e[0] != name] + [(name, generation)]
            slow = slow[-entries_max:]
        elif action == "f":
            expected = {name: record(name, 2 * there[0][1]).tobytes()} if there else {}
            assert packed_in(cache, name) == expected
            slow = [e for e in slow if e[0] != name] + there
        elif action == "d":
            cache.drop(record(name, 2 * generation))
            slow = [e for e in slow if e != (name, generation)]
        else:
            cache.forget(named(name))
            slow = [e for e in slow if e[0] != name]
        assert len(cache) == len(slow)

    # From the oldest on, so that to look at one pushes none of the others.
    assert {name: packed_in(cache, name)[name] for name, _ in slow} == {
        name: record(name, 2 * generation).tobytes() for name, generation in slow
    }


def test_threads_may_share_a_cache() -> None:
    """Nothing is lost to a race but what the bound takes."""
    cache = LocationCache(entries_max=50)
    batch = np.concatenate([record(f"p{i}") for i in range(100)])
    keys = batch["key"]

    def work(seed: int) -> None:
        for i in range(50):
            cache.store(batch[(seed + i) % 50 :], 0.0)
            cache.find(keys)
            cache.drop(batch[: seed + i])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result()

    cache.store(batch, 0.0)
    assert len(cache) == 48  # Whole sets of WAYS.


@pytest.mark.parametrize("removed", ["a", ""])
def test_what_was_found_before_a_removal_is_not_stored_after_it(removed: str) -> None:
    """A call of another thread may have asked before, and would bring it back."""
    cache = LocationCache(entries_max=50)
    before = cache.epoch
    cache.store(record("a"), 0.0)

    cache.end(named(removed) if removed else None)
    cache.store(record("a"), 0.0, epoch=before)
    late = len(cache)
    cache.store(record("a"), 0.0, epoch=cache.epoch)

    assert (late, len(cache)) == (0, 1)
