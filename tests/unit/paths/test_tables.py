"""Locating by the directory tables of this host: when it makes questions needless, and when not."""

from __future__ import annotations

import pytest

from peercache.model.records import ON_DISK, Records
from peercache.observability import reasons
from peercache.paths.lookup import EXISTS_TRUSTS_S
from peercache.paths.steps import Post, ReadTable
from peercache.wire.messages.directory import Lookup
from peercache.wire.messages.pool import Promote, Touched
from tests.unit.paths.pages import named
from tests.unit.paths.world import Node, World


def read(world: World) -> list[int]:
    """Return whose tables were read, in order."""
    return [step.peer for step in world.steps if isinstance(step, ReadTable)]


def page_of(world: World, *, owners: set[int], others: set[int]) -> str:
    """Return a page that these nodes own, and none of the others."""
    for number in range(10_000):
        owned = {node.number for node in world.owners(f"page-{number}")[: world.cluster.replicas]}
        if owners <= owned and not owned & others:
            return f"page-{number}"
    raise AssertionError("there is no such page")


def stored(world: World, name: str, *nodes: Node, holder: int = 4) -> Records:
    record = world.nodes[holder].hold(name)
    for node in nodes:
        node.know(record)
    return record


@pytest.fixture
def world() -> World:
    return World(4, replicas=2)


def test_what_the_home_nodes_table_knows_costs_no_question() -> None:
    """With authority or without: verification decides whether a record is true."""
    world = World(4)
    world.nodes[1].table = "hint"
    for name in "ab":
        stored(world, name, world.nodes[1])

    assert world.get("a", "b").hits == [True, True]

    assert world.asked(Lookup) == []
    assert read(world) == [1]


def test_absent_is_final_where_an_owners_table_has_authority(world: World) -> None:
    """During a hand-over, too: the table lacks nothing on the present ring."""
    world.nodes[1].table = "final"
    name = page_of(world, owners={1}, others=set())

    outcome = world.get(name)

    assert (outcome.hits, outcome.reasons) == ([False], [reasons.ABSENT])
    assert world.asked(Lookup) == []


def test_without_authority_owners_are_asked_for_what_was_not_found(world: World) -> None:
    """The home node included: its answer may know what was on its way into the table."""
    world.nodes[1].table, world.nodes[1].is_behind = "hint", True
    name = page_of(world, owners={1, 2}, others={4})
    stored(world, name, world.nodes[2])
    stored(world, "known", world.nodes[1])

    assert world.exists("known", name) == [True, True]

    asked = {peer for question in world.asked(Lookup) for peer in question}
    assert asked == {1, 2}


def test_authority_counts_for_keys_that_the_node_owns() -> None:
    """Of others it knows only what it holds itself."""
    world = World(5, replicas=2)
    world.nodes[1].table = "final"
    owned = page_of(world, owners={1}, others=set())
    foreign = page_of(world, owners={2, 3}, others={1})
    stored(world, foreign, world.nodes[2], world.nodes[3])

    assert world.exists(owned, foreign) == [False, True]

    assert all(len(message.keys) == 16 for message in world.nodes[1].received)


def test_other_tables_of_the_host_are_read_for_the_keys_that_their_nodes_own(world: World) -> None:
    """And only for what the home node's table left open."""
    world.nodes[1].table = world.nodes[2].table = world.nodes[3].table = "final"
    known = page_of(world, owners={2, 3}, others={1})
    stored(world, known, world.nodes[1])
    foreign = next(
        name
        for name in (f"other-{n}" for n in range(10_000))
        if 1 not in {node.number for node in world.owners(name)[:2]}
        and 2 in {node.number for node in world.owners(name)[:2]}
    )

    assert world.exists(known, foreign) == [True, False]

    assert read(world) == [1, 2]
    assert world.asked(Lookup) == []


def test_a_table_that_cannot_be_read_leaves_all_as_it_was() -> None:
    """Its node is asked."""
    world = World(4)
    world.nodes[1].table = "lost"
    stored(world, "a", world.nodes[1])

    assert world.get("a").hits == [True]

    assert world.asked(Lookup) != []


