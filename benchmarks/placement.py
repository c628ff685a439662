"""`python -m benchmarks.placement TRACE`: what moving pages between nodes brings, at true times.

Each node is its real pool actor and its real placement actor, on a virtual clock (`sims.placing`):
messages take no time, reads of pages do, and a directory that knows everything at once stands for
the shards. Requests come at the times of the trace, each at one node: `idle`, by turns at the first
half of the nodes; `zipf`, all requests with one first block at one node, drawn by Zipf's law; and
`even`, by turns at all. A request reads the leading run of its blocks that some node has, and sets
the rest at its own node, in batches of 128.

Columns: blocks that all nodes have room for together; the routing; the share of all asked blocks
that were hits without and with spill, of one idealised LRU of all memory, of one idealised LRU a
node with the same routing; spilled by it, and pages that were moved, refused and failed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import attrs

from peercache.actors.mailboxes import RecordsChanged
from peercache.actors.placement.offers import OfferProgress
from peercache.cli.traces import LRU, Prompt, hit_rate, requests_of
from peercache.model.records import keys_of
from sims.placing import Nodes

BATCH = 128
BLOCK_BYTES = 4096
READ_S = 0.05
"""How long a node reads what it is offered."""

ROUTINGS = ("idle", "zipf", "even")


class Cluster(Nodes):
    """Nodes with so many blocks each, and where each block is."""

    def __init__(
        self, nodes: int, room: int, *, spills: bool, min_age_s: float, batch_s: float = 0.0
    ) -> None:
        """Make the nodes. batch_s: from a batch of a request to the next."""
        self.holders: dict[bytes, dict[int, int]] = {}
        """By key: the generation at each node."""
        self.batch_s = batch_s
        super().__init__(
            (room,) * nodes,
            block_bytes=BLOCK_BYTES,
            rate=2**30 if spills else 0,
            min_age_s=min_age_s,
            latency_s=0.0,
            read_s=lambda _: READ_S,
        )

    def ask(self, node: int, request: Prompt) -> int:
        """Read the leading run of blocks, set the rest; return the length of the run."""
        self.run(request.at)
        keys = [one.to_bytes(16, "big") for one in request.blocks]
        run = next((n for n, key in enumerate(keys) if not self.holders.get(key)), len(keys))
        for begin in range(0, run, BATCH):
            self._touch(node, keys[begin : min(begin + BATCH, run)])
        for number, begin in enumerate(range(run, len(keys), BATCH)):
            batch = keys[begin : begin + BATCH]
            if number and self.batch_s:
                self.at(self.now + number * self.batch_s, partial(self.store, node, batch))
            else:
                self.store(node, batch)
        return run

    def note(self, number: int, changed: RecordsChanged) -> None:
        """Take the records that a node publishes, as a directory that knows all at once."""
        super().note(number, changed)
        made = changed.records
        for key, generation in zip(keys_of(made), made["generation"].tolist(), strict=True):
            self.holders.setdefault(key, {})[number] = generation
        for key in keys_of(changed.drops):
            self.holders[key].pop(number, None)

    def _touch(self, node: int, keys: Sequence[bytes]) -> None:
        by_holder: dict[int, list[tuple[bytes, int]]] = {}
        for key in keys:
            holders = self.holders[key]
            holder = node if node in holders else next(iter(holders))
            by_holder.setdefault(holder, []).append((key, holders[holder]))
        for holder, read in by_holder.items():
            self.touch(holder, read)


def routed(requests: Sequence[Prompt], routing: str, nodes: int, seed: int) -> list[int]:
    """Return the node of each request."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    if routing == "zipf":
        weights = [1 / (rank + 1) for rank in range(nodes)]
        homes: dict[int, int] = {}
        return [
            homes.setdefault(r.blocks[0] if r.blocks else 0, rng.choices(range(nodes), weights)[0])
            for r in requests
        ]
    busy = nodes // 2 if routing == "idle" else nodes
    return [rng.randrange(busy) for _ in requests]


def shares(
    requests: Sequence[Prompt],
    homes: Sequence[int],
    nodes: int,
    blocks: int,
    min_age_s: float,
    batch_s: float,
) -> Iterator[tuple[float, OfferProgress]]:
    """Yield the share of hits without spill and with it, and what came of the offers."""
    asked = sum(len(request.blocks) for request in requests)
    for spills in (False, True):
        cluster = Cluster(
            nodes, blocks // nodes, spills=spills, min_age_s=min_age_s, batch_s=batch_s
        )
        hits = sum(cluster.ask(home, one) for home, one in zip(homes, requests, strict=True))
        sums = OfferProgress()
        for placement in [node.placement for node in cluster.nodes]:
            for name, value in attrs.asdict(placement.spilling.progress).items():
                setattr(sums, name, getattr(sums, name) + value)
        yield hits / asked, sums


def apart(requests: Sequence[Prompt], homes: Sequence[int], nodes: int, blocks: int) -> float:
    """Return the share of hits of one idealised LRU a node, if each is asked everywhere."""
    caches = [LRU(blocks // nodes) for _ in range(nodes)]
    hits = 0
    for home, request in zip(homes, requests, strict=True):
        for block in request.blocks:
            holder = next((cache for cache in caches if block in cache.held), None)
            if holder is None:
                break
            hits += 1
            holder.held.move_to_end(block)
        for block in request.blocks:
            if not any(block in cache.held for cache in caches):
                caches[home].held[block] = None
                if len(caches[home].held) > caches[home].room:
                    caches[home].held.popitem(last=False)
    return hits / sum(len(request.blocks) for request in requests)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row a size and routing."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--blocks", type=int, nargs="+", default=(4_000,), help="of all nodes")
    parser.add_argument("--requests", type=int, help="the first so many; default: all")
    parser.add_argument("--routing", nargs="+", default=ROUTINGS, choices=ROUTINGS)
    parser.add_argument("--min-age", type=float, default=60.0, help="placement_min_age, seconds")
    parser.add_argument(
        "--batch-seconds",
        type=float,
        default=0.0,
        help="from a batch that a request sets to its next one; 0: all at once",
    )
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    requests = requests_of(chosen.trace, chosen.requests)
    print(
        f"{'blocks':>7} {'routing':>7} {'off':>6} {'spill':>6} {'LRU':>6} {'apart':>6} "
        f"{'spill/LRU':>9} {'moved':>8} {'refused':>8} {'failed':>7}"
    )
    for blocks in chosen.blocks:
        one = hit_rate(requests, LRU(blocks))
        for routing in chosen.routing:
            homes = routed(requests, routing, chosen.nodes, chosen.seed)
            (off, _), (on, sums) = shares(
                requests, homes, chosen.nodes, blocks, chosen.min_age, chosen.batch_seconds
            )
            each = apart(requests, homes, chosen.nodes, blocks)
            print(
                f"{blocks:7} {routing:>7} {off:6.3f} {on:6.3f} {one:6.3f} {each:6.3f} "
                f"{on / one:9.2f} {sums.moved:8} {sums.refused:8} {sums.failed:7}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
