"""Copies: which pages of a pool have a copy on another node, and which have none.

A page and its copy are equals: both are read, both are evicted in their turn, and each of the two
nodes knows of the other (`Slot.copy_at`). A node that evicts its page reports that to the other
one, whose page then has no copy: it is named to the placement actor, which offers it. So is each
page whose other node is dead, and each page that a client stores.

Reports may be lost, so they are numbered, and the last one is repeated. A node that misses one
offers all pages of which that node had a copy to that node again: of those that are still there it
learns so, without a byte being read. A node that others have held dead does so with all of them:
they have forgotten that it relies on their pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import CopiesMade, PagesToCopy
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.slots import SlotAllocator
from peercache.model.keys import split_keys
from peercache.wire.messages.membership import CopiesEvicted

COPY_PAGES: Final = 256
"""Pages that are named at once."""

COPY_BYTES: Final = 32 * 2**20
"""Their bytes, unless one page has more."""

REPORT_S: Final = 0.05
"""How long evicted pages are collected for one report."""

REPORT_KEYS: Final = 4096
"""Pages of one report: 64 KiB."""

REPEAT_S: Final = 5.0
"""How long after a report its number is sent again; then after twice that time, and so on."""

REPEAT_MAX_S: Final = 320.0

DOUBT_S: Final = 10.0
"""How often at most all pages of one node are offered to it again: each time all are looked at."""


@final
@attrs.define(eq=False)
class Copies:
    """The copies of one pool's pages.

    is_wanted: whether a page without a copy is named; else none is, but evictions are reported.
    """

    pages: PageTable
    slots: SlotAllocator
    is_wanted: bool
    _urgent: OrderedDict[bytes, int] = attrs.field(factory=OrderedDict)
    """Pages without a copy that were not named yet, by key: a node that may have one; or 0."""
    _waiting: OrderedDict[bytes, None] = attrs.field(factory=OrderedDict)
    """Those that were named, or evicted by the other node: other nodes have no room for them. The
    next one to be named first."""
    _withheld: dict[bytes, None] = attrs.field(factory=dict)
    """Pages without a copy that are not named: this node may have missed their removal."""
    _counts: Counter[int] = attrs.field(factory=Counter)
    """How many pages have their copy on each node."""
    _more: dict[bytes, set[int]] = attrs.field(factory=dict)
    """By key, further nodes that rely on the page here."""
    _evicted: dict[int, list[bytes]] = attrs.field(factory=dict)
    """Pages to report, by node."""
    _sent: dict[int, int] = attrs.field(factory=dict)
    _repeat_at: dict[int, tuple[float, float]] = attrs.field(factory=dict)
    """When the last number is sent to a node again, and how long after that once more."""
    _received: dict[int, int] = attrs.field(factory=dict)
    _doubted: dict[int, float] = attrs.field(factory=dict)
    """Nodes of which a report was lost, and when their pages are looked at."""
    _looked_at: dict[int, float] = attrs.field(factory=dict)
    _report_at: float = inf

    @property
    def single_count(self) -> int:
        """Return how many pages have no copy, if copies are wanted."""
        return len(self._urgent) + len(self._waiting) + len(self._withheld)

    def counts(self) -> dict[int, int]:
        """Return of how many pages each node has the copy."""
        return dict(self._counts)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note pages that are new here."""
        if self.is_wanted:
            self._urgent.update(dict.fromkeys(keys, 0))

    def adopted(self, page: Page) -> None:
        """Note a page that was mirrored here, and is now a page like others.

        It may have a copy already: it was mirrored while it was taken as one.
        """
        if not page.slot.copy_at:
            self._alone(page, is_urgent=True)

    def ended(self, pages: Sequence[Page], *, is_removed: bool) -> None:
        """Note pages that leave memory; the other node learns it of those that are lost here."""
        if not self._counts and not self.single_count and not self._more:
            return
        for page in pages:
            more = self._more.pop(page.key, ())
            self._no_longer_single(page.key)
            is_lost = not is_removed and not page.slot.disk_length
            if is_lost:
                for node in more:
                    self._report(node, page.key)
            if page.slot.copy_at:
                if is_lost:
                    self._report(page.slot.copy_at, page.key)
                self._part(page)

    def named(self, newer_than: int, now: float, *, again: bool) -> PagesToCopy:
        """Return the next pages without a copy.

        newer_than: pages with no greater generation are not named. again: those that no node
        took are named too, once there are no others.
        """
        chosen: dict[int, list[Page]] = {}
        near = size = 0
        queue: OrderedDict[bytes, Any] = self._urgent
        if not queue and again:
            queue = self._waiting
        for _ in range(min(len(queue), COPY_PAGES)):
            key, node = next(iter(queue.items()))
            page, node = self.pages.find(key), node or 0
            assert page is not None, "a page that is gone waits for a copy"
            if chosen and (node != near or size + page.length > COPY_BYTES):
                break
            del queue[key]
            if page.generation <= newer_than:
                self._withheld[key] = None
                continue
            self._waiting[key] = None
            chosen.setdefault(page.namespace, []).append(page)
            near, size = node, size + page.length
        # The deepest first: of a prompt that has no room as a whole, its begin is taken.
        groups = [(tag, some[::-1]) for tag, some in chosen.items()]
        return PagesToCopy(
            tuple((tag, self.pages.records(some), self._ages(some, now)) for tag, some in groups),
            near,
        )

    def made(self, made: CopiesMade) -> None:
        """Note which node has copies of pages; it learns it of those that are gone by now."""
        keys, generations = made.drops["key"].tolist(), made.drops["generation"].tolist()
        for key, generation in zip(keys, generations, strict=True):
            page = self.pages.find(key)
            if page is None or page.generation != generation:
                if made.node:
                    self._report(made.node, key)
            elif not made.node:
                if not page.slot.copy_at:
                    self._alone(page, is_urgent=True)
            elif not made.is_sure:
                self._more.setdefault(key, set()).add(made.node)
                if not page.slot.copy_at and key in self._waiting:
                    # The next one may answer.
                    del self._waiting[key]
                    self._urgent[key] = 0
            elif page.slot.copy_at not in (0, made.node):
                self._more.setdefault(key, set()).add(made.node)
            elif not page.slot.copy_at:
                self._forget_more(key, made.node)
                page.slot.copy_at = made.node
                self._counts[made.node] += 1
                self._no_longer_single(key)

    def lost(self, node: int, report: CopiesEvicted, now: float) -> None:
        """Take the report of a node that it has pages no more of which this node has copies."""
        expected = self._received.get(node, 0) + (1 if report.keys else 0)
        if report.number != expected:
            self._doubt(node, now)
        self._received[node] = report.number
        for page in self.pages.of_keys(split_keys(report.keys)):
            self._forget_more(page.key, node)
            if page.slot.copy_at == node:
                # Most likely it was cold there too, and has no place anywhere.
                self._alone(page)

    def doubt_all(self, now: float) -> None:
        """Doubt every copy: nodes that held this one dead no longer report what they evict."""
        for node in self._counts:
            self._doubt(node, now)

    def changed(self, nodes: frozenset[int]) -> None:
        """Note which other nodes there are: copies elsewhere are lost. A pass over all pages."""
        gone = self._counts.keys() - nodes
        more = {key: known & nodes for key, known in self._more.items()}
        self._more = {key: known for key, known in more.items() if known}
        if gone:
            for page in self.pages.all():
                if page.slot.copy_at in gone:
                    self._alone(page, is_urgent=True)
        for known in (self._evicted, self._sent, self._repeat_at, self._received, self._doubted):
            for node in known.keys() - nodes:
                del known[node]
        for node in self._looked_at.keys() - nodes:
            del self._looked_at[node]

    def report(self, now: float) -> list[Effect]:
        """Report what was evicted.

        Before a page is offered or taken again: a report that came after that would be mistaken for
        one of the new page.
        """
        effects: list[Effect] = []
        self._report_at = inf
        evicted, self._evicted = self._evicted, {}
        for node, keys in evicted.items():
            for begin in range(0, len(keys), REPORT_KEYS):
                number = self._sent[node] = self._sent.get(node, 0) + 1
                packed = b"".join(keys[begin : begin + REPORT_KEYS])
                effects.append(Send(node, CopiesEvicted(number, packed)))
            self._repeat_at[node] = now + REPEAT_S, 2 * REPEAT_S
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Report what was evicted, repeat the numbers of reports, offer again what is in doubt."""
        effects = self.report(now) if self._report_at <= now else []
        for node, (at, then) in self._repeat_at.items():
            if at <= now:
                self._repeat_at[node] = now + then, min(2 * then, REPEAT_MAX_S)
                effects.append(Send(node, CopiesEvicted(self._sent[node], b"")))
        for node in [node for node, at in self._doubted.items() if at <= now]:
            del self._doubted[node]
            self._looked_at[node] = now
            for page in self.pages.all():
                if page.slot.copy_at == node:
                    # It may have the copy, and then relies on the page here.
                    self._more.setdefault(page.key, set()).add(node)
                    self._alone(page, node)
        return effects

    def deadline(self) -> float:
        """Return when the next report is due."""
        repeats = (at for at, _ in self._repeat_at.values())
        return min(self._report_at, *repeats, *self._doubted.values(), inf)

    def check(self) -> None:
        """Assert that each page counts once, in constant time."""
        with_copy, pages = self._counts.total(), len(self.pages)
        assert with_copy + self.single_count <= pages, (
            f"{with_copy} pages with a copy and {self.single_count} without one, of {pages}"
        )

    def _ages(self, pages: list[Page], now: float) -> npt.NDArray[np.float64]:
        return np.array([self.slots.ages.age(page.slot.touched, now) for page in pages])

    def _report(self, node: int, key: bytes) -> None:
        self._evicted.setdefault(node, []).append(key)
        self._report_at = min(self._report_at, self.slots.now + REPORT_S)

    def _doubt(self, node: int, now: float) -> None:
        self._doubted.setdefault(node, max(now, self._looked_at.get(node, -inf) + DOUBT_S))

    def _forget_more(self, key: bytes, node: int) -> None:
        more = self._more.get(key)
        if more is not None:
            more.discard(node)
            if not more:
                del self._more[key]

    def _alone(self, page: Page, near: int = 0, *, is_urgent: bool = False) -> None:
        """Note that no node is known to have a copy of a page. near: one that may have."""
        if page.slot.copy_at:
            self._part(page)
        if not self.is_wanted or page.key in self._withheld:
            return
        self._no_longer_single(page.key)
        # Who relies on the page here has one too.
        near = near or next(iter(self._more.get(page.key, ())), 0)
        if is_urgent or near:
            self._urgent[page.key] = near
        else:
            self._waiting[page.key] = None

    def _no_longer_single(self, key: bytes) -> None:
        for known in (self._urgent, self._waiting, self._withheld):
            known.pop(key, None)

    def _part(self, page: Page) -> None:
        self._counts[page.slot.copy_at] -= 1
        if not self._counts[page.slot.copy_at]:
            del self._counts[page.slot.copy_at]
        page.slot.copy_at = 0
