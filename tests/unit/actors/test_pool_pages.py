"""What a pool keeps and what it lets go: recency, removal, growth, figures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import numpy as np
import pytest

from peercache.actors.mailboxes import PROMOTER, PagesCommitted, RecordsChanged, RemovalDone
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.page_table import PackedPages, PageTable
from peercache.model.ids import Incarnation
from peercache.model.keys import tag_of
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Remove,
    Removed,
    Reserve,
    ReserveMirror,
)
from tests.unit.actors.pool_world import GRANULE, World, count_of, key, kinds

ALICE, BOB = 101, 102
PAGE = 4 * GRANULE


def test_batch_larger_than_the_free_part_gets_what_fits() -> None:
    """The rest is REFUSED_FULL: no page reserved in this batch is evicted for a later one."""
    world = World(granules=16, uncommitted_max=16 * GRANULE)

    granted = world.reserve(ALICE, range(6), PAGE)

    assert granted.states == bytes((RESERVED,) * 4 + (REFUSED_FULL,) * 2)


def test_a_scan_goes_by_slots_in_steps_that_are_bounded() -> None:
    """So many pages, or so many granules; what is reserved and not committed is no page."""
    world = World(granules=32)
    world.store(ALICE, [1, 2, 3], PAGE)
    world.reserve(BOB, [4], PAGE)
    table = world.pool.pages

    first, at = table.scan(0, 1, pages_max=2, granules_max=32)
    rest, end = table.scan(at, 1, pages_max=2, granules_max=32)

    assert sorted(page.key for page in first + rest) == [key(1), key(2), key(3)]
    assert end == table.granules == 32
    assert table.scan(0, 1, pages_max=9, granules_max=1)[1] == 1
    assert table.scan(0, 2, pages_max=9, granules_max=32) == ([], 32)


def test_page_that_was_here_and_went_before_the_commit_is_not_named() -> None:
    """The commit of the other page goes on."""
    world = World(granules=16)
    world.store(ALICE, [1], PAGE)
    world.reserve(BOB, [1, 2], PAGE)
    world.write(BOB, 1)
    world.remove(1)

    done = world.commit(BOB)

    assert isinstance(done, PagesCommitted)
    assert done.states == bytes((HERE, COMMITTED))
    assert len(done.here) == 0
    assert done.records["key"].tolist() == [key(2)]


def test_a_writer_holds_at_most_half_of_what_is_free_uncommitted() -> None:
    """Further pages of this client wait; another one finds room."""
    world = World(granules=64, uncommitted_max=0)

    alice = world.reserve(ALICE, range(10), PAGE)
    bob = world.reserve(BOB, range(20, 24), PAGE)

    assert (count_of(alice.states, RESERVED), count_of(alice.states, REFUSED_FULL)) == (4, 6)
    assert (count_of(bob.states, RESERVED), count_of(bob.states, REFUSED_FULL)) == (2, 2)


def test_all_writers_together_hold_at_most_half_of_the_pool_uncommitted() -> None:
    """However many writers stop, the other half goes on serving pages."""
    world = World(granules=64, uncommitted_max=0)

    for writer in range(100, 140):
        world.reserve(writer, range(8 * writer, 8 * writer + 8), GRANULE)

    assert world.pool.figures()["pool_bytes_reserved"] == 32 * GRANULE


def test_a_client_with_a_bound_of_its_own_holds_no_more_than_what_is_left() -> None:
    """`client_uncommitted_max` replaces a client's share, not the bound of all clients."""
    world = World(granules=64, uncommitted_max=5 * PAGE)

    alice = world.reserve(ALICE, range(10), PAGE)
    bob = world.reserve(BOB, range(20, 30), PAGE)

    assert (count_of(alice.states, RESERVED), count_of(bob.states, RESERVED)) == (5, 3)


def test_a_page_larger_than_half_of_the_pool_is_stored_by_the_only_writer() -> None:
    """With another writer's pages uncommitted it waits."""
    world = World(granules=16, uncommitted_max=0)

    alone = world.reserve(ALICE, [1], 12 * GRANULE)
    shared = world.reserve(BOB, [2], 4 * GRANULE)

    assert alone.states == bytes((RESERVED,))
    assert shared.states == bytes((REFUSED_FULL,))


