"""The sockets alone: addresses, connections that end, and what no correct peer sends."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peercache.config.quantities import format_address
from peercache.errors import AddressTaken, ConfigError
from peercache.net.peers import Peer, Transport
from peercache.net.sockets import (
    CLOSE_AFTER_S,
    PAIR1_GREETING,
    Dialer,
    Listener,
    UnusableAddress,
    local_path,
    reached,
    remove_dead_socket,
)
from peercache.trust.sharing import Sharing, uid_of_tcp_peer
from tests.examples import examples
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, paced, wait_until
from tests.unit.net.peers import files_open

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


def listening(folder: Path) -> tuple[Listener, str, list[int]]:
    ended: list[int] = []
    listener = Listener(on_removed=ended.append)
    url = f"ipc://{folder}/{len(list(folder.iterdir()))}.ipc"
    listener.listen_local(url)
    return listener, url, ended


def taken(listener: Listener) -> tuple[int, bytes]:
    """Return the next message, however long it takes to come."""
    found: list[tuple[int, bytes]] = []

    def look() -> bool:
        message = listener.receive_now()
        found.extend([message] if message is not None else [])
        return bool(found)

    wait_until(look)
    return found[0]


def received(dialer: Dialer) -> bytes:
    found: list[bytes] = []

    def look() -> bool:
        message = dialer.receive()
        found.extend([message] if message is not None else [])
        return bool(found)

    wait_until(look)
    return found[0]


def test_answers_go_back_on_the_pipe_they_are_for(tmp_path: Path) -> None:
    """A listener knows its callers by pipe, over ipc and tcp alike."""
    listener, url, _ = listening(tmp_path)
    port = listener.listen_tcp("listen", "127.0.0.1", 0)
    callers = [Dialer(url), Dialer(f"tcp://127.0.0.1:{port}")]
    pipes = []
    for i, caller in enumerate(callers):
        caller.send(bytes([i]))
        pipe, raw = taken(listener)
        assert raw == bytes([i])
        pipes.append(pipe)

    for i in (1, 0):
        assert listener.reply(pipes[i], b"to %d" % i)

    assert [received(caller) for caller in callers] == [b"to 0", b"to 1"]
    assert len(listener.pipes()) == 2
    for caller in callers:
        caller.close()
    listener.close()


def test_the_port_that_was_bound_is_reported(tmp_path: Path) -> None:
    """Port 0 is any free one; IPv6 works the same."""
    listener, _, _ = listening(tmp_path)

    port = listener.listen_tcp("listen", "127.0.0.1", 0)

    assert reached(f"tcp://127.0.0.1:{port}", TIMEOUT_S) is True
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        port = listener.listen_tcp("listen", "::1", 0)
        assert reached(f"tcp://[::1]:{port}", TIMEOUT_S) is True
    listener.close()


def test_an_address_that_is_taken_names_its_setting(tmp_path: Path) -> None:
    """A person reads which setting it was."""
    listener, url, _ = listening(tmp_path)
    port = listener.listen_tcp("listen", "127.0.0.1", 0)
    other = Listener(on_removed=lambda _: None)

    with pytest.raises(AddressTaken, match=f"listen = 127.0.0.1:{port}"):
        other.listen_tcp("listen", "127.0.0.1", port)
    with pytest.raises(AddressTaken, match="home = ipc"):
        other.listen_local(url)
    with pytest.raises(ConfigError, match="listen"):
        other.listen_tcp("listen", "203.0.113.7", 0)
    with pytest.raises(ConfigError, match="home"):
        other.listen_local("ipc:///no/such/folder/x.ipc")
    other.close()
    listener.close()


@pytest.mark.parametrize("url", ["tcp://nonsense", "tcp://127.0.0.1:80/x", "", "smoke://signal"])
def test_what_nng_cannot_dial_is_an_error_that_names_it(url: str) -> None:
    """And leaves no descriptor behind."""
    with pytest.raises(UnusableAddress):
        Dialer(url)  # The first socket of a process opens what nng keeps for all of them.
    before = files_open()

    for _ in range(5):
        with pytest.raises(UnusableAddress):
            Dialer(url)

    wait_until(lambda: files_open() <= before)


def test_an_ended_connection_is_reported_and_leaves_no_entry(tmp_path: Path) -> None:
    """Also if its messages are read only afterwards; the reader learns that it is gone."""

    def story(pace_s: float) -> tuple[Listener, int, tuple[int, bytes] | None]:
        listener, url, ended = listening(tmp_path)
        caller = Dialer(url)
        caller.send(b"last words")
        wait_until(lambda: len(listener.pipes()) == 1)
        # Through the kernel: only nng knows of the message so far.
        time.sleep(pace_s)
        caller.close()
        wait_until(lambda: len(ended) == 1)
        return listener, ended[0], listener.receive_now()

    listener, pipe, message = paced(story, lambda reported: reported[2] is not None)

    assert message == (pipe, b"last words")
    assert not listener.is_open(pipe)
    assert not listener.reply(pipe, b"too late")
    assert len(listener.pipes()) == 0
    listener.close()


def test_a_listener_may_hang_up(tmp_path: Path) -> None:
    """The caller's nng dials again by itself."""
    listener, url, ended = listening(tmp_path)
    facts: list[str] = []
    caller = Dialer(
        url,
        on_connected=lambda: facts.append("connected"),
        on_removed=lambda: facts.append("removed"),
    )
    caller.send(b"a")
    pipe, _ = taken(listener)

    listener.disconnect(pipe)

    # nng reports an end and the next connection on threads of their own.
    wait_until(lambda: sorted(facts)[:3] == ["connected", "connected", "removed"])
    assert ended == [pipe]
    listener.disconnect(pipe)
    caller.close()
    listener.close()


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_what_is_no_nng_at_all_leaves_the_listener_alive(tmp_path: Path, raw: bytes) -> None:
    """Port scanners, browsers, garbage."""
    listener, url, _ = listening(tmp_path)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(local_path(url))
        stranger.sendall(raw)
    caller = Dialer(url)
    caller.send(b"still there?")

    assert taken(listener)[1] == b"still there?"
    caller.close()
    listener.close()


