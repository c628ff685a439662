"""The books of a disk tier: its index beside the pages in memory, and what is told of changes.

A page on disk has a record of its own only while it is not in memory. So every change on either
side asks the other one, within one step: whoever deletes from disk looks whether the page is in
memory, and whoever evicts from memory looks whether it is on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.effects import Effect, TellDirectory, TellPublisher
from peercache.actors.mailboxes import DiskIndexed, RecordsChanged
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.storage_port import DiskOpened, Forget
from peercache.model.keys import KEY_BYTES
from peercache.model.records import DROP, RECORD, Records
from peercache.observability.metrics import Metrics

_NO_RECORDS: Final = np.empty(0, RECORD)
_NO_DROPS: Final = np.empty(0, DROP)

PLACES_A_FORGET_MAX: Final = 4096
"""Places of one Forget: some milliseconds of the store's index."""


@final
@attrs.define(eq=False)
class DiskBooks:
    """What all parts of the disk tier look at.

    pages: of this node's memory, with the numbers of every change.
    index: None before the store is open, and after it has ended.
    """

    pages: PageTable
    metrics: Metrics | None = None
    index: DiskIndex | None = None
    _jobs: int = 0
    _unix_s: float = 0.0

    def open(self, index: DiskIndex, *, unix_s: int, now: float) -> None:
        """Begin; unix_s: the wall clock's time at `now`."""
        self.index = index
        self._unix_s = unix_s - now

    def unix_s(self, now: float) -> int:
        """Return the wall clock's time."""
        return int(self._unix_s + now)

    def next_job(self) -> int:
        """Return a number that no other job had."""
        self._jobs += 1
        return self._jobs

    def on_disk(self, pages: Sequence[Page]) -> list[int]:
        """Return under which length each page is on disk, 0 for not at all; makes it hot there."""
        if self.index is None:
            return [0] * len(pages)
        entries = self.index.find(b"".join([page.key for page in pages]))
        there = entries >= 0
        self.index.touch(entries[there])
        lengths = np.zeros(len(pages), np.int64)
        lengths[there] = self.index.lengths(entries[there])
        found: list[int] = lengths.tolist()
        return found

    def only_on_disk(self, keys: bytes) -> list[bytes]:
        """Return those of these packed keys that are not in memory."""
        find = self.pages.find
        return [key for key in split(keys) if find(key) is None]

    def published(self, keys: bytes, lengths: Sequence[int]) -> list[Effect]:
        """Tell that these pages are on disk, where no page in memory says more."""
        pairs = zip(split(keys), lengths, strict=True)
        told = [(key, length) for key, length in pairs if self.pages.find(key) is None]
        records = self.pages.on_disk_records([key for key, _ in told], [size for _, size in told])
        return changed(records, _NO_DROPS)

    def withdrawn(self, keys: bytes) -> list[Effect]:
        """Tell that these pages are on disk no more, where no page in memory says more."""
        return changed(_NO_RECORDS, self.pages.drops_of(self.only_on_disk(keys)))

    def forgotten(self, gone: Gone, *, job: int = 0) -> list[Effect]:
        """Do what must follow when entries have gone."""
        effects: list[Effect] = []
        if len(gone.places) or job:
            cuts = range(PLACES_A_FORGET_MAX, len(gone.places), PLACES_A_FORGET_MAX)
            parts = np.split(gone.places, list(cuts))
            # The last one tells when all are forgotten: the store keeps their order.
            effects += [Forget(part) for part in parts[:-1]]
            effects.append(Forget(parts[-1], job))
        return [*effects, *self.withdrawn(gone.keys)]


def indexed_of(opened: DiskOpened) -> DiskIndexed:
    """Make the index of what lies on disk; takes seconds, so a thread calls it, not the loop."""
    index = DiskIndex(capacity_bytes=opened.usable_bytes, slab_bytes=opened.slab_bytes)
    index.load(opened.entries)
    return DiskIndexed(opened, index)


def split(keys: bytes) -> list[bytes]:
    """Return the keys of a packed batch."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def changed(records: Records, drops: Records) -> list[Effect]:
    """Tell directory and publisher of records, if there are any."""
    if not len(records) and not len(drops):
        return []
    fact = RecordsChanged(records, drops)
    return [TellDirectory(fact), TellPublisher(fact)]
