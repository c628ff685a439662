"""A story: readers of one table, in which holders and their entries come and go all the time.

No cluster is needed for it: an owner writes, and readers look up keys at any moment between two
writes.
"""

from __future__ import annotations

import os
import random

import numpy as np
import trio

from peercache.actors.directory.table import SLOTS_MIN, DirectoryTable
from peercache.model.hash_ring import HashRing
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.records import RECORD
from peercache.paths.steps import ReadTable
from sims import determinism
from sims.clock import VirtualClock
from sims.memory import NodeMemory, Truth
from sims.places import Place
from sims.play import explained
from sims.tables import SimTables, table_file
from sims.world import WALL_LIMIT_S

NODE = Incarnation(0x0DD)
KEYS = 24
HOLDERS = 4
READERS = 4
CHANGES = 3000


def turn(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    clock = VirtualClock(wall_s=WALL_LIMIT_S)

    async def main() -> None:
        await _run(determinism.stream(seed, "turning"))

    try:
        determinism.run(main, seed=seed, clock=clock)
    except Exception as error:
        return explained(error)[0]
    return ""


async def _run(rng: random.Random) -> None:
    file = table_file("turning")
    table = DirectoryTable(
        bytes(16), answer_max=64, rows_max=SLOTS_MIN, slots_min=512, file=file, incarnation=NODE
    )
    os.close(file)
    truth = Truth()
    memory = NodeMemory(NODE, host="h0", granules=1, granule=256, truth=truth)
    memory.table = table
    ring = HashRing([NODE], virtual_nodes=1, replicas=1)
    me = Member(NODE, 1, ALIVE, 255, "h0", "n:1", "n:2", "h0", "/n")
    async with trio.open_nursery() as nursery:
        for number in range(READERS):
            tables = SimTables(
                Place(f"r{number}", "h0"),
                lambda _: memory,
                random.Random(rng.random()),
                number,
                may_stop=lambda: True,
                ring=lambda: ring,
                truth=truth,
            )
            tables.follow([me])
            nursery.start_soon(_read, tables, ring, random.Random(rng.random()))
        await _write(table, rng)
        nursery.cancel_scope.cancel()


async def _read(tables: SimTables, ring: HashRing, rng: random.Random) -> None:
    while True:
        keys = b"".join(_key(rng.randrange(KEYS)) for _ in range(6))
        await tables.look(ReadTable(NODE, keys, ring.version))
        await trio.sleep(rng.uniform(0.0, 0.01))


async def _write(table: DirectoryTable, rng: random.Random) -> None:
    """Put pages, and let holders end; soon another holder has the entry, with other pages."""
    holders: dict[int, int] = {}
    generation = 10
    for number in range(1, CHANGES):
        generation += 2
        if len(holders) < HOLDERS or rng.random() < 0.2:
            entry = table.begin(number, is_served=True)
            assert entry is not None
            holders[number] = entry
        holder = rng.choice(sorted(holders))
        made = np.zeros(4, RECORD)
        made["key"] = [np.void(_key(page)) for page in rng.sample(range(KEYS), 4)]
        made["holder"], made["generation"] = holder, generation
        table.put(holders[holder], made.tobytes())
        if len(holders) > HOLDERS:
            ended = holders.pop(rng.choice(sorted(holders)))
            table.serve(ended, is_served=False)
            while table.sweep(ended, 16) == 16:
                await trio.sleep(0.001)
        await trio.sleep(rng.uniform(0.0, 0.02))


def _key(page: int) -> bytes:
    return page.to_bytes(16, "big")
