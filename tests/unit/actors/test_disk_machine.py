"""Pool and disk tier against an obvious slow oracle, under whatever Hypothesis comes up with.

After every step, whatever is reported of a page must be where it is, what is read must have been
set and not have been removed since, and slots and places must add up to the byte.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    Load,
)
from peercache.model.records import RESIDENT
from peercache.model.records import from_bytes as records_from_bytes
from peercache.wire.messages.pool import Promoted
from tests.examples import examples
from tests.unit.actors.disk_world import GRANULE, LENGTH, DiskWorld, key

pages = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
whichever = st.integers(0, 20)


class DiskMachine(RuleBasedStateMachine):
    """Clients set, ask and remove; the store works, fails, is late and ends; the node restarts."""

    def __init__(self) -> None:
        """Make the world in the first step, when its sizes are drawn."""
        super().__init__()
        self.world: DiskWorld
        self.asked = 0
        self.removed: dict[bytes, int] = {}
        self.removed_on_disk: dict[bytes, int] = {}
        """As it was when the disk ended: a restart undoes what was removed since."""

    @initialize(
        granules=st.sampled_from([4, 6, 12]),
        slabs=st.sampled_from([1, 2]),
        queue_bytes=st.sampled_from([2 * LENGTH, 10**6]),
        on_evict=st.booleans(),
        order=st.none() | st.integers(0, 2**16),
    )
    def start(
        self, granules: int, slabs: int, queue_bytes: int, on_evict: bool, order: int | None
    ) -> None:
        """Draw a small pool and a small disk, and the order in which the actors take turns."""
        self.options = {
            "granules": granules,
            "slabs": slabs,
            "queue_bytes": queue_bytes,
            "on_evict": on_evict,
            "order": None if order is None else random.Random(order),
        }
        self.world = DiskWorld(**self.options)  # type: ignore[arg-type]

    # --- clients ----------------------------------------------------------------------------------

    @rule(numbers=pages, length=st.sampled_from([LENGTH, LENGTH, 2 * GRANULE - 5]))
    def set(self, numbers: list[int], length: int) -> None:
        """Set pages, each in a new version."""
        self.world.set(*numbers, length=length)

    @rule(numbers=pages, timeout_s=st.sampled_from([0.0, 0.1, 5.0]))
    def ask(self, numbers: list[int], timeout_s: float) -> None:
        """Ask for pages on disk."""
        self.asked += 1 if timeout_s else 0
        self.world.ask(*numbers, timeout_s=timeout_s, asker=100 + self.asked)

    @rule(numbers=pages)
    def remove(self, numbers: list[int]) -> None:
        """Remove pages; what was set before is not read again, unless the disk had ended."""
        self.world.remove(*numbers)
        for number in numbers:
            self.removed[key(number)] = self.world.version

    @rule()
    def clear(self) -> None:
        """Remove everything."""
        self.world.clear(1)
        for number in range(10):
            self.removed[key(number)] = self.world.version

    @rule(span_s=st.sampled_from([0.01, 0.2, 1.5, 12.0]))
    def wait(self, span_s: float) -> None:
        """Let time pass."""
        self.world.wait(span_s)

    # --- the store --------------------------------------------------------------------------------

    @precondition(lambda self: any(job > 0 for job in self.world.working))
    @rule(which=whichever, steps=st.integers(1, 4))
    def step(self, which: int, steps: int) -> None:
        """Let a job do some steps."""
        jobs = [job for job in self.world.working if job > 0]
        job = jobs[which % len(jobs)]
        for _ in range(steps):
            if job in self.world.working:
                self.world.step(job)

    @precondition(lambda self: any(job > 0 for job in self.world.working))
    @rule(
        which=whichever,
        outcome=st.sampled_from([DISK_CHANGED, DISK_FULL, DISK_FAILED, DISK_LATE, DISK_UNTRIED]),
    )
    def fail(self, which: int, outcome: int) -> None:
        """Answer a job before it is done."""
        jobs = [job for job in self.world.working if job > 0]
        job = jobs[which % len(jobs)]
        if isinstance(self.world.working[job].effect, Load) and outcome in (
            DISK_CHANGED,
            DISK_FULL,
        ):
            outcome = DISK_DAMAGED
        self.world.answer(job, outcome)

    @precondition(lambda self: self.world.late)
    @rule(which=whichever)
    def late_ends(self, which: int) -> None:
        """Let a late job end at last."""
        jobs = list(self.world.late)
        self.world.late_ends(jobs[which % len(jobs)])

    @rule()
    def finish(self) -> None:
        """Let the store do all it has."""
        self.world.finish()

    @precondition(lambda self: self.world.tier.is_open)
    @rule()
    def end(self) -> None:
        """The disk ends; the node goes on without it."""
        self.world.end()
        self.removed_on_disk = dict(self.removed)

    @rule()
    def restart(self) -> None:
        """The node starts again on what is safe on its disk."""
        if not self.world.tier.is_open:
            self.removed = self.removed_on_disk
        self.world.image.sync()
        versions, number = self.world.versions, self.world.version
        self.world = DiskWorld(image=self.world.image, **self.options)  # type: ignore[arg-type]
        self.world.versions, self.world.version = versions, number
        self.asked = 0

    # --- what must be -----------------------------------------------------------------------------

    @invariant()
    def records_say_where_pages_are(self) -> None:
        """What is reported is so, and what is so is reported, but some of it little by little."""
        if not hasattr(self, "world"):
            return
        world = self.world
        packed = world.tier._unreported
        untold = {packed[at : at + 16] for at in range(0, len(packed), 16)}
        memory = {page.key for page in world.pool.pages.of_namespace(1)}
        disk: set[bytes] = set()
        index = world.tier.index
        if index is not None:
            disk = {row["key"].tobytes() for row in index.entries(index.hottest_first())}
        reported = {k: bool(r["flags"] & RESIDENT) for k, r in world.records.items()}
        assert {k for k, is_resident in reported.items() if is_resident} == memory
        on_disk = {k for k, is_resident in reported.items() if not is_resident}
        assert on_disk - untold <= disk - memory
        assert disk - memory <= on_disk | untold

    @invariant()
    def what_is_read_was_set_and_not_removed(self) -> None:
        """Every record in force of a page in memory, and every one that was just answered."""
        if not hasattr(self, "world"):
            return
        for name, record in self.world.records.items():
            if record["flags"] & RESIDENT:
                assert self.world.read(record) > self.removed.get(name, 0), "a removed page"

    @invariant()
    def slots_and_places_add_up(self) -> None:
        """Reserved is what loads were wanted for; in flight is what is written or let go of.

        A page that left the disk before its load began keeps its slot until the others are loaded.
        """
        if not hasattr(self, "world"):
            return
        world = self.world
        lengths = [length for working in world.working.values() for length in working.reserved]
        reserved = sum(-(-length // GRANULE) * GRANULE for length in lengths)
        assert world.pool.figures()["pool_bytes_reserved"] == reserved
        figures = world.tier.figures()
        if world.tier.is_open:
            total = sum(figures[f"disk_bytes_{word}"] for word in ("used", "in_flight", "free"))
            assert total == figures["disk_bytes"]
            if not world.working:
                assert figures["disk_bytes_in_flight"] == 0

    @invariant()
    def every_reader_is_answered_once(self) -> None:
        """A reader that does not wait has been answered, exactly once."""
        if not hasattr(self, "world"):
            return
        answered = [a.request for a in self.world.answers if isinstance(a, Promoted)]
        assert len(set(answered)) == len(answered)
        assert len(answered) + len(self.world.promote.waiters) == self.asked
        for answer in self.world.answers:
            if isinstance(answer, Promoted):
                assert answer.states.count(0) == len(records_from_bytes(answer.records))


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=examples(120), stateful_step_count=40)


@pytest.mark.parametrize("on_evict", [False, True])
@pytest.mark.parametrize("order", [None, 0, 1, 2, 3])
def test_page_that_is_cleared_while_it_is_loaded_stays_away_over_a_restart(
    order: int | None, *, on_evict: bool
) -> None:
    """1. A page goes to disk. 2. The node starts again, and readers ask for the page. 3. All pages
    are cleared while the page is being loaded. 4. The node starts again; the page is asked for.
    """
    story = DiskMachine()
    story.start(granules=4, slabs=1, queue_bytes=10**6, on_evict=on_evict, order=order)
    story.set([1], LENGTH)
    story.finish()
    story.restart()
    story.ask([0], 0.1)
    story.ask([1], 0.1)
    story.clear()
    story.restart()
    story.remove([0])
    story.ask([1], 0.1)
    story.finish()

    story.records_say_where_pages_are()
    story.what_is_read_was_set_and_not_removed()
    assert story.world.where(1) == ""


@pytest.mark.parametrize("is_clear", [False, True])
def test_page_that_is_removed_after_the_disk_has_ended_is_back_after_a_restart(
    *, is_clear: bool
) -> None:
    """1. A page goes to disk, and the disk ends. 2. The page is removed. 3. The node starts again,
    and the page is asked for.
    """
    story = DiskMachine()
    story.start(granules=4, slabs=1, queue_bytes=10**6, on_evict=False, order=None)
    story.set([1], LENGTH)
    story.finish()
    story.end()
    if is_clear:
        story.clear()
    else:
        story.remove([1])
    assert story.world.where(1) == ""
    story.restart()
    story.ask([1], 0.0)
    story.finish()

    assert story.world.where(1) == "memory"
    story.records_say_where_pages_are()
    story.what_is_read_was_set_and_not_removed()


@pytest.mark.parametrize("on_evict", [False, True])
@pytest.mark.parametrize("order", [None, 0, 1, 2, 3])
def test_slot_of_a_page_that_left_the_disk_before_its_load_is_freed_when_the_load_ends(
    order: int | None, *, on_evict: bool
) -> None:
    """1. Two large pages are being loaded, and two small ones wait for room. 2. One of the small
    ones is removed. 3. A large load ends: the pool reserves slots for both small pages, and the
    disk loads one of them. 4. That load ends.
    """
    story = DiskMachine()
    story.start(granules=6, slabs=2, queue_bytes=10**6, on_evict=on_evict, order=order)
    story.set([0, 1], 2 * GRANULE - 5)
    story.set([2, 3], LENGTH)
    story.wait(1.5)
    story.finish()
    story.restart()
    story.ask([0], 0.0)
    story.ask([1], 0.0)
    story.ask([2, 3], 5.0)
    story.remove([2])
    story.fail(0, DISK_DAMAGED)

    story.slots_and_places_add_up()
    lengths = [w.effect.lengths.tolist() for w in story.world.working.values()]
    assert lengths == [[2 * GRANULE - 5], [LENGTH]]
    assert story.world.pool.figures()["pool_bytes_reserved"] == (2 + 2) * GRANULE
    story.finish()
    assert story.world.pool.figures()["pool_bytes_reserved"] == 0
    assert story.world.places(2, 3) == ["", "memory"]
    story.every_reader_is_answered_once()
