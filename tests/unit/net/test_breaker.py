"""Breakers: evidence opens them, a probe closes them, success never does harm."""

from __future__ import annotations

import math

import pytest

from peercache.net.breaker import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    HEDGE_FIRST_S,
    HEDGE_MAX_S,
    HEDGE_MIN_S,
    HEDGES_AT_ONCE,
    HEDGES_PER_REQUEST,
    LAG_MAX_S,
    LAG_MIN_S,
    STALL_S,
    AnswerTimes,
    Breakers,
    data_port,
)
from peercache.observability import reasons


@pytest.fixture
def breakers() -> Breakers:
    return Breakers()


def test_a_quarter_second_of_fruitless_waiting_opens(breakers: Breakers) -> None:
    """Not before, and it may be in pieces."""
    breakers.waited(1, 0.1, 10.1)
    breakers.waited(1, 0.1, 20.1)
    assert breakers.available(1, 20.1)
    breakers.waited(1, STALL_S - 0.2, 30.0)

    assert breakers.is_open(1)
    assert not breakers.available(1, 30.0)
    assert breakers.opened_count == 1


def test_a_failure_opens_at_once(breakers: Breakers) -> None:
    """A refused or broken connection needs no second proof."""
    breakers.failed(1, 10.0)

    assert not breakers.available(1, 10.0 + BACKOFF_MIN_S / 2)
    assert breakers.available(2, 10.0)


def test_silence_lasts_until_an_answer_and_a_failure_makes_it_endless(breakers: Breakers) -> None:
    """Also once the breaker is open: who may wait longer than others needs to know how long."""
    breakers.waited(1, STALL_S, 10.0)
    breakers.waited(1, STALL_S, 11.0)
    silent = [breakers.silent_s(1)]
    breakers.failed(1, 11.0)
    silent.append(breakers.silent_s(1))
    breakers.answered(1)

    assert [*silent, breakers.silent_s(1)] == [2 * STALL_S, math.inf, 0.0]


def test_threads_that_wait_together_wait_once(breakers: Breakers) -> None:
    """Eight threads in the same 70 ms have not seen half a second of silence."""
    for _ in range(8):
        breakers.waited(1, 0.07, 10.07)
    breakers.waited(1, 0.07, 10.10)

    assert not breakers.is_open(1)
    breakers.waited(1, 0.2, 10.30)
    assert breakers.is_open(1)


def test_an_answer_forgets_the_waiting_before_it(breakers: Breakers) -> None:
    """Any sign of life starts the count again."""
    breakers.waited(1, 0.2, 10.2)

    breakers.answered(1)
    breakers.waited(1, 0.2, 10.6)

    assert not breakers.is_open(1)


def test_one_probe_a_backoff_is_let_through(breakers: Breakers) -> None:
    """The first caller probes; the others wait for its result."""
    breakers.failed(1, 10.0)
    due = 10.0 + BACKOFF_MIN_S

    assert [breakers.available(1, due) for _ in range(3)] == [True, False, False]
    # A probe without a reported result is not the last one.
    assert breakers.available(1, due + BACKOFF_MIN_S)


def test_looking_does_not_take_the_probe(breakers: Breakers) -> None:
    """Only a read takes it."""
    breakers.end_read(1, reasons.PEER_UNREACHABLE, 10.0)
    due = 10.0 + BACKOFF_MIN_S

    assert not breakers.may_read([1], due - 0.01)
    assert [breakers.may_read([1, 2], due) for _ in range(3)] == [True] * 3
    assert breakers.is_open(data_port(1))
    assert breakers.begin_read(1, due)
    assert not breakers.may_read([2, 1], due)


@pytest.mark.parametrize(
    ("failure", "is_open"),
    [("", False), (reasons.PEER_UNREACHABLE, True), (reasons.DEADLINE, True)],
)
def test_end_of_a_probe_decides_whether_the_holder_is_read(
    breakers: Breakers, failure: str, is_open: bool
) -> None:
    """A read that met its caller's deadline does not count against the holder."""
    breakers.end_read(1, reasons.PEER_UNREACHABLE, 10.0)
    assert breakers.begin_read(1, 10.0 + BACKOFF_MIN_S)

    breakers.end_read(1, failure, 10.0 + BACKOFF_MIN_S)

    assert breakers.is_open(data_port(1)) is is_open
    assert not breakers.is_open(1), "the breaker of questions is another one"


def test_backoff_doubles_with_each_failed_probe_up_to_its_bound(breakers: Breakers) -> None:
    """A peer that stays away is asked ever more seldom, but forever."""
    now, waits = 10.0, []
    breakers.failed(1, now)
    for _ in range(6):
        began = now
        while not breakers.available(1, now):
            now += 0.125
        waits.append(now - began)
        breakers.failed(1, now)

    assert waits == [BACKOFF_MIN_S, 1.0, 2.0, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]


def test_failures_at_the_same_time_are_one_piece_of_evidence(breakers: Breakers) -> None:
    """Four threads on one broken connection do not make the back-off eight times as long."""
    for _ in range(4):
        breakers.failed(1, 10.0)

    assert breakers.available(1, 10.0 + BACKOFF_MIN_S)
    assert breakers.opened_count == 1


