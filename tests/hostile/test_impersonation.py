"""Peers that claim to be another one, without certificates: over tcp, and as another user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from peercache.actors.mailboxes import TAKER
from peercache.memory.client_lock import ClientLock, folder_of
from peercache.model.keys import Namespace
from peercache.trust.sharing import Sharing
from peercache.wire.codec import decode
from peercache.wire.messages.pool import Clear, Commit, LiveReservations
from peercache.wire.messages.session import HelloRequired, Refused, Welcome
from tests.hostile.garbage import enveloped, hello
from tests.hostile.strangers import Caller, metric, one_node
from tests.system.nodes import LocalCluster, keys_of, pages_of, read

SPACE = Namespace()


@pytest.mark.parametrize("knows_secret", [False, True], ids=["its id only", "its secret too"])
def test_no_peer_over_tcp_writes_in_a_clients_name(knows_secret: bool) -> None:
    """A client's id is in its messages: it used to be enough to end and commit its reservations."""
    with one_node() as (cluster, node):
        victim = cluster.client(node)
        (file,) = folder_of(node.ready["home"]).glob("*.lock")
        identity = int(file.stem, 16)
        secret = file.read_bytes() if knows_secret else b""

        with Caller.at(node, "control") as attacker:
            claim = hello(cluster.name, lock=file.name, secret=secret)
            refused = attacker.ask(claim, sender=identity)
            assert isinstance(refused, Refused)
            assert refused.reason == "transport"
            for message in (
                LiveReservations(2**63, ()),
                Commit(2, 1, b"\1", bytes(8), 0.0),
                Clear(3, SPACE.tag()),
            ):
                answer = attacker.ask(message, sender=identity)
                assert isinstance(answer, HelloRequired)

        keys = keys_of("victim", 8)
        assert victim.batch_set(keys, pages_of(keys)) == [True] * 8
        assert read(victim, keys) == [True] * 8


def test_a_process_of_this_host_needs_the_secret_of_the_client_that_it_claims_to_be() -> None:
    """Over the home address, too: the lock's name follows from the id."""
    with one_node() as (cluster, node):
        lock = ClientLock(node.ready["home"], 4711, Sharing.of())
        with Caller.at(node, "home") as attacker:
            for secret in (b"", bytes(32)):
                claim = hello(cluster.name, lock=lock.name, secret=secret)
                refused = attacker.ask(claim, sender=4711)
                assert isinstance(refused, Refused)
                assert refused.reason == "secret"
            claim = hello(cluster.name, lock=lock.name, secret=lock.secret)
            assert isinstance(attacker.ask(claim, sender=4711), Welcome)
        lock.release()


def test_a_process_of_this_host_is_none_of_the_nodes_own_actors() -> None:
    """It would end the reservations into which a thread of the node reads pages of others."""
    with one_node() as (cluster, node):
        lock = ClientLock(node.ready["home"], TAKER.identity, Sharing.of())
        with Caller.at(node, "home") as attacker:
            claim = hello(cluster.name, lock=lock.name, secret=lock.secret)
            refused = attacker.ask(claim, sender=TAKER.identity)
            assert isinstance(refused, Refused)
            assert refused.reason == "identity"
            answer = attacker.ask(LiveReservations(2**63, ()), sender=TAKER.identity)
            assert isinstance(answer, HelloRequired)
        lock.release()


def test_one_hello_locks_no_namespace_out_and_clears_none() -> None:
    """A reader may claim any geometry; it changes nothing for the writers of the node."""
    with one_node() as (cluster, node):
        with Caller.at(node, "control") as reader:
            claim = hello(cluster.name, namespace=SPACE.name, geometry="evil")
            assert isinstance(reader.ask(claim, sender=5), Welcome)
            writer = cluster.client(node, namespace=SPACE)
            keys = keys_of("open", 8)
            assert writer.batch_set(keys, pages_of(keys)) == [True] * 8

            refused = reader.ask(Clear(9, SPACE.tag()), sender=5)

        assert isinstance(refused, Refused)
        assert (refused.request, refused.reason) == (9, "role")
        assert read(writer, keys) == [True] * 8
        assert metric(node, "peercache_messages_dropped")["not_allowed"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_process_of_another_user_is_refused_on_loopback() -> None:
    """Without certificates the kernel's socket tables say whose connection it is."""
    script = (
        "import encodings.idna, os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "host, _, port = sys.argv[1].rpartition(':')\n"
        "s = socket.create_connection((host, int(port)), 20)\n"
        "s.sendall(bytes.fromhex(sys.argv[2]))\n"
        "def take(n):\n"
        "    got = b''\n"
        "    while len(got) < n: got += s.recv(n - len(got)) or sys.exit('closed')\n"
        "    return got\n"
        "take(8); print(take(int.from_bytes(take(8), 'big'))[4:].hex())\n"
    )
    with one_node() as (cluster, node):
        framed = Caller(None, is_local=False).framed(  # type: ignore[arg-type]
            enveloped(hello(cluster.name), cluster=cluster.name, sender=5)
        )
        said = b"\0SP\0\0\x11\0\0" + framed
        reported = subprocess.run(
            [sys.executable, "-c", script, node.ready["control"], said.hex()],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        answer = decode(bytes.fromhex(reported.stdout), cluster=cluster.name).message

        assert isinstance(answer, Refused), answer
        assert answer.reason == "owner"
        assert "share_uids = 65534" in answer.detail
        assert metric(node, "peercache_messages_dropped")["owner"] == 1


@pytest.mark.slow
def test_clear_empties_every_host_and_names_the_ones_that_did_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The home node forwards it; a member that is stopped is named, and its pages may stay."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(3)
        clients = [cluster.client(node, op_timeout_s=4.0) for node in nodes]
        for turn, client in enumerate(clients):
            keys = keys_of(f"host {turn}", 4)
            assert client.batch_set(keys, pages_of(keys)) == [True] * 4

        assert clients[0].clear() == 12

        assert [stored(client) for client in clients] == [0, 0, 0]
        keys = keys_of("again", 4)
        assert clients[1].batch_set(keys, pages_of(keys)) == [True] * 4
        nodes[2].pause()
        assert clients[0].clear() == 4
        nodes[2].resume()
        assert "client.removal_incomplete" in caplog.text
        assert nodes[2].ready["control"] in caplog.text


def stored(client: object) -> object:
    """Return how many pages the home node of a client holds."""
    return client.stats()["home_pool_pages"]  # type: ignore[attr-defined]
