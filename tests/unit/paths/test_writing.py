"""The write path: what is stored was wholly copied in time, and what bounds a set."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from peercache.client.bridge import checksums_of
from peercache.model.records import PAGE_BYTES_MAX, RECORD_BYTES
from peercache.model.runs import PageRuns
from peercache.net.breaker import STALL_S
from peercache.observability import reasons
from peercache.paths.steps import Ask, Checksum, Place, Step
from peercache.paths.write import (
    COMMIT_S,
    PUBLISH_TIMEOUT_S,
    RESEND_FRACTION,
    SILENCE_FRACTION,
    ClientReservations,
)
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    Abort,
    Commit,
    Committed,
    Granted,
    LiveReservations,
    Reserve,
)
from peercache.wire.messages.session import Refused
from tests.unit.paths.world import PAGE, Page, World, content_of, named, runs_of


def home_that_grants(world: World, *answers: list[int]) -> None:
    """Let the home node grant the next Reserves with these states, then as it likes."""
    home = world.nodes[1]
    queue = list(answers)

    def answer(message: Message) -> Message | None:
        if isinstance(message, Reserve) and queue:
            return home.grant(message, queue.pop(0))
        assert isinstance(message, (Reserve, Commit))
        return home.grant(message) if isinstance(message, Reserve) else home.commit(message)

    home.script.clear()
    home.script.extend([answer] * 100)


def _lost(_answer: Message | None) -> None:
    return


def sent_home(world: World, kind: type[Any]) -> list[Any]:
    return [message for message in world.nodes[1].received if isinstance(message, kind)]


def test_pages_are_reserved_copied_and_committed(world: World) -> None:
    """Three steps; then they are readable, byte for byte, without a question."""
    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [True, True]
    assert outcome.reasons == ["", ""]
    assert (outcome.copied, outcome.copied_bytes, outcome.here) == (2, 2 * PAGE, 0)
    assert [type(step) for step in world.steps] == [Ask, Place, Ask]
    world.steps.clear()
    got = world.get("a", "b")
    assert [got.content(0), got.content(1)] == [content_of(n).tobytes() for n in "ab"]
    assert world.asked() == []


def test_a_page_that_is_here_is_not_copied(world: World) -> None:
    """A second set of a resident key copies nothing and is stored."""
    home_that_grants(world, [HERE, HERE])

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [True, True]
    assert (outcome.copied, outcome.here) == (0, 2)
    assert [type(step) for step in world.steps] == [Ask, Ask]
    # Nothing was granted, so there is nothing to end.
    assert world.posts(Abort) == []


@pytest.mark.parametrize("published", [0, 1, 2])
def test_pages_that_are_here_count_as_unpublished_until_the_home_node_reports_otherwise(
    world: World,
    published: int,
) -> None:
    """Another client has set them a moment ago, and their owners may not know them."""
    home_that_grants(world, [HERE, HERE])
    records = bytes(2 * RECORD_BYTES)
    world.nodes[1].script.insert(1, lambda _: Committed(0, 1, bytes(2), records, published))

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [True, True]
    assert outcome.unpublished == 2 - published


def test_pages_that_are_here_are_stored_and_unpublished_without_an_answer(world: World) -> None:
    """The home node has said where they are; what their owners know it has not."""
    home = world.nodes[1]
    home.script.append(lambda message: home.grant(message, [HERE, HERE]))
    home.script.extend([_lost] * 100)

    outcome = world.set(["a", "b"], timeout_s=1.0)

    assert outcome.stored.tolist() == [True, True]
    assert outcome.unpublished == 2


def test_repeated_commit_waits_for_owners_within_what_is_left_of_the_time(world: World) -> None:
    """Its answer has to arrive by the deadline, as that of the first one."""
    home = world.nodes[1]
    home.script.extend([home.serve, *[_lost] * 100])
    until = world.now + 0.3

    world.set(["a"], timeout_s=0.3)

    first, *again = sent_home(world, Commit)
    asks = [s for s in world.steps if isinstance(s, Ask) and isinstance(s.questions[0][1], Commit)]
    assert first.timeout_s == PUBLISH_TIMEOUT_S
    assert again
    for ask in asks[1:]:
        (_, commit), *_ = ask.questions
        assert commit.timeout_s < PUBLISH_TIMEOUT_S
        assert ask.until == pytest.approx(until)


def test_only_pages_wholly_copied_in_time_are_committed(world: World) -> None:
    """The rest is aborted by the same Commit, and reports that time was up."""
    names = [f"p{i}" for i in range(10)]
    world.page_s = 0.3

    outcome = world.set(names, timeout_s=1.0)

    commit = sent_home(world, Commit)[0]
    assert list(commit.written) == [1, 1] + [0] * 8
    assert outcome.stored.tolist() == [True] * 2 + [False] * 8
    assert outcome.reasons[2:] == [reasons.DEADLINE] * 8


def test_every_step_that_reads_the_source_ends_before_the_deadline() -> None:
    """The copy ends before its call, and no checksum begins in the time of the Commit."""
    world = World(verify="full")
    world.page_s = 0.2
    until = world.now + 1.0
    steps: list[tuple[float, Step]] = []
    path = world.writer.set(
        named(*[f"p{i}" for i in range(9)]),
        runs_of([content_of(f"p{i}") for i in range(9)]),
        home=1,
        reservations=world.reservations,
        until=until,
    )
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            step = path.send(answer)
            steps.append((world.now, step))
            answer = world.do(step)

    (place,) = [step for _, step in steps if isinstance(step, Place)]
    assert place.until < until
    checksums_at = [at for at, step in steps if isinstance(step, Checksum)]
    assert checksums_at
    assert max(checksums_at) < until - COMMIT_S


def test_with_full_verification_no_page_is_stored_without_a_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full reader would never take it, and it would stand in the way of the next set."""
    monkeypatch.setattr("peercache.paths.verify.CHECKSUM_PORTION_BYTES", PAGE)
    world = World(verify="full")
    world.page_s = 0.05
    world.checksum_s = 0.1
    names = [f"p{i}" for i in range(30)]
    until = world.now + 1.0

    outcome = world.set(names, timeout_s=1.0)

    stored = outcome.stored.tolist()
    (copied,) = [step for step in world.steps if isinstance(step, Place)]
    assert 0 < sum(stored) < len(names)
    assert copied.until < until - COMMIT_S
    assert set(np.array(outcome.reasons)[~outcome.stored]) == {reasons.DEADLINE}
    assert world.now <= until
    world.page_s = world.checksum_s = 0.0
    assert world.get(*names).hits == stored
    # What was too late is stored by the next set, and then found.
    assert world.set(names).stored.all()
    assert world.get(*names).hits == [True] * len(names)