def test_exists_asks_where_a_table_cannot_be_read() -> None:
    """Its node, or another one of the host whose table can be: no table's failure is "absent"."""
    for lost, moods in (([1], {}), ([1, 2], {}), ([1], {2: "final"})):
        world = World(4)
        for number in lost:
            world.nodes[number].table = "lost"
        for number, mood in moods.items():
            world.nodes[number].table = mood
        record = stored(world, "a", *world.nodes.values())

        assert len(record) == 1
        assert world.exists("a") == [True]

        assert read(world)[: len(lost)] == lost
        assert (world.asked(Lookup) == []) == bool(moods)


def test_a_table_of_a_node_that_the_view_has_not_is_not_read() -> None:
    """Also the home node's: it may be there for a while after its node has ended."""
    world = World(4)
    world.nodes[1].table = world.nodes[2].table = "final"
    world.cluster = world.seen({n: node.member for n, node in world.nodes.items() if n > 2})
    for number in (3, 4):
        stored(world, "a", world.nodes[number])

    assert world.exists("a") == [True]
    assert world.get("a").hits == [True]

    assert read(world) == []


def test_a_record_of_a_table_that_failed_verification_is_not_taken_again(world: World) -> None:
    """Until its holder has withdrawn it; the owners are asked for another one."""
    world.nodes[1].table = "hint"
    stale = stored(world, "a", world.nodes[1])
    world.nodes[4].evict(stale, world.nodes[4].memory[:512])

    assert world.get("a").hits == [False]

    assert world.asked(Lookup) != []


def test_a_page_of_which_no_table_is_an_owner_is_asked_for() -> None:
    """However final the tables of other keys are."""
    world = World(5, replicas=2)
    world.nodes[1].table = world.nodes[2].table = "final"
    foreign = page_of(world, owners={3, 4}, others={1, 2})
    stored(world, foreign, world.nodes[3], world.nodes[4])

    assert world.exists(foreign) == [True]

    assert world.asked(Lookup) != []


def test_pages_found_in_tables_are_touched_in_the_order_of_the_batch(world: World) -> None:
    """The record states which holder keeps them."""
    world.nodes[1].table = world.nodes[2].table = "final"
    foreign = page_of(world, owners={2}, others={1})
    stored(world, foreign, world.nodes[2])
    stored(world, "home", world.nodes[1])

    assert world.exists(foreign, "home", touch=True) == [True, True]

    posts = [step for step in world.steps if isinstance(step, Post)]
    ((peer, touched),) = posts[0].messages
    assert isinstance(touched, Touched)
    keys = [touched.drops[at : at + 16] for at in range(0, len(touched.drops), 24)]
    assert (peer, keys) == (4, named(foreign, "home").tolist())
    assert world.asked(Lookup) == []


def test_a_page_that_is_only_on_disk_is_wished_for(world: World) -> None:
    """A look alone would leave it there."""
    world.nodes[1].table = "final"
    world.nodes[1].know(world.nodes[4].hold("a", flags=ON_DISK))

    assert world.exists("a") == [True]

    posts = [step for step in world.steps if isinstance(step, Post)]
    assert [type(message) for post in posts for _, message in post.messages] == [Promote]


def test_a_page_whose_holder_cannot_be_read_does_not_exist(world: World) -> None:
    """A record in a table states nothing of the way to the holder."""
    world.nodes[1].table = "final"
    stored(world, "a", world.nodes[1])
    world.nodes[4].data_mood = "away"
    world.get("a")

    assert world.exists("a") == [False]


def test_of_several_holders_the_nearest_is_touched(world: World) -> None:
    """A table names all of them."""
    world.nodes[1].table = "final"
    for holder in (4, 1, 3):
        stored(world, "a", world.nodes[1], holder=holder)

    assert world.exists("a", touch=True) == [True]

    assert [peer for peer, message in world.posted if isinstance(message, Touched)] == [1]


def test_a_batch_is_touched_once_a_second(world: World) -> None:
    """An engine asks for the prefix that all its prompts share again and again."""
    world.nodes[1].table = "final"
    stored(world, "a", world.nodes[1])

    def touches() -> int:
        return sum(isinstance(message, Touched) for _, message in world.posted)

    # What was only asked for, or stored, was reported to none of its holders.
    assert world.exists("a") == [True]
    assert world.exists("a", touch=True) == [True]
    assert touches() == 1
    looks = len(world.steps)
    assert world.exists("a", touch=True) == [True]
    assert (touches(), len(world.steps)) == (1, looks)
    world.now += EXISTS_TRUSTS_S + 0.1
    assert world.exists("a", touch=True) == [True]
    assert touches() == 2
