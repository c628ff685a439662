"""A set in portions: each promise of a set holds for each portion, and the call waits once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.net.breaker import STALL_S
from peercache.observability import reasons
from peercache.paths.steps import Ask, Collect, Place, Post, Submit
from peercache.paths.write import COMMIT_S, PORTIONS_MAX, SILENCE_FRACTION, cuts_of
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    REFUSED_FULL,
    RESERVED,
    Abort,
    Commit,
    Committed,
    LiveReservations,
    Reserve,
)
from tests.unit.paths.test_writing import home_that_grants, sent_home
from tests.unit.paths.world import PAGE, World, content_of, named, runs_of

NAMES = [f"p{i}" for i in range(12)]
"""Three portions of four pages."""


def world_of_portions(**more: Any) -> World:
    return World(portion_bytes=4 * PAGE, **more)


def at_commit(world: World, number: int, act: Callable[[Message], Message | None]) -> None:
    """Have the home node do something else at the Commit of this number, from 1."""
    home, seen = world.nodes[1], [0]

    def answer(message: Message) -> Message | None:
        seen[0] += isinstance(message, Commit)
        if isinstance(message, Commit) and seen[0] == number:
            return act(message)
        return home.serve(message)

    home.script.extend([answer] * 100)


def kinds(world: World) -> list[str]:
    """Return the steps that were done, with the messages that they carried."""
    return [
        type(step.message if isinstance(step, Submit) else step).__name__ for step in world.steps
    ]


@pytest.fixture
def world() -> World:
    return world_of_portions()


def test_a_portion_is_committed_while_the_next_one_is_copied(world: World) -> None:
    """And reserved while the one before is: the call waits once, after its last copy."""
    outcome = world.set(NAMES)

    assert outcome.stored.all()
    assert (outcome.copied, outcome.copied_bytes) == (12, 12 * PAGE)
    assert kinds(world) == [
        *("Reserve", "Reserve", "Collect", "Place", "Commit"),
        *("Reserve", "Collect", "Place", "Commit"),
        *("Collect", "Place", "Commit"),
        *("Collect", "Collect", "Collect"),
    ]
    world.steps.clear()
    got = world.get(*NAMES)
    assert [got.content(i) for i in range(12)] == [content_of(n).tobytes() for n in NAMES]
    assert world.asked() == []


def test_no_portion_is_committed_before_all_its_bytes_are_in_place(world: World) -> None:
    """The home node makes the word even at once: a reader may come in the next moment."""
    home = world.nodes[1]

    def looks(message: Message) -> Message | None:
        if isinstance(message, Commit):
            reserve, granted = home.reserved[message.sequence]
            keys = np.frombuffer(reserve.keys, "V16")
            for key, offset in zip(keys, np.frombuffer(granted.offsets, np.uint64), strict=True):
                (name,) = [n for n in NAMES if named(n)[0] == key]
                there = home.memory[int(offset) : int(offset) + PAGE]
                assert there.tobytes() == content_of(name).tobytes()
        return home.serve(message)

    home.script.extend([looks] * 100)

    assert world.set(NAMES).stored.all()
    assert len(sent_home(world, Commit)) == 3


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("is_received", [False, True])
def test_a_lost_commit_of_any_portion_is_sent_again(
    world: World, number: int, *, is_received: bool
) -> None:
    """Lost on its way there or back; the home node does not count as hung."""
    home = world.nodes[1]

    def lose(message: Message) -> None:
        if is_received:
            home.serve(message)

    at_commit(world, number, lose)

    outcome = world.set(NAMES)

    assert outcome.stored.all()
    assert outcome.reasons == [""] * 12
    sequences = [commit.sequence for commit in sent_home(world, Commit)]
    assert sorted(sequences) == sorted([1, 2, 3, number])
    assert world.breakers.opened_count == 0
    assert world.get(*NAMES).hits == [True] * 12


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lost_reserve_of_any_portion_is_sent_again(world: World, number: int) -> None:
    """The same sequence, so that no slot is reserved twice."""
    home, lost = world.nodes[1], [number]

    def answer(message: Message) -> Message | None:
        if isinstance(message, Reserve) and message.sequence in lost:
            lost.clear()
            return None
        return home.serve(message)

    home.script.extend([answer] * 100)

    assert world.set(NAMES).stored.all()
    asked = [reserve.sequence for reserve in sent_home(world, Reserve)]
    assert sorted(asked) == sorted([1, 2, 3, number])
    assert world.breakers.opened_count == 0


def test_a_home_node_that_dies_between_portions_keeps_what_it_has_said(world: World) -> None:
    """The pages of answered Commits are stored; the rest costs half of the time, once."""
    home = world.nodes[1]
    began = world.now

    def dies(message: Message) -> Message | None:
        home.mood = "silent"
        return home.serve(message)

    at_commit(world, 1, dies)

    outcome = world.set(NAMES)

    assert outcome.stored.tolist() == [True] * 4 + [False] * 8
    # The second portion was granted before, and its Commit is never answered.
    assert outcome.reasons == [""] * 4 + [reasons.NO_ANSWER] * 8
    assert world.breakers.is_open(1)
    assert world.now - began == pytest.approx(2.0 * SILENCE_FRACTION, abs=2 * STALL_S)
    assert world.reservations.report(0.0).sequences == ()


def test_a_home_node_that_refuses_connections_ends_the_call_at_once(world: World) -> None:
    """Nothing is copied, and no portion waits for another one's silence."""
    world.nodes[1].mood = "away"
    began = world.now

    outcome = world.set(NAMES)

    assert outcome.reasons == [reasons.NO_HOME] * 12
    assert world.now == began
    assert not any(isinstance(step, Place) for step in world.steps)


