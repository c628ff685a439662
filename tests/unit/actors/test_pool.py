"""The pool's answers, effect by effect, and the ways in which others have lost memory or bytes."""

from __future__ import annotations

import pytest

from peercache.actors.effects import Send, StoreWords
from peercache.actors.mailboxes import PagesCommitted, ReserveAhead
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import AHEAD_PAUSE_S
from peercache.actors.pool.answers import AHEAD_MAX
from peercache.actors.pool.reservations import BATCH_PAGES_MAX, ENDED_MAX, Reservation, Reservations
from peercache.actors.pool.size_classes import Ages, Extent, SizeClass, Slot
from peercache.actors.tenants import Tenant
from peercache.model.records import HAS_CHECKSUM, PAGE_BYTES_MAX, RESIDENT
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    RESERVED,
    Commit,
    Granted,
    Reserve,
    ReserveMirror,
)
from peercache.wire.messages.session import Refused
from tests.unit.actors.pool_world import GRANULE, NODE, World, count_of, key, kinds, packed

ALICE, BOB = 101, 102
PAGE = 4 * GRANULE


def test_reserve_makes_words_odd_before_it_grants() -> None:
    """A slot that was never used has an odd word when its Granted goes out."""
    world = World(granules=64)

    effects = world.say(ALICE, Reserve(5, 1, 1, key(1) + key(2), packed([PAGE, PAGE])))

    assert kinds(effects) == ["StoreWords", "Granted"]
    assert isinstance(effects[0], StoreWords)
    assert (effects[0].values % 2 == 1).all()
    assert isinstance(effects[1], Send)
    assert effects[1].to == Origin(ALICE, 3)
    assert effects[1].message == Granted(5, 1, bytes((RESERVED, RESERVED)), packed([0, PAGE]))


def test_eviction_makes_words_odd_then_withdraws_then_grants() -> None:
    """The order of effects is the promise: words, directory, publisher, client."""
    world = World(granules=16)
    world.store(ALICE, range(4), PAGE)
    world.store(ALICE, range(4, 8), PAGE)

    effects = world.say(BOB, Reserve(5, 1, 1, key(20) + key(21), packed([PAGE, PAGE])))

    assert kinds(effects) == [
        "StoreWords", "NotifyDirectory:RecordsChanged", "NotifyPublisher:RecordsChanged", "Granted",
    ]  # fmt: skip
    assert len(effects[1].fact.drops) == 2
    assert effects[1].fact is effects[2].fact


def test_commit_stores_words_then_notifies_directory_then_publisher() -> None:
    """The records of a commit carry what the client said, and the words come first."""
    world = World(granules=64)
    world.reserve(ALICE, [1, 2], [PAGE, PAGE - 5])
    world.write(ALICE, 1)
    world.writing.clear()

    effects = world.say(ALICE, Commit(6, 1, b"\1\1", packed([0, 99]), 0.25))

    assert kinds(effects) == [
        "StoreWords", "NotifyDirectory:RecordsChanged", "NotifyPublisher:PagesCommitted",
    ]  # fmt: skip
    committed = effects[2].fact
    assert committed.origin == Origin(ALICE, 3)
    assert (committed.request, committed.sequence, committed.timeout_s) == (6, 1, 0.25)
    assert committed.states == bytes((COMMITTED, COMMITTED))
    records = committed.records
    assert records["key"].tolist() == [key(1), key(2)]
    assert records["length"].tolist() == [PAGE, PAGE - 5]
    assert records["flags"].tolist() == [RESIDENT, RESIDENT | HAS_CHECKSUM]
    assert records["checksum"].tolist() == [0, 99]
    assert records["offset"].tolist() == [0, PAGE]
    assert (records["generation"] == effects[0].values).all()
    assert len(committed.here) == 0


