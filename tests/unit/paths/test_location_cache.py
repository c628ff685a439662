"""The location cache: bounded, exact in what it drops, safe from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.records import RECORD, Records
from peercache.paths.locating import LocationCache
from peercache.paths.searching import unpacked
from tests.unit.paths.world import named


def record(name: str, generation: int = 2) -> Records:
    made = np.zeros(1, RECORD)
    made["key"], made["generation"] = named(name), generation
    return made


def names_in(cache: LocationCache, names: str) -> str:
    """Return which of these are remembered, without touching one of them."""
    known = set(cache._entries)
    return "".join(name for name in names if named(name).tobytes() in known)


def test_the_least_recently_used_record_goes_first() -> None:
    """To find a record is to use it."""
    cache = LocationCache(entries_max=3)
    for name in "abc":
        cache.store(record(name), 0.0)

    cache.find(named("a").tolist())
    cache.store(record("d"), 0.0)

    assert names_in(cache, "abcd") == "acd"


def test_a_full_cache_lets_go_of_many_at_once() -> None:
    """One at a time costs a walk over all gaps each: 9 ms a batch in a cache of the usual size."""
    cache = LocationCache(entries_max=128)
    names = [f"p{i}" for i in range(129)]
    for name in names:
        cache.store(record(name), 0.0)

    known = cache.find(named(*names).tolist())

    assert len(cache) == 126
    assert [packed is None for packed in known] == [True] * 3 + [False] * 126


def test_a_cache_of_nothing_remembers_nothing() -> None:
    """entries_max = 0 asks the directory for every page."""
    cache = LocationCache(entries_max=0)

    cache.store(record("a"), 0.0)

    assert len(cache) == 0
    assert cache.find(named("a").tolist()) == [None]


def test_drop_spares_a_newer_record() -> None:
    """A reader that failed with an old record must not drop a newer one."""
    cache = LocationCache(entries_max=3)
    cache.store(record("a", 4), 0.0)

    cache.drop(record("a", 2))
    assert names_in(cache, "a") == "a"
    cache.drop(record("a", 4))
    assert names_in(cache, "a") == ""


def test_find_knows_how_old_a_record_is() -> None:
    """not_before is when it was stored, not when it was used."""
    cache = LocationCache(entries_max=3)
    cache.store(record("a"), 10.0)
    cache.find(named("a").tolist())

    assert cache.find(named("a").tolist(), not_before=10.0) != [None]
    assert cache.find(named("a").tolist(), not_before=10.5) == [None]
    # It is still good for a get.
    assert cache.find(named("a").tolist()) != [None]


def test_a_key_that_is_repeated_is_found_at_each_place() -> None:
    """Beside an unknown one, too; and what was found is still remembered."""
    cache = LocationCache(entries_max=3)
    cache.store(record("a"), 0.0)
    cache.store(record("b"), 0.0)

    found = cache.find(named(*"aba").tolist())
    beside_unknown = cache.find(named(*"axa").tolist())

    packed = [record(name).tobytes() for name in "ab"]
    assert found == [packed[0], packed[1], packed[0]]
    assert beside_unknown == [packed[0], None, packed[0]]
    assert names_in(cache, "abx") == "ab"


def test_unpack_gives_zeros_for_what_is_not_known() -> None:
    """Zeros are no record: their generation and their holder are 0."""
    records, known = unpacked([record("a", 8).tobytes(), None])

    assert known.tolist() == [True, False]
    assert records["generation"].tolist() == [8, 0]
    assert unpacked([])[1].tolist() == []


@given(
    st.lists(st.tuples(st.sampled_from("sfdc"), st.sampled_from("abcdef"), st.integers(1, 3))),
    st.integers(1, 4),
)
def test_cache_behaves_like_an_ordered_list(
    steps: list[tuple[str, str, int]], entries_max: int
) -> None:
    """Store, find, drop and forget, beside the obvious slow cache."""
    cache = LocationCache(entries_max=entries_max)
    slow: list[tuple[str, int]] = []
    for action, name, generation in steps:
        there = [entry for entry in slow if entry[0] == name]
        if action == "s":
            cache.store(record(name, 2 * generation), 0.0)
            slow = [e for e in slow if e[0] != name] + [(name, generation)]
            slow = slow[-entries_max:]
        elif action == "f":
            found = cache.find(named(name).tolist())[0]
            assert found == (record(name, 2 * there[0][1]).tobytes() if there else None)
            slow = [e for e in slow if e[0] != name] + there
        elif action == "d":
            cache.drop(record(name, 2 * generation))
            slow = [e for e in slow if e != (name, generation)]
        else:
            cache.forget(named(name).tolist())
            slow = [e for e in slow if e[0] != name]

        assert list(cache._entries) == [named(entry[0]).tobytes() for entry in slow]


def test_threads_may_share_a_cache() -> None:
    """Nothing is lost to a race but what the bound takes."""
    cache = LocationCache(entries_max=50)
    batch = np.concatenate([record(f"p{i}") for i in range(100)])
    keys = batch["key"].tolist()

    def work(seed: int) -> None:
        for i in range(50):
            cache.store(batch[(seed + i) % 50 :], 0.0)
            cache.find(keys)
            cache.drop(batch[: seed + i])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result()

    cache.store(batch, 0.0)
    assert len(cache) == 50