def test_a_deadline_in_the_middle_commits_what_is_whole_and_aborts_the_rest(world: World) -> None:
    """Of the portion that is being copied, and of the one that has slots already."""
    world.page_s = 0.145
    until = world.now + 1.0

    outcome = world.set(NAMES, timeout_s=1.0)

    # 0.9 s are left for copies and questions: six pages.
    assert outcome.stored.tolist() == [True] * 6 + [False] * 6
    assert outcome.reasons == [""] * 6 + [reasons.DEADLINE] * 6
    assert [list(commit.written) for commit in sent_home(world, Commit)] == [
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]
    assert world.posts(Abort) == [(1, Abort(3))]
    copies = [step for step in world.steps if isinstance(step, Place)]
    assert len(copies) == 2
    assert all(step.until == pytest.approx(until - COMMIT_S) for step in copies)
    assert world.now <= until
    assert world.reservations.report(0.0).sequences == ()


def test_nothing_of_a_portion_in_time_is_an_abort_of_it(world: World) -> None:
    """The first portion uses all of the time: nothing of the second one is committed."""
    world.page_s = 0.22

    outcome = world.set(NAMES, timeout_s=1.0)

    assert outcome.stored.tolist() == [True] * 4 + [False] * 8
    assert [commit.sequence for commit in sent_home(world, Commit)] == [1]
    assert world.posts(Abort) == [(1, Abort(2)), (1, Abort(3))]


