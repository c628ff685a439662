"""The rules of questions and answers, with no socket, no thread and no time of its own."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import pytest

from peercache.model.member import ALIVE, Member
from peercache.net.breaker import STALL_S, Breakers
from peercache.net.requests import (
    BURST_MESSAGES,
    REDIAL_S,
    SLICE_S,
    Connections,
    Conversation,
    Enough,
    Hedge,
)
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.pool import Granted, Touched
from peercache.wire.messages.session import Hello, HelloRequired, Refused, Welcome

QUESTION = FIRST = Lookup(0, bytes(16))
SECOND = Lookup(0, bytes(32))
WELCOME = Welcome(0, 1, Member(7, 1, ALIVE, 255, "h", "c", "c", "b", ""), 0)


@attrs.define(eq=False)
class Line:
    """A connection that keeps what is sent; a test puts into `inbox` what comes."""

    url: str
    fd: int
    is_broken: bool = False
    is_fresh: bool = True
    is_redial: bool = False
    is_closed: bool = False
    refuses: bool = False
    sent: list[Message] = attrs.field(factory=list)
    inbox: deque[bytes] = attrs.field(factory=deque)
    probed_for: list[float] = attrs.field(factory=list)
    takes: Callable[[], object] = bool
    """Called for each look at the inbox."""

    def send(self, raw: bytes, /) -> bool:
        self.sent.append(decode(raw, cluster="c").message)
        return True

    def receive(self) -> bytes | None:
        self.takes()
        return self.inbox.popleft() if self.inbox else None

    def is_refused(self, timeout_s: float, /) -> bool:
        self.probed_for.append(timeout_s)
        return self.refuses

    def close(self) -> None:
        self.is_closed = True

    def comes(self, message: Message) -> None:
        self.inbox.append(encode(Envelope(7, 77, message), cluster="c"))


class Asked:
    """A conversation of one `ask`, and the answers that have come."""

    def __init__(self, talk: Conversation[Line], numbers: list[int]) -> None:
        self.wait_s, self.turn, self.end = talk.wait_s, talk.turn, talk.end
        self._talk = talk
        self._numbers = numbers
        self._came: dict[int, Message | None] = {}

    @property
    def answers(self) -> list[Message | None]:
        for number in self._numbers:
            self._came[number] = self._came.get(number) or self._talk.answer(number)
        return [self._came[number] for number in self._numbers]


class Side:
    """One client's side: its connections, its clock, and what it waits for."""

    def __init__(self, kept_max: int = 1024) -> None:
        self.now = 100.0
        self.urls: dict[int, str] = {}
        self.lines: list[Line] = []
        self.watched: list[Line] = []
        self.refusals: list[tuple[int, Refused]] = []
        self.unasked: list[tuple[int, Message]] = []
        self.breakers = Breakers()
        numbers = itertools.count(3)

        def connect(url: str, _peer: int) -> Line:
            self.lines.append(Line(url, next(numbers)))
            return self.lines[-1]

        self.connections: Connections[Line] = Connections(
            identity=77,
            cluster="c",
            hello_for=lambda url: Hello(0, 2, 2, "c", False, 256, "", b"", "", "", url, b""),
            url_of=lambda peer: self.urls.get(peer, f"url-{peer}"),
            connect=connect,
            breakers=self.breakers,
            clock=lambda: self.now,
            on_refused=lambda peer, refused: self.refusals.append((peer, refused)),
            on_unasked=lambda peer, message: self.unasked.append((peer, message)),
            kept_max=kept_max,
        )

    def talk(self, breakers: Breakers | None = None) -> Conversation[Line]:
        return Conversation(
            self.connections,
            watch=self.watched.append,
            unwatch=self.watched.remove,
            breakers=breakers,
        )

    def ask(
        self,
        *peers: int,
        until: float = 110.0,
        enough: Enough | None = None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> Asked:
        talk = self.talk()
        return Asked(talk, talk.ask([(peer, QUESTION) for peer in peers], until, enough, hedge))

    def greet(self, until: float) -> tuple[Asked, int]:
        """Send Hello to the listener of an address; return the Hello's number, too."""
        talk = self.talk(Breakers())
        number = talk.greet("there", until)
        return Asked(talk, [number]), number

    def turn(self, turns: Asked | Conversation[Line], passed_s: float = 0.0) -> float | None:
        """Let time pass, take what has come; return how long it would wait next."""
        self.now += passed_s
        turns.turn([(line.fd, 1) for line in self.watched if line.inbox])
        return turns.wait_s()

    def pooled(self) -> Line:
        """Return a connection that has answered once, and waits for the next question."""
        exchange = self.ask(7)
        self.answer(self.lines[0])
        self.turn(exchange)
        exchange.end()
        return self.lines[0]

    def answer(self, line: Line, records: bytes = b"") -> None:
        line.comes(Located(number_of(line), records))


def number_of(line: Line) -> int:
    """Return the number of the last question on a connection."""
    return [m for m in line.sent if isinstance(m, Lookup)][-1].request


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_peer_that_becomes_the_home_node_is_asked_at_its_home_address(side: Side) -> None:
    """Over its own Hello, which alone proves that the client may write there; never over tcp."""
    before = side.ask(7)
    before_line = side.lines[0]
    side.urls[7] = "home"
    side.answer(before_line)
    side.turn(before)
    before.end()

    after = side.ask(7)
    side.answer(side.lines[1])
    side.turn(after)
    after.end()
    again = side.ask(7)

    assert [line.url for line in side.lines] == ["url-7", "home"]
    assert [line.sent[0].lock for line in side.lines] == ["url-7", "home"]
    assert (before_line.is_closed, len(before_line.sent)) == (True, 2)
    again.end()


def test_an_answer_ends_the_exchange_and_the_connection_is_kept(side: Side) -> None:
    """A Hello first, once; the next question goes over the same connection with a new number."""
    line = side.pooled()
    first = number_of(line)

    exchange = side.ask(7)
    waits_s = exchange.wait_s()
    side.answer(line)
    over = side.turn(exchange)
    exchange.end()

    assert (waits_s, over) == (SLICE_S, None)
    assert [type(message) for message in line.sent] == [Hello, Lookup, Lookup]
    assert number_of(line) != first
    assert isinstance(exchange.answers[0], Located)
    assert len(side.lines) == 1
    assert not line.is_closed
    assert side.watched == []


def test_unawaited_messages_are_received_between_two_questions(side: Side) -> None:
    """It is handed on with whom it came from; the connection is kept."""
    line = side.pooled()
    line.comes(Located(0, bytes(56)))
    line.comes(Located(0, b""))

    side.connections.drain(7)
    side.connections.drain(8)

    assert side.unasked == [(7, Located(0, bytes(56))), (7, Located(0, b""))]
    assert side.connections.lease(7, fresh=False) is line


def test_messages_from_an_earlier_address_are_not_received(side: Side) -> None:
    """They would be read in place of those of the home node, which wait in the next connection."""
    before = side.connections.lease(7, fresh=True)
    side.urls[7] = "home"
    home = side.connections.lease(7, fresh=True)
    assert before is not None
    assert home is not None
    before.comes(Located(0, b""))
    home.comes(Located(0, bytes(56)))
    side.connections.give_back(7, home)
    side.connections.give_back(7, before)

    side.connections.drain(7)

    assert side.unasked == [(7, Located(0, bytes(56)))]
    assert (before.is_closed, home.is_closed) == (True, False)


@pytest.mark.parametrize("message", [HelloRequired(7), Refused(0, "stranger", "who are you?")])
def test_a_connection_that_is_refused_meanwhile_is_not_used_again(
    side: Side, message: Message
) -> None:
    """The next question gets a new one, and learns the reason."""
    line = side.pooled()
    line.comes(message)

    side.connections.drain(7)

    assert line.is_closed
    assert side.unasked == []
    assert side.connections.lease(7, fresh=False) is not line


def test_what_a_stale_connection_swallowed_is_asked_once_more(side: Side) -> None:
    """On a new one that greets; if that breaks too, the peer has failed, and at once."""
    side.pooled()
    exchange = side.ask(7)
    # Another pooled one, just as old.
    other = Line("url-7", 999)
    side.connections.give_back(7, other)
    side.lines[0].is_broken = True

    goes_on = side.turn(exchange)
    side.lines[1].is_broken = True
    over = side.turn(exchange)

    assert (goes_on, over) == (pytest.approx(REDIAL_S), None)
    assert [type(message) for message in side.lines[1].sent] == [Hello, Lookup]
    assert [line.is_closed for line in side.lines] == [True, True]
    assert exchange.answers == [None]
    assert other.sent == []
    assert side.breakers.is_open(7)


def test_a_stranger_greets_again(side: Side) -> None:
    """HelloRequired on a pooled connection: once more over a new one, and no peer is to blame.

    On one that has just greeted it means that another node is there, and the peer has failed.
    """
    line = side.pooled()
    exchange = side.ask(7)

    line.comes(HelloRequired(7))
    side.turn(exchange)
    side.answer(side.lines[1])
    side.turn(exchange)
    is_blamed = side.breakers.is_open(7)
    other = side.ask(8)
    side.lines[2].comes(HelloRequired(9))
    over = side.turn(other)

    assert isinstance(exchange.answers[0], Located)
    assert line.is_closed
    assert not is_blamed
    assert (over, other.answers) == (None, [None])
    assert side.breakers.is_open(8)


def test_a_refusal_counts_only_on_a_connection_that_is_new(side: Side) -> None:
    """On a pooled one it may be the answer to what was posted before."""
    line = side.pooled()
    side.connections.post([(7, Touched(b""))])
    exchange = side.ask(7)
    line.comes(Refused(0, "role", "no"))
    side.turn(exchange)
    after_pooled = list(exchange.answers)
    side.lines[1].comes(Refused(0, "role", "never"))
    over = side.turn(exchange)

    assert after_pooled == [None]
    assert over is None
    assert exchange.answers == [Refused(0, "role", "never")]
    assert side.refusals == [(7, Refused(0, "role", "never"))]
    assert all(line.is_closed for line in side.lines)


def test_one_answer_may_be_enough_and_the_others_are_not_blamed(side: Side) -> None:
    """A peer that was cut short has not been silent."""
    exchange = side.ask(1, 2, enough=lambda _: True)
    side.answer(side.lines[1])
    over = side.turn(exchange, 2 * STALL_S)
    exchange.end()

    assert over is None
    assert exchange.answers[0] is None
    assert not side.breakers.is_open(1)
    assert side.watched == []


def asks(*peers: int, seen: list[list[Message | None]]) -> Hedge:
    """Return a hedge that asks these peers once, and records the answers so far."""

    def hedge(answers: Sequence[Message | None]) -> tuple[Sequence[tuple[int, Message]], float]:
        seen.append(list(answers))
        return [(peer, SECOND) for peer in peers], float("inf")

    return hedge


def test_further_peers_are_asked_when_an_answer_is_late(side: Side) -> None:
    """At that time and not before; the answers so far are those that count."""
    seen: list[list[Message | None]] = []
    exchange = side.ask(1, 2, hedge=(100.01, asks(3, seen=seen)))
    side.answer(side.lines[0])
    wait_s = side.turn(exchange, 0.004)
    before = list(seen)
    side.turn(exchange, 0.006)
    side.answer(side.lines[2], bytes(112))
    goes_on = side.turn(exchange, 0.001)
    side.answer(side.lines[1], bytes(56))
    over = side.turn(exchange)

    assert wait_s == pytest.approx(0.006)
    assert before == []
    assert [[type(answer) for answer in answers] for answers in seen] == [[Located, type(None)]]
    assert goes_on is not None
    assert over is None
    assert [len(getattr(answer, "records", "")) for answer in exchange.answers] == [0, 56, 112]


def test_what_arrived_while_the_caller_slept_is_not_late(side: Side) -> None:
    """A busy engine's thread may look at its answers much later than they came."""
    seen: list[list[Message | None]] = []
    exchange = side.ask(1, hedge=(100.01, asks(2, seen=seen)))
    side.answer(side.lines[0])
    side.now += 5.0
    exchange.turn([])  # The poll returned before the answer came.

    assert seen == []
    assert exchange.wait_s() is None
    assert len(side.lines) == 1


def test_a_peer_in_place_of_which_another_was_asked_has_been_silent(side: Side) -> None:
    """Also if the other answer ends the wait: the silence counts for its breaker."""
    exchange = side.ask(
        1, enough=lambda answers: answers[-1] is not None, hedge=(100.01, asks(2, seen=[]))
    )
    side.turn(exchange, STALL_S)
    side.answer(side.lines[1])
    over = side.turn(exchange)
    exchange.end()

    assert over is None
    assert side.breakers.is_open(1)
    assert not side.breakers.is_open(2)
    assert side.watched == []


def test_usual_answer_times_are_those_of_kept_connections(side: Side) -> None:
    """The first answer over a new connection includes the dial."""
    for took_s in (3.0, 0.01):
        exchange = side.ask(7, hedge=(200.0, asks(8, seen=[])))
        side.now += took_s
        side.answer(side.lines[0])
        side.turn(exchange)
        exchange.end()

    assert side.breakers.times.hedge_s(7) == pytest.approx(2 * (0.01 + 4 * 0.005))


def test_silence_until_the_deadline_counts_for_the_breaker() -> None:
    """Not before it has lasted as long as a hung peer is waited for."""
    for waited_s, opens in ((STALL_S / 2, False), (STALL_S, True)):
        side = Side()
        exchange = side.ask(7, until=100.0 + waited_s)
        exchange.wait_s()
        side.now += waited_s
        last_s = exchange.wait_s()
        over = side.turn(exchange)
        exchange.end()

        assert (last_s, over) == (0.0, None)
        assert side.breakers.is_open(7) == opens


def test_a_welcome_is_no_answer(side: Side) -> None:
    """It proves that the peer listens, not that it works."""
    side.breakers.failed(7, side.now)
    exchange = side.ask(7)
    side.lines[0].comes(WELCOME)
    goes_on = side.turn(exchange)

    assert goes_on == SLICE_S
    assert side.breakers.is_open(7)


def test_who_was_late_himself_looks_before_he_blames(side: Side) -> None:
    """The thread got no turn until long after the deadline: the answer is there."""
    exchange = side.ask(7, until=101.0)
    side.now = 200.0
    waits_s = exchange.wait_s()
    side.answer(side.lines[0])
    over = side.turn(exchange)
    exchange.end()

    assert (waits_s, over) == (0.0, None)
    assert isinstance(exchange.answers[0], Located)
    assert not side.breakers.is_open(7)


def test_missing_peer_is_noticed_after_a_slice(side: Side) -> None:
    """One that does not come about is probed then, and not before."""
    exchange = side.ask(7)
    side.lines[0].refuses = True
    at_once = side.turn(exchange)
    over = side.turn(exchange, 2 * SLICE_S)

    assert (at_once, over) == (SLICE_S, None)
    assert side.breakers.is_open(7)


def test_questions_beyond_the_bound_follow_as_answers_come() -> None:
    """However many owners a batch has, the engine's open files are enough."""
    side = Side(kept_max=4)
    exchange = side.ask(7, 8, 9, 10)

    assert [line.url for line in side.watched] == ["url-7", "url-8"]
    side.answer(side.watched[0])
    side.turn(exchange)
    assert [line.url for line in side.watched] == ["url-8", "url-9"]
    side.watched[0].is_broken = True
    side.turn(exchange)
    side.turn(exchange)
    assert [line.url for line in side.watched] == ["url-9", "url-10"]
    exchange.end()

    assert [line.url for line in side.lines] == ["url-7", "url-8", "url-9", "url-10"]
    assert [answer is not None for answer in exchange.answers] == [True, False, False, False]
    assert side.breakers.is_open(8)
    assert not side.watched


def test_a_question_that_was_never_sent_is_no_failure_of_its_peer() -> None:
    """The time was up, or another answer was enough."""
    side = Side(kept_max=2)
    exchange = side.ask(7, 8, until=101.0)
    side.turn(exchange, 2.0)
    exchange.end()

    assert len(side.lines) == 1
    assert not side.breakers.is_open(8)


def test_nothing_begins_after_the_close_and_what_comes_back_ends(side: Side) -> None:
    """A call may be in flight while another thread closes."""
    leased = side.connections.lease(7, fresh=False)
    assert leased is not None
    side.connections.close()
    side.connections.give_back(7, leased)

    assert leased.is_closed
    assert side.connections.lease(7, fresh=False) is None


def test_who_was_not_asked_for_lack_of_time_is_not_blamed(side: Side) -> None:
    """Others used the time up: not even a connection is begun."""
    exchange = side.ask(7, until=side.now)
    exchange.end()

    assert exchange.wait_s() is None
    assert side.lines == []
    assert not side.breakers.is_open(7)


def test_nothing_is_posted_to_a_peer_whose_breaker_is_open(side: Side) -> None:
    """What is lost anyway should cost nothing."""
    side.breakers.failed(7, side.now)
    side.connections.post([(7, Touched(b"")), (8, Touched(b""))])

    assert [line.url for line in side.lines] == ["url-8"]


def test_a_peer_that_talks_without_end_gets_one_burst_a_turn(side: Side) -> None:
    """The clock is looked at in between."""
    exchange = side.ask(7)
    for _ in range(3 * BURST_MESSAGES):
        side.lines[0].comes(Located(10**9, b""))
    goes_on = side.turn(exchange)

    assert goes_on == SLICE_S
    assert len(side.lines[0].inbox) == 2 * BURST_MESSAGES


def test_a_greeting_ends_with_its_answer_its_deadline_or_its_connection(side: Side) -> None:
    """What came before the connection broke still counts."""
    answers: list[Message | None] = []
    for message, breaks in ((WELCOME, True), (Refused(0, "cluster", "no"), False), (None, True)):
        greeting, number = side.greet(side.now + 1.0)
        line = side.lines[-1]
        assert greeting.wait_s() == SLICE_S
        if message is not None:
            line.comes(attrs.evolve(message, request=number))
        line.is_broken = breaks
        # A poll looked before the message came.
        greeting.turn([] if breaks else [(line.fd, 1)])
        assert greeting.wait_s() is None
        answers += greeting.answers
        greeting.end()
    silent, _ = side.greet(side.now + 1.0)
    side.now += 1.0

    assert [type(answer) for answer in answers] == [Welcome, Refused, type(None)]
    assert silent.wait_s() == 0.0
    assert side.turn(silent) is None
    silent.end()
    assert silent.answers == [None]
    assert side.refusals == []
    assert side.breakers.opened_count == 0


def test_the_connection_of_a_greeting_serves_whom_it_has_named(side: Side) -> None:
    """Only where its caller requests it: a client asks a member over one that knows its name."""
    for keeps in (False, True):
        talk = side.talk(Breakers())
        number = talk.greet("there", side.now + 1.0)
        line = side.lines[-1]
        line.comes(attrs.evolve(WELCOME, request=number))
        side.turn(talk)
        if keeps:
            talk.keep_as(7)
        talk.end()

        assert line.is_closed != keeps
        assert [type(message) for message in line.sent] == [Hello]

    side.urls[7] = "there"
    assert side.connections.lease(7, fresh=False) is line


def test_what_a_caller_slept_beyond_its_deadline_is_no_silence_of_the_peer(side: Side) -> None:
    """A starved thread looks late: the peer had the time until the deadline, and no more."""
    exchange = side.ask(7, until=side.now + 0.8 * STALL_S)

    side.turn(exchange, passed_s=2 * STALL_S)
    exchange.end()

    assert not side.breakers.is_open(7)


def test_questions_that_wait_are_not_sent_when_an_answer_was_enough() -> None:
    """Their connections would never be given back."""
    side = Side(kept_max=4)
    exchange = side.ask(7, 8, 9, 10, enough=lambda _: True)
    side.answer(side.lines[0])
    side.turn(exchange)
    exchange.end()

    assert [line.url for line in side.lines] == ["url-7", "url-8", "url-9"]
    assert side.watched == []


def test_the_refusal_of_another_question_is_not_this_ones_answer(side: Side) -> None:
    """It comes late, to a question that was given up."""
    exchange = side.ask(7)
    late = Refused(10**9, "busy", "why")
    side.lines[0].comes(late)
    side.turn(exchange)
    side.answer(side.lines[0])
    side.turn(exchange)

    assert isinstance(exchange.answers[0], Located)
    assert side.unasked == [(7, late)]


def test_who_waits_long_may_look_less_often(side: Side) -> None:
    """An operator's program follows many nodes, each with a question that waits for changes."""
    side.connections.slice_s = 5 * SLICE_S

    assert side.ask(7).wait_s() == 5 * SLICE_S


def test_an_address_is_probed_within_the_deadline(side: Side) -> None:
    """A probe blocks: no longer than what is left, and not at all when nothing is."""
    exchange = side.ask(7, until=side.now + 2 * SLICE_S)
    side.turn(exchange, 1.25 * SLICE_S)
    late = Side()
    too_late = late.ask(7, until=late.now + SLICE_S)
    late.turn(too_late, 2 * SLICE_S)

    assert side.lines[0].probed_for == [pytest.approx(0.75 * SLICE_S)]
    assert late.lines[0].probed_for == []


def test_a_peer_that_talks_slowly_takes_no_longer_than_a_turn(side: Side) -> None:
    """To decode one message may take milliseconds: the clock is looked at before each."""
    exchange = side.ask(7, until=side.now + SLICE_S)
    greeting, _ = side.greet(side.now + SLICE_S)
    for line in side.lines:
        line.takes = partial(pass_time, side)
        for _ in range(BURST_MESSAGES):
            line.comes(Located(10**9, b""))
    side.turn(exchange)
    side.turn(greeting)

    assert [BURST_MESSAGES - len(line.inbox) for line in side.lines] == [2, 2]


def await_(side: Side, talk: Conversation[Line], number: int, until: float) -> Message | None:
    """Wait in turns, as a driver does, while nothing comes."""
    talk.collect(number, until)
    for _ in range(200):
        wait_s = talk.wait_s()
        if wait_s is None:
            talk.stop()
            return talk.answer(number)
        side.turn(talk, wait_s)
    raise AssertionError("the wait does not end")


def questions(line: Line) -> list[Message]:
    return [message for message in line.sent if not isinstance(message, Hello)]


def test_questions_go_out_at_once_and_answers_are_found_by_number(side: Side) -> None:
    """Over one connection, in their order; an answer may come before it is waited for."""
    talk = side.talk()
    first, second = talk.send(7, FIRST), talk.send(7, SECOND)
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


def test_silence_counts_from_the_last_sign_of_life(side: Side) -> None:
    """A peer that has just answered another question is not hung."""
    talk = side.talk()
    first, second = talk.send(7, FIRST), talk.send(7, SECOND)
    side.now += STALL_S
    side.lines[0].comes(Located(first, b"", False))
    assert await_(side, talk, first, side.now + 1.0) is not None

    assert await_(side, talk, second, side.now + STALL_S / 2) is None

    assert not side.breakers.is_open(7)


def test_a_late_answer_and_one_to_no_question_are_unasked(side: Side) -> None:
    """They may be of use to another call."""
    talk = side.talk()
    late = talk.send(7, FIRST)
    assert await_(side, talk, late, side.now + SLICE_S) is None
    number = talk.send(7, SECOND)
    ahead = Granted(0, 9, b"", b"")
    for message in (Located(late, b"", False), ahead, Located(number, b"", False)):
        side.lines[0].comes(message)

    assert await_(side, talk, number, side.now + 1.0) is not None

    assert side.unasked == [(7, Located(late, b"", False)), (7, ahead)]


@pytest.mark.parametrize("asks_for_hellos", [0, 2])
def test_what_a_stale_connection_swallowed_is_sent_again_over_a_new_one(
    side: Side, asks_for_hellos: int
) -> None:
    """All of it, in order, with the same numbers; the peer has not failed.

    The connection is broken, or a node asks for a Hello for each request that it does not know:
    then, too, there is one new connection.
    """
    talk_before = side.talk()
    talk_before.send(7, FIRST)
    talk_before.end()
    talk = side.talk()
    first, second = talk.send(7, FIRST), talk.send(7, SECOND)
    (stale,) = side.lines
    stale.is_broken = not asks_for_hellos
    for _ in range(asks_for_hellos):
        stale.comes(HelloRequired(7))

    talk.collect(second, 110.0)
    side.turn(talk)

    fresh = side.lines[1]
    assert stale.is_closed
    assert questions(fresh) == [Lookup(first, FIRST.keys), Lookup(second, SECOND.keys)]
    fresh.comes(Located(first, b"", False))
    fresh.comes(Located(second, b"", False))
    assert await_(side, talk, second, 110.0) is not None
    assert await_(side, talk, first, 110.0) is not None
    assert side.breakers.opened_count == 0


def test_a_new_connection_that_breaks_is_the_peers_failure(side: Side) -> None:
    """No answer will come, so no question waits any more."""
    talk = side.talk()
    first, second = talk.send(7, FIRST), talk.send(7, SECOND)
    side.lines[0].is_broken = True

    assert await_(side, talk, first, 110.0) is None
    assert await_(side, talk, second, 110.0) is None

    assert side.now < 101.0
    assert side.breakers.is_open(7)
    assert len(side.lines) == 1


def test_a_refusal_over_a_new_connection_is_the_answer_to_its_question_alone(side: Side) -> None:
    """The other question is asked once more; one that names no question answers all."""
    talk = side.talk()
    first, second = talk.send(7, FIRST), talk.send(7, SECOND)
    refused = Refused(first, "malformed", "why")
    side.lines[0].comes(refused)
    talk.collect(first, 110.0)
    side.turn(talk)

    assert talk.answer(first) == refused
    assert side.lines[0].is_closed
    assert questions(side.lines[1]) == [Lookup(second, SECOND.keys)]
    every = Refused(0, "gone", "why")
    side.lines[1].comes(every)
    assert await_(side, talk, second, 110.0) == every
    assert side.refusals == [(7, refused), (7, every)]


def test_a_peer_without_an_address_is_not_asked(side: Side) -> None:
    """It has failed at once."""
    side.connections.close()
    talk = side.talk()

    assert await_(side, talk, talk.send(7, FIRST), 110.0) is None
    assert side.now == 100.0
    assert side.breakers.is_open(7)
    talk.end()


def test_any_message_is_a_sign_of_life(side: Side) -> None:
    """A probe that is answered closes the breaker, whatever the answer is to."""
    side.breakers.failed(7, side.now)
    talk = side.talk()
    talk.send(7, FIRST)
    side.lines[0].comes(Granted(0, 9, b"", b""))

    side.turn(talk)

    assert not side.breakers.is_open(7)


def pass_time(side: Side) -> None:
    side.now += SLICE_S / 2
