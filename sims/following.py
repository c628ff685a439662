"""A story: routers follow the pages of nodes, while pages come and go and nodes die.

Messages are lost, and followers are disconnected: for longer than a node keeps changes, and for
longer than it counts them. After a complete answer of a node the index must equal what the node
held at the last change that was sent; and nothing of a dead node may be left after a short time.

Production code numbers, sends, requests and applies changes; this module has the connections and
the clocks.
"""

from __future__ import annotations

import random
from typing import final
from unittest.mock import patch

import attrs
import trio

from peercache.actors.publisher import waiters
from peercache.events.following import Index, NodeFollower
from peercache.wire.messages.directory import ALL_ROWS, ReportChanges
from peercache.wire.messages.pool import Remove
from sims.crowd import SETTLED_S, Crowd, settled
from sims.play import staged
from sims.trace import Violation
from sims.world import World, address_of

PAGES = 32
POOL_PAGES = 12
KEPT = 16
"""Changes that a node keeps: a follower that is disconnected for a second has missed more."""
REPORTED_MAX = 5
"""Changes of one answer: the pages of a node take several."""

NONE, LOSS, AWAY, DEATH = FAULTS = ("none", "loss", "away", "death")
ROUNDS = 16
STEP_S = 0.3
TIMEOUT_S, ANSWER_S, RETRY_S = 0.2, 0.3, 0.1
LOST_S = 1.0
"""How long messages are lost."""
AWAY_S = waiters.FOLLOWED_S + 3.0
DEAD_S = 2 * (TIMEOUT_S + ANSWER_S) + RETRY_S + 0.2
"""After this time nothing may be left of a dead node: two requests without an answer."""


def follow(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    options = attrs.evolve(
        Crowd(readers=1, pages=PAGES, seed=seed).options(),
        pool_granules=POOL_PAGES,
        latency_mean_s=0.0005,
    )
    # So that there are gaps, and the pages of a node take several answers.
    with patch.multiple(waiters, CHANGES_KEPT=KEPT, CHANGES_A_MESSAGE_MAX=REPORTED_MAX):
        return staged(options, _run)[0]


@final
class Router:
    """A process on the second host that follows all nodes, and checks what it receives."""

    def __init__(self, world: World) -> None:
        """Start empty."""
        self.index = Index()
        self.compared = self.again = 0
        self.away_until = 0.0
        self._world = world

    async def follow(self, name: str) -> None:
        """Follow the node at an address, with any incarnation."""
        address = address_of(name)
        follower = NodeFollower(address)
        while True:
            await trio.sleep_until(max(self.away_until, trio.current_time()))
            reply = await self._ask(follower, address)
            batch = follower.failed() if reply is None else follower.take(reply)
            if batch is not None:
                self.index.apply(batch)
                self.again += batch.again and not batch.is_gone
            if reply is not None and reply.row >= ALL_ROWS:
                self._compare(address, reply)
            if follower.is_silent:
                await trio.sleep(RETRY_S)

    async def _ask(self, follower: NodeFollower, address: str) -> ReportChanges | None:
        client = self._world.clients["c-n1"]
        found = [m for m in client.cluster.members.values() if m.control == address]
        if not found:
            await trio.sleep(RETRY_S)
            return None
        until = client.place.now() + TIMEOUT_S + ANSWER_S
        question = (found[0].incarnation, follower.question(TIMEOUT_S))
        [answer] = await client.asker.ask([question], until)
        return answer if isinstance(answer, ReportChanges) else None

    def _compare(self, address: str, reply: ReportChanges) -> None:
        held = self._world.truth.followed.get((reply.incarnation, reply.after))
        if held is None:
            return  # There was more than fitted into the answer.
        self.compared += 1
        pages = self.index.pages(address)
        if pages != held:
            wrong = sorted(key.hex() for key in pages.keys() ^ held.keys())
            raise Violation("followed", f"at change {reply.after} of {address}: {wrong} differ")

    def forget_dead(self, name: str) -> None:
        """Fail if anything is known of a node that died a while ago."""
        pages = self.index.pages(address_of(name))
        if pages:
            raise Violation(
                "followed-dead", f"{len(pages)} pages of {name} are reported, and it is dead"
            )


async def _run(world: World) -> None:
    async with settled(world) as nursery:
        router, rng = Router(world), world.stream("follow")
        for name in world.host_of:
            nursery.start_soon(router.follow, name)
        for number in range(ROUNDS):
            await _round(world, router, number, rng)
        assert router.compared > ROUNDS, "the index was hardly ever compared"
        assert router.again > ROUNDS // 2, "followers never had to begin again"


async def _round(world: World, router: Router, number: int, rng: random.Random) -> None:
    """Store and remove, with a fault of this round's kind."""
    now = trio.current_time()
    kind = FAULTS[number % len(FAULTS)]
    if kind == LOSS:
        world.network.cut("h0", "h1", now + rng.uniform(0.0, LOST_S))
    elif kind == AWAY:
        is_long = number < len(FAULTS)
        router.away_until = now + (AWAY_S if is_long else rng.uniform(STEP_S, 2 * STEP_S))
        # Changes from now on are neither kept nor counted by a node.
        await trio.sleep(waiters.FOLLOWED_S + 1.0 if is_long else 0.0)
    elif kind == DEATH:
        world.nursery.start_soon(world.crash_node, "n0", DEAD_S + 1.0)
        await trio.sleep(DEAD_S)
        router.forget_dead("n0")
        await trio.sleep(SETTLED_S)
    writer = world.clients["c-n0"]
    for _ in range(4):
        pages = rng.sample(range(PAGES), 6)
        await world.calls.set(writer, pages, rng, 2.0)
        keys = world.library.keys[rng.sample(range(PAGES), 2)].tobytes()
        removal = Remove(0, writer.namespace.tag(), keys, 0.0)
        await world.calls.ask_all(writer, removal)
        await trio.sleep(rng.uniform(0.0, STEP_S))
    await trio.sleep(max(0.0, router.away_until - trio.current_time()) + 2 * LOST_S)
