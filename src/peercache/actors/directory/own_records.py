"""The own pool's records in the shard's table, and those that found no memory there yet.

The pool tells each change once, so what the table refuses is kept here and put again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import final

import attrs

from peercache.actors.directory.holdings import Holdings
from peercache.actors.directory.table import Change
from peercache.actors.mailboxes import RecordsChanged

RETRY_S = 0.25
"""Pause before records without memory are put again: a full file system is full for longer."""

RETRIED_MAX = 1024
"""Records that are put again at once: a third of a millisecond."""


@final
@attrs.define(eq=False)
class OwnRecords:
    """The records of the own pool. retry_at: when to put again what is late; inf for never."""

    held: Holdings
    retry_at: float = math.inf
    _late: dict[bytes, tuple[int, bytes]] = attrs.field(factory=dict)
    """By key: generation and record of pages that the table lacks; the pool has all of them."""

    @property
    def is_whole(self) -> bool:
        """Whether the table lacks none of them."""
        return not self._late

    def change(self, changed: RecordsChanged, now: float) -> Iterator[Change]:
        """Take what the pool says; yield what the table says of it."""
        put = self.held.put(changed.records.tobytes())
        yield put
        if put.refused:
            self._keep(changed)
            self.retry_at = min(self.retry_at, now + RETRY_S)
        elif self._late:
            for key in changed.records["key"].tolist():
                self._late.pop(key, None)
        if len(changed.drops):
            yield self.held.drop(changed.drops.tobytes())
        if self._late:
            self._forget(changed)

    def retry(self, now: float) -> Change:
        """Put some of the late records again."""
        some = list(islice(self._late, RETRIED_MAX))
        put = self.held.put(b"".join(self._late[key][1] for key in some))
        if not put.refused:
            for key in some:
                del self._late[key]
        self.retry_at = now + RETRY_S if self._late else math.inf
        return put

    def _keep(self, changed: RecordsChanged) -> None:
        keys, generations = changed.records["key"].tolist(), changed.records["generation"].tolist()
        for key, generation, record in zip(keys, generations, changed.records, strict=True):
            if key not in self._late or self._late[key][0] < generation:
                self._late[key] = generation, record.tobytes()

    def _forget(self, changed: RecordsChanged) -> None:
        drops = zip(
            changed.drops["key"].tolist(), changed.drops["generation"].tolist(), strict=True
        )
        for key, generation in drops:
            late = self._late.get(key)
            if late is not None and late[0] <= generation:
                del self._late[key]