def test_second_set_of_a_resident_page_copies_nothing() -> None:
    """A key that is held with this length is HERE, and a commit names its record."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)

    granted = world.reserve(BOB, [1, 2], PAGE)
    world.write(BOB, 1)
    done = world.commit(BOB)

    assert granted.states == bytes((HERE, RESERVED))
    assert done.states == bytes((HERE, COMMITTED))
    assert done.here["key"].tolist() == [key(1)]
    assert done.records["key"].tolist() == [key(2)]


def test_reservation_without_slots_ends_at_once_and_can_be_committed() -> None:
    """Where everything was HERE a Commit is answered with the records, and nothing stays open."""
    world = World(granules=64)
    world.store(ALICE, [1, 2], PAGE)

    world.reserve(BOB, [1, 2], PAGE)
    open_count = world.figure("pool_reservations")
    done = world.commit(BOB, count=2)

    assert open_count == 0
    assert done.states == bytes((HERE, HERE))
    assert done.here["key"].tolist() == [key(1), key(2)]


def test_reserve_of_other_pages_under_an_open_sequence_is_refused() -> None:
    """A sequence names one reservation: other keys under it are a mistake, and get no slots."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)

    answer = world.reserve(ALICE, [2], PAGE, sequence=1)

    assert isinstance(answer, Refused)
    assert answer.reason == "malformed"


def test_abort_after_commit_changes_nothing() -> None:
    """Commit ended it: a late Abort takes no page away."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)

    world.abort(ALICE, 1)

    assert world.holds(1) == [True]
    assert world.is_readable(world.record(1))


def test_commit_of_an_unknown_reservation_is_aborted() -> None:
    """A reservation of an earlier incarnation commits nothing."""
    world = World(granules=64)

    done = world.commit(ALICE, 17, count=3)

    assert isinstance(done, PagesCommitted)
    assert done.states == bytes((ABORTED,)) * 3
    assert len(done.records) == len(done.here) == 0


@pytest.mark.parametrize(("written", "checksums"), [(b"\1", [0]), (b"\1\1", [0]), (b"", [])])
def test_commit_that_does_not_fit_is_refused_and_leaves_the_reservation(
    written: bytes, checksums: list[int]
) -> None:
    """A Commit of the wrong length ends nothing."""
    world = World(granules=64)
    world.reserve(ALICE, [1, 2], PAGE)
    world.write(ALICE, 1)

    answer = world.commit(ALICE, 1, written=written, checksums=checksums)
    done = world.commit(ALICE, 1)

    assert isinstance(answer, Refused)
    assert answer.reason == "malformed"
    assert done.states == bytes((COMMITTED, COMMITTED))


@pytest.mark.parametrize(
    ("keys", "lengths"), [(key(1), b""), (key(1)[:-1], packed([1])), (key(1), packed([1, 1]))]
)
def test_reserve_whose_counts_differ_is_refused(keys: bytes, lengths: bytes) -> None:
    """Keys and lengths that do not pair up are refused, with a reason."""
    world = World(granules=64)

    effects = world.say(ALICE, Reserve(5, 1, 1, keys, lengths))

    assert len(effects) == 1
    assert effects[0].message.request == 5
    assert effects[0].message.reason == "malformed"


@pytest.mark.parametrize("count", [0, 2])
def test_mirrored_pages_are_named(count: int) -> None:
    """Slots ahead are for pages of the client's own."""
    world = World(granules=64)

    (refusal,) = world.say(ALICE, ReserveMirror(5, 1, 1, b"", packed([GRANULE] * count)))

    assert (refusal.message.request, refusal.message.reason) == (5, "malformed")
    assert "name them" in refusal.message.detail


def test_reserve_of_too_many_pages_is_refused() -> None:
    """One Reserve may keep the pool busy for so long and no longer."""
    world = World(granules=64)

    answer = world.reserve(ALICE, range(BATCH_PAGES_MAX + 1), PAGE)

    assert isinstance(answer, Refused)


def test_empty_reserve_is_granted_nothing() -> None:
    """A batch of no pages is answered."""
    world = World(granules=64)

    answer = world.reserve(ALICE, [], PAGE)

    assert answer == Granted(9, 1, b"", b"")


