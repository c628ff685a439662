"""Memory of a run: published segments of nodes, and buffers of the callers.

Both check at each access: a byte under a committed record changes only after its word is odd, and
nothing accesses a caller's buffer after its call has returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.actors.directory.table import DirectoryTable
from peercache.actors.effects import StoreWords
from peercache.model.hash_ring import HashRing
from peercache.model.records import RESIDENT, Records
from peercache.model.seal import SEAL, Seals
from sims.content import POISON, Page, version_of
from sims.places import Place
from sims.planted import KEY_AFTER_WORD, planted
from sims.removals import Removals, Stay
from sims.trace import Violation

REGION_BITS = 32
"""An address is a buffer's number and an offset: runs do not depend on addresses of the system."""


@attrs.define(eq=False)
class Region:
    """A buffer of a caller."""

    address: int
    data: Page
    owner: str
    is_open: bool = True


class Buffers:
    """The callers' buffers, by simulated addresses that are the same in each run of a seed."""

    def __init__(self) -> None:
        """Start without buffers."""
        self._regions: dict[int, Region] = {}
        self._last = 0

    def take(self, size: int, owner: str) -> Region:
        """Return a new buffer, open for its call."""
        self._last += 1
        region = Region(self._last << REGION_BITS, np.full(size, POISON, np.uint8), owner)
        self._regions[self._last] = region
        return region

    def close(self, region: Region) -> None:
        """Mark that the call has returned: from now on only the owner may access the buffer."""
        region.is_open = False
        del self._regions[region.address >> REGION_BITS]

    def write(self, address: int, data: Page) -> None:
        """Store bytes into a destination, as a fabric does."""
        region, at = self._find(address, "write-after-return")
        region.data[at : at + len(data)] = data

    def read(self, address: int, size: int) -> Page:
        """Return bytes of a source, as a copy into a slot does."""
        region, at = self._find(address, "read-after-return")
        data: Page = region.data[at : at + size].copy()
        return data

    def _find(self, address: int, checker: str) -> tuple[Region, int]:
        region = self._regions.get(address >> REGION_BITS)
        if region is None:
            raise Violation(checker, f"a buffer at {address:#x} was touched after its call")
        return region, address & ((1 << REGION_BITS) - 1)


@attrs.define(eq=False)
class Noted:
    """A recorded page of a holder: its generation, and the owners that it was sent to.

    owners: by owner, the number of the message that has sent it; 0 if there is none.
    """

    generation: int
    owners: dict[int, int] = attrs.field(factory=dict)


class Truth:
    """History of commits: the content that a hit may return."""

    def __init__(self) -> None:
        """Start without history."""
        self.stays: dict[bytes, list[Stay]] = {}
        self.generations: dict[int, int] = {}
        self.arrived: dict[tuple[int, int, bytes], int] = {}
        """By owner, holder and key: the generation with which a record has arrived at an owner."""
        self.known: dict[bytes, dict[int, Noted]] = {}
        """By key and holder: the generation of a record that all its owners have acknowledged."""
        self.unanswered: dict[bytes, dict[int, Noted]] = {}
        """By key and holder: the generation of a record that a set has returned with, though not
        all owners have acknowledged it; the nodes that were stopped for as long as sets wait."""
        self.announced: dict[bytes, dict[int, Noted]] = {}
        """By key and holder: a generation, and by owner the last message that has sent it."""
        self.received: dict[tuple[int, int], int] = {}
        """By holder and owner: the highest message of a stream that has arrived."""
        self.sent: dict[tuple[int, int], int] = {}
        """By holder and owner: the last message of a stream that the holder has sent."""
        self.ended: dict[tuple[int, int], int] = {}
        """By holder and owner: how often the owner has dropped all records of the holder."""
        self.live: dict[int, set[int]] = {}
        """By node: the members that its view has alive or suspected."""
        self.forged: set[tuple[int, int]] = set()
        """Streams to which another sender has added a message since holder and owner compared."""
        self.suspects: dict[int, set[int]] = {}
        """By node: the members that its shard knows to be suspected."""
        self.places: dict[int, Place] = {}
        """By node: its process."""
        self.rings: dict[int, HashRing] = {}
        """By node: the ring that its shard follows."""
        self.waiting: dict[tuple[int, int, int, int], Records] = {}
        """By node, client, request and reservation: the records of a commit that is not answered.
        """
        self.offered_at: dict[int, float] = {}
        """By node: when it last offered pages that it evicts next."""
        self.revoked: dict[int, float] = {}
        """By node whose certificate is revoked: when all others have dropped the pages that they
        had from other nodes."""
        self.followed: dict[tuple[int, int], dict[bytes, int]] = {}
        """By node and change: the tier of each page that the node held at the change."""
        self.nodes: set[int] = set()
        """Every incarnation that ever existed."""
        self.living: set[int] = set()
        """Those whose processes run."""
        self.removals = Removals()
        self.hits = 0
        self.spilled = 0
        """Pages that were evicted because another node had taken them."""
        self.taken_bytes = 0
        """Of pages that nodes have taken from others."""

    def stopped_for(self, span_s: float) -> list[int]:
        """Return the nodes that have been paused for this time."""
        now = trio.current_time()
        return [
            node
            for node, place in self.places.items()
            if place.alive and place.paused_s(now - span_s, now) > 0.99 * span_s
        ]

    def committed_at(self, key: bytes, incarnation: int) -> bool:
        """Return whether this page was ever committed at this node."""
        return any(stay.incarnation == incarnation for stay in self.stays.get(key, ()))

    def judge_hit(self, key: bytes, page: Page, since: float, until: float, who: str) -> None:
        """Fail unless these are the bytes of a version that was in force during the call."""
        version = version_of(key, page)
        if version is None:
            raise Violation("wrong-bytes", f"{who} got bytes that are no page of {key.hex()}")
        stays = [stay for stay in self.stays.get(key, ()) if stay.version == version]
        if not stays:
            raise Violation("uncommitted", f"{who} got version {version} of {key.hex()}")
        if not any(stay.since <= until and stay.until >= since for stay in stays):
            last = max(stay.until for stay in stays)
            detail = f"version {version} of {key.hex()} ended at {last:.6f}, before {since:.6f}"
            raise Violation("stale-hit", f"{who} got {detail}")
        # The version was stored there first; later stays are copies of it.
        source = stays[0].incarnation
        if self.revoked.get(source, math.inf) < since:
            detail = f"version {version} of {key.hex()} that {source:016x} has stored"
            raise Violation("revoked-served", f"{who} got {detail}")
        self.hits += 1