def test_uncommitted_allowance_comes_back_with_the_end() -> None:
    """What is committed or aborted counts no longer."""
    world = World(granules=64, uncommitted_max=2 * PAGE)
    world.store(ALICE, [1, 2], PAGE)
    world.reserve(ALICE, [3, 4], PAGE)
    world.abort(ALICE, 2)

    granted = world.reserve(ALICE, [5, 6, 7], PAGE)

    assert granted.states == bytes((RESERVED, RESERVED, REFUSED_FULL))


def test_least_recently_touched_page_is_evicted() -> None:
    """What readers report decides who goes; a touch of an earlier page under a key does not."""
    for is_stale, gone in ((False, 1), (True, 0)):
        world = World(granules=16)
        for number in range(4):
            world.now = 10.0 * number
            world.store(ALICE, [number], PAGE)
        world.now = 40.0
        world.touch(0, stale=is_stale)

        world.now = 50.0
        world.store(ALICE, [10], PAGE)

        assert world.holds(*range(4), 10) == [number != gone for number in (*range(4), 10)]


def test_prompt_loses_its_deepest_pages_first_however_many_batches_it_came_in() -> None:
    """What comes within some seconds is one prompt: pages are useless without those before them."""
    world = World(granules=24)
    for first in (1, 3, 5):
        world.now += 2.0
        world.store(ALICE, [first, first + 1], PAGE)

    world.now += 0.2
    world.store(BOB, [10, 11], PAGE)

    assert world.holds(1, 2, 3, 4, 5, 6) == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("second_at", "second", "touches", "new", "gone"),
    [
        pytest.param(10.0, (3, 4), (), (10,), [2], id="the first key of a batch is its hottest"),
        pytest.param(0.0, (1, 2, 3, 4), (), (10, 11), [3, 4], id="a prefix that is here stays"),
        pytest.param(0.0, (3, 4), (), (4, 10, 11), [2, 3], id="a batch evicts none of its own"),
        pytest.param(
            0.0, (3, 4), ((0.0, (1, 2, 3, 4)),), (10,), [4], id="reads are noted in reverse order"
        ),
        pytest.param(
            0.0, (3, 4), ((10.0, (2, 1)), (14.0, (4, 3))), (10, 11), [3, 4], id="so are two batches"
        ),
        pytest.param(
            10.0,
            (3, 4),
            ((20.0, (2, 1)),),
            (10, 11),
            [3, 4],
            id="later periods outlive earlier ones",
        ),
    ],
)
def test_a_chain_loses_its_tail_first(
    second_at: float,
    second: Sequence[int],
    touches: Sequence[tuple[float, Sequence[int]]],
    new: Sequence[int],
    gone: Sequence[int],
) -> None:
    """Pages 1 and 2 are stored, then a second batch; some are touched, and new ones evict some.

    new, gone: what is stored in the end, and which pages go for it.
    """
    world = World(granules=16)
    world.store(ALICE, [1, 2], PAGE)
    world.now = second_at
    world.store(ALICE, second, PAGE)
    for at, numbers in touches:
        world.now = at
        world.touch(*numbers)

    world.now += 10.0 if touches and touches[0][0] else 0.0
    world.store(BOB, new, PAGE)

    assert world.holds(1, 2, 3, 4) == [number not in gone for number in (1, 2, 3, 4)]
    assert all(world.holds(*new))


def test_remove_drops_pages_and_answers_how_many() -> None:
    """Words go odd, one withdrawal for all, then the answer; an unknown key counts for nothing."""
    world = World(granules=64)
    world.store(ALICE, [1, 2, 3], PAGE)
    records = [world.record(1), world.record(2)]

    effects = world.say(BOB, Remove(8, 1, key(1) + key(9) + key(2) + key(1)))

    assert kinds(effects) == [
        "StoreWords", "NotifyDirectory:RecordsChanged", "NotifyPublisher:RecordsChanged",
        "NotifyPublisher:RemovalDone",
    ]  # fmt: skip
    assert effects[3].fact == RemovalDone(Origin(BOB, 3), Removed(8, 2))
    assert [world.is_readable(record) for record in records] == [False, False]
    assert world.holds(1, 2, 3) == [False, False, True]