def test_sizes_that_can_not_be_are_refused() -> None:
    """Nothing is stored under length 0, beyond 4 GiB, or beyond the pool."""
    world = World(granules=64)

    granted = world.reserve(ALICE, [1, 2, 3, 4], [0, PAGE_BYTES_MAX + 1, 65 * GRANULE, 2**63])

    assert granted.states == bytes(
        (REFUSED_SIZE, REFUSED_TOO_LARGE, REFUSED_TOO_LARGE, REFUSED_TOO_LARGE)
    )


def test_page_as_large_as_the_pool_is_stored() -> None:
    """The largest page is the pool; it evicts all and may exceed what a client may hold."""
    world = World(granules=601)
    world.store(ALICE, range(10), PAGE)

    states = world.store(ALICE, [99], 601 * GRANULE)

    assert states == bytes((COMMITTED,))
    assert world.holds(*range(10)) == [False] * 10


def test_first_commit_wins_and_the_loser_is_answered_here() -> None:
    """A reservation locks no key: the slower of two gives its slot back."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.reserve(BOB, [1], PAGE)
    world.write(ALICE, 1)
    world.write(BOB, 1)

    winner = world.commit(BOB)
    loser = world.commit(ALICE)

    assert winner.states == bytes((COMMITTED,))
    assert loser.states == bytes((HERE,))
    assert loser.here.tobytes() == winner.records.tobytes()
    assert len(loser.records) == 0
    assert world.figure("pool_bytes_used") == PAGE
    assert world.figure("pool_bytes_reserved") == 0


def test_loser_with_another_size_is_refused() -> None:
    """Of two sizes under one key the first committed stays."""
    world = World(granules=64)
    world.reserve(ALICE, [1], 2 * PAGE)
    world.reserve(BOB, [1], PAGE)
    world.commit(BOB)

    loser = world.commit(ALICE)

    assert loser.states == bytes((REFUSED_SIZE,))
    assert world.record(1)["length"] == PAGE
    assert len(loser.here) == 0


def test_outcomes_are_remembered_for_a_while_only() -> None:
    """After many more reservations an old outcome is forgotten: its Commit is aborted."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)

    for number in range(ENDED_MAX):
        world.store(ALICE, [2 + number % 5], PAGE)
    done = world.commit(ALICE, 1, count=1)

    assert done.states == bytes((ABORTED,))
    assert world.holds(1) == [True]


# --- slots ahead ----------------------------------------------------------------------------------


def test_slots_ahead_are_named_by_their_commit() -> None:
    """Readable under the names of the Commit, and not before; the others are free again."""
    world = World(granules=1024)
    granted = world.reserve_ahead(ALICE, [PAGE, PAGE, PAGE])
    world.write(ALICE, granted.sequence)

    done = world.commit(ALICE, granted.sequence, named=[5, 6])

    assert granted.states == bytes((RESERVED,)) * 3
    assert isinstance(done, PagesCommitted)
    assert done.states == bytes((COMMITTED,)) * 2
    assert [bytes(record["key"]) for record in done.records] == [key(5), key(6)]
    assert world.holds(5, 6) == [True, True]
    assert world.figure("pool_bytes_reserved") == 0


def test_a_page_that_is_there_by_then_stays_and_its_slot_is_free() -> None:
    """The names were unknown when the slots were reserved: the first commit wins."""
    world = World(granules=256)
    granted = world.reserve_ahead(ALICE, [PAGE, PAGE])
    world.store(BOB, [5], PAGE)
    world.write(ALICE, granted.sequence)

    done = world.commit(ALICE, granted.sequence, named=[5, 6])

    assert isinstance(done, PagesCommitted)
    assert done.states == bytes((HERE, COMMITTED))
    assert world.figure("pool_bytes_reserved") == 0


@pytest.mark.parametrize(
    ("named", "written"), [([], b""), ([1], b"\1\1"), ([1, 2, 3], b"\1\1\1"), ([], b"\1\1")]
)
def test_a_commit_that_does_not_name_its_pages_is_refused(named: list[int], written: bytes) -> None:
    """A name for each page it speaks of, and no more than there are slots."""
    world = World(granules=256)
    granted = world.reserve_ahead(ALICE, [PAGE, PAGE])

    refused = world.commit(ALICE, granted.sequence, written=written, named=named)

    assert isinstance(refused, Refused)
    assert refused.reason == "malformed"
    assert world.figure("pool_bytes_reserved") == 2 * PAGE


