"""What bounds a set: its time, and what a home node may make the client believe."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.model.records import PAGE_BYTES_MAX
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.paths.steps import Checksum
from peercache.paths.write import AHEAD_S, PUBLISH_TIMEOUT_S, ClientReservations
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    RESERVED,
    Commit,
    Committed,
    Granted,
)
from tests.unit.paths.test_writing import home_that_grants, told_home
from tests.unit.paths.world import PAGE, World, named

NAMES = [f"p{i}" for i in range(12)]


def test_page_larger_than_any_may_be_is_refused_here() -> None:
    """Its length does not fit into a record; not one byte of it is looked at."""
    world = World()
    runs = PageRuns.of([[(4096, PAGE_BYTES_MAX + 1)]])

    outcome = world.run(
        world.writer.set(
            named("a"),
            runs,
            home=1,
            reservations=world.reservations,
            until=world.now + 1.0,
        )
    )

    assert outcome.reasons == [reasons.TOO_LARGE]
    assert world.steps == []


def test_set_of_a_short_deadline_keeps_time_for_its_copy() -> None:
    """Less is kept back for the Commit where the whole of it is little."""
    world = World()

    assert world.set(["a"], timeout_s=0.05).stored.tolist() == [True]


@pytest.mark.parametrize("portion_bytes", [PAGE, 100 * PAGE])
def test_silent_home_node_costs_no_more_than_the_deadline(portion_bytes: int) -> None:
    """The deadline comes before the second silence, which opens the breaker."""
    world = World(portion_bytes=portion_bytes)
    world.nodes[1].mood = "silent"
    until = world.now + 0.1

    outcome = world.set(["a", "b"], timeout_s=0.1)

    assert outcome.stored.tolist() == [False, False]
    assert world.now <= until


def test_commit_leaves_the_home_node_time_to_answer() -> None:
    """An answer after the deadline would make pages that are stored look lost."""
    world = World()

    world.set(["a"], timeout_s=0.1)

    assert [commit.timeout_s <= 0.05 for commit in told_home(world, Commit)] == [True]
    assert PUBLISH_TIMEOUT_S > 0.05


def test_commit_that_is_late_asks_for_no_timeout() -> None:
    """A checksum that took too long leaves less than no time."""
    world = World(verify="full", portion_bytes=PAGE)
    world.checksum_s = 5.0

    world.set(["a", "b"], timeout_s=1.0)

    assert [commit.timeout_s for commit in told_home(world, Commit)] == [0.0]


def test_no_checksum_is_made_of_a_page_that_was_not_copied() -> None:
    """It would take the time of those that are to be stored."""
    world = World(verify="full")
    world.page_s = 0.1

    outcome = world.set(NAMES, timeout_s=1.0)

    made = sum(len(step.pages) for step in world.steps if isinstance(step, Checksum))
    assert 0 < made < len(NAMES)
    assert made == outcome.stored.sum()


def test_page_that_is_here_stays_so_whatever_a_commit_says() -> None:
    """The Commit is about the slots that were given, and about nothing else."""
    world = World()
    home = world.nodes[1]

    def nonsense(_message: Message) -> Message:
        return Committed(0, 1, bytes([ABORTED, COMMITTED]), b"", 0)

    home_that_grants(world, [HERE, RESERVED])
    home.script.insert(1, nonsense)

    outcome = world.set(["a", "b"])

    assert outcome.stored.tolist() == [True, True]
    assert (outcome.here, outcome.copied) == (1, 1)


def test_more_published_than_committed_counts_as_all() -> None:
    """A counter takes no negative number: the set would look like a failure."""
    world = World()
    home = world.nodes[1]
    home.script.append(home.serve)
    home.script.append(lambda _: Committed(0, 1, bytes([COMMITTED]), b"", 3))

    assert world.set(["a"]).unpublished == 0


@pytest.mark.parametrize("size", [0, 8, 15, 24])
def test_slots_ahead_without_an_offset_each_are_given_up(size: int) -> None:
    """They are not written to, and not reported as live."""
    reservations = ClientReservations()
    lengths = np.array([PAGE, PAGE], np.uint64)
    reservations.ask_ahead(lengths, 0.0)
    assert reservations.ask_ahead(lengths, AHEAD_S / 2) == (1, 2)

    reservations.granted(Granted(0, 1, bytes([RESERVED] * 2), bytes(size)))

    assert reservations.report(AHEAD_S / 2).sequences == (2,)
