"""A member that reports thousands of others: they cost little, and count for nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from pathlib import Path

import attrs
import pynng
import pytest

from peercache.model.ids import incarnation_of
from peercache.model.member import ALIVE, Member
from peercache.wire.codec import decode
from peercache.wire.envelope import WIRE_VERSION
from peercache.wire.messages.membership import Join, ShareView
from peercache.wire.messages.session import Hello, Welcome
from tests.hostile.garbage import enveloped, hello
from tests.hostile.strangers import Caller, Vitals, one_node
from tests.pace import wait_until
from tests.system.nodes import NodeProcess

INVENTED = 4000
PART = 500
WORST_S = 0.1
DESCRIPTORS_MAX = 200
WATCHED_S = 4.0
"""Each address is tried for a second, and four rounds of them look as all others do."""


def invented(number: int, cluster: str) -> Member:
    """Return a member that does not exist, at an address where no process listens."""
    nonce = number.to_bytes(16, "little")
    incarnation = incarnation_of(cluster, "", nonce)
    address = f"127.9.{number >> 8}.{number & 255}:{20_000 + number}"
    return Member(
        incarnation, 1, ALIVE, 255, f"h{number}", address, "", "", "", name="", nonce=nonce
    )


def loop_s(node: NodeProcess) -> float:
    """Return how long the thread of a node's loop has worked, in seconds of its own."""
    ran_ns, *_ = Path(f"/proc/{node.process.pid}/schedstat").read_text(encoding="ascii").split()
    return int(ran_ns) / 1e9


class Answering:
    """A process that answers each Hello as the member that it claims to be, and nothing else."""

    def __init__(self, cluster: str) -> None:
        """Listen on a port of its own."""
        self._socket = pynng.Pair1(polyamorous=True, recv_timeout=100)
        self._socket.listen("tcp://127.0.0.1:0")
        port = self._socket.listeners[0].local_address.port
        number = int.from_bytes(port.to_bytes(2, "little"), "big")
        self.member = attrs.evolve(invented(1, cluster), control=f"127.0.0.1:{number}")
        self._cluster = cluster
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(pynng.Timeout):
                received = self._socket.recv_msg()
                if isinstance(decode(received.bytes, cluster=self._cluster).message, Hello):
                    welcome = Welcome(0, WIRE_VERSION, self.member, 0)
                    sender = self.member.incarnation
                    raw = enveloped(welcome, cluster=self._cluster, sender=sender)
                    self._socket.send_msg(pynng.Message(raw, received.pipe))

    def close(self) -> None:
        """End."""
        self._ends.set()
        self._thread.join()
        self._socket.close()


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["stranger", "member"])
def test_four_thousand_invented_members_stop_no_node(answers: bool) -> None:
    """The worst answer costs the loop less than 0.1 s, and a few addresses are tried at a time."""
    with (
        one_node() as (cluster, node),
        Caller.at(node, "control") as attacker,
        contextlib.ExitStack() as stack,
    ):
        name = cluster.name
        own = invented(1, name)
        if answers:
            answering = Answering(name)
            stack.callback(answering.close)
            own = answering.member
        reported = [invented(number, name) for number in range(2, INVENTED)]

        say = partial(attacker.say, sender=own.incarnation)
        say(hello(name, is_node=True, nonce=own.nonce))
        assert isinstance(attacker.answer(), Welcome)
        say(Join(own))
        with cluster.client(node) as client:
            if answers:
                wait_until(lambda: client.stats().get("home_members_alive") == 2)
            for begin in range(0, len(reported), PART):
                say(ShareView(0, (own, *reported[begin : begin + PART])))
            waits: list[float] = []
            worked: list[float] = []
            descriptors = 0
            ends = time.monotonic() + WATCHED_S
            while time.monotonic() < ends:
                began, busy_s = time.monotonic(), loop_s(node)
                stats = client.stats()
                waits.append(time.monotonic() - began)
                worked.append(loop_s(node) - busy_s)
                descriptors = max(descriptors, Vitals.of(node).descriptors)
                time.sleep(0.02)

            assert int(stats["home_members_alive"]) <= 1 + answers
        # By the loop's own time: on a busy machine answers are late whatever the node does.
        assert max(worked) < WORST_S
        assert max(waits) < 10 * WORST_S
        assert descriptors < DESCRIPTORS_MAX