def test_a_commit_cannot_name_pages_again() -> None:
    """What was reserved by name has its names."""
    world = World(granules=256)
    world.reserve(ALICE, [1, 2], PAGE)

    refused = world.commit(ALICE, 1, named=[5, 6])

    assert isinstance(refused, Refused)
    assert refused.reason == "malformed"


def test_all_clients_together_have_a_part_of_the_pool_ahead() -> None:
    """All of a batch or nothing; what is named or given up makes room again."""
    world = World(granules=1024)
    mine = world.reserve_ahead(ALICE, [PAGE] * 6)
    full = world.reserve_ahead(BOB, [PAGE] * 3)
    named = world.commit(ALICE, mine.sequence, named=[1, 2, 3, 4, 5, 6])
    room = world.reserve_ahead(BOB, [PAGE] * 8)
    world.exit(BOB)
    again = world.reserve_ahead(ALICE, [PAGE] * 8)
    world.list_live(ALICE, again.sequence, [])

    assert set(full.states) == {REFUSED_FULL}
    assert isinstance(named, PagesCommitted)
    assert set(room.states) == {RESERVED}
    assert set(again.states) == {RESERVED}
    assert set(world.reserve_ahead(ALICE, [PAGE] * 8).states) == {RESERVED}


def test_slots_ahead_take_nothing_from_what_a_client_may_have_uncommitted() -> None:
    """A client that may hold one batch can store one, whatever it has asked for ahead."""
    world = World(granules=256, uncommitted_max=8 * GRANULE)
    ahead = world.reserve_ahead(ALICE, [PAGE, PAGE])

    by_name = world.reserve(ALICE, [1, 2], PAGE)

    assert isinstance(by_name, Granted)
    assert ahead.states == by_name.states == bytes((RESERVED,)) * 2


@pytest.mark.parametrize("length", [0, 257 * GRANULE, PAGE_BYTES_MAX + 1])
def test_no_slot_ahead_for_a_page_that_cannot_be(length: int) -> None:
    """Nor for those next to it."""
    world = World(granules=256)

    assert set(world.reserve_ahead(ALICE, [GRANULE, length]).states) == {REFUSED_FULL}


def test_further_slots_that_a_commit_asks_for_come_when_it_is_answered() -> None:
    """A commit does not wait for evictions: they come after its answer."""
    world = World(granules=1024)
    world.reserve(ALICE, [1, 2], PAGE, namespace=9)
    world.write(ALICE, 1)
    del world.writing[ALICE, 1]

    effects = world.say(ALICE, Commit(6, 1, b"\1\1", bytes(16), 0.5, b"", (2, 3)))

    assert kinds(effects)[-1] == "NotifyPublisher:PagesCommitted"
    reserves = [Reserve(0, number, 9, b"", packed([PAGE, PAGE])) for number in (2, 3)]
    assert effects[-1].fact.then == tuple(
        ReserveAhead(Origin(ALICE, 3), reserve) for reserve in reserves
    )
    offsets = [packed([2 * PAGE, 3 * PAGE]), packed([4 * PAGE, 5 * PAGE])]
    for reserve, where in zip(reserves, offsets, strict=True):
        granted = Granted(0, reserve.sequence, bytes((RESERVED,)) * 2, where)
        assert world.writing[ALICE, reserve.sequence] == (reserve, granted)


def test_slots_ahead_are_reserved_a_moment_after_the_answer() -> None:
    """The client that has the answer may need this processor."""
    world = World(granules=256)
    asked = ReserveAhead(Origin(ALICE, 3), Reserve(0, 2, 1, b"", packed([PAGE])))

    assert world.pool.on_message(NODE, asked, 5.0) == []

    assert world.pool.deadline() == 5.0 + AHEAD_PAUSE_S
    assert kinds(world.pool.on_tick(world.pool.deadline())) == ["StoreWords", "Granted"]
    assert world.figure("pool_bytes_reserved") == PAGE


