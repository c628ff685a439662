"""Reservations: what a writer holds, what it is told of, and what is over."""

from __future__ import annotations

from peercache.actors.pool.reservations import Reservation, Reservations
from peercache.actors.pool.slots import Extent, SizeClass, Slot
from peercache.actors.tenants import Tenant
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED

ALICE = 101
EXTENT = Extent(SizeClass(1, Tenant("t", 0)), 0, 1, 0, 64)
KEYS = [bytes((number,)) * 16 for number in range(4)]


def made(sequence: int, *, named: bool = False, slots: int = 4, refused: int = 0) -> Reservation:
    """Return a reservation of pages of one granule, the last of them without a slot."""
    count = slots + refused
    return Reservation(
        1,
        b"".join(KEYS[:count]) if named else b"",
        bytes(8 * count),
        bytes((RESERVED,)) * slots + bytes((REFUSED_FULL,)) * refused,
        bytes(8 * count),
        (*(Slot(10 * sequence + at, EXTENT) for at in range(slots)), *[None] * refused),
        slots,
    )


def begun(*ahead: int, **more: int) -> Reservations:
    """Return reservations made ahead under these sequences."""
    reservations = Reservations()
    for sequence in ahead:
        reservations.begin(ALICE, sequence, made(sequence, **more))
    return reservations


def test_slots_ahead_count_as_their_writer_s_once_they_have_names() -> None:
    """Until the reservation ends; the slots beyond the names come back at once."""
    reservations = begun(1, 2)
    reservations.begin(ALICE, 3, made(3, named=True))
    assert reservations.granules_of(ALICE) == 4

    named, spare = reservations.name(ALICE, 1, b"".join(KEYS[:3]), 3)

    assert [slot.first for slot in spare] == [13]
    assert named.slots == reservations.find(ALICE, 1).slots
    assert reservations.granules_of(ALICE) == 7
    assert (reservations.granules, reservations.ahead_granules, reservations.ahead_count) == (
        11, 4, 1,
    )  # fmt: skip
    for sequence in (1, 2, 3):
        reservations.end(ALICE, sequence)
    assert reservations.granules_of(ALICE) == 0
    assert (reservations.granules, reservations.ahead_granules, reservations.ahead_count) == (
        0, 0, 0,
    )  # fmt: skip


def test_slots_ahead_that_end_without_names_leave_the_others_ahead() -> None:
    reservations = begun(1, 2)

    reservations.end(ALICE, 1)

    assert reservations.granules_of(ALICE) == 0


def test_a_page_ahead_that_got_no_slot_has_none_to_give_back() -> None:
    reservations = begun(1, slots=2, refused=2)

    _, spare = reservations.name(ALICE, 1, KEYS[0], 1)

    assert [slot.first for slot in spare] == [11]


def test_a_writer_without_other_slots_ahead_is_told_of_these_at_once() -> None:
    """It has none to use meanwhile; pages with names are none to use either."""
    reservations = begun(1)
    reservations.begin(ALICE, 2, made(2, named=True))

    assert not reservations.hold_back(ALICE, 1)
    assert reservations.tell(ALICE) == (0, b"")


def test_slots_ahead_wait_for_the_next_commit_of_a_writer_that_has_others() -> None:
    reservations = begun(1, 2)

    assert reservations.hold_back(ALICE, 2)
    assert reservations.tell(ALICE)[0] == 2
    assert reservations.tell(ALICE)[0] == 0


def test_slots_ahead_that_a_writer_was_not_told_of_are_none_to_use_meanwhile() -> None:
    reservations = begun(1, 2)
    assert reservations.hold_back(ALICE, 2)
    reservations.end(ALICE, 1)
    reservations.begin(ALICE, 3, made(3))

    assert not reservations.hold_back(ALICE, 3)


def test_slots_ahead_of_which_one_is_missing_are_told_at_once() -> None:
    """The answer to a Commit names no states."""
    reservations = begun(1)
    reservations.begin(ALICE, 2, made(2, slots=2, refused=1))

    assert not reservations.hold_back(ALICE, 2)


def test_what_has_ended_is_not_told() -> None:
    reservations = begun(1, 2)
    assert reservations.hold_back(ALICE, 2)
    reservations.end(ALICE, 2)

    assert reservations.tell(ALICE) == (0, b"")
    assert not reservations.hold_back(ALICE, 2)


def test_a_list_ends_what_it_does_not_name_up_to_its_newest() -> None:
    """What it names may still come; the sequence after it is new."""
    reservations = begun(1, 2, 4, 6)

    ended = reservations.end_unlisted(ALICE, 4, (2, 3))

    assert [one.slots[0].first for one in ended if one.slots[0]] == [10, 40]
    assert [sequence for sequence, _ in reservations.open_of(ALICE)] == [2, 6]
    over = [reservations.is_over(ALICE, sequence) for sequence in (1, 3, 4, 5)]
    assert over == [True, False, True, False]
