"""The report of a call of a client: how much it moved, and why pages were misses.

The return value of a call shows which pages are hits. An engine's connector also needs to know why
the others are misses, for this call only, not for calls that run at the same time. The metrics
count all calls together. So a caller opens a report, and the calls that it makes in this thread
until the end of the block write into it: a call runs in its caller's thread from start to end.

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

    pages, bytes: read and verified, or copied into the pool; pages that were stored already do not
                  count. fabrics: pages that were read, by fabric. misses: pages that were not
                  served, by miss reason. is_detailed: whether calls also report reasons that they
                  do not count for the metrics. call: the number of the last call, which is in its
                  log lines.
    """

    is_detailed: bool = False
    pages: int = 0
    bytes: int = 0
    fabrics: Counter[str] = attrs.field(factory=Counter)
    misses: Counter[str] = attrs.field(factory=Counter)
    call: int = 0

    def add(self, other: CallReport, *, with_misses: bool) -> None:
        """Add the report of a block within this one."""
        self.pages += other.pages
        self.bytes += other.bytes
        self.fabrics.update(other.fabrics)
        if with_misses:
            self.misses.update(other.misses)
        self.call = other.call


class _Current(threading.local):
    report: CallReport | None = None


current = _Current()
"""`current.report` is the open report of this thread, None if there is none: an attribute, so that
calls without a report pay nothing for it."""


@contextmanager
def reporting(*, is_detailed: bool = False) -> Iterator[CallReport]:
    """Collect what calls in this thread do until the end of the block; outer blocks are
    suspended.
    """
    outer, report = current.report, CallReport(is_detailed)
    current.report = report
    try:
        yield report
    finally:
        current.report = outer


def add_moved(pages: int, moved_bytes: int, fabric: str = "") -> None:
    """Add pages that were moved to the open report. fabric: the one that they were read over."""
    if (report := current.report) is not None:
        report.pages += pages
        report.bytes += moved_bytes
        if fabric:
            report.fabrics[fabric] += pages


def add_missed(pages_by_reason: Mapping[str, int]) -> None:
    """Add pages that were not served to the open report; reason "" means no miss."""
    if (report := current.report) is not None:
        for reason, pages in pages_by_reason.items():
            if reason and pages:
                report.misses[reason] += pages