def test_a_probe_that_is_answered_closes(breakers: Breakers) -> None:
    """And the next trouble begins with the shortest back-off again."""
    breakers.failed(1, 10.0)
    breakers.available(1, 11.0)

    breakers.answered(1)

    assert breakers.available(1, 11.0)
    assert not breakers.is_open(1)


def test_long_success_is_no_evidence(breakers: Breakers) -> None:
    """However long a batch takes, answers close and never open."""
    for second in range(100):
        breakers.waited(1, 0.2, second + 0.2)
        breakers.answered(1)

    assert breakers.opened_count == 0


@pytest.mark.parametrize("peer", [1, 2**64 - 1])
def test_control_and_data_port_have_breakers_of_their_own(breakers: Breakers, peer: int) -> None:
    """A node may answer questions and serve no pages; both are forgotten with the peer."""
    breakers.failed(data_port(peer), 10.0)
    breakers.answered(peer)

    assert breakers.available(peer, 10.0)
    assert breakers.is_open(data_port(peer))
    breakers.forget({peer})
    assert breakers.is_open(data_port(peer))
    breakers.forget({7})
    assert not breakers.is_open(data_port(peer))


def test_a_wait_a_little_under_the_limit_opens(breakers: Breakers) -> None:
    """Callers wait for the limit by the same clock, and wake a moment early."""
    breakers.waited(1, STALL_S * 0.99, 10.0)

    assert breakers.is_open(1)


def test_a_wait_that_ended_before_another_takes_nothing_back(breakers: Breakers) -> None:
    """Two threads report in any order."""
    breakers.waited(1, STALL_S - 0.01, 10.0)

    breakers.waited(1, 0.02, 9.5)
    breakers.waited(1, 0.02, 10.1)

    assert breakers.is_open(1)


def test_a_probe_cut_short_is_no_failed_one(breakers: Breakers) -> None:
    """The waiting that opened the breaker is not counted again."""
    breakers.waited(1, STALL_S, 10.0)
    assert breakers.available(1, 10.0 + BACKOFF_MIN_S)

    breakers.waited(1, 0.01, 10.0 + BACKOFF_MIN_S + 0.01)

    assert breakers.available(1, 10.0 + 2 * BACKOFF_MIN_S)


def test_an_older_question_adds_nothing_to_a_failed_probe(breakers: Breakers) -> None:
    """It was asked before: only the next probe lengthens the back-off again."""
    breakers.failed(1, 10.0)
    now = 10.0 + BACKOFF_MIN_S
    assert breakers.available(1, now)
    breakers.failed(1, now)

    breakers.failed(1, now)

    assert breakers.available(1, now + 2 * BACKOFF_MIN_S)


# --- the usual answer times -----------------------------------------------------------------------


def test_how_long_to_wait_for_an_answer_follows_what_is_usual_for_the_peer() -> None:
    """A slow peer gets more time than a quick one, and none less than the interpreter may take."""
    times = AnswerTimes()
    assert times.hedge_s(1) == HEDGE_FIRST_S

    for _ in range(100):
        times.answered(1, 0.0005)
        times.answered(2, 0.02)

    assert times.hedge_s(1) == HEDGE_MIN_S
    assert times.hedge_s(2) == pytest.approx(0.04, rel=0.01)
    times.answered(2, 10.0)
    assert times.hedge_s(2) == HEDGE_MAX_S


def test_irregular_answers_get_more_time_than_regular_ones_of_the_same_mean() -> None:
    """The deviation counts, as for the retransmission timer of TCP."""
    times = AnswerTimes()

    for number in range(100):
        times.answered(1, 0.01)
        times.answered(2, 0.002 if number % 2 else 0.018)

    assert times.hedge_s(2) > 2 * times.hedge_s(1)


def test_one_call_in_ten_may_ask_a_second_owner() -> None:
    """However slow all owners are: a busy machine does not get twice the load."""
    times = AnswerTimes()
    hedged = 0

    for _ in range(1000):
        times.asked()
        if times.may_hedge():
            times.hedged()
            hedged += 1

    assert hedged == pytest.approx(1000 * HEDGES_PER_REQUEST + HEDGES_AT_ONCE, abs=1)


def test_a_peer_lags_for_a_while_and_longer_each_time_until_it_answers() -> None:
    """Then it counts like any other."""
    breakers = Breakers()
    times, now = breakers.times, 100.0

    for lag_s in (LAG_MIN_S, 2 * LAG_MIN_S, 4 * LAG_MIN_S, LAG_MAX_S, LAG_MAX_S):
        times.lags(7, now)
        times.lags(7, now + lag_s / 2)  # The same silence is no new evidence.
        assert times.lagging(now + lag_s * 0.99) == {7}
        now += lag_s
        assert times.lagging(now) == set()
    times.lags(7, now)
    breakers.answered(7)

    assert times.lagging(now) == set()
    times.lags(7, now)
    assert times.lagging(now + LAG_MIN_S) == set()


def test_peers_that_are_gone_do_not_lag(breakers: Breakers) -> None:
    """Their answer times are forgotten with them."""
    for peer in (1, 2):
        breakers.times.answered(peer, 0.05)
        breakers.times.lags(peer, 10.0)

    breakers.forget({2})

    assert breakers.times.lagging(10.0) == {2}
    assert breakers.times.hedge_s(1) == HEDGE_FIRST_S
