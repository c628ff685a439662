"""A link between nodes: greeting first, order kept, bounds counted, whatever the peer does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from peercache.net import link as link_module
from peercache.net import sockets
from peercache.net.link import BURST_MESSAGES, OUTBOX_BYTES_MAX, OUTBOX_MESSAGES_MAX, Link
from peercache.net.sockets import Listener
from peercache.wire.codec import MESSAGE_BYTES_MAX
from tests.certificates import Certificates
from tests.pace import FACTOR, ends_within, until
from tests.unit.net.test_handshakes import control_tls

HELLO = b"hello"


@attrs.define(eq=False)
class Ends:
    """A link and the listener at its other end; what came back, how much was dropped."""

    link: Link
    answers: list[bytes]
    dropped: list[int]


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[Ends]:
    """Run a link to an address."""
    answers: list[bytes] = []
    dropped: list[int] = []
    link = Link(
        url,
        hello=lambda: HELLO,
        on_answer=answers.append,
        on_dropped=dropped.append,
        accepts=lambda _: True,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        yield Ends(link, answers, dropped)
        link.stop()


def listening(url: str) -> Listener:
    listener = Listener(on_removed=lambda _: None)
    listener.listen_local(url)
    return listener


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/x.ipc"


@pytest.fixture
def listener(url: str) -> Iterator[Listener]:
    listener = listening(url)
    yield listener
    listener.close()


async def take(listener: Listener, count: int) -> list[tuple[int, bytes]]:
    """Return the next messages with their pipes."""
    with ends_within():
        return [await listener.receive() for _ in range(count)]


async def test_a_connection_begins_with_a_hello(url: str, listener: Listener) -> None:
    """What was said before it came about follows, in order, over the same connection."""
    async with linked(url) as ends:
        for i in range(5):
            ends.link.send(b"%d" % i)
        received = await take(listener, 6)
        assert ends.link.is_empty

    assert [raw for _, raw in received] == [HELLO, b"0", b"1", b"2", b"3", b"4"]
    assert len({pipe for pipe, _ in received}) == 1


async def test_a_new_connection_begins_with_a_hello_again(url: str, listener: Listener) -> None:
    """The other end has forgotten the pipe that it had greeted us on."""
    async with linked(url) as ends:
        ends.link.send(b"a")
        pipe, _ = (await take(listener, 2))[0]

        listener.disconnect(pipe)
        again = await take(listener, 1)
        ends.link.send(b"b")
        after = await take(listener, 1)

    assert [raw for _, raw in again + after] == [HELLO, b"b"]
    assert again[0][0] == after[0][0] != pipe


async def test_a_restarted_peer_receives_hello_and_then_what_waited(url: str) -> None:
    """While it is away messages wait; nothing precedes the greeting."""
    first = listening(url)
    async with linked(url) as ends:
        ends.link.send(b"a")
        await take(first, 2)
        first.close()
        await until(lambda: not ends.link._connected)
        ends.link.send(b"b")
        ends.link.send(b"c")
        await trio.testing.wait_all_tasks_blocked()
        assert not ends.link.is_empty

        second = listening(url)
        received = await take(second, 3)

    assert [raw for _, raw in received] == [HELLO, b"b", b"c"]
    second.close()


async def test_a_peer_that_does_not_know_us_is_greeted_again(url: str, listener: Listener) -> None:
    """Before anything else is said."""
    async with linked(url) as ends:
        ends.link.send(b"a")
        await take(listener, 2)

        ends.link.greet_again()
        ends.link.send(b"b")
        received = await take(listener, 2)

    assert [raw for _, raw in received] == [HELLO, b"b"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links notice soon that nothing comes back."""
    monkeypatch.setattr(link_module, "SILENT_S", 0.05)
    monkeypatch.setattr(link_module, "UNANSWERED_S", FACTOR)


@pytest.mark.usefixtures("impatient")
async def test_a_link_whose_peer_receives_nothing_dials_again(url: str, listener: Listener) -> None:
    """The connection may be lost, though neither the kernel nor nng reports it."""
    async with linked(url) as ends:
        pipe, _ = (await take(listener, 1))[0]
        listener.reply(pipe, b"welcome")
        await until(lambda: bool(ends.answers))

        ends.link.send(b"a")
        with ends_within():
            while (received := await listener.receive())[0] == pipe:
                assert received[1] in (b"a", HELLO)

    assert received[1] == HELLO


@pytest.mark.usefixtures("impatient")
async def test_a_link_whose_peer_answers_keeps_its_connection(url: str, listener: Listener) -> None:
    """However little it sends of its own, and however much it is sent."""
    async with linked(url) as ends:
        asked: list[int] = []
        with ends_within():
            while len(asked) < 12:
                ends.link.send(b"a")
                pipe, raw = await listener.receive()
                if raw == HELLO:
                    asked.append(pipe)
                    listener.reply(pipe, b"welcome")
                await trio.sleep(0.01)

    assert len(set(asked)) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_link_without_anything_to_send_sends_nothing(url: str, listener: Listener) -> None:
    """In a cluster of thousands most links are idle."""
    async with linked(url) as ends:
        pipe, _ = (await take(listener, 1))[0]
        listener.reply(pipe, b"welcome")
        await until(lambda: bool(ends.answers))

        await trio.sleep(20 * link_module.SILENT_S)

        assert listener.receive_now() is None


