"""Slots ahead: asked for by one batch, named by the next."""

from __future__ import annotations

import math

import numpy as np
import pytest

from peercache.observability import reasons
from peercache.paths.steps import Ask, Drain, Place
from peercache.paths.write import AHEAD_S, SKIPPED, ClientReservations
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    LiveReservations,
    Reserve,
)
from tests.unit.paths.world import PAGE, World, content_of

LENGTHS = np.array([PAGE, PAGE], np.uint64)


def granted(sequence: int, *offsets: int, state: int = RESERVED) -> Granted:
    """Return the answer of a home node."""
    states = bytes((state,)) * len(offsets)
    return Granted(0, sequence, states, np.array(offsets, np.uint64).tobytes())


def asked(now: float = 0.0) -> ClientReservations:
    """Return reservations that have asked for two slots ahead, twice, as numbers 1 and 2."""
    reservations = ClientReservations()
    assert reservations.ask_ahead(LENGTHS, now - 0.1) == ()
    assert reservations.ask_ahead(LENGTHS, now) == (1, 2)
    return reservations


def kinds(world: World) -> list[str]:
    """Return what a path asked for, in order."""
    return [
        type(step.questions[0][1]).__name__ if isinstance(step, Ask) else type(step).__name__
        for step in world.steps
    ]


# --- the numbers ----------------------------------------------------------------------------------


@pytest.fixture
def reservations() -> ClientReservations:
    return asked()


def test_only_a_batch_that_follows_another_asks_ahead() -> None:
    """A lone batch would keep room from others for nothing."""
    reservations = ClientReservations()

    numbers = [reservations.ask_ahead(LENGTHS, now) for now in (0.0, AHEAD_S, AHEAD_S + 0.1)]

    assert numbers == [(), (), (1, 2)]


def test_so_many_batches_ahead_and_no_more(reservations: ClientReservations) -> None:
    """Several threads that store share them; what was taken is asked for again."""
    again = reservations.ask_ahead(LENGTHS, 0.1)

    reservations.take_ahead(LENGTHS)
    more = reservations.ask_ahead(LENGTHS, 0.2)

    assert (again, more) == ((), (3,))


def test_slots_ahead_are_live_until_their_batch_has_ended(reservations: ClientReservations) -> None:
    """The home node frees what is not listed."""
    listed = [reservations.report(0.1)]
    reservations.granted(granted(1, 0, PAGE))
    listed.append(reservations.report(0.2))

    ahead = reservations.take_ahead(LENGTHS)
    listed.append(reservations.report(0.3))

    assert ahead is not None
    assert ahead.sequence == 1
    assert ahead.offsets is not None
    assert ahead.offsets.tolist() == [0, PAGE]
    assert listed == [LiveReservations(2, (1, 2))] * 3
    assert reservations.report(AHEAD_S) == LiveReservations(2, (1,))
    reservations.end(1)
    assert reservations.report(9.0) == LiveReservations(2, ())


@pytest.mark.parametrize("now", [AHEAD_S, math.inf])
def test_slots_that_are_not_used_are_given_up_and_never_taken(
    reservations: ClientReservations, now: float
) -> None:
    """As soon as they are not listed, the home node may give them to another client."""
    reservations.granted(granted(1, 0, PAGE))

    listed = reservations.report(now)

    assert listed == LiveReservations(2, ())
    assert reservations.take_ahead(LENGTHS) is None


def test_a_batch_of_other_lengths_gives_them_up(reservations: ClientReservations) -> None:
    """They would not fit the next one either."""
    reservations.granted(granted(1, 0, PAGE))

    assert reservations.take_ahead(LENGTHS + np.uint64(1)) is None
    assert reservations.report(0.0) == LiveReservations(2, ())


def test_a_longer_batch_gives_them_up_and_a_shorter_one_takes_them(
    reservations: ClientReservations,
) -> None:
    """The last batch of a prompt is short."""
    assert reservations.take_ahead(np.repeat(LENGTHS, 2)) is None
    assert reservations.ask_ahead(LENGTHS, 0.1) == (3, 4)
    reservations.granted(granted(3, 0, PAGE))

    ahead = reservations.take_ahead(LENGTHS[:1])

    assert ahead is not None
    assert ahead.sequence == 3


def test_what_is_granted_is_taken_before_what_is_not(reservations: ClientReservations) -> None:
    """The first answer may have been lost."""
    reservations.granted(granted(2, 0, PAGE))
    waits = reservations.awaits_grant()

    taken = [reservations.take_ahead(LENGTHS) for _ in range(3)]

    assert not waits
    assert [ahead.sequence if ahead else 0 for ahead in taken] == [2, 1, 0]


@pytest.mark.parametrize(
    "answer",
    [
        granted(1, 0, 0, state=REFUSED_FULL),
        granted(1, 0),
        granted(1, 0, 1, 2),
        *(Granted(0, 1, bytes([RESERVED] * 2), bytes(size)) for size in (0, 8, 15, 24)),
    ],
)
def test_an_answer_without_a_slot_for_each_page_ends_them(
    reservations: ClientReservations, answer: Granted
) -> None:
    """A full pool, or an answer that does not fit: what was granted is not listed any more."""
    reservations.granted(answer)

    assert reservations.report(0.0) == LiveReservations(2, (2,))


