"""The second phase: the faults stop in a random connected core, and everything must heal.

Required within LIVENESS_S: equal views and rings; a directory with exactly the core's pages; no
reservation left; empty mailboxes; every client finds every page that is held, and can store a new
one that all clients find.
"""

from __future__ import annotations

import math
import random

import numpy as np
import trio

from peercache.model.keys import from_bytes
from peercache.model.member import ALIVE
from peercache.model.records import ON_DISK, RECORD
from sims.client import SimClient
from sims.node import SimNode
from sims.trace import Violation
from sims.watch import held_generation
from sims.world import World

LIVENESS_S = 30.0
"""Virtual seconds from the end of the faults until everything is healed."""

LOOK_S = 0.5

WHOLE_CORE = 0.5
"""Chance that no host is left out."""

READ_PAGES = 16


class Liveness:
    """Chooses a core, and waits for it to heal."""

    def __init__(self, world: World, rng: random.Random) -> None:
        """Check this world."""
        self._world = world
        self._rng = rng
        self._core = self._choose_core()

    async def demand(self) -> float:
        """Return the seconds until everything has healed; raise Violation if it does not."""
        started = trio.current_time()
        problem = "nothing was looked at"
        while trio.current_time() < started + LIVENESS_S:
            problem = self._problem() or await self._reading_problem()
            if not problem:
                healed_s = trio.current_time() - started
                await self._store_and_find(started + LIVENESS_S)
                return healed_s
            await trio.sleep(LOOK_S)
        checker, _, detail = problem.partition(": ")
        raise Violation(f"liveness-{checker}", detail)

    # --- the core ---------------------------------------------------------------------------------

    def _choose_core(self) -> list[str]:
        """Cut some hosts off forever; keep a head, so that new nodes find the cluster."""
        world, rng = self._world, self._rng
        hosts = list(world.hosts)
        if rng.random() < WHOLE_CORE:
            return hosts
        heads = [world.host_of[address.partition(":")[0]] for address in world.heads]
        core = {rng.choice(heads)}
        core.update(host for host in hosts if rng.random() < 0.6)
        chosen = [host for host in hosts if host in core]
        for outside in [host for host in hosts if host not in core]:
            for inside in chosen:
                world.network.cut(inside, outside, math.inf)
                world.network.cut(outside, inside, math.inf)
        world.trace.line("core", *chosen)
        return chosen

    def _nodes(self) -> list[SimNode]:
        world = self._world
        names = [name for name in world.host_of if world.host_of[name] in self._core]
        return [
            world.nodes[name]
            for name in names
            if name in world.nodes and world.nodes[name].place.alive
        ]

    def _clients(self) -> list[SimClient]:
        return [
            client
            for client in self._world.clients.values()
            if client.place.host in self._core and client.place.alive
        ]

    # --- requirements of nodes --------------------------------------------------------------------

    def _problem(self) -> str:
        nodes = self._nodes()
        expected = [n for n in self._world.host_of if self._world.host_of[n] in self._core]
        if len(nodes) < len(expected):
            return "start: some process is not up again"
        return (
            self._views(nodes)
            or self._directory(nodes)
            or self._completeness(nodes)
            or self._reservations(nodes)
        )

    def _views(self, nodes: list[SimNode]) -> str:
        living = sorted(node.incarnation for node in nodes)
        digests = {node.crew.membership.view.digest() for node in nodes}
        for client in self._clients():
            if sorted(client.cluster.members) != living:
                count = len(client.cluster.members)
                return f"views: {client.place.name} knows {count} live of {len(living)}"
            if list(client.cluster.ring.members) != living:
                return f"rings: {client.place.name} has another ring"
        for node in nodes:
            members = node.crew.membership.view.live()
            if [member.incarnation for member in members] != living:
                return f"views: {node.place.name} has {len(members)} live of {len(living)}"
            if any(member.state != ALIVE for member in members):
                return f"views: {node.place.name} suspects a member"
            if list(node.crew.ring.current.members) != living:
                return f"rings: {node.place.name} has another ring"
        return "views: digests differ" if len(digests) > 1 else ""

    def _directory(self, nodes: list[SimNode]) -> str:
        """Directory ⊆ truth, and no node keeps records that others own."""
        known: dict[int, SimNode] = {node.incarnation: node for node in nodes}
        for node in nodes:
            shard = node.crew.directory
            for holder in [h for h in shard._serving if h in shard._held]:
                of_holder = known.get(holder)
                if of_holder is None:
                    return f"directory: {node.place.name} serves {holder:016x}, which is gone"
                packed = shard._held[holder].records()
                keys = b"".join(packed[at : at + 16] for at in range(0, len(packed), 56))
                if records_in_force(of_holder, keys) != packed:
                    return f"directory: {node.place.name} lies about {holder:016x}"
                if holder != node.incarnation and keys:
                    owners = node.crew.ring.current.owners(from_bytes(keys))
                    if not (owners == node.incarnation).any(axis=1).all():
                        return f"directory: {node.place.name} keeps what it does not own"
        return ""

    def _completeness(self, nodes: list[SimNode]) -> str:
        shards = {node.incarnation: node.crew.directory for node in nodes}
        for node in nodes:
            held = list(held_lengths(node))
            if not held:
                continue
            in_force = numbers_in_force(node)
            owners_of = node.crew.ring.current.owners(from_bytes(b"".join(held))).tolist()
            for key, owners in zip(held, owners_of, strict=True):
                for owner in owners:
                    known = held_generation(shards[owner], node.incarnation, key)
                    if known is None or known != in_force.get(key):
                        return f"directory: {key.hex()} of {node.place.name} is not known"
        return ""

    def _reservations(self, nodes: list[SimNode]) -> str:
        for node in nodes:
            open_count = node.crew.pool.figures()["pool_reservations"]
            if open_count:
                return f"reservations: {open_count} at {node.place.name} never ended"
            for name, mailbox in node.crew.mailboxes.named().items():
                if len(mailbox):
                    return f"mailboxes: {len(mailbox)} wait for {name} of {node.place.name}"
            figures = node.crew.disk.figures()
            if node.crew.disk.is_open and figures["disk_bytes_in_flight"]:
                return f"disk: {figures['disk_bytes_in_flight']} bytes of {node.place.name} hang"
        return ""

    # --- requirements of clients ------------------------------------------------------------------

    def _held(self) -> dict[bytes, list[int]]:
        """Return the lengths with which each page is held in the core."""
        held: dict[bytes, list[int]] = {}
        for node in self._nodes():
            for key, length in held_lengths(node).items():
                held.setdefault(key, []).append(length)
        return held

    async def _reading_problem(self) -> str:
        """Let every client read every page; return the pages that a client does not find."""
        for client in self._clients():
            if client.attached is None:
                return f"home: {client.place.name} has none"
            held = self._held()
            places = [
                place
                for place, key in enumerate(self._world.library.keys.tolist())
                # If copies differ in length, the nearest is read, and may not fit.
                if len(set(held.get(key, ()))) == 1
                and self._world.calls.own_places(client, [place]) == [place]
            ]
            for begin in range(0, len(places), READ_PAGES):
                batch = places[begin : begin + READ_PAGES]
                keys = self._world.library.keys[batch].tolist()
                lengths = [held[key][0] for key in keys]
                reasons = await self._world.calls.get(client, batch, self._rng, 2.0, lengths)
                for key, reason in zip(keys, reasons, strict=True):
                    if reason and key in self._held():
                        return f"reading: {client.place.name} misses {key.hex()}: {reason}"
        return ""

    async def _store_and_find(self, until: float) -> None:
        """Every client stores a page, and every client finds one."""
        for client in self._clients():
            while True:
                problem = await self._stored_is_found(client)
                if not problem:
                    break
                if trio.current_time() > until:
                    raise Violation("liveness-writing", problem)
                await trio.sleep(LOOK_S)

    async def _stored_is_found(self, client: SimClient) -> str:
        place = self._rng.randrange(len(self._world.library.keys))
        (place,) = self._world.calls.own_places(client, [place])
        key = self._world.library.keys[[place]].tolist()[0]
        stored = await self._world.calls.set(client, [place], self._rng, 2.0)
        lengths = self._held().get(key, [])
        if not stored[0] and not lengths:
            return f"{client.place.name} cannot store {key.hex()}"
        for reader in self._clients():
            if len(set(lengths)) != 1 or reader.tenant != client.tenant:
                continue
            reasons = await self._world.calls.get(reader, [place], self._rng, 2.0, lengths[:1])
            if reasons[0]:
                return f"{reader.place.name} misses what was stored: {reasons[0]}"
        return ""