def test_a_lost_grant_is_asked_for_again(world: World) -> None:
    """Reserve is idempotent: the same sequence, the same slots."""
    world.nodes[1].script.append(lambda _: None)

    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [True]
    assert [reserve.sequence for reserve in sent_home(world, Reserve)] == [1, 1]
    assert world.breakers.opened_count == 0


def test_a_lost_answer_to_a_commit_is_asked_for_again(world: World) -> None:
    """Commit is idempotent too; one lost message does not make the home node a hung one."""
    home = world.nodes[1]
    home.script.extend([home.serve, lambda message: _lost(home.serve(message))])

    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [True]
    assert len(sent_home(world, Commit)) == 2
    assert world.breakers.opened_count == 0


@pytest.mark.parametrize("timeout_s", [0.4, 2.0, 20.0])
def test_a_home_node_that_stays_silent_is_given_up_after_half_of_the_time(
    world: World, timeout_s: float
) -> None:
    """Then the next set does not wait at all."""
    world.nodes[1].mood = "silent"
    began = world.now

    outcome = world.set(["a"], timeout_s=timeout_s)
    after_first = world.now
    again = world.set(["a"], timeout_s=timeout_s)

    assert outcome.stored.tolist() == [False]
    assert outcome.reasons == again.reasons == [reasons.NO_ANSWER]
    # A probe of its breaker may be due at the end.
    assert after_first - began == pytest.approx(timeout_s * SILENCE_FRACTION, abs=STALL_S)
    assert world.now == after_first


@pytest.mark.parametrize("silent_s", [STALL_S * 1.2, STALL_S * 3])
def test_a_set_waits_longer_for_a_living_home_node_than_a_lookup(
    world: World, silent_s: float
) -> None:
    """Lookups have opened its breaker before, and it answers the set in the middle of its time."""
    home = world.nodes[1]
    world.breakers.waited(1, STALL_S, world.now)
    assert world.breakers.is_open(1)
    answers_at = world.now + silent_s

    def busy(message: Message) -> Message | None:
        return home.serve(message) if world.now >= answers_at else None

    home.script.extend([busy] * 20)
    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [True]
    assert not world.breakers.is_open(1)


