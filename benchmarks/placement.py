"""`python -m benchmarks.placement TRACE`: what moving pages between nodes brings, at true times.

Each node is its real pool actor and its real placement actor, in this process, on a virtual clock;
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
import heapq
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from peercache.actors.effects import (
    NotifyDirectory,
    NotifyPlacement,
    NotifyPool,
    NotifyPublisher,
    Pull,
    Send,
)
from peercache.actors.mailboxes import (
    TAKER,
    PagesCommitted,
    PullDone,
    RecordsChanged,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import Placement
from peercache.actors.placement.offers import OfferProgress, Offers
from peercache.actors.pool.actor import Pool
from peercache.cli.traces import LRU, Prompt, hit_rate, requests_of
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.records import DROP, keys_of
from peercache.wire.messages.membership import RequestRoom
from peercache.wire.messages.pool import Commit, Committed, Granted, Reserve, Touched

BATCH = 128
BLOCK_BYTES = 4096
READ_S = 0.05
"""How long a node reads what it is offered."""

CLIENT = Origin(7, 1)
ROUTINGS = ("idle", "zipf", "even")


class Cluster:
    """Nodes with so many blocks each, and where each block is."""

    def __init__(
        self, nodes: int, room: int, *, spills: bool, min_age_s: float, batch_s: float = 0.0
    ) -> None:
        """Make the nodes, which know each other. batch_s: from a batch of a request to the next."""
        self.now, self.batch_s = 0.0, batch_s
        self.pools: list[Pool] = []
        self.placements: list[Placement] = []
        self.holders: dict[bytes, dict[int, int]] = {}
        """By key: the generation at each node."""
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        members = tuple(_member(number) for number in range(nodes))
        for number in range(nodes):
            rng = random.Random(number)  # noqa: S311 - not for secrets
            self.pools.append(
                Pool(
                    incarnation=Incarnation(number + 1),
                    granule=BLOCK_BYTES,
                    page_bytes=room * BLOCK_BYTES,
                    usable_bytes=room * BLOCK_BYTES,
                    client_uncommitted_max=0,
                    rng=rng,
                )
            )
            spilling = Offers(2**30 if spills else 0, min_age_s, rng)
            self.placements.append(Placement(number + 1, spilling=spilling))
        for number in range(nodes):
            self._place(number, Origin(0), ViewChanged(members))

    def ask(self, node: int, request: Prompt) -> int:
        """Read the leading run of blocks, set the rest; return the length of the run."""
        self.advance(request.at)
        keys = [one.to_bytes(16, "big") for one in request.blocks]
        run = next((n for n, key in enumerate(keys) if not self.holders.get(key)), len(keys))
        for begin in range(0, run, BATCH):
            self._touch(node, keys[begin : min(begin + BATCH, run)])
        for number, begin in enumerate(range(run, len(keys), BATCH)):
            batch = keys[begin : begin + BATCH]
            if number and self.batch_s:
                self._after(number * self.batch_s, partial(self._set, node, batch))
            else:
                self._set(node, batch)
        return run

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.later, (self.now + seconds, self.number, act))

    def advance(self, until: float) -> None:
        """Let the actors do what is due."""
        while True:
            at, number = min((one.deadline(), n) for n, one in enumerate(self.placements))
            if self.later and self.later[0][0] <= min(at, until):
                self.now, _, act = heapq.heappop(self.later)
                act()
            elif at <= until:
                self.now = at
                self._perform(number, self.placements[number].on_tick(at))
            else:
                break
        self.now = until

    def _touch(self, node: int, keys: Sequence[bytes]) -> None:
        by_holder: dict[int, list[tuple[bytes, int]]] = {}
        for key in keys:
            holders = self.holders[key]
            holder = node if node in holders else next(iter(holders))
            by_holder.setdefault(holder, []).append((key, holders[holder]))
        for holder, read in by_holder.items():
            drops = np.zeros(len(read), DROP)
            for index, (key, generation) in enumerate(read):
                drops[index] = np.void(key), generation
            self._pool(holder, CLIENT, Touched(drops.tobytes()))

    def _set(self, node: int, keys: Sequence[bytes]) -> None:
        self.number += 1
        count = len(keys)
        lengths = np.full(count, BLOCK_BYTES, "<u8").tobytes()
        reserve = Reserve(1, self.number, 1, b"".join(keys), lengths)
        effects = self.pools[node].on_message(CLIENT, reserve, self.now)
        granted = effects[-1].message  # type: ignore[union-attr]
        assert isinstance(granted, Granted), granted
        self._perform(node, effects[:-1])
        written = bytes(state == 0 for state in granted.states)
        checksums = np.frombuffer(b"".join(keys), "<u8")[1::2].tobytes()
        self._pool(node, CLIENT, Commit(2, self.number, written, checksums, 0.5))

    def _pool(self, node: int, sender: Origin, message: Any) -> None:
        self._perform(node, self.pools[node].on_message(sender, message, self.now))

    def _place(self, node: int, sender: Origin, message: Any) -> None:
        self._perform(node, self.placements[node].on_message(sender, message, self.now))

    def _perform(self, node: int, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(node, effect)
            elif isinstance(effect, NotifyPool):
                self._pool(node, Origin(0), effect.fact)
            elif isinstance(effect, NotifyPlacement):
                self._place(node, Origin(0), effect.fact)
            elif isinstance(effect, NotifyDirectory) and isinstance(effect.fact, RecordsChanged):
                self._note(node, effect.fact)
            elif isinstance(effect, NotifyPublisher) and isinstance(effect.fact, PagesCommitted):
                self._answer(node, effect.fact)
            elif isinstance(effect, Pull):
                self._read(node, effect)

    def _send(self, node: int, effect: Send) -> None:
        to = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if to == CLIENT.identity:
            return
        receive = self._pool if isinstance(effect.message, RequestRoom) else self._place
        receive(to - 1, Origin(node + 1), effect.message)

    def _note(self, node: int, changed: RecordsChanged) -> None:
        for key, generation in zip(
            keys_of(changed.records), changed.records["generation"].tolist(), strict=True
        ):
            self.holders.setdefault(key, {})[node] = generation
        for key in keys_of(changed.drops):
            self.holders[key].pop(node, None)

    def _answer(self, node: int, fact: PagesCommitted) -> None:
        if fact.origin == TAKER:
            records = np.concatenate((fact.records, fact.here))
            answer = Committed(0, fact.sequence, fact.states, records.tobytes(), len(records))
            self._place(node, Origin(0), answer)

    def _read(self, node: int, pull: Pull) -> None:
        def arrive() -> None:
            holder = pull.member.incarnation - 1
            here = [self.holders.get(key, {}).get(holder) for key in keys_of(pull.records)]
            arrived = np.array(here, object) == pull.records["generation"]
            self._place(node, Origin(0), PullDone(pull.job, arrived.astype(np.uint8).tobytes()))

        self._after(READ_S, arrive)


def _member(number: int) -> Member:
    return Member(number + 1, 1, ALIVE, 255, f"h{number}", f"a:{number}", f"b:{number}", "", "")


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
        for placement in cluster.placements:
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
