"""A Byzantine member: it gives readers records that name another page, or a future commit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from peercache.actors.pool.reservations import Reservation
from peercache.model.keys import split_keys
from peercache.model.records import RECORD, RESIDENT, Records
from sims.client import SimClient
from sims.node import SimNode
from sims.world import World

RECORDS_AT_ONCE = 8


class Forger:
    """Forges records of honest nodes' memory, and gives them to every reader.

    A Byzantine owner answers lookups with such records; here they appear in the readers' caches.
    One reader reads the forged pages at once: the effect of a forged record often lasts only for a
    moment.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        """Forge records for the clients of this world."""
        self._world = world
        self._rng = rng
        self._places = {key: at for at, key in enumerate(world.library.keys.tolist())}

    async def forge(self) -> None:
        """Forge some records of one node, of a kind that is possible now."""
        nodes = [node for _, node in sorted(self._world.nodes.items()) if node.place.alive]
        if not nodes:
            return
        writing = [node for node in nodes if any(True for _ in _reservations(node))]
        node = self._rng.choice(writing or nodes)
        kinds = [list(self._mixed_up(node)), list(self._to_come(node)), list(self._replayed(node))]
        sent = [kind for kind in kinds if kind]
        if not sent:
            return
        forged = self._rng.choice(sent)
        self._rng.shuffle(forged)
        records = np.concatenate(forged[:RECORDS_AT_ONCE])
        self._world.trace.line("fault", "forge", f"{node.incarnation:016x}", len(records))
        readers = []
        for _, client in sorted(self._world.clients.items()):
            client.cache.store(records, client.place.now())
            if client.place.alive:
                readers.append(client)
        if readers:
            reader = self._rng.choice(readers)
            reader.nursery().start_soon(self._read, reader, records)

    async def _read(self, reader: SimClient, records: Records) -> None:
        """Let a reader get the pages of forged records, with the sizes in these."""
        calls = self._world.calls
        places = [self._places[key] for key in records["key"].tolist()]
        calls.now_in_flight += 1
        try:
            await reader.place.awake()
            await calls.get(reader, places, self._rng, lengths=records["length"].tolist())
        finally:
            calls.now_in_flight -= 1

    def _mixed_up(self, node: SimNode) -> Iterator[Records]:
        """Yield records of one page's key that lead to the slot of another page."""
        library = self._world.library
        pages = node.crew.pool.pages
        named = list(zip(library.keys.tolist(), library.lengths, strict=True))
        for key in self._rng.sample(named, min(4, len(named))):
            page = pages.find(key[0])
            others = [name for name, length in named if name != key[0] and length == key[1]]
            if page is not None and others:
                yield _record(node, self._rng.choice(others), page.slot.first, page.generation,
                              page.length)  # fmt: skip

    def _to_come(self, node: SimNode) -> Iterator[Records]:
        """Yield records of pages that are being written, with the words that they get next."""
        for reservation in _reservations(node):
            yield from self._of_reservation(node, reservation, node.crew.pool.pages._sequence)

    def _of_reservation(
        self, node: SimNode, reservation: Reservation, sequence: int
    ) -> Iterator[Records]:
        lengths = np.frombuffer(reservation.lengths, "<u8").tolist()
        # Slots reserved ahead have no keys yet: a run of neighbours is a likely guess.
        keys = split_keys(reservation.keys) or self._neighbours(len(lengths))
        for at, key in enumerate(keys):
            slot = reservation.slots[at]
            if slot is not None:
                generation = 2 * (sequence + len(keys) - at)
                yield _record(node, key, slot.first, generation, lengths[at])

    def _neighbours(self, count: int) -> list[bytes]:
        keys = self._world.library.keys.tolist()
        first = self._rng.randrange(len(keys))
        return [keys[(first + step) % len(keys)] for step in range(count)]

    def _replayed(self, node: SimNode) -> Iterator[Records]:
        """Yield records of the key that a slot had before, with its current word."""
        memory = node.memory
        for index in sorted(memory.earlier):
            word = int(memory.words[index])
            if not word & 1:
                key, length = memory.earlier[index]
                yield _record(node, key, index, word, length)


def _reservations(node: SimNode) -> Iterator[Reservation]:
    for known in node.crew.pool._reservations._clients.values():
        yield from known.open.values()


def _record(node: SimNode, key: bytes, index: int, generation: int, length: int) -> Records:
    record = np.zeros(1, RECORD)
    record["key"], record["holder"] = np.frombuffer(key, "V16"), node.incarnation
    record["offset"], record["generation"] = index * node.memory.granule, generation
    record["length"], record["flags"] = length, RESIDENT
    return record
