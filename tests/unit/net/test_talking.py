"""The rules of several pending questions to one peer, with no socket and no time of its own."""

from __future__ import annotations

from peercache.net.asking import SLICE_S
from peercache.net.talking import Talk
from peercache.paths.breaker import STALL_S
from peercache.wire.envelope import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.pool import Granted
from peercache.wire.messages.session import Hello, Refused, SayHello
from tests.unit.net.test_exchange import Line, Side

FIRST, SECOND = Lookup(0, bytes(16)), Lookup(0, bytes(32))


def talk_of(side: Side, peer: int = 7) -> Talk[Line]:
    return Talk(side.connections, peer, watch=side.watched.append, unwatch=side.watched.remove)


def await_(side: Side, talk: Talk[Line], number: int, until: float) -> Message | None:
    """Wait in turns, as a driver does, while nothing comes."""
    talk.collect(number, until)
    for _ in range(200):
        wait_s = talk.wait_s()
        if wait_s is None:
            return talk.answer()
        side.now += wait_s
        talk.turn([])
    raise AssertionError("the wait does not end")


def questions(line: Line) -> list[Message]:
    return [message for message in line.sent if not isinstance(message, Hello)]


def test_questions_go_out_at_once_and_answers_are_found_by_number() -> None:
    """Over one connection, in their order; an answer may come before it is waited for."""
    side = Side()
    talk = talk_of(side)
    first, second = talk.send(FIRST), talk.send(SECOND)
    (line,) = side.lines
    assert questions(line) == [Lookup(first, FIRST.keys), Lookup(second, SECOND.keys)]

    line.comes(Located(second, b"", False))
    line.comes(Located(first, b"", True))

    assert await_(side, talk, first, 110.0) == Located(first, b"", True)
    assert await_(side, talk, second, 110.0) == Located(second, b"", False)
    assert side.now < 100.0 + 2 * SLICE_S
    assert side.unasked == []
    talk.end()
    assert side.watched == []
    assert not line.is_closed


def test_a_silent_peer_costs_the_time_given_and_is_counted() -> None:
    """A second silence opens its breaker."""
    side = Side()
    talk = talk_of(side)
    number = talk.send(FIRST)

    assert await_(side, talk, number, 100.0 + STALL_S / 2) is None
    assert not side.breakers.is_open(7)
    again = talk.send(FIRST)
    assert await_(side, talk, again, side.now + STALL_S / 2) is None

    assert side.breakers.is_open(7)


def test_silence_counts_from_the_last_sign_of_life() -> None:
    """A peer that has just answered another question is not hung."""
    side = Side()
    talk = talk_of(side)
    first, second = talk.send(FIRST), talk.send(SECOND)
    side.now += STALL_S
    side.lines[0].comes(Located(first, b"", False))
    assert await_(side, talk, first, side.now + 1.0) is not None

    assert await_(side, talk, second, side.now + STALL_S / 2) is None

    assert not side.breakers.is_open(7)


def test_a_late_answer_and_one_to_no_question_are_unasked() -> None:
    """They may be of use to another call."""
    side = Side()
    talk = talk_of(side)
    late = talk.send(FIRST)
    assert await_(side, talk, late, side.now + SLICE_S) is None
    number = talk.send(SECOND)
    ahead = Granted(0, 9, b"", b"")
    for message in (Located(late, b"", False), ahead, Located(number, b"", False)):
        side.lines[0].comes(message)

    assert await_(side, talk, number, side.now + 1.0) is not None

    assert side.unasked == [(7, Located(late, b"", False)), (7, ahead)]


def test_what_a_stale_connection_swallowed_is_sent_again_over_a_new_one() -> None:
    """All of it, in order, with the same numbers; the peer has not failed."""
    side = Side()
    talk_before = talk_of(side)
    talk_before.send(FIRST)
    talk_before.end()
    talk = talk_of(side)
    first, second = talk.send(FIRST), talk.send(SECOND)
    (stale,) = side.lines
    stale.is_broken = True

    talk.collect(second, 110.0)
    talk.turn([])

    fresh = side.lines[1]
    assert stale.is_closed
    assert questions(fresh) == [Lookup(first, FIRST.keys), Lookup(second, SECOND.keys)]
    fresh.comes(Located(first, b"", False))
    fresh.comes(Located(second, b"", False))
    assert await_(side, talk, second, 110.0) is not None
    assert await_(side, talk, first, 110.0) is not None
    assert side.breakers.opened_count == 0


def test_a_new_connection_that_breaks_is_the_peers_failure() -> None:
    """No answer will come, so no question waits any more."""
    side = Side()
    talk = talk_of(side)
    first, second = talk.send(FIRST), talk.send(SECOND)
    side.lines[0].is_broken = True

    assert await_(side, talk, first, 110.0) is None
    assert await_(side, talk, second, 110.0) is None

    assert side.now < 101.0
    assert side.breakers.is_open(7)
    assert len(side.lines) == 1


def test_an_address_that_refuses_is_noticed_after_a_slice() -> None:
    """The kernel knows a refusal, nng does not tell it."""
    side = Side()
    talk = talk_of(side)
    number = talk.send(FIRST)
    side.lines[0].refuses = True

    assert await_(side, talk, number, 110.0) is None

    assert side.now < 100.0 + 3 * SLICE_S
    assert side.breakers.is_open(7)


def test_a_peer_that_does_not_know_us_is_greeted_over_a_new_connection() -> None:
    """It has restarted its session; a stale connection is not asked twice."""
    side = Side()
    before = talk_of(side)
    before.send(FIRST)
    before.end()
    talk = talk_of(side)
    number = talk.send(FIRST)
    side.lines[0].comes(SayHello(7))

    talk.collect(number, 110.0)
    talk.turn([])

    assert isinstance(side.lines[1].sent[0], Hello)
    assert questions(side.lines[1]) == [Lookup(number, FIRST.keys)]


def test_a_refusal_over_a_new_connection_is_the_answer_to_its_question_alone() -> None:
    """The other question is asked once more; one that names no question answers all."""
    side = Side()
    talk = talk_of(side)
    first, second = talk.send(FIRST), talk.send(SECOND)
    refused = Refused(first, "malformed", "why")
    side.lines[0].comes(refused)
    talk.collect(first, 110.0)
    talk.turn([])

    assert talk.answer() == refused
    assert side.lines[0].is_closed
    assert questions(side.lines[1]) == [Lookup(second, SECOND.keys)]
    every = Refused(0, "gone", "why")
    side.lines[1].comes(every)
    assert await_(side, talk, second, 110.0) == every
    assert side.refusals == [(7, refused), (7, every)]


def test_a_peer_without_an_address_is_not_asked() -> None:
    """It has failed at once."""
    side = Side()
    side.connections.close()
    talk = talk_of(side)

    assert talk.send(FIRST) == 0
    assert side.breakers.is_open(7)
    talk.end()


def test_the_turn_after_the_deadline_takes_what_came_while_this_thread_slept() -> None:
    """A copy of seconds may lie between the question and the look at its answer."""
    side = Side()
    talk = talk_of(side)
    number = talk.send(FIRST)
    side.lines[0].comes(Located(number, b"", False))
    side.now += 60.0

    assert await_(side, talk, number, 100.5) is not None