def test_slots_ahead_of_a_client_that_has_exited_meanwhile_are_refused() -> None:
    world = World(granules=256)
    world.store(ALICE, [1], PAGE)
    world.exit(ALICE)
    asked = ReserveAhead(Origin(ALICE, 3), Reserve(0, 2, 1, b"", packed([PAGE])))

    world.pool.on_message(NODE, asked, 5.0)

    assert kinds(world.pool.on_tick(world.pool.deadline())) == ["Refused"]
    assert world.figure("pool_bytes_reserved") == 0


def test_slots_that_are_needed_later_come_with_the_next_commit() -> None:
    """A message less for each batch: those of the next one are known by then."""
    world = World(granules=1024)
    world.reserve(ALICE, [1, 2], PAGE)
    first = world.commit(ALICE, 1, ahead=(2, 3))

    second = world.commit(ALICE, 2, named=[3, 4], ahead=(4,))
    third = world.commit(ALICE, 3, named=[5, 6], ahead=(5,))

    assert isinstance(first, PagesCommitted)
    assert isinstance(second, PagesCommitted)
    assert isinstance(third, PagesCommitted)
    assert (first.ahead, first.offsets) == (0, b"")
    assert (second.ahead, second.offsets) == (3, packed([4 * PAGE, 5 * PAGE]))
    assert (third.ahead, third.offsets) == (4, packed([6 * PAGE, 7 * PAGE]))


def test_slots_ahead_that_not_every_page_has_do_not_come_with_a_commit() -> None:
    """An answer names no states: a page without a slot would go into another page's slot."""
    world = World(granules=256, uncommitted_max=256 * GRANULE)
    world.reserve(BOB, range(100, 350), GRANULE)
    world.reserve(ALICE, [1, 2, 3, 4], GRANULE)
    # Six granules are left: four for the first that follows, two for the second.
    world.commit(ALICE, 1, ahead=(2, 3))
    partly = world.writing[ALICE, 3][1].states

    done = world.commit(ALICE, 2, named=[5, 6, 7, 8])

    assert partly == bytes((RESERVED, RESERVED, REFUSED_FULL, REFUSED_FULL))
    assert isinstance(done, PagesCommitted)
    assert (done.ahead, done.offsets) == (0, b"")
    # Of the slots that are not named only those that there are come back.
    assert world.commit(ALICE, 3, named=[9]).states == bytes((COMMITTED,))
    assert world.figure("pool_bytes_reserved") == 250 * GRANULE


def test_slots_ahead_that_were_given_up_are_not_reported() -> None:
    """The client has left them out of its list: its writes would hit another page."""
    world = World(granules=256)
    world.reserve(ALICE, [1], PAGE)
    world.commit(ALICE, 1, ahead=(2, 3))
    world.list_live(ALICE, 3, [2])

    done = world.commit(ALICE, 2, named=[4])

    assert isinstance(done, PagesCommitted)
    assert (done.ahead, done.offsets) == (0, b"")


def test_slots_ahead_that_a_writer_was_not_notified_of_are_not_usable_meanwhile() -> None:
    """Those that it was notified of have ended since: it learns of the next ones at once."""
    extent, reservations = Extent(SizeClass(1, Tenant("t", 0), Ages()), 0, 1, 0, 64), Reservations()

    def begin(sequence: int) -> None:
        slot, offset = Slot(sequence, extent), packed([sequence * GRANULE])
        ahead = Reservation(1, b"", packed([GRANULE]), bytes((RESERVED,)), offset, (slot,), 1)
        reservations.begin(ALICE, sequence, ahead)

    for sequence in (1, 2):
        begin(sequence)
    assert reservations.hold_back(ALICE, 2)
    reservations.end(ALICE, 1)
    begin(3)

    assert not reservations.hold_back(ALICE, 3)