def test_remove_of_nothing_is_answered() -> None:
    """No page, no words, no withdrawal."""
    world = World(granules=64)

    effects = world.say(BOB, Remove(8, 1, key(1)))

    assert kinds(effects) == ["NotifyPublisher:RemovalDone"]


def test_clear_drops_one_namespace_only() -> None:
    """Pages of other namespaces, and what is still being written, stay."""
    world = World(granules=64)
    world.store(ALICE, [1, 2], PAGE, namespace=5)
    world.store(ALICE, [3], PAGE, namespace=6)
    world.reserve(ALICE, [4], PAGE, namespace=5)

    count = world.clear(5)
    world.write(ALICE, 3)
    world.commit(ALICE, 3)

    assert count == 2
    assert world.holds(1, 2, 3, 4) == [False, False, True, True]


def test_clear_of_a_name_drops_all_its_geometries() -> None:
    """A space tag names no geometry; a whole tag still drops its own pages only."""
    world = World(granules=64)
    for page, namespace in enumerate((tag_of(5, 7), tag_of(5, 8), tag_of(6, 7)), 1):
        world.store(ALICE, [page], PAGE, namespace=namespace)
    world.store(ALICE, [4], PAGE, namespace=tag_of(5, 9))

    assert world.clear(tag_of(5, 9)) == 1
    assert world.clear(5) == 2
    assert world.holds(1, 2, 3, 4) == [False, False, True, False]


def test_nothing_is_granted_of_memory_that_is_not_populated() -> None:
    """Only the usable part is given out; it grows."""
    world = World(granules=1024, usable=0)

    before = world.reserve(ALICE, [1], PAGE)
    world.grow(8)
    during = world.reserve(ALICE, [1, 2, 3], PAGE)
    world.grow(1024)
    after = world.reserve(ALICE, range(10, 20), PAGE)

    assert before.states == bytes((REFUSED_FULL,))
    assert during.states == bytes((RESERVED, RESERVED, REFUSED_FULL))
    assert after.states == bytes((RESERVED,)) * 10


def test_growth_reported_out_of_order_takes_nothing_back() -> None:
    """Usable memory never shrinks."""
    world = World(granules=64, usable=32)

    world.grow(16)

    assert world.figure("pool_bytes_usable") == 32 * GRANULE


def test_records_of_names_what_is_here_in_key_order() -> None:
    """Local readers learn the records without the directory."""
    world = World(granules=64)
    world.store(ALICE, [1, 2, 3], PAGE)

    records = world.pool.records_of(key(3) + key(9) + key(1))

    assert records["key"].tolist() == [key(3), key(1)]
    assert records["generation"].tolist() == [world.record(3)["generation"], world.record(1)[3]]


def test_generations_start_at_random() -> None:
    """Two incarnations on one segment name never agree on a generation."""
    one, other = World(granules=64, seed=1), World(granules=64, seed=2)
    one.store(ALICE, [1], PAGE)
    other.store(ALICE, [1], PAGE)

    generations = [int(world.record(1)["generation"]) for world in (one, other)]

    assert generations[0] != generations[1]
    assert all(2**40 < generation < 2**62 + 2**20 for generation in generations)


