"""Questions over real connections. Their rules are those of test_conversation.py."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peercache.net.breaker import STALL_S
from peercache.net.requests import DESCRIPTORS, OF_ONE_MAX
from peercache.net.sockets import reached
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.pool import Touched
from peercache.wire.messages.session import Hello, Refused, Welcome
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, at_best, paced, wait_until
from tests.unit.net.peers import Asking, Peer, files_open, hello, located, member, threads_running


@pytest.fixture(params=["tcp", "ipc"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    with Peer(request.param, tmp_path) as peer:
        yield peer


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Peer]:
    with Peer("ipc", tmp_path) as peer:
        yield peer


def test_a_connection_begins_with_a_hello_and_is_used_again(peer: Peer) -> None:
    """One greeting for many questions, each with a number of its own."""
    with Asking({7: peer.url}) as client:
        for _ in range(3):
            assert isinstance(client.ask(7)[0], Located)

    assert isinstance(peer.received[0][1], Hello)
    assert len(peer.of(Hello)) == 1
    assert len({question.request for question in peer.of(Lookup)}) == 3


def test_all_peers_are_asked_at_once(tmp_path: Path) -> None:
    """Each answer stands in its question's place."""
    together = threading.Barrier(3, timeout=TIMEOUT_S)

    def meet(message: Message) -> Message | None:
        together.wait()
        return located(message)

    peers = {i: Peer("ipc", tmp_path, incarnation=i, answer=meet) for i in (3, 1, 2)}
    with Asking({i: peer.url for i, peer in peers.items()}) as client:
        answers = client.ask(3, 1, 2)

    assert [type(answer) for answer in answers] == [Located] * 3
    for peer in peers.values():
        peer.end()


def test_connections_of_a_call_serve_the_next_one(tmp_path: Path) -> None:
    """The end of its talks gives them back: one greeting, however many calls."""
    with Peer("ipc", tmp_path) as peer, Asking({7: peer.url}) as client:
        for _ in range(3):
            talk = client.asker.talk()
            answer = talk.collect(talk.send(7, Lookup(0, bytes(16))), time.monotonic() + TIMEOUT_S)
            talk.end()
            assert isinstance(answer, Located)

        assert len(peer.of(Hello)) == 1


def test_one_answer_may_be_enough(tmp_path: Path) -> None:
    """The others are not waited for, and not blamed for having been cut short."""

    def after_a_while(message: Message) -> Message | None:
        # Long enough to make another silent peer suspect.
        threading.Event().wait(STALL_S + 0.05)
        return located(message)

    with (
        Peer("ipc", tmp_path, answer=after_a_while) as quick,
        Peer("ipc", tmp_path, answer=lambda _: None) as slow,
        Asking({1: quick.url, 2: slow.url}) as client,
    ):
        began = time.monotonic()
        question = Lookup(0, bytes(16))
        answers = client.asker.ask(
            [(2, question), (1, question)], began + TIMEOUT_S, lambda _: True
        )
        took_s = time.monotonic() - began

    assert [type(answer) for answer in answers] == [type(None), Located]
    assert_within(took_s, PROMPT_S)
    assert not client.breakers.is_open(2)


def test_silence_lasts_until_the_deadline_and_opens_the_breaker(local: Peer) -> None:
    """A peer that accepts and never answers costs STALL_S, and then nothing."""
    local.answer = lambda _: None
    with Asking({7: local.url}) as client:

        def story(pace_s: float) -> float:
            began = time.monotonic()
            assert client.ask(7, timeout_s=pace_s) == [None]
            return time.monotonic() - began

        # A question that was put late has waited for less than its time-out.
        took_s = paced(story, lambda _: client.breakers.is_open(7))

    assert STALL_S <= took_s < PROMPT_S
    assert client.breakers.is_open(7)


def test_a_restarted_peer_is_asked_again_on_a_fresh_connection(tmp_path: Path) -> None:
    """The pooled connection broke between two calls: one retry, no miss."""
    for kind in ("ipc", "tcp"):
        first = Peer(kind, tmp_path)
        with Asking({7: first.url}) as client:
            assert isinstance(client.ask(7)[0], Located)
            first.end()
            with Peer(kind, tmp_path, url=first.url) as second:
                assert isinstance(client.ask(7)[0], Located), kind
                assert len(second.of(Hello)) >= 1


