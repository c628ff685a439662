"""`python -m benchmarks.chains`: owners by page key, and by the key of a chain of 64 pages.

A simulation of who is asked where a prompt of 32,000 tokens is, in a cluster of 100 hosts with two
owners of each key. The ring, the search of a client, its cache and the messages are production
code; a dictionary stands for the directory shards, and no message takes time or is lost. The home
node's table is read in memory, as clients do.

`key` is what PeerCache does. `chain` routes each page by the key of page floor(i / 64) * 64 of its
prompt, as if every process knew that key. `cover` is `key` with another order of the two owners of
each page: for each batch as few nodes as a greedy choice finds.

    whole, half, new
                the prompt is stored, its first half, or nothing of it: requests, bytes and round
                trips in batches of 128 pages, as SGLang asks, up to the first that is not whole
    first, put  nodes that are asked for a batch, and to which a set of a batch sends records
    mean, most  requests, keys and processor time of a node for each prompt, on average and of the
                busiest one, for prompts whose homes are random; `shared`: all of them begin with
                the same system prompt of 4,096 tokens
    paused      fraction of prompts that ask one given node at all, which may be paused
    owner_us    processor time of an owner for a question of so many keys, with a real shard
    join        records that change an owner when a node joins, over all; and prompts that have
                such records; records of the fullest owner over the mean
    lost        with `chain`: pages that are not found if writer and reader count from different
                pages of the prompt
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.mailboxes import ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.model.hash_ring import AUTO, HashRing, Places
from peercache.model.keys import KEY, PageKeys
from peercache.model.member import ALIVE, Member
from peercache.model.reads import Looked
from peercache.model.records import RECORD, RESIDENT
from peercache.net.breaker import Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.location_cache import LocationCache
from peercache.paths.lookup import Locator
from peercache.paths.steps import Ask, ReadTable
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import Located, Lookup, Put

HOSTS: Final = 100
TOKENS: Final = 32_000
SYSTEM_TOKENS: Final = 4_096
SYSTEMS: Final = 1
CHAIN_PAGES: Final = 64
BATCH: Final = 128
VIRTUAL_NODES: Final = 160
PROMPTS: Final = 300
RECORDS: Final = 2_000_000
CLUSTER: Final = "benchmark"
SCHEMES: Final = ("key", "cover", "chain")


class ChainRing(HashRing):
    """A ring that finds the owners of a page by the key of the head of its chain."""

    heads: dict[bytes, bytes]

    def arcs(self, keys: PageKeys) -> Places:
        """Return the arc of each key's head; a key without one is its own."""
        found = b"".join(self.heads.get(key, key) for key in keys.tolist())
        return super().arcs(np.frombuffer(found, KEY))


def members_of(count: int) -> dict[int, Member]:
    """Return members, each on a host of its own."""
    return {
        n: Member(n, 1, ALIVE, 255, "host", f"n{n}:1", "d:1", f"h{n}", "")
        for n in range(1, count + 1)
    }


def ring_of(count: int, *, heads: dict[bytes, bytes] | None = None) -> HashRing:
    """Return the ring of so many hosts, with the spare that readers have."""
    hosts = {n: member.boot_id for n, member in members_of(count).items()}
    options: dict[str, Any] = {"virtual_nodes": VIRTUAL_NODES, "replicas": AUTO, "spares": 1}
    if heads is None:
        return HashRing(hosts, **options)
    ring = ChainRing(hosts, **options)
    ring.heads = heads
    return ring


def keys_of(rng: np.random.Generator, pages: int) -> PageKeys:
    """Return new page keys: hashes, so any bytes."""
    return np.frombuffer(rng.bytes(16 * pages), KEY)