def test_messages_of_no_bytes_are_messages(tmp_path: Path) -> None:
    """No correct peer sends one; a wrong one must not raise here."""
    listener, url, _ = listening(tmp_path)
    caller = Dialer(url)

    caller.send(b"")
    pipe, raw = taken(listener)
    listener.reply(pipe, b"")

    assert raw == b""
    assert received(caller) == b""
    caller.close()
    listener.close()


def test_a_buffer_that_is_full_is_reported() -> None:
    """It never blocks; the outbox above it waits and counts."""
    caller = Dialer("tcp://127.0.0.1:1")

    taken_in = 0
    while caller.send(b"x"):
        taken_in += 1
        assert taken_in < 1000

    assert taken_in > 0
    caller.close()
    caller.close()
    assert caller.receive() is None


def test_reached_distinguishes_the_three_cases(tmp_path: Path) -> None:
    """A listener, none, or no answer in time."""
    listener, url, _ = listening(tmp_path)
    with socket.socket(socket.AF_UNIX) as mute, socket.socket(socket.AF_UNIX) as dead:
        mute.bind(f"{tmp_path}/mute")
        mute.listen()
        dead.bind(f"{tmp_path}/dead")
        began = time.monotonic()

        assert reached(url, TIMEOUT_S) is True
        assert reached(f"ipc://{tmp_path}/dead", TIMEOUT_S) is False
        assert reached(f"ipc://{tmp_path}/none", TIMEOUT_S) is False
        assert reached("tcp://127.0.0.1:1", TIMEOUT_S) is False
        assert reached("tcp://nonsense", TIMEOUT_S) is False
        assert reached(f"ipc://{tmp_path}/mute", 0.05) is None
        assert reached("tcp://no-such-host.invalid:9", 0.05) is None
        assert reached("inproc://x", 0.05) is None
    assert_within(time.monotonic() - began, PROMPT_S)
    listener.close()


def serve_greeting(folder: Path, answer: bytes | None) -> tuple[socket.socket, str]:
    """Listen at a path as another program does: silent, or with an answer of its own."""
    listener = socket.socket(socket.AF_UNIX)
    path = f"{folder}/other{len(list(folder.iterdir()))}"
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        with suppress(OSError):
            while answer is not None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return listener, f"ipc://{path}"