def test_a_connection_that_breaks_ends_the_wait_at_once(tmp_path: Path) -> None:
    """A killed peer is noticed by the end of its connection, not by a timer."""
    for kind in ("ipc", "tcp"):
        asked = threading.Event()

        def say_nothing(_: Message, asked: threading.Event = asked) -> None:
            asked.set()

        peer = Peer(kind, tmp_path)
        # Nothing but the connection can end the poll.
        with Asking({7: peer.url}, slice_s=TIMEOUT_S) as client, ThreadPoolExecutor(1) as threads:
            assert isinstance(client.ask(7)[0], Located)
            peer.answer = say_nothing
            answers = threads.submit(client.ask, 7, timeout_s=2 * TIMEOUT_S)
            assert asked.wait(TIMEOUT_S)
            ended = time.monotonic()
            peer.end()

            assert answers.result(TIMEOUT_S) == [None], kind
            assert_within(time.monotonic() - ended, PROMPT_S)
            assert client.breakers.is_open(7)


def test_a_peer_that_ended_between_two_calls_is_found_out_at_once(tmp_path: Path) -> None:
    """Its address refuses, which nng does not report: it is probed after a millisecond."""
    for kind in ("ipc", "tcp"):
        peer = Peer(kind, tmp_path)
        with Asking({7: peer.url}, slice_s=TIMEOUT_S) as client:
            assert isinstance(client.ask(7)[0], Located)
            peer.end()
            began = time.monotonic()

            assert client.ask(7, timeout_s=2 * TIMEOUT_S) == [None], kind
            assert_within(time.monotonic() - began, PROMPT_S)
            assert client.breakers.is_open(7)


def test_an_address_that_accepts_until_its_process_has_ended_is_probed_again(
    tmp_path: Path,
) -> None:
    """The kernel ends the connections of a killed process first: on a busy machine, long before."""
    peer = Peer("ipc", tmp_path)
    with Asking({7: peer.url}) as client, ThreadPoolExecutor(1) as threads:
        assert isinstance(client.ask(7)[0], Located)
        peer.end()
        path = peer.url.removeprefix("ipc://")
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            answers = threads.submit(client.ask, 7, timeout_s=TIMEOUT_S)
            # Those of nng and of the first probe, which has ended without an answer.
            accepted = [listener.accept()[0] for _ in range(2)]
            wait_until(lambda: any(has_ended(each) for each in accepted), "the end of a probe")
            ended = time.monotonic()
        for each in accepted:
            each.close()

        assert answers.result(2 * TIMEOUT_S) == [None]
        assert_within(time.monotonic() - ended, PROMPT_S)
        assert client.breakers.is_open(7)


def has_ended(accepted: socket.socket) -> bool:
    """Read what has come; return whether the other side has closed."""
    return bool(select.select([accepted], [], [], 0)[0]) and not accepted.recv(64)


def test_a_second_peer_is_asked_when_the_first_is_slow(tmp_path: Path) -> None:
    """The answer to it follows, and ends the call if it is enough."""
    with (
        Peer("ipc", tmp_path, answer=lambda _: None) as slow,
        Peer("ipc", tmp_path) as other,
        Asking({1: slow.url, 2: other.url}, slice_s=TIMEOUT_S) as client,
    ):
        began, question = time.monotonic(), Lookup(0, bytes(16))
        answers = client.asker.ask(
            [(1, question)],
            began + 2 * TIMEOUT_S,
            any,
            (began + 0.01, lambda _: ([(2, question)], float("inf"))),
        )
        took_s = time.monotonic() - began

    assert [type(answer) for answer in answers] == [type(None), Located]
    assert_within(took_s, PROMPT_S)


def test_another_cluster_is_a_refusal(tmp_path: Path) -> None:
    """Its words cannot be understood; that they cannot is understood at once."""
    with Peer("ipc", tmp_path, cluster="theirs") as peer, Asking({7: peer.url}) as client:
        began = time.monotonic()
        answer = client.ask(7)[0]
        greeted = client.asker.greet(peer.url, time.monotonic() + TIMEOUT_S)
        took_s = time.monotonic() - began

    for refusal in (answer, greeted):
        assert isinstance(refusal, Refused)
        assert refusal.reason == "cluster"
        assert "theirs" in refusal.detail
        assert "test" in refusal.detail
    assert_within(took_s, PROMPT_S)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 9, b"\x80", bytes(100)])