def test_without_room_the_next_batches_ask_for_nothing(reservations: ClientReservations) -> None:
    """A pool that is small for these batches would refuse each of them."""
    reservations.take_ahead(LENGTHS)
    reservations.granted(granted(2, 0, 0, state=REFUSED_FULL))

    numbers = [reservations.ask_ahead(LENGTHS, 0.1) for _ in range(SKIPPED + 1)]

    assert numbers == [()] * SKIPPED + [(3, 4)]


def test_an_answer_to_another_number_is_of_no_interest(reservations: ClientReservations) -> None:
    """It comes late, for what was given up or has been used."""
    reservations.granted(granted(7, 0, PAGE))

    assert reservations.awaits_grant()


# --- the write path -------------------------------------------------------------------------------


def test_a_batch_that_follows_two_others_reserves_nothing(world: World) -> None:
    """The second asks for its slots, the third names its pages in its Commit; all are read back."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)
    world.steps.clear()

    outcome = world.set(["e", "f"])

    assert outcome.stored.tolist() == [True, True]
    assert (outcome.copied, outcome.copied_bytes) == (2, 2 * PAGE)
    assert kinds(world) == ["Drain", "Place", "Commit"]
    got = world.get("a", "c", "e", "f")
    assert [got.content(i) for i in range(4)] == [content_of(n).tobytes() for n in "acef"]


def test_a_commit_brings_the_slots_of_the_batch_after_it(world: World) -> None:
    """From then on a batch is one question, and no other message comes."""
    for names in (["a", "b"], ["c", "d"], ["e", "f"]):
        world.set(names)
    world.steps.clear()

    for names in (["g", "h"], ["i", "j"]):
        assert world.set(names).stored.all()

    assert kinds(world) == ["Place", "Commit"] * 2
    assert [world.get(name).content(0) for name in "gj"] == [
        content_of(name).tobytes() for name in "gj"
    ]


def test_slots_in_an_answer_to_a_commit_that_do_not_fit_are_given_up(
    reservations: ClientReservations,
) -> None:
    """The home node is believed as far as it goes."""
    reservations.note_ahead(Committed(0, 9, b"", b"", 0, 1, bytes(8)))

    assert reservations.report(0.0).sequences == (2,)


def test_slots_beyond_a_short_batch_are_not_written_to(world: World) -> None:
    """The Commit speaks of its own pages only."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)

    outcome = world.set(["e"])

    commit = world.nodes[1].received[-1]
    assert isinstance(commit, Commit)
    assert (len(commit.written), len(commit.keys)) == (1, 16)
    assert outcome.stored.tolist() == [True]
    assert world.get("e").content(0) == content_of("e").tobytes()


def test_slots_without_a_received_grant_are_asked_for_once_more(world: World) -> None:
    """Under their own number: the home node has them, or reserves them now."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)
    world.nodes[1].late.clear()
    world.steps.clear()

    outcome = world.set(["e", "f"])

    assert outcome.stored.all()
    assert kinds(world) == ["Drain", "Reserve", "Place", "Commit"]
    reserve = next(m for m in reversed(world.nodes[1].received) if isinstance(m, Reserve))
    assert reserve.keys == b""
    assert reserve.sequence not in world.reservations.report(0.0).sequences


def test_slots_that_were_refused_ahead_are_asked_for_by_name(world: World) -> None:
    """A pool without room to spare: the batch goes as any other."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)
    late = world.nodes[1].late
    refused = [granted(answer.sequence, 0, 0, state=REFUSED_FULL) for answer in late]
    late.clear()
    late.extend(refused)
    world.steps.clear()

    outcome = world.set(["e", "f"])

    assert outcome.stored.all()
    assert kinds(world) == ["Drain", "Reserve", "Place", "Commit"]
    assert world.get("e").content(0) == content_of("e").tobytes()


def test_pages_known_to_be_at_home_are_asked_for_by_name(world: World) -> None:
    """A second set of a resident key copies nothing, though there are slots."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)
    world.steps.clear()

    world.set(["a", "b"])

    assert not any(isinstance(step, Drain) for step in world.steps)
    assert kinds(world)[0] == "Reserve"


def test_a_home_node_that_is_away_ends_what_was_asked_ahead(world: World) -> None:
    """Only slots that will be written are listed, and the call ends in time."""
    for names in (["a", "b"], ["c", "d"]):
        world.set(names)
    world.nodes[1].late.clear()
    world.nodes[1].mood = "silent"

    outcome = world.set(["e", "f"], timeout_s=0.4)

    assert outcome.reasons == [reasons.NO_ANSWER] * 2
    assert len(world.reservations.report(world.now).sequences) == 1
    assert world.reservations.report(math.inf).sequences == ()
    assert not any(isinstance(step, Place) for step in world.steps[-3:])


def test_a_batch_that_was_not_written_whole_asks_for_nothing(world: World) -> None:
    """Who runs late has no use for more slots."""
    world.set(["a", "b"])
    world.page_s = 0.6

    world.set(["c", "d"], timeout_s=1.0)

    commits = [m for m in world.nodes[1].received if isinstance(m, Commit)]
    assert [commit.ahead for commit in commits] == [(), ()]


def test_a_lost_commit_is_asked_again_with_the_same_number(world: World) -> None:
    """Neither the pages nor the slots ahead come twice."""
    world.set(["a", "b"])
    home = world.nodes[1]

    def lost(message: Message) -> None:
        del message

    home.script.extend([home.serve, lost])
    outcome = world.set(["c", "d"])

    commits = [m for m in home.received if isinstance(m, Commit)][-2:]
    assert commits[0] == commits[1]
    assert commits[0].ahead
    assert outcome.stored.all()