def test_one_commit_asks_for_a_few_reservations_only() -> None:
    """A message of a few bytes must not keep the pool busy for long."""
    world = World(granules=256)
    world.reserve(ALICE, [1], GRANULE)

    done = world.commit(ALICE, 1, ahead=tuple(range(2, 1000)))

    assert isinstance(done, PagesCommitted)
    assert len(done.then) == AHEAD_MAX


def test_paused_client_keeps_its_slot_however_long_it_takes() -> None:
    """A reservation outlives a lost pipe, a thousand sets of others and any time.

    1. Alice reserves and is stopped; 2. Bob turns the pool over; 3. Alice wakes up and writes.
    """
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)

    for number in range(1000):
        world.store(BOB, [1000 + number], PAGE)
        world.pool.on_tick(3600.0 * number)
    world.write(ALICE, 1)
    done = world.commit(ALICE, 1)

    assert done.states == bytes((COMMITTED,))
    assert world.is_readable(world.record(1))


def test_client_that_dies_between_reserve_and_commit_gives_its_slots_back() -> None:
    """Its slots come back, unread; what it had committed stays."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)
    world.reserve(ALICE, range(10, 18), PAGE)
    world.write(ALICE, 2, pages=[0, 1])

    world.exit(ALICE)

    assert world.figure("pool_bytes_reserved") == 0
    assert world.figure("pool_clients") == 0
    assert world.holds(1, 10, 11) == [True, False, False]


def test_what_a_dead_client_had_sent_reserves_nothing() -> None:
    """A Reserve that was on its way when the process exited would never be freed again."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)
    world.exit(ALICE)

    late = world.reserve(ALICE, [2], PAGE)
    done = world.commit(ALICE, 2)

    assert isinstance(late, Refused)
    assert late.reason == "gone"
    assert done.states == bytes((ABORTED,))
    assert world.figure("pool_bytes_reserved") == 0


def test_lost_granted_is_freed_when_the_client_no_longer_lists_it() -> None:
    """1. A Granted is lost; 2. the client gives up, and lists what it still means to write."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.reserve(ALICE, [2], PAGE)
    world.reserve(ALICE, [3], PAGE)

    world.list_live(ALICE, 2, [1])

    assert world.figure("pool_bytes_reserved") == 2 * PAGE
    assert world.commit(ALICE, 1).states == bytes((COMMITTED,))
    assert world.commit(ALICE, 2).states == bytes((ABORTED,))
    assert world.commit(ALICE, 3).states == bytes((COMMITTED,))


def test_late_duplicate_of_a_reserve_that_ended_leaks_nothing() -> None:
    """Whether it was committed, aborted or unlisted: its duplicate gets no slot."""
    world = World(granules=64)
    messages = [Reserve(5, s, 1, key(s), packed([PAGE])) for s in (1, 2, 3)]
    for message in messages:
        world.reserve_again(ALICE, message)
    world.commit(ALICE, 1)
    world.abort(ALICE, 2)
    world.list_live(ALICE, 3, [])

    answers = [world.reserve_again(ALICE, message) for message in messages]

    assert [answer.states for answer in answers] == [bytes((REFUSED_FULL,))] * 3
    assert world.figure("pool_bytes_reserved") == 0


def test_late_duplicate_of_a_forgotten_reserve_leaks_nothing() -> None:
    """Also when so much has happened since that its outcome is forgotten."""
    world = World(granules=64)
    message = Reserve(5, 1, 1, key(1), packed([PAGE]))
    world.reserve_again(ALICE, message)
    world.sequences[ALICE] = 1
    world.abort(ALICE, 1)
    for _ in range(ENDED_MAX + 1):
        world.reserve(ALICE, [2], PAGE)
        world.abort(ALICE, world.sequences[ALICE])

    answer = world.reserve_again(ALICE, message)

    assert answer.states == bytes((REFUSED_FULL,))
    assert world.figure("pool_bytes_reserved") == 0


@pytest.mark.parametrize("how", ["not listed", "listed before", "aborted"])
def test_reserve_that_arrives_after_the_client_gave_it_up_leaks_nothing(how: str) -> None:
    """1. A Reserve is delayed; 2. an Abort, or a list that does not name it, overtakes it.

    What a newer list has closed stays closed, in whatever order lists arrive.
    """
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    if how == "aborted":
        world.abort(ALICE, 2)
    else:
        world.list_live(ALICE, 3, [1])
    if how == "listed before":
        world.list_live(ALICE, 1, [1])

    late = world.reserve(ALICE, [2], PAGE, sequence=2)

    assert late.states == bytes((REFUSED_FULL,))
    assert world.figure("pool_bytes_reserved") == PAGE


def test_reserve_that_is_listed_before_it_arrives_is_granted() -> None:
    """The list may overtake the Reserve: what it names is awaited, not over."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.list_live(ALICE, 3, [1, 2, 3])

    answers = [world.reserve(ALICE, [9 + s], PAGE, sequence=s) for s in (3, 2)]

    assert [answer.states for answer in answers] == [bytes((RESERVED,))] * 2