def test_garbage_is_skipped_and_reported(local: Peer, garbage: bytes) -> None:
    """What no correct peer sends is dropped; the answer behind it counts."""

    def answer(message: Message) -> Message | None:
        local.listener.reply(local.received[0][0], garbage)
        return located(message)

    local.answer = answer
    with Asking({7: local.url}) as client:
        assert isinstance(client.ask(7)[0], Located)

    assert [refusal.reason for _, refusal in client.refusals] == ["protocol"]  # type: ignore[union-attr]


def test_many_threads_share_an_asker(tmp_path: Path) -> None:
    """Every answer reaches the question it belongs to; few connections stay."""

    def echo(message: Message) -> Message | None:
        # Which question it was stands in its key.
        assert isinstance(message, Lookup)
        return Located(message.request, message.keys + bytes(40))

    with (
        Peer("ipc", tmp_path, answer=echo) as one,
        Peer("tcp", tmp_path, answer=echo) as two,
        Asking({1: one.url, 2: two.url}) as client,
    ):

        def work(thread: int) -> None:
            for i in range(40):
                keys = [bytes([thread, i, peer] + 13 * [0]) for peer in (1, 2)]
                answers = client.asker.ask(
                    [(1, Lookup(0, keys[0])), (2, Lookup(0, keys[1]))],
                    time.monotonic() + TIMEOUT_S,
                )
                assert [a.records[:16] for a in answers] == keys  # type: ignore[union-attr]

        with ThreadPoolExecutor(12) as threads:
            for done in [threads.submit(work, thread) for thread in range(12)]:
                done.result()

        wait_until(lambda: len(one.listener.pipes()) <= OF_ONE_MAX)


def test_a_peer_without_an_address_has_failed_at_once() -> None:
    """Its address is unknown, or no node can be there."""
    urls = {1: None, 2: "tcp://127.0.0.1:1", 3: "tcp://nonsense", 4: "ipc:///nowhere/at/all", 5: ""}
    with Asking(urls) as client:
        began = time.monotonic()
        answers = client.ask(*urls)
        took_s = time.monotonic() - began

    assert answers == [None] * 5
    assert_within(took_s, PROMPT_S)
    assert [client.breakers.is_open(peer) for peer in urls] == [True] * 5


@pytest.mark.parametrize("control", ["127.0.0.1:80/path", "a b:1", "x" * 300 + ":9", "[::1:9"])
def test_an_address_that_makes_no_sense_is_no_exception(control: str) -> None:
    """A member may say of itself what it likes."""
    with Asking({1: f"tcp://{control}"}) as client:
        assert client.ask(1, timeout_s=0.1) == [None]
        client.asker.post([(1, Touched(b""))])
        assert client.asker.greet(f"tcp://{control}", time.monotonic() + 0.1) is None


def test_a_host_name_is_not_looked_up_in_the_callers_thread() -> None:
    """A name server that is away would hold the caller for seconds."""
    with Asking({1: "tcp://no-such-host.invalid:9"}) as client:
        began = time.monotonic()
        assert client.ask(1, timeout_s=0.1) == [None]
        assert_within(time.monotonic() - began, PROMPT_S)