def test_a_portion_refused_as_full_comes_again_after_the_others_are_committed(world: World) -> None:
    """Its room was that of the pages that were still uncommitted."""
    full, room = [REFUSED_FULL] * 4, [RESERVED] * 4
    home_that_grants(world, room, full, room)

    outcome = world.set(NAMES)

    assert outcome.stored.all()
    assert outcome.reasons == [""] * 12
    assert [len(r.keys) // 16 for r in sent_home(world, Reserve)] == [4] * 4
    assert sent_home(world, Reserve)[-1].keys == named(*NAMES[4:8]).tobytes()


def test_a_pool_that_stays_full_ends_the_call_with_its_portions(world: World) -> None:
    """A round without any progress is the last one."""
    home_that_grants(world, *[[REFUSED_FULL] * 4] * 3)

    outcome = world.set(NAMES)

    assert outcome.reasons == [reasons.POOL_FULL] * 12
    assert len(sent_home(world, Reserve)) == 3
    assert not any(isinstance(step, Place) for step in world.steps)


def test_every_reservation_is_live_until_its_commit_is_answered(world: World) -> None:
    """One that is not listed may be freed, with its Commit still on the way."""
    home = world.nodes[1]
    reports: list[LiveReservations] = []

    def listening(message: Message) -> Message | None:
        reports.append(world.reservations.report(0.0))
        return home.serve(message)

    home.script.extend([listening] * 100)
    path_ends: list[LiveReservations] = []

    world.set(NAMES)
    path_ends.append(world.reservations.report(0.0))

    live = [report.sequences for report in reports]
    assert live == [(1,), (1, 2), (1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3)]
    assert path_ends == [LiveReservations(3, ())]


@pytest.mark.parametrize("steps", range(1, 15))
def test_a_path_that_is_dropped_anywhere_ends_all_its_reservations(
    world: World, steps: int
) -> None:
    """A call that fails in the middle leaves nothing that is listed forever."""
    pages = [content_of(name) for name in NAMES]
    path = world.writer.set(
        named(*NAMES), runs_of(pages), home=1, reservations=world.reservations, until=200.0
    )
    answer: Any = None
    for _ in range(steps):
        answer = world.do(path.send(answer))
    assert world.reservations.report(0.0).sequences != ()

    path.close()

    assert world.reservations.report(0.0).sequences == ()


def test_every_page_has_its_checksum_whatever_its_portion() -> None:
    """Under full verification a reader takes no page without one."""
    world = world_of_portions(verify="full")

    assert world.set(NAMES).stored.all()
    assert world.get(*NAMES).hits == [True] * 12
    assert all(0 not in np.frombuffer(c.checksums, "<u8") for c in sent_home(world, Commit))


def test_what_no_owner_acknowledged_is_counted_over_all_portions(world: World) -> None:
    """Each Commit reports how much of its own is published; the rest is known to home alone."""
    home = world.nodes[1]

    def unpublished(message: Message) -> Message | None:
        if not isinstance(message, Commit):
            return home.serve(message)
        done = home.commit(message)
        return Committed(0, done.sequence, done.states, done.records, 1)

    home.script.extend([unpublished] * 100)

    assert world.set(NAMES).unpublished == 9


def test_only_the_first_portion_asks_for_slots_ahead_and_takes_them(world: World) -> None:
    """The reservations of the others are hidden behind its copy."""
    world.set(NAMES)
    world.now += 0.01
    world.set([f"{name}/2" for name in NAMES])
    world.now += 0.01
    asked = [bool(commit.ahead) for commit in sent_home(world, Commit)]
    world.nodes[1].received.clear()
    names = [f"{name}/3" for name in NAMES]

    assert world.set(names).stored.all()

    assert asked == [False] * 3 + [True, False, False]
    commits = sent_home(world, Commit)
    assert [bool(commit.keys) for commit in commits] == [True, False, False]
    assert len([r for r in sent_home(world, Reserve) if r.keys]) == 2
    assert world.get(*names).hits == [True] * 12


def test_a_small_batch_is_one_portion_and_asks_as_before(world: World) -> None:
    """No message more than a question and its answer, twice."""
    world.set(NAMES[:7])

    assert [type(step) for step in world.steps] == [Ask, Place, Ask]
    assert not any(isinstance(step, (Submit, Collect, Post)) for step in world.steps)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    portion_bytes=st.integers(1, 400),
)
def test_portions_are_the_batch_in_order(lengths: list[int], portion_bytes: int) -> None:
    """Each page once; no portion is empty, too many pages, or one too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peercache.paths.write.RESERVE_PAGES_MAX", 16)
        cuts = cuts_of(np.array(lengths, np.uint64), portion_bytes)

    assert (cuts[0], cuts[-1]) == (0, len(lengths))
    assert all(0 < end - begin <= 16 for begin, end in pairwise(cuts))
    most = PORTIONS_MAX + len(lengths) // 16
    assert len(cuts) - 1 <= most
    if sum(lengths) < 2 * portion_bytes and len(lengths) <= 16:
        assert len(cuts) == 2


def test_pages_that_no_pool_takes_stand_in_no_portion(world: World) -> None:
    """Their neighbours keep their names, their bytes and their places in the answer."""
    pages = [content_of(name) for name in NAMES]
    pages[1] = pages[9] = content_of("none", 0)

    outcome = world.set(NAMES, pages)

    stored = [place not in (1, 9) for place in range(12)]
    assert outcome.stored.tolist() == stored
    assert [why == reasons.WRONG_SIZE for why in outcome.reasons] == [not one for one in stored]
    assert len(sent_home(world, Commit)) == 2
    kept = [name for name, one in zip(NAMES, stored, strict=True) if one]
    assert world.get(*kept).hits == [True] * 10