def test_list_that_was_overtaken_ends_nothing_newer() -> None:
    """An old list shows nothing about what came after it."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.reserve(ALICE, [2], PAGE)
    world.list_live(ALICE, 3, [1, 2, 3])

    world.list_live(ALICE, 1, [1])
    awaited = world.reserve(ALICE, [3], PAGE, sequence=3)

    assert awaited.states == bytes((RESERVED,))
    assert world.commit(ALICE, 2).states == bytes((COMMITTED,))


def test_one_odd_page_in_a_full_pool_evicts_an_extent_at_most() -> None:
    """A page of another size costs one extent, here 4 of 256 units, and not everything."""
    world = World(granules=1024)
    pages = range(1024 // 4)
    for start in range(0, len(pages), 64):
        world.store(ALICE, pages[start : start + 64], PAGE)
    assert world.figure("pool_pages") == 256

    states = world.store(BOB, [9999], 5 * GRANULE)

    evicted = 256 - sum(world.holds(*pages))
    assert states == bytes((COMMITTED,))
    # 5 of 8 granules would waste 3/8; 4 units of 4 hold 3 slots and waste 1/16.
    assert evicted == 4


def test_odd_page_does_not_fail_forever() -> None:
    """Each of many sizes that come once finds room in a full pool."""
    world = World(granules=512)
    for start in range(0, 128, 32):
        world.store(ALICE, range(start, start + 32), PAGE)

    states = [world.store(BOB, [1000 + n], n * GRANULE) for n in range(1, 200, 7)]

    assert set(states) == {bytes((COMMITTED,))}


def test_page_larger_than_the_pool_is_refused_and_evicts_nothing() -> None:
    """It can never fit, so no page is evicted for it."""
    world = World(granules=16, uncommitted_max=16 * GRANULE)
    world.store(ALICE, range(4), PAGE)

    granted = world.reserve(BOB, [99], 17 * GRANULE)

    assert granted.states == bytes((REFUSED_TOO_LARGE,))
    assert world.figure("pool_pages") == 4


def test_eviction_of_a_batch_is_withdrawn_in_one_message() -> None:
    """However many pages go for a batch, directory and publisher are notified once."""
    world = World(granules=256)
    world.store(ALICE, range(32), PAGE)
    world.store(ALICE, range(32, 64), PAGE)
    world.drop_batches.clear()

    granted = world.reserve(BOB, range(100, 132), PAGE)

    assert count_of(granted.states, RESERVED) == 32
    assert [len(drops) for drops in world.drop_batches] == [32]


@pytest.mark.parametrize("granules", [1, 2, 3, 5])
def test_smallest_pools_work(granules: int) -> None:
    """A pool of a few granules stores and turns over like any other."""
    world = World(granules=granules, uncommitted_max=granules * GRANULE)

    states = [world.store(ALICE, [number], GRANULE) for number in range(20)]

    assert set(states) == {bytes((COMMITTED,))}
    assert world.figure("pool_pages") == granules
