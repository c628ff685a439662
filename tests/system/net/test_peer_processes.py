"""Peers that are killed, stopped or forked from: the caller notices, in time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.net.breaker import STALL_S
from peercache.wire.messages.directory import Located
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within
from tests.system.nodes import pause
from tests.unit.net.peers import Asking

ROOT = Path(__file__).parents[3]

# The deadlines below are of a peer that has stalled.
pytestmark = pytest.mark.usefixtures("stalls")


@contextmanager
def peer_process(kind: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.net.peer_process", kind, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_killed_peer_is_noticed_at_once(kind: str, tmp_path: Path) -> None:
    """In the middle of a question, long before its deadline; and it is not asked again."""
    with peer_process(kind, tmp_path) as (process, url), Asking({7: url}) as client:
        assert isinstance(client.ask(7)[0], Located)
        pause(process)
        threading.Timer(0.1, process.kill).start()
        began = time.monotonic()

        answers = client.ask(7, timeout_s=TIMEOUT_S)
        noticed_s = time.monotonic() - began
        again = client.ask(7, timeout_s=TIMEOUT_S)
        again_s = time.monotonic() - began - noticed_s

    assert answers == [None]
    assert again == [None]
    assert_within(noticed_s, PROMPT_S)
    assert_within(again_s, PROMPT_S)
    assert client.breakers.is_open(7)


DIAL_OFTEN = """
import os, resource, sys
from peercache.net.sockets import Dialer

limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
most = 0
for _ in range(limit):
    dialer = Dialer(sys.argv[1], waits_to_send=False)
    most = max(most, len(os.listdir("/proc/self/fd")))
    dialer.close()
print(most)
"""


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_closed_connections_leave_descriptors_to_the_next_ones(kind: str, tmp_path: Path) -> None:
    """Where a process may open few files, too: one connection at a time always succeeds."""
    limit = 256
    with peer_process(kind, tmp_path) as (_, url):
        words = [sys.executable, "-c", DIAL_OFTEN, url, str(limit)]
        most = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)

    assert int(most.stdout) < limit / 2


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_stopped_peer_costs_its_deadline_and_comes_back(kind: str, tmp_path: Path) -> None:
    """On old connections and new ones; late answers confuse no client."""
    with peer_process(kind, tmp_path) as (process, url), Asking({7: url}) as client:
        assert isinstance(client.ask(7)[0], Located)
        pause(process)
        began = time.monotonic()
        old = client.ask(7, timeout_s=2 * STALL_S)
        old_s = time.monotonic() - began
        client.asker.forget(set())
        new = client.ask(7, timeout_s=2 * STALL_S)
        new_s = time.monotonic() - began - old_s
        was_open = client.breakers.is_open(7)
        process.send_signal(signal.SIGCONT)
        after = client.ask(7)

    assert (old, new) == ([None], [None])
    assert_within(max(old_s, new_s), PROMPT_S)
    assert was_open
    assert isinstance(after[0], Located)
    assert not client.breakers.is_open(7)


FORKED = """
import gc, os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.unit.net.peers import Asking, Peer
from peercache.errors import InvalidRequest
from peercache.wire.messages.directory import Located
from peercache.net.sockets import Dialer

def main():
    peer = Peer("ipc", Path(sys.argv[2]))
    client = Asking({7: peer.url})
    dialer = Dialer(peer.url)
    assert isinstance(client.ask(7)[0], Located)
    child = os.fork()
    if not child:
        try:
            Dialer(peer.url)
        except InvalidRequest:
            pass
        else:
            os._exit(3)
        dialer.close()
        client.asker.close()
        peer.listener.close()
        del dialer, client, peer
        gc.collect()
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    # The child has closed nothing of ours.
    assert isinstance(client.ask(7)[0], Located)
    print("child", status, flush=True)

main()
"""


NEVER_CLOSES = FORKED[: FORKED.index("    child = os.fork()")] + "main()\n"


@pytest.mark.parametrize(("program", "printed"), [(FORKED, "child 0\n"), (NEVER_CLOSES, "")])
def test_a_process_exits_though_it_forks_or_never_closes(
    tmp_path: Path, program: str, printed: str
) -> None:
    """The threads of nng do not exist in a child: what waits for them would wait forever."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), str(tmp_path)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
