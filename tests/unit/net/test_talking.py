"""The rules of several pending questions to one peer, with no socket and no time of its own."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from peercache.net.asking import BURST_MESSAGES, SLICE_S
from peercache.net.breaker import STALL_S
from peercache.net.talking import Talk, Talking
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.pool import Granted
from peercache.wire.messages.session import Hello, Refused, SayHello
from tests.pace import TIMEOUT_S
from tests.unit.net.peers import Asking, Peer
from tests.unit.net.test_exchange import Line, Side, pass_time

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

    assert side.lines[0].is_closed
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


def test_any_message_is_a_sign_of_life() -> None:
    """A probe that is answered closes the breaker, whatever the answer is to."""
    side = Side()
    side.breakers.failed(7, side.now)
    talk = talk_of(side)
    talk.send(FIRST)
    side.lines[0].comes(Granted(0, 9, b"", b""))

    talk.turn([])

    assert not side.breakers.is_open(7)


def test_the_refusal_of_a_question_given_up_ends_no_other() -> None:
    """It is no answer to what is pending, and the connection goes on."""
    side = Side()
    talk = talk_of(side)
    number = talk.send(FIRST)
    late = Refused(10**9, "busy", "why")
    side.lines[0].comes(late)
    side.lines[0].comes(Located(number, b"", False))

    assert await_(side, talk, number, side.now + 1.0) == Located(number, b"", False)
    assert side.unasked == [(7, late)]
    assert len(side.lines) == 1


def test_a_peer_that_talks_without_end_gets_one_burst_a_turn() -> None:
    """And less where its messages take long: the clock is looked at before each."""
    side = Side()
    talk = talk_of(side)
    number = talk.send(FIRST)
    talk.collect(number, side.now + SLICE_S)
    for _ in range(3 * BURST_MESSAGES):
        side.lines[0].comes(Located(10**9, b""))
    talk.turn([])
    left = [len(side.lines[0].inbox)]
    side.lines[0].takes = partial(pass_time, side)
    talk.turn([])
    left.append(len(side.lines[0].inbox))

    assert left == [2 * BURST_MESSAGES, 2 * BURST_MESSAGES - 2]


def test_an_address_is_probed_within_the_deadline() -> None:
    """A probe blocks: no longer than what is left, and not at all when nothing is."""
    side = Side()
    talk = talk_of(side)
    talk.collect(talk.send(FIRST), side.now + 2 * SLICE_S)
    side.now += 1.25 * SLICE_S
    talk.turn([])
    first = list(side.lines[0].probed_for)
    side.now += SLICE_S
    talk.turn([])

    assert first == [pytest.approx(0.75 * SLICE_S)]
    assert side.lines[0].probed_for == first


def test_connections_of_a_call_serve_the_next_one(tmp_path: Path) -> None:
    """The end of its talks gives them back: one greeting, however many calls."""
    with Peer("ipc", tmp_path) as peer, Asking({7: peer.url}) as client:
        for _ in range(3):
            talking = Talking(client.asker.connections)
            number = talking.send(7, FIRST)
            answer = talking.collect(7, number, time.monotonic() + TIMEOUT_S)
            talking.end()
            assert isinstance(answer, Located)

        assert len(peer.of(Hello)) == 1
