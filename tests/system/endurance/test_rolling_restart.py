"""Five nodes are restarted in turn, under load, at the addresses that they had."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from peercache import Client
from tests.pace import PROMPT_S, TIMEOUT_S, wait_until
from tests.system.endurance.load import Corpus, Load, Reader
from tests.system.nodes import LocalCluster, NodeProcess, keys_of, pages_of

NODES = 5
PAGE_BYTES = 32 * 1024
KEYS_EACH = 48
BATCH = 16
ATTACHED_WITHIN_S = PROMPT_S
"""From the new node's ready line to its client's first stored page, on a machine that is slow."""
PROMISED_S = 5.0
"""The same at its best."""
MEMBERS_WITHIN_S = TIMEOUT_S
BETWEEN_S = 2.0
HIT_RATE_MIN = 0.5
"""Four fifths of the pages are always there; the rest is as long away as it takes to write them."""


def restarted(cluster: LocalCluster, place: int) -> NodeProcess:
    """Stop a node as an operator does, and start its successor at the same addresses."""
    old, other = cluster.nodes[place], cluster.nodes[(place + 1) % NODES]
    assert old.terminate() == 0, old.said()
    new = cluster.start(
        f"n{place}",
        flags=(
            "--listen", old.ready["control"],
            "--data-port", old.ready["data"].rpartition(":")[2],
            "--discovery-addr", other.ready["control"],
        ),
    )  # fmt: skip
    # `start` has put it last; its place is that of the one before it.
    cluster.nodes.remove(new)
    cluster.nodes[place] = new
    old.end()
    return new


def stores(client: Client, name: str) -> bool:
    """Return whether a client stores a page that no node has."""
    key = keys_of(name, 1)
    return client.batch_set(key, pages_of(key, PAGE_BYTES)) == [True]


@pytest.mark.slow
def test_a_rolling_restart_under_load_gives_no_wrong_byte_and_many_hits() -> None:
    """Every client goes on, attaches to its home's successor in time, reads only right bytes."""
    corpus = Corpus(keys_of("rolling", NODES * KEYS_EACH), PAGE_BYTES)
    with LocalCluster() as cluster:
        nodes = cluster.start_many(NODES)
        load, readers, attached_s = Load(), [], []
        clients = [
            cluster.client(node, fabric=("tcp", "auto")[place % 2])
            for place, node in enumerate(nodes)
        ]
        for place, client in enumerate(clients):
            readers.append(reader := Reader(client, corpus, BATCH))
            load.run(writes_and_reads(reader, place, corpus))

        with load:
            load.last(BETWEEN_S)
            started = time.monotonic()
            for place, client in enumerate(clients):
                successor = restarted(cluster, place)
                name = f"after {successor.ready['node']}"
                attached_s.append(
                    wait_until(
                        lambda client=client, name=name: stores(client, name),
                        "its client stores again",
                        ATTACHED_WITHIN_S,
                    )
                )
                load.last(BETWEEN_S)
                cluster.wait_for_members(successor, NODES, MEMBERS_WITHIN_S)
            took_s = time.monotonic() - started

        pages = sum(reader.counts.pages for reader in readers)
        rate = sum(reader.counts.hits for reader in readers) / pages
        longest_s = max(reader.counts.longest_s for reader in readers)
        print(
            f"{pages} pages read in {took_s:.0f} s, hit rate {rate:.3f}, longest get "
            f"{longest_s:.2f} s; attached again after "
            + ", ".join(f"{seconds:.2f}" for seconds in attached_s)
            + " s"
        )
        assert min(attached_s) < PROMISED_S
        assert rate > HIT_RATE_MIN
        for reader in readers:
            assert reader.counts.hit_rate > HIT_RATE_MIN / 2, "one client was left behind"
        for node in cluster.nodes:
            assert '"error"' not in node.said()


def writes_and_reads(reader: Reader, place: int, corpus: Corpus) -> Callable[[], None]:
    """Return a step that writes its own part of the corpus again, and reads from all of it."""
    rng = random.Random(place)
    own = range(place * KEYS_EACH, (place + 1) * KEYS_EACH)
    turn = 0

    def step() -> None:
        nonlocal turn
        begin = own[turn * BATCH % KEYS_EACH]
        turn += 1
        reader.client.batch_set(
            corpus.keys[begin : begin + BATCH], corpus.pages[begin : begin + BATCH]
        )
        for _ in range(4):
            reader.read(rng.sample(range(len(corpus)), BATCH))
        # Five engines and five nodes share two cores: leave the nodes some.
        time.sleep(0.02)

    return step