def _any_client(client: int, index: int) -> bool:
    del client, index
    return True


class NodeMemory:
    """The published segment of one incarnation: page memory and seals."""

    def __init__(
        self, incarnation: int, *, host: str, granules: int, granule: int, truth: Truth
    ) -> None:
        """Start with zeros, like a new segment."""
        self.incarnation = incarnation
        self.host = host
        self.granule = granule
        self.pages: Page = np.zeros(granules * granule, np.uint8)
        self.seals: Seals = np.zeros(granules, SEAL)
        self.words: npt.NDArray[np.uint64] = self.seals["word"]
        self.sent_bytes = 0
        """Bytes of pages that readers of other hosts have read from here."""
        self.table: DirectoryTable | None = None
        """The directory table next to it."""
        self.is_linked = True
        """Whether it can be opened by its name: until the host's next node removes leftovers."""
        self.may_write: Callable[[int, int], bool] = _any_client
        """Whether a client has a reservation of the slot at an index, as the owner knows."""
        self.earlier: dict[int, tuple[bytes, int]] = {}
        """By index, key and length of the last other page that was committed at a slot."""
        self._latest: dict[int, tuple[bytes, int]] = {}
        self._unnamed: StoreWords | None = None
        self._truth = truth
        self._cover: npt.NDArray[np.int64] = np.full(granules, -1, np.int64)
        self._stays: dict[int, tuple[Stay, int]] = {}

    def store_words(self, effect: StoreWords, now: float) -> None:
        """Store seals in order, like the owner's process."""
        self._name(self._unnamed)
        self._unnamed = effect
        if KEY_AFTER_WORD not in planted:
            self._name(effect)
        for index, value in zip(effect.indices.tolist(), effect.values.tolist(), strict=True):
            self.words[index] = value
            if value & 1:
                self._ended(index, now)
                continue
            if value in self._truth.generations:
                raise Violation("generation", f"{value} at word {index} stood for a page before")
            self._truth.generations[value] = self.incarnation

    def _name(self, effect: StoreWords | None) -> None:
        """Store the fields of an effect's seals, except the words."""
        if effect is None or effect.seals is None:
            return
        for index, seal in zip(effect.indices.tolist(), effect.seals, strict=True):
            for name in ("key", "space", "length"):
                self.seals[name][index] = seal[name]

    def published(self, records: Records, now: float) -> None:
        """Check records when they become valid: every byte is there, with their word."""
        for record in records:
            if not record["flags"] & RESIDENT:
                continue
            key = record["key"].tobytes()
            offset, length = int(record["offset"]), int(record["length"])
            index = offset // self.granule
            if int(self.words[index]) != int(record["generation"]):
                raise Violation("publish-order", f"a record of {key.hex()} came before its word")
            version = version_of(key, self.pages[offset : offset + length])
            if version is None:
                raise Violation("torn-commit", f"{key.hex()} was published before it was whole")
            end = index + -(-length // self.granule)
            if (self._cover[index:end] >= 0).any():
                raise Violation("overlap", f"{key.hex()} is on another committed page")
            self._cover[index:end] = index
            latest = self._latest.get(index, (key, length))
            if latest[0] != key:
                self.earlier[index] = latest
            self._latest[index] = (key, length)
            stay = Stay(self.incarnation, version, now)
            self._stays[index] = (stay, end)
            stays = self._truth.stays.setdefault(key, [])
            stays.append(stay)
            same = [earlier for earlier in stays if earlier.version == version]
            self._truth.removals.judge(key, same, now)

    def write(self, offset: int, slot_offset: int, data: Page, client: int) -> None:
        """Store bytes of a page with the slot at `slot_offset`, in the name of a client."""
        who = f"{client:016x}"
        if not self.may_write(client, slot_offset // self.granule):
            raise Violation("write-without-reservation", f"{who} wrote at {offset}")
        begin, end = offset // self.granule, -(-(offset + len(data)) // self.granule)
        if (self._cover[begin:end] >= 0).any():
            raise Violation("write-under-committed", f"{who} wrote at {offset}")
        if not int(self.words[slot_offset // self.granule]) & 1:
            raise Violation("write-under-even-word", f"{who} wrote at {offset}")
        self.pages[offset : offset + len(data)] = data

    def load(self, offset: int, slot_offset: int, data: Page) -> None:
        """Store bytes of a page from disk, in the name of the node's own disk tier."""
        self.write(offset, slot_offset, data, 0)

    def word_at(self, offset: int) -> int:
        """Return the word of the slot at an offset."""
        return int(self.words[offset // self.granule])

    def read(self, offset: int, size: int) -> Page:
        """Return the bytes as they are at this moment."""
        data: Page = self.pages[offset : offset + size].copy()
        return data

    def _ended(self, index: int, now: float) -> None:
        found = self._stays.pop(index, None)
        if found is not None:
            stay, end = found
            stay.until = now
            self._cover[index:end] = -1
