"""The leading run: a batch that is asked again is asked up to the page that was missing."""

from __future__ import annotations

import pytest

from peercache.model.keys import PageKeys
from peercache.observability import reasons
from peercache.paths.read import RUN_ENDS_MAX, Leading, RunEnds
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.pool import Touched
from tests.unit.paths.world import World, named

NAMES = tuple(f"page-{i}" for i in range(64))


@pytest.fixture
def world() -> World:
    return World(12, replicas=2)


def stored(world: World, *names: str) -> None:
    """Store pages at node 4."""
    world.publish(*[world.nodes[4].hold(name) for name in names])


def asked(world: World) -> tuple[int, int]:
    """Return how many Lookups were sent since the last call, and for how many keys."""
    lookups = [
        message for node in world.nodes.values() for message in node.received
        if isinstance(message, Lookup)
    ]  # fmt: skip
    for node in world.nodes.values():
        node.received.clear()
    return len(lookups), sum(len(message.keys) // 16 for message in lookups)


def test_a_missing_prefix_that_is_asked_again_costs_one_question_to_its_owner(
    world: World,
) -> None:
    """A new one is asked for at all owners of its pages, and at the home node."""
    assert world.leading(*NAMES) == Leading(0, reasons.ABSENT, "asked")
    first, _ = asked(world)
    assert first >= 11

    for _ in range(8):
        assert world.leading(*NAMES) == Leading(0, reasons.ABSENT, "asked", is_again=True)
        count, keys = asked(world)
        assert count <= 2
        assert keys <= 2


def test_pages_that_are_set_meanwhile_are_found_by_the_next_question(world: World) -> None:
    """The missing page is not remembered as absent for any time."""
    assert world.leading(*NAMES).run == 0

    stored(world, *NAMES[:40])

    assert world.leading(*NAMES) == Leading(40, reasons.ABSENT, "asked", is_again=True)
    stored(world, *NAMES[40:])
    assert world.leading(*NAMES) == Leading(64, "", "asked", is_again=True)
    assert world.leading(*NAMES) == Leading(64, "", "known")


def test_of_a_run_that_is_known_only_its_missing_page_is_asked_again(world: World) -> None:
    """The pages before it are in the cache for a second, and then they are asked for, too."""
    stored(world, *NAMES[:40])
    assert world.leading(*NAMES, touch=True).run == 40
    asked(world)

    assert world.leading(*NAMES, touch=True).run == 40

    assert asked(world)[1] <= 2
    world.nodes[4].mood = world.nodes[4].data_mood = "away"
    world.get(NAMES[0])
    assert world.leading(*NAMES).run == 0


def test_a_page_of_the_run_that_is_gone_ends_it(world: World) -> None:
    stored(world, *NAMES[:40])
    assert world.leading(*NAMES).run == 40

    for node in world.nodes.values():
        node.forget(NAMES[20])
    world.cache.clear()

    assert world.leading(*NAMES) == Leading(20, reasons.ABSENT, "asked", is_again=True)


def test_the_pages_of_the_run_are_touched_and_no_others(world: World) -> None:
    world.nodes[1].table = "final"
    stored(world, *NAMES[:3])

    world.leading(*NAMES[:4], touch=True)

    ((peer, message),) = world.posted
    assert peer == 4
    assert isinstance(message, Touched)


def test_each_batch_has_its_own_missing_page(world: World) -> None:
    """Prompts with one beginning, in turns; and one of which the engine has computed a part."""
    stored(world, "a", "b")
    batches = (("a", "x", "y"), ("a", "b", "z"), ("b", "z"))

    assert [world.leading(*batch).run for batch in batches] == [1, 2, 1]
    asked(world)
    assert [world.leading(*batch).is_again for batch in batches] == [True] * 3
    assert asked(world)[1] <= 6


def test_only_an_absent_page_is_remembered(world: World) -> None:
    """A page whose owners do not answer reveals nothing of the pages after it."""
    for node in world.nodes.values():
        node.mood = "away"

    assert world.leading(*NAMES).why == reasons.PEER_UNREACHABLE
    assert not world.leading(*NAMES).is_again


def test_a_question_without_keys_has_no_run(world: World) -> None:
    assert world.leading() == Leading(0, "", "")


def test_the_ends_of_a_bounded_number_of_batches_are_remembered() -> None:
    """The oldest is forgotten; a batch whose missing key is another one is a new batch."""
    ends = RunEnds()

    def batch(number: int) -> PageKeys:
        return named(f"first-{number}", f"last-{number}")

    for number in range(RUN_ENDS_MAX + 1):
        ends.note(batch(number), 0, is_absent=True)

    assert ends.pages_before(batch(0)) is None
    assert ends.pages_before(batch(1)) == 0
    assert ends.pages_before(named("other", "last-1")) is None
    assert ends.pages_before(named("last-1")) is None
    ends.note(batch(1), 2, is_absent=False)
    assert ends.pages_before(batch(1)) is None


def test_an_owner_that_is_behind_is_no_owner_of_an_absent_page(world: World) -> None:
    """The next owner is asked, as for a new batch: the missing page costs no less certainty."""
    assert world.leading(*NAMES).run == 0
    owner, other, *_ = [node for node in world.owners(NAMES[0]) if node.number != 1]
    world.publish(world.nodes[4].hold(NAMES[0]))
    owner.forget(NAMES[0])
    owner.script.append(lambda message: Located(message.request, b"", behind=True))

    assert world.leading(*NAMES).run == 1
    assert other.received