def test_a_dead_socket_makes_room(tmp_path: Path) -> None:
    """The address is the same after a restart, however the last node ended."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead")

    remove_dead_socket(f"ipc://{tmp_path}/dead", Sharing.of())
    remove_dead_socket(f"ipc://{tmp_path}/none", Sharing.of())

    assert not list(tmp_path.iterdir())


def test_a_socket_at_which_something_listens_is_never_removed(tmp_path: Path) -> None:
    """Not a node's, not one of a node that is stopped, and no other program's."""
    listener, node, _ = listening(tmp_path)
    stopped, mute = serve_greeting(tmp_path, None)
    other, docker = serve_greeting(tmp_path, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log, stopped, other:
        log.bind(f"{tmp_path}/log")
        inodes = {path: path.stat().st_ino for path in tmp_path.iterdir()}

        for url in (node, mute):
            with pytest.raises(AddressTaken, match="home"):
                remove_dead_socket(url, Sharing.of())
        for url in (docker, f"ipc://{tmp_path}/log"):
            with pytest.raises(ConfigError, match="another program listens"):
                remove_dead_socket(url, Sharing.of())

        assert inodes == {path: path.stat().st_ino for path in tmp_path.iterdir()}
    listener.close()


def test_what_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    """A typing error must not delete a file; a link to a dead socket is not ours to follow."""
    (tmp_path / "thesis.txt").write_text("ten years")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead")
    (tmp_path / "link").symlink_to(tmp_path / "dead")

    for name in ("thesis.txt", "link"):
        with pytest.raises(ConfigError, match="no socket"):
            remove_dead_socket(f"ipc://{tmp_path}/{name}", Sharing.of())

    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a socket of another user")
def test_the_dead_socket_of_another_uid_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    os.chown(path, 65_534, -1)

    with pytest.raises(ConfigError, match=r"65534.*share_uids"):
        remove_dead_socket(f"ipc://{path}", Sharing.of())
    assert path.exists()


def test_a_pipe_reports_the_uid_or_the_addresses_of_its_other_end(tmp_path: Path) -> None:
    """The kernel's word: over ipc the uid, over tcp both ends, numeric."""
    listener, url, _ = listening(tmp_path)
    port = listener.listen_tcp("listen", "127.0.0.1", 0)
    port6 = listener.listen_tcp("listen", "::1", 0)
    port_all = listener.listen_tcp("listen", "::", 0)
    callers = [
        Dialer(url),
        Dialer(f"tcp://127.0.0.1:{port}"),
        Dialer(f"tcp://[::1]:{port6}"),
        # Over IPv4 to a socket of IPv6: an operator knows the address without the mapping.
        Dialer(f"tcp://127.0.0.1:{port_all}"),
    ]
    pipes = []
    for caller in callers:
        caller.send(b"x")
        pipes.append(taken(listener)[0])

    assert listener.peer(pipes[0]) == Peer(Transport.IPC, uid=os.geteuid())
    expected = (("127.0.0.1", port), ("::1", port6), ("127.0.0.1", port_all))
    for pipe, (host, bound) in zip(pipes[1:], expected, strict=True):
        peer = listener.peer(pipe)
        assert peer is not None
        assert (peer.transport, peer.uid) == (Transport.TCP, None)
        assert (peer.local, peer.remote[0]) == ((host, bound), host)
        assert uid_of_tcp_peer(peer.local, peer.remote) == os.geteuid()
    assert listener.peer(12345) is None
    for caller in callers:
        caller.close()
    listener.close()


def test_nothing_is_said_to_a_listener_of_another_uid(tmp_path: Path) -> None:
    """The first message of a client holds its secret."""
    listener, url, _ = listening(tmp_path)
    asked: list[int | None] = []

    def refuse(peer: Peer) -> bool:
        asked.append(peer.uid)
        return False

    wary = Dialer(url, accepts=refuse)
    wary.send(b"secret")
    wait_until(lambda: len(asked) > 2)
    # nng dials again and again: a caller that came later is accepted first.
    trusting = Dialer(url, accepts=lambda peer: peer.uid == os.geteuid())
    trusting.send(b"hello")

    assert taken(listener)[1] == b"hello"
    assert listener.receive_now() is None
    assert set(asked) == {os.geteuid()}
    for each in (wary, trusting):
        each.close()
    listener.close()


