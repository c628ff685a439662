"""`python -m benchmarks.overlap`: how long it takes to find out where a prompt of 32k tokens is.

16 nodes hold the prompt, each a longer prefix than the one before. In one process and in turns:

    keys_us       page keys of the prompt's tokens (numpy, pages of 64)
    lookup_us     for comparison: the directory's own Lookup of these keys, which returns 8 holders
    shard_us the overlap if one node owns all records, as on up to 8 hosts nodes_us if 16 hosts own
    them, two each: with real messages. All 16 nodes run on the one thread of this process, one
    after another.
    gpu_us        the same prompt on the GPUs of 16 engines, in blocks of 16 tokens
    rest_us       the whole answer to a JSON question, of shard_us's cluster; without HTTP
    packed_us     the same, with the tokens as base64
    http_us, http_packed_us
                  both over HTTP: from before another process connects to when it has the answer

Medians of processor time, which depends less on other work of the machine; over HTTP of real time.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import trio
from starlette.applications import Starlette

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.content.chain import Chain, in_namespace
from peercache.events.blocks import BlockStored
from peercache.http.prefix import ROOT, PrefixIndex, TokensAsked
from peercache.http.server import serve_http
from peercache.manager.gpu_blocks import GpuBlocks
from peercache.model.hash_ring import HashRing
from peercache.model.keys import Namespace, PageKeys
from peercache.model.member import ALIVE, Member
from peercache.model.records import DROP, RECORD, RESIDENT
from peercache.node.questions import MemberBroker, Overlaps
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import Lookup, Put, ReportOverlap, RequestOverlap

NODES = 16
TOKENS = 32_768
PAGE_TOKENS = 64
BLOCK_TOKENS = 16
PIPE = 3
CLUSTER = "benchmark"


def main() -> None:
    """Measure in one run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=200)
    chosen = parser.parse_args()
    found = trio.run(measured, chosen.rounds)
    if chosen.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value:8,.0f}")


