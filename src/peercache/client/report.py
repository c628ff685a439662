"""What one call of a client did: how much it moved, and why pages were misses.

The answer of a call says which pages are hits. An engine's connector also wants to know why the
others are not, for this call and no other that runs beside it. The metrics cannot tell: they count
all calls together. So a caller opens a report, and the calls that it makes in this thread until the
end of the block write into it: a call runs in its caller's thread from begin to end.

    with reporting() as report:
        hits = client.batch_get_into(keys, runs)
    report.misses  # Counter({"absent": 32})
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs


@attrs.define(eq=False)
class CallReport:
    """What the calls of one block did.

    pages, bytes: read and verified, or copied into the pool; pages that were there already are
    none of them. misses: pages that were not served, by miss reason. is_detailed: whether calls
    give reasons that they do not count for the metrics anyway. call: the number of the last call,
    which log lines about it carry.
    """

    is_detailed: bool = False
    pages: int = 0
    bytes: int = 0
    misses: Counter[str] = attrs.field(factory=Counter)
    call: int = 0


class _Current(threading.local):
    report: CallReport | None = None


current = _Current()
"""`current.report` is the report that is open in this thread, None where nothing asked for one: an
attribute, because most calls have none and should pay nothing for it."""


@contextmanager
def reporting(*, is_detailed: bool = False) -> Iterator[CallReport]:
    """Collect what calls in this thread do until the end of the block; an outer block rests."""
    outer, report = current.report, CallReport(is_detailed)
    current.report = report
    try:
        yield report
    finally:
        current.report = outer


def tell_moved(pages: int, moved_bytes: int) -> None:
    """Add pages that were moved to the open report."""
    if (report := current.report) is not None:
        report.pages += pages
        report.bytes += moved_bytes


def tell_missed(pages_by_reason: Mapping[str, int]) -> None:
    """Add pages that were not served to the open report; reason "" is no miss."""
    if (report := current.report) is not None:
        for reason, pages in pages_by_reason.items():
            if reason and pages:
                report.misses[reason] += pages
