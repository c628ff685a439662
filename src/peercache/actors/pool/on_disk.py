"""Pages of this node on its disk: what the pool knows of them, and the records that it tells.

A page has one record. It is RESIDENT while the page is in memory, else ON_DISK while the page is on
disk. The pool alone numbers records, so the disk actor tells it the facts (`PagesSpilled`,
`PagesForgotten`) and the pool decides what follows. Of pages in memory it notes under which length
they are on disk (`Page.disk_length`), because eviction must know; of pages on disk only it keeps
nothing, as the next fact of the disk actor says all that is needed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from peercache.actors.effects import Effect, Send, TellDirectory, TellDisk, TellPublisher
from peercache.actors.mailboxes import (
    PagesDemoted,
    PagesSpilled,
    PromoteAnswered,
    RecordsChanged,
    ResidentAsked,
)
from peercache.actors.pool.page_table import Page, PageTable
from peercache.model.keys import split_keys
from peercache.model.records import DROP, RECORD, Records
from peercache.wire.messages.promote import LATER, PROMOTED, Promoted

NO_RECORDS: Final = np.empty(0, RECORD)
NO_DROPS: Final = np.empty(0, DROP)


def changed(records: Records, drops: Records) -> list[Effect]:
    """Tell directory and publisher of records and drops, if there are any."""
    if not len(records) and not len(drops):
        return []
    fact = RecordsChanged(records, drops)
    return [TellDirectory(fact), TellPublisher(fact)]


def spilled(pages: PageTable, fact: PagesSpilled) -> list[Effect]:
    """Note of pages in memory that they are on disk; give all others an ON_DISK record."""
    keys: list[bytes] = []
    lengths: list[int] = []
    for key, length in zip(split_keys(fact.keys), fact.lengths.tolist(), strict=True):
        page = pages.find(key)
        if page is None:
            keys.append(key)
            lengths.append(length)
        else:
            page.disk_length = length
    return changed(pages.on_disk_records(keys, lengths), NO_DROPS)


def forgotten(pages: PageTable, packed: bytes) -> list[Effect]:
    """Note of pages in memory that they are on disk no longer; withdraw all others' records."""
    gone: list[bytes] = []
    for key in split_keys(packed):
        page = pages.find(key)
        if page is None:
            gone.append(key)
        else:
            page.disk_length = 0
    return changed(NO_RECORDS, pages.drops_of(gone))


def demoted(pages: PageTable, evicted: list[Page], drops: Records) -> list[Effect]:
    """Tell what eviction means: an ON_DISK record for each page on disk, a drop for the others."""
    kept = [page for page in evicted if page.disk_length]
    if not kept:
        return changed(NO_RECORDS, drops)
    lost = np.array([not page.disk_length for page in evicted], np.bool_)
    keys = [page.key for page in kept]
    records = pages.on_disk_records(keys, [page.disk_length for page in kept])
    told = changed(records, drops[lost])
    return [*told, TellDisk(PagesDemoted(b"".join(keys)))]


def residents(pages: PageTable, packed: bytes) -> bytes:
    """Return one byte a page: 1 where it is in memory."""
    find = pages.find
    return bytes(find(key) is not None for key in split_keys(packed))


def unchanged(pages: PageTable, asked: ResidentAsked) -> bytes:
    """Return one byte a page: 1 where it is in memory under the generation that is asked for."""
    find = pages.find
    generations = np.frombuffer(asked.generations, "<u8").tolist()
    return bytes(
        (page := find(key)) is not None and page.generation == generation
        for key, generation in zip(split_keys(asked.keys), generations, strict=True)
    )


def promote_answer(pages: PageTable, asked: PromoteAnswered) -> Send:
    """Answer a reader with the records of this moment: a page evicted since is LATER."""
    states = bytearray(asked.states)
    found: list[Page] = []
    for at, state in enumerate(states):
        if state == PROMOTED:
            page = pages.find(asked.keys[at])
            if page is None:
                states[at] = LATER
            else:
                found.append(page)
    records = pages.records(found).tobytes()
    return Send(asked.origin, Promoted(asked.request, bytes(states), records))