def test_a_home_node_that_is_always_late_is_understood(world: World) -> None:
    """Each request to it is answered after longer than the first silence."""
    world.nodes[1].latency_s = 1.5 * RESEND_FRACTION * STALL_S

    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [True]


@pytest.mark.parametrize("portions", [1, 3])
def test_a_home_node_that_dies_during_the_wait_ends_the_set(portions: int) -> None:
    """The kernel reports the end of its connections: only a node that runs is waited for."""
    world = World(portion_bytes=PAGE)
    home = world.nodes[1]

    def dies(_: Message) -> None:
        home.mood = "away"

    home.script.extend([_lost] * (portions - 1) + [dies])
    began = world.now
    outcome = world.set([f"p{i}" for i in range(portions)])

    assert outcome.reasons == [reasons.NO_HOME] * portions
    assert world.now - began <= STALL_S


def test_a_home_node_may_be_silent_for_a_part_of_a_long_deadline() -> None:
    """On a host with more work than cores each answer takes longer than the least stall."""
    world = World(op_timeout_s=20.0)
    home, late_s = world.nodes[1], 2 * STALL_S
    began = world.now

    def late(message: Message) -> Message:
        world.now += late_s
        return home.grant(message) if isinstance(message, Reserve) else home.commit(message)

    home.script.extend([late] * 10)

    assert world.set(["a"], timeout_s=20.0).stored.tolist() == [True]
    assert world.now - began == pytest.approx(2 * late_s)
    assert world.breakers.opened_count == 0

    home.script.clear()
    home.mood, began = "silent", world.now
    assert world.set(["b"], timeout_s=20.0).reasons == [reasons.NO_ANSWER]
    assert world.now - began == pytest.approx(20.0 * SILENCE_FRACTION, rel=1 / 8)
    assert world.breakers.opened_count == 1


def test_a_commit_that_waits_for_an_owner_is_no_silence(world: World) -> None:
    """The home node may take its whole timeout; the client waits longer than that."""
    home = world.nodes[1]

    def slow(message: Message) -> Message:
        assert isinstance(message, Commit)
        assert message.timeout_s <= PUBLISH_TIMEOUT_S
        world.now += message.timeout_s
        return home.commit(message)

    home.script.extend([home.serve, slow])

    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [True]
    commit_ask = [step for step in world.steps if isinstance(step, Ask)][1]
    assert commit_ask.until - 100.0 > PUBLISH_TIMEOUT_S + RESEND_FRACTION * STALL_S / 2
    assert world.breakers.opened_count == 0


def test_a_commit_that_is_never_answered_stores_nothing_for_us(world: World) -> None:
    """It may have happened; we do not say so."""
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.extend([lambda _: None] * 20)

    outcome = world.set(["a"])

    assert outcome.stored.tolist() == [False]
    assert outcome.reasons == [reasons.NO_ANSWER]


def test_an_answer_that_the_deadline_cuts_off_is_no_silence(world: World) -> None:
    """The copy took nearly all of the time: the home node had a tenth of a second."""
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.extend([_lost] * 20)
    world.page_s = 0.8

    outcome = world.set(["a"], timeout_s=1.0)

    assert outcome.reasons == [reasons.DEADLINE]


def test_a_refusal_is_not_asked_again(world: World) -> None:
    """A peer that refuses will refuse a microsecond later, too."""
    world.nodes[1].script.append(lambda _: Refused(0, "gone", "this client has exited"))

    outcome = world.set(["a"])

    assert outcome.reasons == [reasons.NO_HOME]
    assert len(world.steps) == 1


