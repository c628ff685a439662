"""Scan the pages of a namespace on every member, some at a time, as SCAN of Redis does.

A cursor is the whole state of a scan: neither the nodes nor this process keep any other, so a scan
continues after a restart of either. It names the member that is read, in the order of their names,
and a position in it.

A page that a member holds from the beginning to the end of its scan is listed at least once. Of a
page that is stored, moved or removed meanwhile nothing is promised: it may be missing, or listed
again. Each holder of a page lists it. A member that has restarted since is read again from its
beginning.
"""

from __future__ import annotations

import re
import time

import attrs
import numpy as np

from peercache.client.operator import Operator
from peercache.errors import ConfigError, Rejected
from peercache.model.keys import Namespace
from peercache.model.records import IN_MEMORY, changes_from_bytes
from peercache.model.status import NO_ANSWER
from peercache.wire.messages.directory import (
    CHANGES_A_MESSAGE_MAX,
    SCANNED,
    ReportKeys,
    RequestKeys,
)

BUSY = "busy"
BUSY_PAUSE_S = 0.05
"""Pause before a node is asked again that reads as many scans as it may."""

_CURSOR = re.compile(r"(?P<name>\S+)@([0-9a-f]{1,16}):([0-9a-f]{1,16}):([0-9a-f]{1,16})", re.ASCII)


@attrs.frozen
class HeldPage:
    """A page that a member holds. tier: memory, or disk if it is only there."""

    node: str
    key: str
    bytes: int
    tier: str


@attrs.frozen
class ScanPart:
    """A part of a scan.

    cursor: where the next part begins; "" after the last one.
    missed: the members that did not answer: their pages are missing.
    """

    pages: tuple[HeldPage, ...]
    cursor: str
    missed: tuple[str, ...]


@attrs.frozen
class _Position:
    """Where a scan is: before `row` of a member."""

    name: str = ""
    incarnation: int = 0
    row: int = 0
    newest: int = 0

    @classmethod
    def of(cls, cursor: str) -> _Position:
        if not cursor:
            return cls()
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise ConfigError("cursor", f"{cursor!r} is no cursor of an earlier scan")
        return cls(found[1], *[int(part, 16) for part in found.groups()[1:]])

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation:x}:{self.row:x}:{self.newest:x}"


def scan_part(
    operator: Operator, namespace: str, *, cursor: str = "", limit: int = 1000, timeout_s: float
) -> ScanPart:
    """Return up to `limit` pages of a namespace, and the cursor of the next ones.

    It returns what it has after `timeout_s`: fewer pages, or none, and a cursor.
    Raises ConfigError for an invalid cursor, PeerUnreachable, Rejected or DeadlineExceeded if the
    node of the operator does not answer.
    """
    position = _Position.of(cursor)
    until = time.monotonic() + timeout_s
    tag = Namespace(namespace).space_tag()
    members = sorted(
        (each.status.name, int(each.status.incarnation or "0", 16), each.status.state)
        for each in operator.statuses()
        if each.seen != "left"
    )
    pages: list[HeldPage] = []
    missed: list[str] = []
    for name, incarnation, state in members:
        if name < position.name:
            continue
        if (name, incarnation) != (position.name, position.incarnation):
            position = _Position(name, incarnation)
        if state == NO_ANSWER:
            missed.append(name)
            continue
        while position.row != SCANNED:
            if len(pages) >= limit or time.monotonic() >= until:
                return ScanPart(tuple(pages), str(position), tuple(missed))
            count = min(limit - len(pages), CHANGES_A_MESSAGE_MAX)
            try:
                asked = RequestKeys(0, tag, incarnation, position.row, position.newest, count)
                reply = operator.ask(asked, ReportKeys)
            except Rejected as refused:
                if refused.reason == BUSY:
                    time.sleep(BUSY_PAUSE_S)
                    continue
                if refused.reason != "unreachable":
                    raise
                missed.append(name)
                break
            pages += _pages_of(reply, name)
            position = attrs.evolve(position, row=reply.row, newest=reply.newest)
    return ScanPart(tuple(pages), "", tuple(missed))


def _pages_of(reply: ReportKeys, name: str) -> list[HeldPage]:
    held = changes_from_bytes(reply.held)
    tiers = np.where(held["tier"] == IN_MEMORY, "memory", "disk").tolist()
    keys, lengths = held["key"].tolist(), held["length"].tolist()
    return [
        HeldPage(name, key.hex(), length, tier)
        for key, length, tier in zip(keys, lengths, tiers, strict=True)
    ]
