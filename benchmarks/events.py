"""`python -m benchmarks.events`: the processor time for publishing what a node holds.

In one process and in turns, medians of rounds:

    commit_us     a publisher handles a commit of 32 pages and the drop of 32 others; no followers
    followed_us the same with one follower, and each 10 ms of a node with 50,000 changes a second
    its request, and the encoded answer; without sockets node_us the difference for each change, and
    node_core: of a core at 50,000 a second reader_us the follower's side for each change: decode,
    and apply to an index blocks_us `BlockPublisher`, vLLM's format: each event of a block of 16
    tokens, from `publish` until it is sent to one reader, all threads of the publisher's process,
    and blocks_core: of a core at 10,000 a second
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import PagesCommitted, RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher.actor import Publisher
from peercache.events.blocks import BlockStored
from peercache.events.following import Index, NodeFollower
from peercache.events.publishing import BlockPublisher
from peercache.model.hash_ring import HashRing
from peercache.model.records import DROP, RECORD, RESIDENT, Records
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import ReportChanges

ME = 5
BATCH = 32
CHANGES_A_SECOND = 50_000
BLOCKS_A_SECOND = 10_000
ANSWERS_A_SECOND = 100
POOL_PAGES = 20_000
BATCHES_A_ROUND = 400
CLUSTER = "benchmark"
CLIENT, ROUTER = Origin(9, 1), Origin(10, 2)

READER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
print("ready", flush=True)
while True:
    socket.recv_multipart()
"""


def main() -> None:
    """Measure in one run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    found = measured(chosen.rounds)
    if chosen.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value:10,.3f}")


def measured(rounds: int) -> dict[str, float]:
    """Return the figures, in microseconds and parts of a core."""
    alone, followed = Node(is_followed=False), Node(is_followed=True)
    found: dict[str, list[float]] = {name: [] for name in ("commit", "followed", "reader")}
    for _ in range(rounds):
        found["commit"].append(alone.run() / BATCHES_A_ROUND)
        found["followed"].append(followed.run() / BATCHES_A_ROUND)
        found["reader"].append(followed.read())
    assert len(followed.index) == POOL_PAGES, "the index is not what the node holds"
    commit, with_follower, reader = (
        1e6 * statistics.median(found[name]) for name in ("commit", "followed", "reader")
    )
    node_us = (with_follower - commit) / (2 * BATCH)
    blocks_us = 1e6 * statistics.median(blocks_s() for _ in range(max(1, rounds // 5)))
    return {
        "commit_us": commit,
        "followed_us": with_follower,
        "node_us": node_us,
        "node_core": node_us * CHANGES_A_SECOND / 1e6,
        "reader_us": reader,
        "blocks_us": blocks_us,
        "blocks_core": blocks_us * BLOCKS_A_SECOND / 1e6,
    }


class Node:
    """A publisher that has no peers, and holds the last POOL_PAGES pages of an endless stream."""

    def __init__(self, *, is_followed: bool) -> None:
        self.publisher = Publisher(
            incarnation=ME,
            republish_rate=50_000.0,
            summary_s=2.0,
            rng=random.Random(1),  # noqa: S311 - a benchmark needs the same numbers each time
        )
        self.publisher.on_message(
            Origin(ME), RingChanged(HashRing([ME], virtual_nodes=16, replicas=2)), 0.0
        )
        self.now, self.generation = 0.0, 2
        self.rng = np.random.default_rng(1)
        self.batches: list[Records] = []
        self.is_followed = is_followed
        self.follower, self.index = NodeFollower("n:1"), Index()
        self.raw: list[bytes] = []
        for _ in range(POOL_PAGES // BATCH):
            self.store(self.new_records())
        while is_followed and (batch := self.follower.take(self.receive())) is not None:
            self.index.apply(batch)

    def new_records(self) -> Records:
        records = np.zeros(BATCH, RECORD)
        records["key"] = np.frombuffer(self.rng.bytes(16 * BATCH), "V16")
        records["holder"], records["flags"], records["length"] = ME, RESIDENT, 131_072
        records["generation"] = np.arange(self.generation, self.generation + 2 * BATCH, 2)
        self.generation += 2 * BATCH
        return records

    def store(self, records: Records) -> None:
        self.batches.append(records)
        empty = np.zeros(0, RECORD)
        committed = PagesCommitted(CLIENT, 1, 1, b"", records, empty, 1.0)
        self.publisher.on_message(Origin(ME), committed, self.now)

    def receive(self) -> ReportChanges:
        """Send a request, and return the decoded answer."""
        question = self.follower.question(0.0)
        effects = self.publisher.on_message(ROUTER, question, self.now)
        message = decode(self.encoded(effects), cluster=CLUSTER).message
        assert isinstance(message, ReportChanges)
        return message

    def encoded(self, effects: list[Effect]) -> bytes:
        (effect,) = effects
        assert isinstance(effect, Send)
        return encode(Envelope(ME, ROUTER.identity, effect.message), cluster=CLUSTER)

    def run(self) -> float:
        """Return the seconds of one round: stores, drops, and answers each 10 ms of the node."""
        steps = [(self.new_records(), drops_of(self.batches[at])) for at in range(BATCHES_A_ROUND)]
        del self.batches[:BATCHES_A_ROUND]
        no_records = np.zeros(0, RECORD)
        each = CHANGES_A_SECOND // ANSWERS_A_SECOND // (2 * BATCH)
        after, row = self.follower.question(0.0).after, self.follower.question(0.0).row
        self.raw = []
        started = time.thread_time()
        for at, (records, drops) in enumerate(steps, 1):
            self.now += 2 * BATCH / CHANGES_A_SECOND
            self.store(records)
            self.publisher.on_message(ROUTER, RecordsChanged(no_records, drops), self.now)
            if self.is_followed and (at % each == 0 or at == BATCHES_A_ROUND):
                question = type(self.follower.question(0.0))(1, ME, after, row, 0.0)
                effects = self.publisher.on_message(ROUTER, question, self.now)
                self.raw.append(self.encoded(effects))
                after = effects[0].message.after  # type: ignore[union-attr]
        return time.thread_time() - started

    def read(self) -> float:
        """Return the reader's seconds for each change of the last round."""
        count, started = 0, time.thread_time()
        for raw in self.raw:
            reply = decode(raw, cluster=CLUSTER).message
            assert isinstance(reply, ReportChanges)
            batch = self.follower.take(reply)
            assert batch is not None, "each answer reports something"
            self.index.apply(batch)
            count += len(batch.changes)
        return (time.thread_time() - started) / count