def heads_of(keys: PageKeys, first: int = 0) -> dict[bytes, bytes]:
    """Return the head of each page's chain. first: the page at which a process begins to count."""
    names = keys.tolist()
    return {
        name: names[max(0, first + (at - first) // CHAIN_PAGES * CHAIN_PAGES)]
        for at, name in enumerate(names)
    }


@attrs.define
class Asked:
    """What a search has cost: requests and keys by node, bytes, round trips, pages found."""

    requests: Counter[int] = attrs.field(factory=Counter)
    keys: Counter[int] = attrs.field(factory=Counter)
    bytes: int = 0
    rounds: int = 0
    found: int = 0

    def add(self, other: Asked) -> None:
        """Add another one."""
        self.requests += other.requests
        self.keys += other.keys
        self.bytes += other.bytes
        self.rounds += other.rounds
        self.found += other.found


@attrs.define(eq=False)
class Directory:
    """The records of all shards, and the clients of one home each."""

    ring: HashRing
    scheme: str
    stored: frozenset[bytes] = frozenset()
    _clusters: dict[int, Cluster] = attrs.field(factory=dict)

    def cluster(self, home: int) -> Cluster:
        """Return the cluster as a client of this node knows it."""
        known = self._clusters.get(home)
        if known is None:
            made = Cluster.of(
                members_of(HOSTS), home=home, boot_id=f"h{home}", replicas=AUTO,
                virtual_nodes=VIRTUAL_NODES, handover_until=0.0,
            )  # fmt: skip
            known = self._clusters[home] = attrs.evolve(made, ring=self.ring)
        return known

    def ask(self, keys: PageKeys, home: int) -> tuple[Asked, int]:
        """Find a batch; return its cost, and how many leading pages were found."""
        cluster = self.cluster(home)
        if self.scheme == "cover":
            order = covered(self.ring.table[:, : self.ring.replicas], self.ring.arcs(keys), home)
            cluster = attrs.evolve(cluster, query_order=order(cluster.query_order))
        cache, asked = LocationCache(entries_max=0), Asked()
        locator = Locator(
            cache=cache, breakers=Breakers(), clock=lambda: 1.0, tables=lambda: (home,)
        )
        path = locator.locate(keys, cluster, 3.0, cached_since=np.inf)
        answer: Any = None
        while True:
            try:
                step = path.send(answer)
            except StopIteration as end:
                known = end.value.known
                break
            if isinstance(step, ReadTable):
                answer = self._table(step, home)
            else:
                assert isinstance(step, Ask), step
                asked.rounds += 1
                answer = [self._answer(peer, message, asked) for peer, message in step.questions]
        asked.found = int(known.sum())
        return asked, len(keys) if known.all() else int(np.argmin(known))

    def _records(self, packed: bytes, node: int) -> np.ndarray[Any, Any]:
        keys = np.frombuffer(packed, KEY)
        owned = (self.ring.owners(keys) == node).any(axis=1)
        here = [own and key in self.stored for own, key in zip(owned, keys.tolist(), strict=True)]
        records = np.zeros(sum(here), RECORD)
        records["key"], records["holder"] = keys[here], 1
        records["flags"], records["generation"] = RESIDENT, 2
        return records

    def _table(self, step: ReadTable, home: int) -> Looked:
        records = self._records(step.keys, home)
        named = {key: at for at, key in enumerate(np.frombuffer(step.keys, KEY).tolist())}
        places = np.array([named[key] for key in records["key"].tolist()], np.uint32)
        return Looked(records.tobytes(), places, is_final=True, is_at_work=True)

    def _answer(self, peer: int, message: Any, asked: Asked) -> Located:
        assert isinstance(message, Lookup), message
        answer = Located(0, self._records(message.keys, peer).tobytes())
        asked.requests[peer] += 1
        asked.keys[peer] += len(message.keys) // 16
        for sent in (message, answer):
            asked.bytes += len(encode(Envelope(1, peer, sent), cluster=CLUSTER))
        return answer


def covered(table: Places, arcs: Places, home: int) -> Callable[[Places], Places]:
    """Return how to order owners so that a batch has few first owners: a greedy cover."""
    left = {int(arc): frozenset(table[arc].tolist()) for arc in np.unique(arcs)}
    rank: dict[int, int] = {home - 1: 0}
    while left:
        left = {arc: owners for arc, owners in left.items() if not owners & rank.keys()}
        counted = Counter(owner for owners in left.values() for owner in owners)
        if counted:
            rank[max(counted, key=lambda owner: (counted[owner], -owner))] = len(rank)

    def ordered(order: Places) -> Places:
        order = order.copy()
        for arc in np.unique(arcs):
            replicas = table.shape[1]
            owners = sorted(order[arc, :replicas].tolist(), key=lambda o: rank.get(o, HOSTS))
            order[arc, :replicas] = owners
        return order

    return ordered


def batches(keys: PageKeys, size: int) -> Iterator[PageKeys]:
    """Cut keys into the batches of an engine."""
    return (keys[at : at + size] for at in range(0, len(keys), size))


def asked_for(directory: Directory, keys: PageKeys, home: int, size: int) -> Asked:
    """Ask batch by batch, as SGLang does, until one is not whole."""
    total = Asked()
    for batch in batches(keys, size):
        asked, run = directory.ask(batch, home)
        total.add(asked)
        if run < len(batch):
            break
    return total


def directory_of(scheme: str, prompts: Sequence[PageKeys], stored: frozenset[bytes]) -> Directory:
    """Return a directory in which owners are found by this scheme."""
    heads: dict[bytes, bytes] | None = None
    if scheme == "chain":
        heads = {}
        for keys in prompts:
            heads |= heads_of(keys)
    return Directory(ring_of(HOSTS, heads=heads), scheme, stored)


def of_prompt(scheme: str, page_tokens: int, rounds: int) -> dict[str, float]:
    """Return the cost of one prompt: medians."""
    rng = np.random.default_rng(1)
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        keys = keys_of(rng, TOKENS // page_tokens)
        home = int(rng.integers(1, HOSTS + 1))
        for case, part in (("whole", 1.0), ("half", 0.5), ("new", 0.0)):
            stored = frozenset(keys[: int(len(keys) * part)].tolist())
            directory = directory_of(scheme, [keys], stored)
            asked = asked_for(directory, keys, home, BATCH)
            assert asked.found == len(stored) or part < 1, "a page was not found"
            figures.setdefault(f"{case}_requests", []).append(asked.requests.total())
            figures.setdefault(f"{case}_kb", []).append(asked.bytes / 1000)
            figures.setdefault(f"{case}_rounds", []).append(asked.rounds)
            if case == "whole":
                first, _ = directory.ask(keys[:BATCH], home)
                figures.setdefault("first", []).append(first.requests.total())
                owners = directory.ring.owners(keys[:BATCH])
                figures.setdefault("put", []).append(len(np.unique(owners)))
    return {name: statistics.median(each) for name, each in figures.items()}


def of_many(scheme: str, cost: dict[int, float], *, shared: bool, prompts: int) -> dict[str, float]:
    """Return how evenly many stored prompts of random homes are asked for, in pages of 64 tokens.

    cost: `owner_us`. shared: each begins with one of the system prompts.
    """
    a_key = (cost[128] - cost[1]) / 127
    rng = np.random.default_rng(2)
    systems = [keys_of(rng, SYSTEM_TOKENS // 64) for _ in range(SYSTEMS)]
    requests: Counter[int] = Counter()
    looked: Counter[int] = Counter()
    asks_first = 0
    for _ in range(prompts):
        tail = keys_of(rng, (TOKENS - SYSTEM_TOKENS * shared) // 64)
        keys = np.concatenate([systems[rng.integers(SYSTEMS)], tail]) if shared else tail
        directory = directory_of(scheme, [keys], frozenset(keys.tolist()))
        asked = asked_for(directory, keys, int(rng.integers(1, HOSTS + 1)), BATCH)
        requests += asked.requests
        looked += asked.keys
        asks_first += len(asked.requests)
    busy = {n: requests[n] * (cost[1] - a_key) + looked[n] * a_key for n in requests}
    counted: dict[str, dict[int, Any]] = {"requests": requests, "keys": looked, "us": busy}
    found = {"paused": asks_first / prompts / HOSTS}
    for name, by_node in counted.items():
        found[f"mean_{name}"] = sum(by_node.values()) / HOSTS / prompts
        found[f"most_{name}"] = max(by_node.values()) / prompts
    return found


def owner_us(rounds: int) -> dict[int, float]:
    """Return the processor time of an owner for a Lookup of so many keys, decoded and encoded."""
    rng = np.random.default_rng(3)
    keys = keys_of(rng, 100_000)
    shard = DirectoryShard(incarnation=1)
    shard.on_message(SELF, ViewChanged(tuple(members_of(HOSTS).values())), 0.0)
    records = np.zeros(len(keys), RECORD)
    records["key"], records["holder"] = keys, 2
    records["flags"], records["generation"] = RESIDENT, 2
    for number, begin in enumerate(range(0, len(keys), 10_000), 1):
        shard.on_message(Origin(2), Put(number, records[begin : begin + 10_000].tobytes()), 0.0)
    found: dict[int, float] = {}
    for count in (1, 2, 64, 128):
        took: list[float] = []
        for _ in range(rounds):
            some = keys[rng.integers(0, len(keys), count)]
            raw = encode(Envelope(9, 1, Lookup(1, some.tobytes())), cluster=CLUSTER)
            begun = time.thread_time()
            message: Any = decode(raw, cluster=CLUSTER).message
            for effect in shard.on_message(Origin(9, 3), message, 0.0):
                encode(Envelope(1, 9, getattr(effect, "message")), cluster=CLUSTER)  # noqa: B009
            took.append(time.thread_time() - begun)
        found[count] = statistics.median(took) * 1e6
    return found


def of_join(scheme: str) -> dict[str, float]:
    """Return which part of the records changes an owner when a node joins, and how uneven it is.

    prompts_touched: of which at least one record changes an owner.
    """
    rng = np.random.default_rng(4)
    pages = CHAIN_PAGES if scheme == "chain" else 1
    keys = keys_of(rng, RECORDS // pages)
    before, after = (ring_of(count).owners(keys) for count in (HOSTS, HOSTS + 1))
    changed = (np.sort(before, axis=1) != np.sort(after, axis=1)).any(axis=1)
    owned = np.bincount(before.ravel().astype(np.int64), minlength=HOSTS + 1)[1:]
    a_prompt = -(-TOKENS // 64 // pages)
    prompts = changed[: len(changed) // a_prompt * a_prompt].reshape(-1, a_prompt)
    return {
        "moved": float(changed.mean()),
        "prompts_touched": float(prompts.any(axis=1).mean()),
        "most_records": float(owned.max() / owned.mean()),
    }


def lost(rounds: int) -> float:
    """Return the part of pages whose owners writer and reader do not agree on.

    A reader that has the beginning of a prompt in its own memory asks for the rest of it, and does
    not know how many pages precede that.
    """
    rng = np.random.default_rng(5)
    parts: list[float] = []
    for _ in range(rounds):
        keys = keys_of(rng, TOKENS // 64)
        first = int(rng.integers(1, len(keys)))
        right, wrong = heads_of(keys), heads_of(keys[first:])
        of = [ring_of(HOSTS, heads=heads).owners(keys[first:]) for heads in (right, wrong)]
        agree = (of[0][:, :, None] == of[1][:, None, :]).any(axis=(1, 2))
        parts.append(1 - float(agree.mean()))
    return statistics.fmean(parts)


def measured(rounds: int, prompts: int) -> dict[str, Any]:
    """Return all figures."""
    cost = owner_us(50 * rounds)
    found: dict[str, Any] = {"owner_us": cost, "lost": lost(rounds)}
    for scheme in SCHEMES:
        figures: dict[str, Any] = {}
        for page_tokens in (64, 16):
            figures[f"page_{page_tokens}"] = of_prompt(scheme, page_tokens, rounds)
        if scheme != "cover":
            figures["page_1"] = of_prompt(scheme, 1, 1)
            figures["join"] = of_join(scheme)
        for shared in (False, True):
            name = "shared" if shared else "apart"
            figures[name] = of_many(scheme, cost, shared=shared, prompts=prompts)
        found[scheme] = figures
    return found


def main() -> None:
    """Measure in one run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chains", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    chosen = parser.parse_args()
    found = measured(chosen.rounds, chosen.prompts)
    if chosen.json:
        print(json.dumps(found))
        return
    print("owner_us   ", {count: round(took, 1) for count, took in found["owner_us"].items()})
    print(f"lost        {found['lost']:.3f}")
    for scheme in SCHEMES:
        for name, figures in found[scheme].items():
            shown = "  ".join(f"{key} {value:.3g}" for key, value in figures.items())
            print(f"{scheme:6} {name:8} {shown}")


if __name__ == "__main__":
    main()