@pytest.mark.usefixtures("impatient")
async def test_connections_that_end_with_a_last_message_over_tls_are_dialled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some hundred such ends nng misses one, and would dial no more."""
    monkeypatch.setattr(sockets, "RECONNECT_MIN_MS", 1)
    monkeypatch.setattr(sockets, "RECONNECT_MAX_MS", 5)
    certificates = Certificates(tmp_path / "ca")
    certificates.node("one")
    certificates.node("two")
    listener = Listener(on_removed=_ignore, tls=control_tls(certificates, "node-one"))
    port = listener.listen_tcp("listen", "127.0.0.1", 0)
    link = Link(
        f"tls+tcp://127.0.0.1:{port}",
        hello=lambda: HELLO,
        on_answer=_ignore,
        on_dropped=_ignore,
        accepts=lambda _: True,
        tls=control_tls(certificates, "node-two"),
    )

    async def sends() -> None:
        while True:
            link.send(b"a")
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        nursery.start_soon(sends)
        for _ in range(600):
            pipe, _ = (await take(listener, 1))[0]
            listener.reply(pipe, b"refused")
            listener.disconnect(pipe)
        nursery.cancel_scope.cancel()
    listener.close()


async def test_answers_come_back(url: str, listener: Listener) -> None:
    """Welcome, Refused and HelloRequired arrive on the connection that was greeted on."""
    async with linked(url) as ends:
        pipe, _ = (await take(listener, 1))[0]
        for count, raw in enumerate((b"welcome", b"", b"again")):
            # One at a time: nng keeps two for a pipe and drops the third.
            listener.reply(pipe, raw)
            await until(lambda: len(ends.answers) == count + 1)  # noqa: B023 - used at once

    # One of no bytes at all, which no correct peer sends, ends nothing.
    assert ends.answers == [b"welcome", b"", b"again"]


async def test_the_outbox_is_bounded_and_drops_the_oldest(url: str) -> None:
    """No peer is there: the newest stay, each drop is counted, nothing blocks."""
    async with linked(url) as ends:
        for i in range(OUTBOX_MESSAGES_MAX + 100):
            ends.link.send(b"%d" % i)
        await trio.testing.wait_all_tasks_blocked()

        listener = listening(url)
        received = await take(listener, 3)

    assert sum(ends.dropped) == 100
    assert [raw for _, raw in received] == [HELLO, b"100", b"101"]
    listener.close()


async def test_the_outbox_is_bounded_in_bytes(url: str) -> None:
    """Few large messages count like many small ones, and what was sent no longer does."""
    large = bytes(MESSAGE_BYTES_MAX)
    async with linked(url) as ends:
        for _ in range(OUTBOX_BYTES_MAX // len(large) + 3):
            ends.link.send(large)
        assert sum(ends.dropped) == 3

        listener = listening(url)
        await take(listener, 1 + OUTBOX_BYTES_MAX // len(large))
        ends.link.send(large)
        await take(listener, 1)

    assert sum(ends.dropped) == 3
    listener.close()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:80/x", "", "::::"])
async def test_an_address_that_cannot_be_dialled_ends_no_other_link(address: str) -> None:
    """A member may say of itself what it likes: its link drops, the node lives."""
    async with linked(f"tcp://{address}") as ends:
        ends.link.send(b"a")
        await trio.testing.wait_all_tasks_blocked()
        ends.link.send(b"b")

        assert sum(ends.dropped) == 2
        assert ends.link.is_empty


async def test_stop_ends_a_link_whatever_it_does(url: str, listener: Listener) -> None:
    """Connected or not, with or without something to say; or before it began."""
    for address in (url, f"{url}.none"):
        with ends_within():
            async with linked(address) as ends:
                ends.link.send(b"a")
    early = Link(
        url,
        hello=lambda: HELLO,
        on_answer=_ignore,
        on_dropped=_ignore,
        accepts=lambda _: True,
    )
    early.stop()
    with ends_within():
        await early.run()


async def test_a_full_buffer_of_nng_is_waited_for(url: str, listener: Listener) -> None:
    """More than nng takes at once arrives all the same, in order."""
    async with linked(url) as ends:
        for i in range(OUTBOX_MESSAGES_MAX):
            ends.link.send(b"%d" % i + bytes(5000))
        received = await take(listener, OUTBOX_MESSAGES_MAX + 1)

    assert [int(raw[:-5000]) for _, raw in received[1:]] == list(range(OUTBOX_MESSAGES_MAX))
    assert ends.dropped == []


async def test_a_talkative_peer_leaves_others_their_turn(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much has come, other tasks run after a burst of it."""
    monkeypatch.setattr(link_module, "BURST_MESSAGES", 4)
    turns = 0
    turn_of: list[int] = []
    listener = listening(url)
    link = Link(
        url,
        hello=lambda: HELLO,
        on_answer=lambda _: turn_of.append(turns),
        on_dropped=_ignore,
        accepts=lambda _: True,
    )

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        pipe, _ = (await take(listener, 1))[0]
        for _ in range(200):
            assert listener.reply(pipe, b"blah")
            # The loop is busy with something else while they arrive; of too many at once nng drops
            # some.
            time.sleep(0.002)  # noqa: ASYNC251 - that is the point
        nursery.start_soon(other)
        with ends_within():
            while len(turn_of) < 60:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    assert max(turn_of.count(turn) for turn in turn_of) <= 2 * 4
    assert BURST_MESSAGES < OUTBOX_MESSAGES_MAX
    listener.close()


def _ignore(_: object) -> None:
    return
