"""Messages with which a reader asks a holder for pages on its disk.

The holder loads them into its pool and answers with fresh records; then the reader reads them as
any page.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import CLIENTS, NO_ROLE, Declared, Receiver

PROMOTED = 0
"""The page is in memory now: its record is in the answer."""
LATER = 1
"""On disk and not loaded yet: beyond this answer's portion, or the patience was over. Ask again."""
LOST = 2
"""Neither in memory nor on disk: removed, damaged, or the disk has failed."""


@attrs.frozen
class Promote:
    """Ask a holder to load pages from its disk into its memory, the first of them first.

    patience_s: how long the answer may wait for the disk; 0 wants no answer, and the holder loads
                as many as its rate for such wishes allows.
    """

    declared: ClassVar = Declared(32, Receiver.PROMOTE, CLIENTS)

    request: int
    keys: bytes
    patience_s: float


@attrs.frozen
class Promoted:
    """Answer a Promote: a state a key, and the records, in key order, of pages now in memory."""

    declared: ClassVar = Declared(33, Receiver.ASKER, NO_ROLE)

    request: int
    states: bytes
    records: bytes