def drops_of(records: Records) -> Records:
    """Return the drops of these records."""
    drops = np.zeros(len(records), DROP)
    drops["key"], drops["generation"] = records["key"], records["generation"]
    return drops


def blocks_s(seconds: float = 2.0) -> float:
    """Return the processor seconds of one event in vLLM's format, at 10,000 a second."""
    numbers = iter_numbers()
    with closing(BlockPublisher("tcp://127.0.0.1:*")) as publisher:
        command = [sys.executable, "-c", READER, publisher.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:  # noqa: S603 - our own
            try:
                assert reader.stdout is not None
                reader.stdout.readline()
                started, before = time.monotonic(), time.process_time()
                sent = publisher.figures().events
                count = 0
                while (passed := time.monotonic() - started) < seconds:
                    due = int(passed * BLOCKS_A_SECOND) - count
                    events = [stored(next(numbers)) for _ in range(due)]
                    publisher.publish(events)
                    count += due
                    time.sleep(0.01)
                while publisher.figures().events - sent < count:
                    time.sleep(0.01)
                return (time.process_time() - before) / count
            finally:
                reader.kill()


def stored(number: int) -> BlockStored:
    """Return one block of 16 tokens."""
    return BlockStored((number,), number - 1, tuple(range(number, number + 16)), 16, medium="CPU")


def iter_numbers() -> Iterator[int]:
    """Yield numbers of blocks."""
    number = 2**31
    while True:
        number += 1
        yield number


if __name__ == "__main__":
    main()
