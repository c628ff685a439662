"""Peers that were admitted, and whose messages make no sense: the node lives, pages stay right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peercache.fabric.tcp import wire as tcp_wire
from peercache.memory.client_lock import ClientLock
from peercache.model.keys import Namespace
from peercache.trust.sharing import Sharing
from peercache.wire.messages.pool import (
    Abort,
    Clear,
    Commit,
    Demote,
    LiveReservations,
    Remove,
    Reserve,
    Retain,
)
from peercache.wire.messages.session import ReportStats, RequestStats
from tests.examples import examples
from tests.hostile.garbage import any_message, conversation, enveloped, hello, mutated, noise
from tests.hostile.strangers import MIB, Caller, Vitals, metric, one_node, ports_of
from tests.hostile.test_live_node import HARMLESS, _empty, assert_well
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, keys_of, pages_of, read

NAMED = (Reserve, Remove, Clear, Retain, Demote)
WRITING = (*NAMED, Commit, Abort, LiveReservations)


@pytest.mark.slow
def test_a_writer_that_sends_false_records_spoils_no_other_page() -> None:
    """Reservations, commits and lists that fit nothing, mixed with some that do."""
    rng, count = random.Random(11), 20_000
    with one_node(pool="8MiB") as (cluster, node):
        home = node.ready["home"]
        honest = cluster.client(node, verify="full")
        lock = ClientLock(home, 4711, Sharing.of())
        with Caller.at(node, "home") as attacker:
            said = hello(
                cluster.name, lock=lock.name, secret=lock.secret, namespace=Namespace().name
            )

            assert attacker.ask(said, sender=4711)
            for step in range(count // 50):
                for _ in range(50):
                    message = any_message(rng, WRITING)
                    if isinstance(message, Reserve | Commit):
                        message = fitting(message, rng)
                    if isinstance(message, NAMED) and rng.random() < 0.8:
                        message = attrs.evolve(message, namespace=Namespace().tag())
                    attacker.say(message, sender=4711)
                _empty(attacker.connection)
                keys = keys_of(f"honest-{step % 7}", 4)
                honest.batch_set(keys, pages_of(keys))
                # A Clear may have taken them: a miss is right, wrong bytes are asserted away.
                read(honest, keys)
            taken = metric(node, "peercache_messages_received")
        lock.release()

        # Its process has exited, as far as the node knows: its reservations end.
        wait_until(lambda: honest.stats()["home_pool_bytes_reserved"] == 0)
        keys = keys_of("after", 4)
        wait_until(lambda: all(honest.batch_set(keys, pages_of(keys))))
        assert read(honest, keys) == [True] * 4
        for kind in WRITING:
            assert taken[kind.__name__] > count // 20, "the attacker was not let in"
        assert_well(node)


def fitting(message: Reserve | Commit, rng: random.Random) -> Reserve | Commit:
    """Return a message whose parts agree with each other, of few sequences, so that some match."""
    count = rng.randrange(5)
    if isinstance(message, Reserve):
        lengths = [rng.choice((0, 1, 16384, 100_000, 2**20, 2**23, 2**32, 2**64 - 1))] * count
        return attrs.evolve(
            message,
            sequence=rng.randrange(50),
            keys=b"".join(bytes([rng.randrange(20)] * 16) for _ in range(count)),
            lengths=b"".join(length.to_bytes(8, "little") for length in lengths),
        )
    return attrs.evolve(
        message,
        sequence=rng.randrange(50),
        written=bytes(rng.randrange(3) for _ in range(count)),
        checksums=rng.randbytes(8 * count),
    )


@pytest.mark.slow
def test_a_node_that_sends_false_records_costs_no_page_its_bytes() -> None:
    """A process that was admitted can lie about members and records; nothing breaks.

    What it may cost is liveness as long as it goes on: who is admitted as a node is believed.
    """
    rng, count = random.Random(12), 30_000
    kinds = HARMLESS
    with one_node() as (cluster, node):
        client = cluster.client(node)
        keys = keys_of("kept", 16)
        assert client.batch_set(keys, pages_of(keys)) == [True] * 16
        for sender in (5, 2**63, 2**64 - 1):
            with Caller.at(node, "control") as attacker:
                attacker.say(hello(cluster.name, is_node=True), sender=sender)
                for _ in range(count // 3):
                    message = any_message(rng, kinds)
                    member = getattr(message, "member", None)
                    if member is not None and rng.random() < 0.8:
                        own = attrs.evolve(member, incarnation=sender, state=rng.choice((0, 3)))
                        message = attrs.evolve(message, member=own)  # type: ignore[call-arg]
                    attacker.say(message, sender=sender)
            read(client, keys)
        time.sleep(1.0)

        assert_well(node)
        wait_until(lambda: read(cluster.client(node), keys) == [True] * 16)
        print(Vitals.of(node), metric(node, "peercache_members"))
        assert Vitals.of(node).rss_bytes < 256 * MIB


@pytest.fixture(scope="module")
def standing() -> Iterator[LocalCluster]:
    """Give a node that lives through every example, and is well after the last."""
    with one_node() as (cluster, node):
        yield cluster
        assert_well(node)


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(st.lists(st.randoms(use_true_random=False), min_size=1, max_size=5))
def test_whatever_is_said_on_any_port_the_next_one_is_answered(
    standing: LocalCluster,
    rngs: list[random.Random],
) -> None:
    """Conversations that Hypothesis can shrink, against a node that lives through all of them."""
    node = standing.nodes[0]
    for rng in rngs:
        port = rng.choice(("control", "home", "data", "http"))
        try:
            with ports_of(node)[port]() as connection:
                connection.sendall(conversation(rng))
            with Caller.at(node, rng.choice(("control", "home"))) as caller:
                message, sender = any_message(rng), rng.getrandbits(64)
                caller.say(message, sender=sender)
                raw = enveloped(message, cluster=standing.name, sender=sender)
                caller.connection.sendall(
                    caller.framed(mutated(raw, rng), hops=rng.getrandbits(32))
                )
            with ports_of(node)["data"]() as connection:
                connection.sendall(
                    tcp_wire.encode_greeting(tcp_wire.Greeting(0, 0, bytes(16)))[:8] + noise(rng)
                )
        except (BrokenPipeError, ConnectionResetError):
            pass  # The node was done with us.

    with Caller.at(node, "home") as honest:
        welcome = honest.ask(hello(standing.name), sender=6)
        stats = honest.ask(RequestStats(8), sender=6)
    assert type(welcome).__name__ == "Welcome"
    assert isinstance(stats, ReportStats)