def test_a_pool_without_room_is_asked_in_portions(world: World) -> None:
    """What found no room comes again after the first part has been committed."""
    full, room = REFUSED_FULL, RESERVED
    home_that_grants(world, [room, room, full, full, full], [room, full, full])

    outcome = world.set(list("abcde"))

    assert outcome.stored.tolist() == [True] * 5
    # A page stored at the second try has no miss reason.
    assert outcome.reasons == [""] * 5
    assert [len(r.keys) // 16 for r in sent_home(world, Reserve)] == [5, 3, 2]
    assert [r.sequence for r in sent_home(world, Reserve)] == [1, 2, 3]


def test_one_page_of_progress_at_a_time_still_ends(world: World) -> None:
    """Each portion settles at least one page, so the number of portions is bounded."""
    names = [f"p{i}" for i in range(12)]
    home_that_grants(world, *[[RESERVED] + [REFUSED_FULL] * (11 - i) for i in range(12)])

    outcome = world.set(names)

    assert outcome.stored.all()
    assert len(sent_home(world, Reserve)) == 12


def test_a_large_batch_goes_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Reserve is never larger than the home node likes."""
    monkeypatch.setattr("peercache.paths.write.RESERVE_PAGES_MAX", 4)
    world = World()

    outcome = world.set([f"p{i}" for i in range(10)])

    assert outcome.stored.all()
    assert [len(c.written) for c in sent_home(world, Commit)] == [4, 4, 2]
    assert max(len(r.lengths) // 8 for r in sent_home(world, Reserve)) == 4


def test_a_second_size_under_one_key_is_refused(world: World) -> None:
    """The first stays; the second gets the reason."""
    home_that_grants(world, [RESERVED, REFUSED_SIZE])

    outcome = world.set(["a", "a"], [content_of("a"), content_of("a", 2 * PAGE)])

    assert outcome.stored.tolist() == [True, False]
    assert outcome.reasons == ["", reasons.WRONG_SIZE]


def test_a_repeated_key_shares_the_outcome_of_its_first_place(world: World) -> None:
    """One copy; both places are stored, or neither."""
    home_that_grants(world, [RESERVED, RESERVED, REPEATED, REPEATED])

    outcome = world.set(["a", "b", "a", "b"])

    assert outcome.stored.tolist() == [True] * 4
    assert outcome.copied == 2
    home_that_grants(world, [REFUSED_TOO_LARGE, REPEATED])
    refused = world.set(["c", "c"])
    assert refused.reasons == [reasons.TOO_LARGE] * 2


def test_pages_that_cannot_be_are_not_asked_for(world: World) -> None:
    """An empty page is refused here; the others of the batch are stored."""
    outcome = world.set(["empty", "a"], [np.empty(0, np.uint8), content_of("a")])

    assert outcome.stored.tolist() == [False, True]
    assert outcome.reasons == [reasons.WRONG_SIZE, ""]
    assert sent_home(world, Reserve)[0].keys == named("a").tobytes()


def test_an_empty_batch_does_nothing(world: World) -> None:
    """No keys, no steps."""
    assert world.set([]).stored.tolist() == []
    assert world.steps == []


@pytest.mark.parametrize(
    "granted",
    [
        Granted(0, 1, bytes([RESERVED]), bytes(16)),
        Granted(0, 1, bytes([RESERVED] * 3), bytes(24)),
        Granted(0, 1, bytes([RESERVED] * 2), bytes(8)),
        Granted(0, 1, bytes([RESERVED] * 2), bytes(24)),
    ],
)
def test_a_grant_that_does_not_fit_is_not_believed(world: World, granted: Granted) -> None:
    """Nothing is copied by it."""
    world.nodes[1].script.append(lambda _: granted)

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [False, False]
    assert not any(isinstance(step, Place) for step in world.steps)


@pytest.mark.parametrize("states", [[], [COMMITTED], [COMMITTED] * 3])
def test_a_committed_that_does_not_fit_is_not_believed(world: World, states: list[int]) -> None:
    """Its states would be those of other pages."""
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.append(lambda _: Committed(0, 1, bytes(states), b"", 0))

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [False, False]


def test_a_page_committed_that_was_not_written_is_not_believed(world: World) -> None:
    """We know what we copied."""
    world.page_s = 0.5
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.append(lambda _: Committed(0, 1, bytes([COMMITTED] * 3), b"", 0))

    outcome = world.set(["a", "b", "c"], timeout_s=1.0)

    assert outcome.stored.tolist() == [True, False, False]


def test_a_rival_that_was_faster_counts_as_stored(world: World) -> None:
    """The first commit wins; the page is here, with this length."""
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.append(lambda _: Committed(0, 1, bytes([HERE, REFUSED_SIZE, ABORTED]), b"", 0))

    outcome = world.set(["a", "b", "c"])

    assert outcome.stored.tolist() == [True, False, False]
    assert outcome.reasons == ["", reasons.WRONG_SIZE, reasons.DEADLINE]
    assert (outcome.copied, outcome.here) == (0, 1)


def test_numbers_rise_and_are_never_used_twice() -> None:
    """The home node recognises a lost Grant by them."""
    reservations = ClientReservations()

    numbers = [reservations.begin() for _ in range(3)]
    reservations.end(2)

    assert numbers == [1, 2, 3]
    assert reservations.report(0.0) == LiveReservations(3, (1, 3))


def test_checksums_are_those_of_the_source() -> None:
    """Writer and reader make the same of the same bytes, whatever their runs."""
    world = World(verify="full")
    pages: list[Page] = [content_of("a"), content_of("b")]

    world.set(["a", "b"], pages)

    commit = sent_home(world, Commit)[0]
    assert commit.checksums == checksums_of(runs_of(pages), np.arange(2)).tobytes()
    assert world.get("a", "b").hits == [True, True]


def test_a_set_after_its_deadline_asks_no_node(world: World) -> None:
    """And reports that time was up."""
    outcome = world.set(["a"], timeout_s=0.0)

    assert outcome.reasons == [reasons.DEADLINE]
    assert world.steps == []


NAMES = [f"p{i}" for i in range(12)]


def test_page_larger_than_any_may_be_is_refused_here(world: World) -> None:
    """Its length does not fit into a record; not one byte of it is looked at."""
    runs = PageRuns.of([[(4096, PAGE_BYTES_MAX + 1)]])

    outcome = world.run(
        world.writer.set(
            named("a"),
            runs,
            home=1,
            reservations=world.reservations,
            until=world.now + 1.0,
        )
    )

    assert outcome.reasons == [reasons.TOO_LARGE]
    assert world.steps == []


@pytest.mark.parametrize("portion_bytes", [PAGE, 100 * PAGE])
def test_silent_home_node_costs_no_more_than_the_deadline(portion_bytes: int) -> None:
    """The deadline comes before the second silence, which opens the breaker."""
    world = World(portion_bytes=portion_bytes)
    world.nodes[1].mood = "silent"
    until = world.now + 0.1

    outcome = world.set(["a", "b"], timeout_s=0.1)

    assert outcome.stored.tolist() == [False, False]
    assert world.now <= until


def test_commit_that_is_late_asks_for_no_timeout() -> None:
    """A checksum that took too long leaves less than no time."""
    world = World(verify="full", portion_bytes=PAGE)
    world.checksum_s = 5.0

    world.set(["a", "b"], timeout_s=1.0)

    assert [commit.timeout_s for commit in sent_home(world, Commit)] == [0.0]


def test_no_checksum_is_made_of_a_page_that_was_not_copied() -> None:
    """It would take the time of those that are to be stored."""
    world = World(verify="full")
    world.page_s = 0.1

    outcome = world.set(NAMES, timeout_s=1.0)

    made = sum(len(step.pages) for step in world.steps if isinstance(step, Checksum))
    assert 0 < made < len(NAMES)
    assert made == outcome.stored.sum()


def test_page_that_is_here_stays_so_whatever_a_commit_reports(world: World) -> None:
    """The Commit is about the slots that were given, and about nothing else."""
    home = world.nodes[1]

    def nonsense(_message: Message) -> Message:
        return Committed(0, 1, bytes([ABORTED, COMMITTED]), b"", 0)

    home_that_grants(world, [HERE, RESERVED])
    home.script.insert(1, nonsense)

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [True, True]
    assert (outcome.here, outcome.copied) == (1, 1)


def test_more_published_than_committed_counts_as_all(world: World) -> None:
    """A counter takes no negative number: the set would look like a failure."""
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.append(lambda _: Committed(0, 1, bytes([COMMITTED]), b"", 3))

    assert world.set(["a"]).unpublished == 0


def test_a_short_deadline_has_time_for_the_copy_and_for_the_answer(world: World) -> None:
    """An answer after the deadline would make pages that are stored look lost."""
    assert world.set(["a"], timeout_s=0.05).stored.tolist() == [True]

    assert [commit.timeout_s <= 0.025 for commit in sent_home(world, Commit)] == [True]
    assert PUBLISH_TIMEOUT_S > 0.025