def test_many_connections_come_and_go_at_once(tmp_path: Path) -> None:
    """No entry of pynng's, no descriptor and no thread is left of two hundred.

    nng loses a descriptor of a socket that is closed in the act of connecting.
    """
    listener, url, ended = listening(tmp_path)

    def come_and_go(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            caller = Dialer(url)
            caller.send(b"x")
            time.sleep(rng.random() * rng.choice([0, 0.0001, 0.001]))
            caller.close()

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(4)]
    before = files_open()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while listener.receive_now() is not None:
        pass

    wait_until(lambda: len(listener.pipes()) == 0)
    wait_until(lambda: files_open() <= before)
    while listener.receive_now() is not None:
        pass
    wait_until(lambda: len(listener.pipes()) == 0)
    assert len(ended) == len(set(ended))
    listener.close()


def test_a_closed_dialer_ends_its_connection_and_dials_no_more(tmp_path: Path) -> None:
    """Its peer learns of the end at once; its descriptors are closed later."""
    listener, url, ended = listening(tmp_path)
    facts: list[str] = []

    def story(_pace_s: float) -> float:
        ended.clear()
        caller = Dialer(url, on_removed=lambda: facts.append("removed"))
        caller.send(b"x")
        taken(listener)
        open_before = files_open()
        caller.close()
        took_s = wait_until(lambda: ended)
        wait_until(lambda: files_open() < open_before - 2)
        return took_s

    assert paced(story, lambda took_s: took_s < CLOSE_AFTER_S / 2) < CLOSE_AFTER_S / 2
    assert (len(ended), listener.pipes(), facts) == (1, [], [])
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_that_is_made_after_the_close_is_ended(host: str) -> None:
    """Without a callback: nng was still dialling when it was closed."""
    facts: list[str] = []
    with socket.create_server((host, 0), family=FAMILIES[host]) as server:
        server.settimeout(TIMEOUT_S)
        address = format_address(host, server.getsockname()[1])
        caller = Dialer(
            f"tcp://{address}",
            on_connected=lambda: facts.append("connected"),
            on_removed=lambda: facts.append("removed"),
        )
        caller.send(b"waits for the connection")
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            caller.close()
            connection.sendall(PAIR1_GREETING)
            received = b"".join(iter(lambda: connection.recv(100), b""))

    assert received == PAIR1_GREETING
    assert facts == []


CLOSE_DIALERS = """
import random, sys, threading, time
from peercache.net.sockets import Dialer

def dial(seed):
    rng = random.Random(seed)
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        dialer = Dialer("tcp://127.0.0.1:9", waits_to_send=False)
        time.sleep(rng.random() * rng.choice([0, 0.0001, 0.0004, 0.001, 0.1]))
        dialer.close()

threads = [threading.Thread(target=dial, args=(seed,)) for seed in range(6)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""

END_PIPES = """
import random, socket, struct, sys, threading, time
from contextlib import suppress
from peercache.net.sockets import PAIR1_GREETING, Listener

listener = Listener(on_removed=lambda pipe: None)
port = listener.listen_tcp("listen", "127.0.0.1", 0)
until = time.monotonic() + float(sys.argv[1])
hops, body = 1, b"x" * 64
message = struct.pack(">QI", 4 + len(body), hops) + body

def send(seed):
    rng = random.Random(seed)
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.sendall(PAIR1_GREETING)
            connection.recv(len(PAIR1_GREETING))
            while time.monotonic() < until:
                connection.sendall(message * rng.randint(1, 20))
                time.sleep(rng.random() * rng.choice([0, 0.001]))

threads = [threading.Thread(target=send, args=(seed,)) for seed in range(8)]
for each in threads:
    each.start()
rng = random.Random(8)
while time.monotonic() < until:
    for pipe in listener.pipes():
        listener.disconnect(pipe)
    while listener.receive_now() is not None:
        pass
    time.sleep(rng.choice([0, 0.00001, 0.0001]))
for each in threads:
    each.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [CLOSE_DIALERS, END_PIPES], ids=["dialers", "pipes"])
def test_connections_are_ended_at_any_moment_of_their_beginning(program: str) -> None:
    """In some of these moments nng 1.11 would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", program, "60"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