def test_nothing_in_a_pool_comes_due() -> None:
    """There is no timer: nothing ends by time."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)

    effects = world.pool.on_tick(1e9)

    assert effects == []
    assert world.pool.deadline() == inf
    assert world.figure("pool_bytes_reserved") == PAGE


def test_metrics_follow_the_figures() -> None:
    """What /metrics shows is what the pool counts."""
    metrics = Metrics()
    world = World(granules=16, metrics=metrics)

    for number in range(6):
        world.store(ALICE, [number], PAGE)
    world.reserve(ALICE, [9], PAGE)

    def sample(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert sample("peercache_pool_pages") == 3
    assert sample("peercache_pages_evicted_total") == 3
    assert sample("peercache_reservations") == 1
    assert sample("peercache_pool_bytes", state="used") == 3 * PAGE
    assert sample("peercache_pool_bytes", state="reserved") == PAGE
    assert sample("peercache_pool_bytes", state="free") == 0


def test_hit_rates_of_other_amounts_of_memory_are_estimated() -> None:
    """A page that comes back after twice the memory was used would have been there in twice it."""
    metrics = Metrics()
    world = World(granules=320, uncommitted_max=320 * GRANULE, metrics=metrics)
    parts = range(300), range(300, 600)
    for part in (*parts, parts[0]):
        world.now += 10.0
        world.store(ALICE, part, GRANULE)

    rates = world.pool.hit_rates()

    assert list(rates) == ["0.25", "0.5", "1", "2", "4", "8"]
    # The begin of the prompt is the hottest of it.
    assert rates["1"] == pytest.approx(20 / 900, abs=0.01)
    assert rates["2"] == rates["8"] == pytest.approx(1 / 3, abs=0.02)
    # A client of another host reads what it stored.
    world.touch(*parts[0])
    rates = world.pool.hit_rates()
    assert rates["1"] == pytest.approx(1 / 4, abs=0.03)
    shown = metrics.registry.get_sample_value("peercache_hit_rate_estimate", {"memory": "2"})
    assert shown == rates["2"]


@pytest.mark.parametrize(
    ("sender", "kind"), [(PROMOTER, Reserve), (Origin(ALICE, 3), ReserveMirror)]
)
def test_pages_that_are_loaded_or_copied_are_no_uses(
    sender: Origin, kind: type[Reserve | ReserveMirror]
) -> None:
    """Their readers report them when they have read them."""
    pool = Pool(
        incarnation=Incarnation(1), granule=GRANULE, page_bytes=64 * GRANULE,
        usable_bytes=64 * GRANULE, client_uncommitted_max=0, rng=random.Random(1),
        mirror_share=0.5,
    )  # fmt: skip
    pool.on_message(sender, kind(1, 1, 5, key(1), np.array([GRANULE], "<u8").tobytes()), 0.0)
    pool.on_message(sender, Commit(2, 1, b"\1", bytes(8), 0.5), 0.0)

    assert pool.figures()["pool_pages"] == 1
    assert pool.reuse.uses() == 0


def test_a_touch_of_what_is_gone_is_harmless() -> None:
    """Of a page that was evicted, or never there."""
    world = World(granules=16)
    world.store(ALICE, [1], PAGE)
    world.touch(1, 2, 3)
    world.touch()
    assert world.pool.reuse.uses() == 4


def test_a_page_is_published_only_where_its_slot_could_be_written_to() -> None:
    """Under an even word, or beyond the page memory, is our bug: nothing is stored."""
    table = PageTable(incarnation=Incarnation(1), granule=GRANULE, granules=4, sequence=7)
    table.protect([0, 1])

    for other in (2, 4):
        offsets = np.array([0, other * GRANULE], "<u8").tobytes()
        pages = PackedPages(5, bytes(32), offsets, offsets, bytes(16))
        with pytest.raises(AssertionError, match="even word"):
            table.publish(pages)

    offsets = np.array([0, GRANULE], "<u8").tobytes()
    records, stored = table.publish(PackedPages(5, bytes(32), offsets, offsets, bytes(16)))
    assert records["generation"].tolist() == stored.values.tolist() == [14, 12]
    assert stored.indices.tolist() == [0, 1]
    assert stored.seals is not None
    assert stored.seals["space"].tolist() == [5, 5]


def test_message_that_is_not_for_a_pool_is_a_bug() -> None:
    """An unexpected message fails at once."""
    pool = Pool(
        incarnation=Incarnation(1),
        granule=GRANULE,
        page_bytes=GRANULE,
        usable_bytes=GRANULE,
        client_uncommitted_max=0,
        rng=random.Random(1),
    )

    with pytest.raises(AssertionError):
        pool.on_message(Origin(1), RecordsChanged(np.empty(0), np.empty(0)), 0.0)