class Cluster:
    """Nodes that own records of each other, and messages between them."""

    def __init__(self, keys: PageKeys, *, owners: int) -> None:
        members = {
            n: Member(n, 1, ALIVE, 255, "host", f"n{n}:1", "d:1", f"h{n}", "")
            for n in range(1, NODES + 1)
        }
        self.ring = HashRing(
            {n: m.boot_id for n, m in members.items()}, virtual_nodes=160, replicas=owners
        )
        self.nodes: dict[int, Overlaps] = {}
        self.brokers: dict[int, MemberBroker] = {}
        self.shards = {n: DirectoryShard(incarnation=n) for n in members}
        owned = self.ring.owners(keys)
        for n, shard in self.shards.items():
            shard.on_message(SELF, ViewChanged(tuple(members.values())), 0.0)
            for holder in members:
                records = np.zeros(len(keys) * holder // NODES, RECORD)
                records["key"], records["holder"] = keys[: len(records)], holder
                records["flags"], records["generation"] = RESIDENT, 2
                if holder == n:
                    shard.on_message(SELF, RecordsChanged(records, np.zeros(0, DROP)), 0.0)
                else:
                    records = records[(owned[: len(records)] == n).any(axis=1)]
                    shard.on_message(Origin(holder), Put(1, records.tobytes()), 0.0)
            self.brokers[n] = MemberBroker(partial(self.perform, n))
            self.nodes[n] = Overlaps(
                shard=shard,
                ring=lambda: self.ring,
                member_of=members.get,
                broker=self.brokers[n],
            )

    def perform(self, sender: int, effect: Effect) -> None:
        """Deliver a message to its node, as bytes."""
        assert isinstance(effect, Send), effect
        target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        raw = encode(Envelope(sender, target, effect.message), cluster=CLUSTER)
        message = decode(raw, cluster=CLUSTER).message
        if isinstance(message, RequestOverlap):
            assert self.nodes[target].ask(Origin(sender, PIPE), message) is None
        else:
            assert isinstance(message, ReportOverlap), message
            self.brokers[target].take(sender, message)


async def measured(rounds: int) -> dict[str, float]:
    """Return the median of each figure, in microseconds."""
    tokens = np.random.default_rng(1).integers(0, 128_000, TOKENS, np.uint32)
    chain, space = Chain("model", "bfloat16", PAGE_TOKENS), Namespace()
    keys = in_namespace(chain.keys(tokens), space.digest())
    alone, spread = Cluster(keys, owners=NODES), Cluster(keys, owners=2)
    gpu = GpuBlocks(f"gpu-{n}" for n in range(NODES))
    for n in range(NODES):
        gpu.begin(f"gpu-{n}")
        held = tokens[: TOKENS * (n + 1) // NODES].tolist()
        hashes = range(len(held) // BLOCK_TOKENS)
        gpu.store(f"gpu-{n}", BlockStored(tuple(hashes), None, tuple(held), BLOCK_TOKENS))
    lookup, packed = Lookup(1, keys.tobytes()), Origin(99, PIPE)
    index = PrefixIndex(overlap=alone.nodes[1].overlap, named=str, gpu=GpuBlocks(()))
    facts = {"model": "model", "dtype": "bfloat16", "page_tokens": 64}
    listed = json.dumps({"tokens": tokens.tolist(), **facts}).encode()
    text = base64.b64encode(tokens.astype("<u4").tobytes()).decode()
    packed_up = json.dumps({"tokens": text, **facts}).encode()

    async def rest(body: bytes) -> None:
        asked = msgspec.json.decode(body, type=TokensAsked)
        msgspec.json.encode(await index._of_tokens(asked))  # noqa: SLF001 - without HTTP

    def now(call: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
        async def called() -> Any:
            return call()

        return called

    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "keys_us": now(lambda: in_namespace(chain.keys(tokens), space.digest())),
        "lookup_us": now(lambda: alone.shards[1].on_message(packed, lookup, 0.0)),
        "shard_us": partial(alone.nodes[1].overlap, keys),
        "nodes_us": partial(spread.nodes[1].overlap, keys),
        "gpu_us": now(lambda: gpu.find(tokens)),
        "rest_us": partial(rest, listed),
        "packed_us": partial(rest, packed_up),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    async with trio.open_nursery() as nursery:
        for broker in (*alone.brokers.values(), *spread.brokers.values()):
            nursery.start_soon(broker.run)
        await trio.lowlevel.checkpoint()
        for cluster in (alone, spread):
            reply = await cluster.nodes[1].overlap(keys)
            runs = dict(zip(reply.holders, reply.run().tolist(), strict=True))
            assert runs == {n: len(keys) * n // NODES for n in range(1, NODES + 1)}, runs
            assert reply.whole
        for _ in range(rounds):
            for name, call in calls.items():
                begun = time.thread_time()
                await call()
                took[name].append(time.thread_time() - begun)
        took["http_us"] = await over_http(index, listed, rounds)
        took["http_packed_us"] = await over_http(index, packed_up, rounds)
        nursery.cancel_scope.cancel()
    return {name: statistics.median(each) * 1e6 for name, each in took.items()}


async def over_http(index: PrefixIndex, body: bytes, rounds: int) -> list[float]:
    """Serve the index like a node, without access checks; return the time of each answer."""
    access: Any = SimpleNamespace(ssl_context=None, refusal=lambda *_: "")
    application = Starlette(routes=index.routes())
    serve = partial(serve_http, "127.0.0.1", 0, application=application, access=access)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        async with trio.open_nursery() as nursery:
            asking = pool.submit(ask_often, await nursery.start(serve), body, rounds)
            took = await trio.to_thread.run_sync(asking.result)
            nursery.cancel_scope.cancel()
    return took


def ask_often(address: str, body: bytes, rounds: int) -> list[float]:
    """Return the seconds of each answer."""
    host, port = address.rsplit(":", 1)
    head = f"POST {ROOT}/tokens HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n"
    raw = f"{head}content-type: application/json\r\n\r\n".encode() + body
    took = []
    for _ in range(rounds):
        begun = time.perf_counter()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(raw)
            answer = b"".join(iter(partial(connection.recv, 2**16), b""))
        took.append(time.perf_counter() - begun)
        reply = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (reply["stored_tokens"], len(reply["nodes"])) == (TOKENS, NODES), reply
    return took


if __name__ == "__main__":
    main()