@pytest.fixture
def full_port() -> Iterator[str]:
    """Yield an address whose host drops every further connection, as one that is gone does."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        waiting = []
        for _ in range(4):
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(door.getsockname())
            waiting.append(caller)
        select.select([], waiting[:1], [], TIMEOUT_S)
        yield f"tcp://127.0.0.1:{door.getsockname()[1]}"
        for caller in waiting:
            caller.close()


def test_hosts_that_drop_connections_do_not_add_up(full_port: str) -> None:
    """Twenty of them: the call ends in time, and a post does not wait at all."""
    peers = dict.fromkeys(range(1, 21), full_port)

    def ask() -> float:
        with Asking({**peers}) as client:
            began = time.monotonic()
            assert client.ask(*peers, timeout_s=0.2) == [None] * 20
            return time.monotonic() - began

    def post() -> float:
        with Asking({**peers}) as client:
            began = time.monotonic()
            client.asker.post([(peer, Touched(b"")) for peer in peers])
            return time.monotonic() - began

    assert at_best(ask, below=0.4) < 0.4
    assert at_best(post, below=0.2) < 0.2


def test_a_connection_takes_as_many_open_files_as_the_bound_counts(local: Peer) -> None:
    """The end at the peer is in this process, too."""
    with Asking({7: local.url}) as client:
        client.ask(7)
        wait_until(lambda: len(local.listener.pipes()) == 1)

        def taken() -> int:
            before = files_open()
            lease = client.asker.connections.lease(7, fresh=True)
            assert lease is not None
            wait_until(lambda: len(local.listener.pipes()) == 2)
            count = files_open() - before - 1
            lease.close()
            wait_until(lambda: len(local.listener.pipes()) == 1)
            return count

        # Again, where what an earlier test has closed ends meanwhile.
        wait_until(lambda: taken() == DESCRIPTORS)


def test_posts_pass_over_peers_whose_breaker_is_open(local: Peer) -> None:
    """What is lost anyway should cost nothing."""
    with Asking({7: local.url}) as client:
        client.breakers.failed(7, time.monotonic())
        client.asker.post([(7, Touched(b""))])
        client.breakers.answered(7)
        client.asker.post([(7, Touched(bytes(24)))])
        wait_until(lambda: len(local.of(Touched)) == 1)

    assert local.of(Touched) == [Touched(bytes(24))]


def test_greeting_brings_welcome_from_the_node_at_the_address(peer: Peer) -> None:
    """And nothing within the deadline if no node listens."""
    with Asking({}) as client:
        answer = client.asker.greet(peer.url, time.monotonic() + TIMEOUT_S)
        peer.end()
        began = time.monotonic()
        silent = client.asker.greet(peer.url, time.monotonic() + TIMEOUT_S)

    assert isinstance(answer, Welcome)
    assert answer.member == member(7)
    assert peer.of(Hello) == [hello(request=answer.request)]
    assert silent is None
    assert_within(time.monotonic() - began, PROMPT_S)


def test_a_new_connection_takes_milliseconds(peer: Peer) -> None:
    """A look at the address that is no proper greeting makes nng refuse all others for 100 ms."""

    def connect_and_ask() -> float:
        with Asking({7: peer.url}) as client:
            assert reached(peer.url, TIMEOUT_S) is True
            began = time.monotonic()
            assert isinstance(client.ask(7)[0], Located)
            return time.monotonic() - began

    assert at_best(connect_and_ask, below=0.08) < 0.08


def test_forgotten_peers_have_no_connection_left(local: Peer) -> None:
    """Who is dead in the view keeps no descriptor here."""
    with Asking({7: local.url}) as client:
        client.ask(7)
        client.asker.forget({7})
        # On a machine that was paused a second connection was tried, and goes by itself.
        wait_until(lambda: len(local.listener.pipes()) == 1)

        client.asker.forget(set())

        wait_until(lambda: len(local.listener.pipes()) == 0)


def test_after_close_nothing_is_asked(local: Peer) -> None:
    """Answers are None, at once, and no connection is opened."""
    client = Asking({7: local.url})
    client.ask(7)
    client.asker.close()

    began = time.monotonic()
    assert client.ask(7) == [None]
    assert_within(time.monotonic() - began, PROMPT_S)
    wait_until(lambda: len(local.listener.pipes()) == 0)


def test_two_hundred_askers_leave_nothing_behind(local: Peer) -> None:
    """No descriptor, no thread: opened, asked, closed."""

    def cycle() -> None:
        with Asking({7: local.url}) as client:
            assert isinstance(client.ask(7)[0], Located)

    for _ in range(5):
        cycle()
    wait_until(lambda: len(local.listener.pipes()) == 0)
    before = files_open(), threads_running()

    for _ in range(200):
        cycle()

    wait_until(lambda: len(local.listener.pipes()) == 0)
    wait_until(lambda: files_open() <= before[0])
    assert threads_running() <= before[1]