def held_lengths(node: SimNode) -> dict[bytes, int]:
    """Return the length of each page that a node has, in memory or on disk only."""
    held = {page.key: page.length for page in node.crew.pool.pages._by_key.values()}
    index = node.crew.disk.index
    if index is not None:
        for row in index.entries(index.hottest_first()):
            held.setdefault(row["key"].tobytes(), int(row["length"]))
    return held


def numbers_in_force(node: SimNode) -> dict[bytes, int]:
    """Return the generation with which a node has published each page, in memory or not."""
    table = node.crew.publisher._table
    numbers = {key: int(table.records["generation"][row]) for key, row in table.rows.items()}
    # Only the pool knows what is in memory: the publisher may be wrong.
    numbers.update({p.key: p.generation for p in node.crew.pool.pages._by_key.values()})
    return numbers


def records_in_force(node: SimNode, keys: bytes) -> bytes:
    """Return the packed records of these pages, as a node must have published them."""
    held, numbers = held_lengths(node), numbers_in_force(node)
    packed: list[bytes] = []
    for at in range(0, len(keys), 16):
        key = keys[at : at + 16]
        if node.crew.pool.pages.find(key) is not None:
            packed.append(node.crew.pool.records_of(key).tobytes())
        elif key in held and key in numbers:
            record = np.zeros(1, RECORD)
            record["key"], record["holder"] = np.void(key), node.incarnation
            record["length"], record["flags"] = held[key], ON_DISK
            record["generation"] = numbers[key]
            packed.append(record.tobytes())
    return b"".join(packed)
