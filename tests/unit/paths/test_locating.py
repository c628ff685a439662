"""Locating: whom a client asks, what it makes of silence, and which of several holders is read."""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest

from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import ON_DISK, Records
from peercache.model.runs import PageRuns
from peercache.model.seal import unread_seals
from peercache.net.breaker import (
    BACKOFF_MIN_S,
    HEDGE_FIRST_S,
    HEDGE_MIN_S,
    HEDGES_AT_ONCE,
    HEDGES_PER_REQUEST,
    data_port,
)
from peercache.observability import reasons
from peercache.paths.cluster import STRANGER_S, STRANGERS_MAX, Strangers
from peercache.paths.costs import MEASURED_BYTES, MEASURED_MAX, MEASURED_S, ReadCosts
from peercache.paths.lookup import Search
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.session import Refused
from tests.unit.paths.pages import Clock
from tests.unit.paths.world import PAGE, Node, World, content_of, named


def elsewhere(world: World) -> tuple[str, list[Node]]:
    """Return a page whose owners are all others than the home node and node 4, and them."""
    for i in range(10_000):
        owners = world.owners(f"page-{i}")
        if not {1, 4} & {node.number for node in owners}:
            return f"page-{i}", owners
    raise AssertionError("every page is owned by one of them")


def held_by(world: World, name: str, *nodes: Node) -> Records:
    """Let the home node hold nothing, node 4 hold the page, and these owners know."""
    record = world.nodes[4].hold(name)
    for node in nodes:
        node.know(record)
    return record


@pytest.fixture
def world() -> World:
    return World(5)


def test_home_and_an_owner_of_each_page_are_asked_at_once() -> None:
    """One question a peer, all of them in one step."""
    world = World(4)

    world.get("a", "b", "c", "d")

    first = world.asked(Lookup)[0]
    assert len(first) == len(set(first))
    assert 1 in first
    for name in "abcd":
        assert set(first) & {node.number for node in world.owners(name)[:2]}
    assert len(world.steps) == 1


def test_pages_that_two_nodes_own_between_them_cost_no_question_more() -> None:
    """Of three nodes the home node and one other know everything, however often each is named."""
    for count in range(1, 9):
        world = World(3, replicas=2)

        world.get(*[f"page-{count}-{i}" for i in range(count)])

        assert len(world.asked(Lookup)[0]) <= 2


def test_a_silent_owner_is_replaced_by_its_replica_within_the_deadline(world: World) -> None:
    """And soon, so that the second can answer: without a usual answer time, after a fixed time."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, owner, replica)
    owner.mood = "silent"
    began = world.now

    found = world.exists(name, timeout_s=0.1)

    assert found == [True]
    assert world.asked(Lookup) == [sorted([1, owner.number])]
    assert world.hedged == [replica.number]
    assert world.now - began == pytest.approx(HEDGE_FIRST_S + replica.latency_s)


def test_an_owner_that_refuses_connections_is_replaced_at_once(world: World) -> None:
    """No time passes, and the next call does not ask it again."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, owner, replica)
    owner.mood = "away"
    began = world.now

    assert world.get(name).hits == [True]
    world.cache.clear()
    world.steps.clear()
    assert world.get(name).hits == [True]

    assert world.now - began < 0.02
    assert world.asked(Lookup) == [sorted([1, replica.number])]


def test_owner_and_replica_silent_is_unreachable_or_deadline(world: World) -> None:
    """The reason shows whether there was still time when every owner had been asked."""
    name, owners = elsewhere(world)
    for owner in owners:
        owner.mood = "silent"

    late = world.get(name, timeout_s=0.2)
    world.now += 60
    early = world.get(name, timeout_s=2.0)

    assert (late.hits, late.reasons) == ([False], [reasons.PEER_UNREACHABLE])
    assert (early.hits, early.reasons) == ([False], [reasons.PEER_UNREACHABLE])


def test_the_time_of_a_call_is_never_exceeded_however_many_are_silent() -> None:
    """Silence everywhere: the call ends in time, and reports why."""
    world = World(6)
    for node in world.nodes.values():
        node.mood = "silent"
    for timeout_s in (0.01, 0.1, 2.0):
        began = world.now

        got = world.get("a", "b", "c", timeout_s=timeout_s)

        assert got.hits == [False] * 3
        assert world.now - began <= timeout_s + 1e-6
        assert set(got.reasons) <= {reasons.PEER_UNREACHABLE, reasons.DEADLINE}
        world.now += 60


def test_absent_is_the_last_word_outside_a_handover(world: World) -> None:
    """An owner that knows nothing of a page is believed: its replica is not asked."""
    name, (owner, replica, former) = elsewhere(world)
    held_by(world, name, replica, former)

    got = world.get(name)

    assert (got.hits, got.reasons) == ([False], [reasons.ABSENT])
    assert world.asked(Lookup) == [sorted([1, owner.number])]


def test_absent_at_an_owner_that_is_behind_needs_a_second_owner(world: World) -> None:
    """The owner itself reports that it lacks records; in a settled cluster none does."""
    name, (owner, replica, former) = elsewhere(world)
    held_by(world, name, replica, former)
    owner.is_behind = True

    found = world.get(name)
    absent, (first, second, _) = "nowhere", world.owners("nowhere")
    first.is_behind = second.is_behind = True
    missed = world.get(absent)

    assert found.hits == [True]
    assert world.asked(Lookup)[:2] == [sorted([1, owner.number]), [replica.number]]
    assert (missed.hits, missed.reasons) == ([False], [reasons.ABSENT])
    assert sum(len(peers) for peers in world.asked(Lookup)[2:]) <= 3


def test_where_every_host_owns_every_key_two_owners_that_are_behind_have_the_last_word() -> None:
    """A round trip to each of eight hosts for every unknown page would be the price of a join."""
    world = World(6, replicas=6)
    for node in world.nodes.values():
        node.is_behind = True

    got = world.get("nowhere")
    world.handover_until = 200.0
    world.cluster = world.seen({node.number: node.member for node in world.nodes.values()})
    again = world.get("nowhere")

    assert got.reasons == again.reasons == [reasons.ABSENT]
    assert [len(asked) for asked in world.asked(Lookup)] == [1, 1, 1, 1, 1]


def test_in_a_handover_the_next_owner_is_asked_and_the_one_before_the_change() -> None:
    """For a while after a view change the new owner may not know the records yet."""
    world = World(5, handover_until=200.0)
    name, (owner, replica, former) = elsewhere(world)
    held_by(world, name, former)

    got = world.get(name)

    assert got.hits == [True]
    assert world.asked(Lookup) == [sorted([1, owner.number]), [replica.number], [former.number]]


def test_a_handover_that_is_over_asks_one_owner_again() -> None:
    """The time is looked at when it matters, not when the view was taken."""
    world = World(5, handover_until=100.0)
    name, (owner, _, former) = elsewhere(world)
    held_by(world, name, former)

    assert world.get(name).hits == [False]
    assert world.asked(Lookup) == [sorted([1, owner.number])]


def test_no_other_node_is_waited_for_when_home_finds_everything(world: World) -> None:
    """The home node is near: what it holds needs no owner."""
    name, owners = elsewhere(world)
    world.nodes[1].know(world.nodes[1].hold(name))
    for owner in owners:
        owner.mood = "silent"
    began = world.now

    assert world.get(name).hits == [True]
    assert world.now - began < 0.01
    # To be cut short is no failure of theirs.
    assert world.breakers.opened_count == 0


def test_a_silent_home_node_costs_no_hit(world: World) -> None:
    """Owners know the page as well."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, owner, replica)
    world.nodes[1].mood = "silent"

    assert world.get(name).hits == [True]


def test_a_refusal_is_not_an_answer_about_pages(world: World) -> None:
    """A peer that will not talk to us has not said that a page is absent."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, replica)
    owner.script.append(lambda _: Refused(0, "role", "no"))

    assert world.get(name).hits == [True]


def test_unrequested_records_are_not_taken() -> None:
    """What else an answer names neither fills the cache nor another place of the batch."""
    world = World(3)
    stray = world.nodes[2].hold("stray")
    for node in world.nodes.values():
        node.know(world.nodes[2].hold("a"))
        node.shard[named("b").tobytes()] = [stray.tobytes()]

    assert world.exists("a", "b") == [True, False]
    assert len(world.cache) == 1


def test_exists_believes_the_cache_for_a_second() -> None:
    """A younger record answers without a question, an older one does not."""
    world = World()
    world.publish(world.nodes[2].hold("a"))
    assert world.exists("a") == [True]

    world.steps.clear()
    world.now += 0.9
    assert world.exists("a") == [True]
    assert world.steps == []
    world.now += 0.2
    for node in world.nodes.values():
        node.forget("a")
    assert world.exists("a") == [False]
    assert len(world.steps) > 0


def test_get_believes_the_cache_however_old() -> None:
    """There the word decides, so a hot prefix needs no question at all."""
    world = World()
    world.publish(world.nodes[2].hold("a"))
    world.exists("a")
    world.now += 3600
    world.steps.clear()

    assert world.get("a").hits == [True]
    assert world.asked() == []


def test_absence_is_never_remembered() -> None:
    """A page may appear anywhere at any moment."""
    world = World()
    assert world.exists("a") == [False]

    world.publish(world.nodes[2].hold("a"))

    assert world.exists("a") == [True]


def test_a_holder_whose_breaker_is_open_is_passed_over_until_a_probe_is_due(world: World) -> None:
    """It owns nothing that we ask for, so only reading can find out that it is back."""
    name, (owner, replica, _) = elsewhere(world)
    record = held_by(world, name, owner, replica)
    holder = world.nodes[4]
    holder.data_mood = "away"
    assert world.get(name).reasons == [reasons.PEER_UNREACHABLE]
    holder.data_mood = "up"

    soon = world.get(name)
    world.steps.clear()
    world.now += BACKOFF_MIN_S
    # Asking whether it exists does not use the probe up.
    assert world.exists(name) == [True]
    later = world.get(name)

    assert (soon.hits, soon.reasons) == ([False], [reasons.PEER_UNREACHABLE])
    assert later.hits == [True]
    assert record["holder"][0] == 4
    assert not world.breakers.is_open(data_port(4))


def test_a_holder_that_is_silent_on_its_control_port_is_read_all_the_same(world: World) -> None:
    """Over shared memory nothing needs the holder, and its data port has a breaker of its own."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, owner, replica)
    world.breakers.failed(4, world.now)

    assert world.get(name).hits == [True]


def test_answers_on_the_control_port_do_not_vouch_for_the_data_port() -> None:
    """Behind a firewall each get would wait for the stall again."""
    world = World(2)
    world.publish(world.nodes[2].hold("a"))
    world.nodes[2].data_mood = "silent"
    world.get("a")
    began = world.now

    for _ in range(5):
        assert world.get("a").hits == [False]

    assert world.now - began < 0.1


def test_a_large_batch_is_asked_in_messages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beyond the size of a message would cost the connection."""
    monkeypatch.setattr("peercache.paths.lookup.LOOKUP_KEYS_MAX", 10)
    world = World(1)
    names = [f"p{i}" for i in range(35)]
    world.publish(*[world.nodes[1].hold(name, content=content_of(name)) for name in names])

    assert world.exists(*names) == [True] * 35
    assert [len(m.keys) // 16 for m in world.nodes[1].received if isinstance(m, Lookup)] == [
        10, 10, 10, 5,
    ]  # fmt: skip


def test_a_cluster_without_members_finds_nothing() -> None:
    """Before the first view there is no node to ask."""
    world = World(1)
    world.cluster = world.seen({})

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.PEER_UNREACHABLE])
    assert world.steps == []


@pytest.mark.parametrize("others", [(), (2, 3)])
def test_a_home_node_that_no_view_names_yet_gives_its_pages(others: tuple[int, ...]) -> None:
    """It has just restarted: what it holds is found, and it speaks for no owner."""
    world = World(3)
    (record,) = world.nodes[1].hold("mine")
    world.nodes[1].know(record)
    view = {number: world.nodes[number].member for number in others}
    world.cluster = world.seen(view, newcomer=world.nodes[1].member)

    got = world.get("mine", "not there")

    assert got.hits == [True, False]
    assert got.reasons[1] == (reasons.ABSENT if others else reasons.PEER_UNREACHABLE)


def test_of_several_owners_each_is_asked_for_its_own_keys_only() -> None:
    """The home node is asked for everything, once."""
    world = World(4)
    names = [f"p{i}" for i in range(40)]

    world.exists(*names)

    asked = {
        number: [message.keys for message in node.received if isinstance(message, Lookup)]
        for number, node in world.nodes.items()
    }
    assert asked[1] == [named(*names).tobytes()]
    for name in names:
        owners = [node.number for node in world.owners(name)[:2]]
        about = [
            number
            for number in (2, 3, 4)
            if named(name).tobytes() in _split(b"".join(asked[number]))
        ]
        # The home node's word is enough for what it owns itself.
        assert len(about) == (0 if 1 in owners else 1)
        assert set(about) <= set(owners)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


def test_whether_answers_are_enough_is_only_a_question() -> None:
    """Asked again it has the same answer, and no page is found before the answers are put in."""
    world = World(4)
    keys = named("a", "b")
    in_memory, other = world.nodes[4].hold("a").tobytes(), world.nodes[4].hold("b").tobytes()
    on_disk = world.nodes[4].hold("b", flags=ON_DISK).tobytes()
    search = Search(
        keys, keys.tolist(), world.cluster, frozenset(), frozenset(), lambda *_: True, set()
    )
    one, slow, both = (
        [None, Located(1, in_memory)],
        [Located(1, on_disk), Located(2, in_memory)],
        [Located(1, other), None, Located(2, in_memory)],
    )

    verdicts = [search.has_all(answers) for answers in (one, one, slow, both, both)]
    known_before = search.known.any()
    search.take(both)

    assert verdicts == [False, False, False, True, True]
    assert not known_before
    assert search.known.all()


def test_exists_does_not_believe_the_cache_about_a_holder_that_is_out_of_reach() -> None:
    """Dead in the view, or its breaker open: what was known of it is not good enough."""
    world = World()
    name = "a"
    world.publish(world.nodes[2].hold(name))
    assert world.exists(name) == [True]

    world.breakers.failed(data_port(world.nodes[2].number), world.now)
    assert world.exists(name) == [False]

    world.now += BACKOFF_MIN_S
    assert world.exists(name) == [True]
    world.cluster = world.seen(
        {i: m for i, m in world.cluster.members.items() if i != world.nodes[2].number}
    )
    assert world.exists(name) == [False]


def test_exists_believes_the_cache_only_if_it_knows_every_key_and_all_in_memory() -> None:
    """One key unknown, or known to be on disk only: the directory is asked."""
    world = World()
    world.publish(world.nodes[2].hold("a"))
    on_disk = world.nodes[2].hold("b")
    on_disk["flags"] = ON_DISK
    world.cache.store(on_disk, world.now)
    world.exists("a")
    world.steps.clear()

    assert world.exists("a", "c") == [True, False]
    assert len(world.steps) > 0
    world.steps.clear()
    world.exists("a", "b")
    assert len(world.steps) > 0


def test_exists_forgets_what_it_knows_when_the_home_node_has_removed_something(
    world: World,
) -> None:
    """Another client of this host has: what this one remembers may be gone."""
    name, (owner, replica, _) = elsewhere(world)
    held_by(world, name, owner, replica)
    assert world.exists(name) == [True]
    for node in world.nodes.values():
        node.shard.clear()
    believed = world.exists(name)

    world.removals = 1

    assert believed == [True]
    assert world.exists(name) == [False]


MIB = 2**20


def read_of(holder: int, size: int) -> PeerRead:
    """Return the read of one page."""
    member = Member(holder, 1, ALIVE, 255, "h", "h:1", "h:1", "boot", "")
    runs = PageRuns.of([[(0, size)]])
    return PeerRead(member, np.zeros(1, np.uint64), runs.lengths, runs, np.full(1, 2, np.uint64))


def read(costs: ReadCosts, holder: int, took_s: float, size: int = MIB) -> None:
    reads = (read_of(holder, size),)
    costs.begin(reads)
    costs.end(reads, (Fetched(unread_seals(1), ""),), took_s)


def test_a_holder_that_was_slow_lately_is_read_less() -> None:
    """Until that is too long ago."""
    clock = Clock()
    costs = ReadCosts(salt=3, clock=clock)
    order = sorted((1, 2), key=costs.cost_of)
    read(costs, order[0], 0.1)

    assert sorted((1, 2), key=costs.cost_of) == order[::-1]
    clock.now += MEASURED_S
    assert sorted((1, 2), key=costs.cost_of) == order


def test_what_is_in_flight_counts() -> None:
    """Another call of this client reads from the holder."""
    clock = Clock()
    costs = ReadCosts(salt=3, clock=clock)
    order = sorted((1, 2), key=costs.cost_of)
    given_up = (read_of(order[0], 64 * MIB),)
    costs.begin(given_up)

    assert sorted((1, 2), key=costs.cost_of) == order[::-1]
    costs.end(given_up, (), 1.0)
    assert sorted((1, 2), key=costs.cost_of) == order


def test_small_reads_do_not_show_how_busy_a_holder_is() -> None:
    """Their time is latency."""
    costs = ReadCosts(salt=3, clock=Clock())
    order = sorted((1, 2), key=costs.cost_of)

    read(costs, order[0], 1.0, MEASURED_BYTES - 1)

    assert sorted((1, 2), key=costs.cost_of) == order


def test_the_holders_that_are_remembered_are_bounded() -> None:
    """The ones that were not read for longest go."""
    clock = Clock()
    costs = ReadCosts(salt=3, clock=clock)
    unread = [costs.cost_of(holder) for holder in range(MEASURED_MAX + 10)]

    for holder in range(MEASURED_MAX + 10):
        read(costs, holder, 0.005)

    known = [costs.cost_of(holder) != cost for holder, cost in enumerate(unread)]
    assert known == [False] * 10 + [True] * MEASURED_MAX


def test_clients_that_know_nothing_spread_over_the_holders() -> None:
    """Each has an order of its own: 200 clients, 4 holders."""
    holders = [0x1111111111111111, 0x2222222222222222, 0xABCDEF0123456789, 0x7777777777777777]
    first = Counter(
        min(holders, key=ReadCosts(salt=salt * 0x9E3779B97F4A7C15, clock=Clock()).cost_of)
        for salt in range(1, 201)
    )

    assert len(first) == 4
    assert max(first.values()) < 100


def test_the_nearest_holder_is_read_whatever_it_costs() -> None:
    """And of two on other hosts the one that costs less."""
    cost = {2: (9, 9), 3: (2, 0), 4: (1, 0), 5: (2, 0)}
    world = World(5, remote=frozenset({3, 4, 5}), cost_of=cost.__getitem__)
    for holder in (3, 4, 5):
        world.publish(world.nodes[holder].hold("a"))

    world.get("a")
    assert world.fetched_from() == [[4]]

    world.cache.clear()
    world.publish(world.nodes[2].hold("a"))
    world.steps.clear()
    assert world.get("a", size=PAGE).hits == [True]
    assert world.fetched_from() == [[2]]


def test_a_read_notes_what_it_reads_and_forgets_it() -> None:
    """Whether it succeeds or not."""
    world = World(remote=frozenset({3}))
    large = content_of("a", MEASURED_BYTES)
    world.publish(world.nodes[3].hold("a", content=large))
    idle = world.costs.cost_of(3)
    seen: list[bool] = []
    world.before = lambda _node, _page: seen.append(world.costs.cost_of(3) > idle)

    world.get("a", size=MEASURED_BYTES)
    world.nodes[3].data_mood = "refusing"
    world.get("a", size=MEASURED_BYTES)

    assert seen == [True]
    assert world.costs.cost_of(3) == idle


def newcomer_with(world: World, *names: str, is_in_view: bool = True) -> None:
    """Let node 4 hold pages that the owners of before know, and the view of now name it."""
    for name in names:
        record = world.nodes[4].hold(name)
        for node in (1, 2, 3):
            world.nodes[node].know(record)
    whole = {node.number: node.member for node in world.nodes.values()}
    world.cluster = world.seen({number: whole[number] for number in (1, 2, 3)})
    world.cluster_of_now = world.seen(whole) if is_in_view else world.cluster


def test_get_asks_for_the_view_once_when_a_holder_is_new() -> None:
    """Its pages are hits; those of others are read as ever, by one call."""
    world = World(4)
    world.publish(world.nodes[2].hold("old"))
    newcomer_with(world, "a", "b")

    got = world.get("a", "old", "b")

    assert got.hits == [True, True, True]
    assert got.content(0) == content_of("a").tobytes()
    assert world.renewed == 1


def test_exists_asks_for_the_view_when_a_holder_is_new() -> None:
    """What it reports is there to be read."""
    world = World(4)
    newcomer_with(world, "a")

    assert world.exists("a", "absent") == [True, False]
    assert world.renewed == 1


def test_view_is_not_asked_for_again_because_of_a_holder_that_it_does_not_name() -> None:
    """An owner may invent holders, or know one earlier than the home node does."""
    world = World(4)
    newcomer_with(world, "a", is_in_view=False)

    first, second = world.get("a"), world.get("a")
    asked = world.renewed
    world.now += STRANGER_S
    world.get("a")

    assert first.reasons == second.reasons == [reasons.PEER_UNREACHABLE]
    assert (asked, world.renewed) == (1, 2)


def test_holders_that_left_before_the_view_of_now_are_misses() -> None:
    """They were found in the view of before, and another page's holder is in neither."""
    world = World(4)
    world.publish(world.nodes[2].hold("old"))
    newcomer_with(world, "a", is_in_view=False)
    left = {node.number: node.member for node in world.nodes.values() if node.number in (1, 3)}
    world.cluster_of_now = world.seen(left)

    got = world.get("old", "a")

    assert got.hits == [True, False]
    assert world.renewed == 1


def test_view_is_not_asked_for_if_every_page_has_a_holder_that_is_known() -> None:
    """A copy at a node that has just joined is no reason to wait."""
    world = World(4)
    world.publish(world.nodes[2].hold("a"))
    newcomer_with(world, "a")

    assert world.get("a").hits == [True]
    assert world.renewed == 0


def test_unknown_holders_that_are_remembered_are_bounded() -> None:
    """Each answer may name others; those that were named first are forgotten."""
    strangers = Strangers()

    for holder in range(STRANGERS_MAX + 1):
        assert strangers.are_new(frozenset([holder]), 0.0)

    assert not strangers.are_new(frozenset([1]), 0.0)
    assert strangers.are_new(frozenset([0]), 0.0)


@pytest.mark.parametrize("holders", [frozenset(), frozenset([1])])
def test_no_holder_is_new_twice(holders: frozenset[int]) -> None:
    """Nor is no entry."""
    strangers = Strangers()

    assert strangers.are_new(holders, 0.0) == bool(holders)
    assert not strangers.are_new(holders, 0.1)


# --- owners that are slow -------------------------------------------------------------------------


def warmed(world: World) -> World:
    """Let every node have answered some Lookups: then its usual answer time is known."""
    for node in world.nodes:
        for _ in range(20):
            world.breakers.times.answered(node, world.nodes[node].latency_s)
    return world


def test_another_owner_is_asked_when_one_takes_longer_than_usual(world: World) -> None:
    """And its record is used: the call takes a few milliseconds more, not half of its time."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    held_by(world, name, owner, replica)
    owner.mood = "silent"
    began = world.now

    assert world.exists(name, timeout_s=2.0) == [True]

    assert world.hedged == [replica.number]
    assert world.now - began == pytest.approx(HEDGE_MIN_S + replica.latency_s)


def test_an_answer_of_the_slow_owner_still_counts(world: World) -> None:
    """Both are awaited: what arrives first and is enough ends the call."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    held_by(world, name, owner)
    owner.latency_s, replica.is_behind = 0.03, True
    began = world.now

    assert world.exists(name) == [True]

    assert world.hedged == [replica.number]
    assert world.now - began == pytest.approx(owner.latency_s)


def test_absence_needs_no_answer_of_a_slow_owner_if_another_one_has_authority(
    world: World,
) -> None:
    """An owner that lacks nothing is believed, whichever owner it is."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    owner.mood = "silent"
    began = world.now

    got = world.get(name)

    assert (got.hits, got.reasons) == ([False], [reasons.ABSENT])
    assert world.now - began == pytest.approx(HEDGE_MIN_S + replica.latency_s)


def test_silence_does_not_mean_absent(world: World) -> None:
    """One owner is behind, the other one silent: neither knows that the page is nowhere."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    owner.mood, replica.is_behind = "silent", True

    for _ in range(3):
        found = world.leading(name)
        assert (found.run, found.why) == (0, reasons.PEER_UNREACHABLE)
        world.now += 0.01


def test_an_owner_that_may_be_the_only_one_with_a_record_is_awaited_as_long_as_before(
    world: World,
) -> None:
    """The first time that it is slow, nothing shows that it is not just busy."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    held_by(world, name, owner)
    owner.latency_s, replica.is_behind = 0.2, True

    assert world.get(name).hits == [True]


def test_an_owner_that_was_slow_is_asked_last_for_a_while(world: World) -> None:
    """Then the next call has no delay; any answer of the owner ends that."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    owner.mood = "silent"
    world.exists(name)
    world.steps.clear()
    began = world.now

    world.exists(name)

    assert world.asked(Lookup) == [sorted([1, replica.number])]
    assert world.now - began == pytest.approx(replica.latency_s)
    owner.mood = "up"
    world.breakers.answered(owner.number)
    world.steps.clear()
    world.exists(name)
    assert world.asked(Lookup) == [sorted([1, owner.number])]


def test_an_owner_that_is_known_to_lag_is_not_awaited_for_what_another_one_lacks(
    world: World,
) -> None:
    """It is asked, and has a few milliseconds: it may answer again."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    owner.mood, replica.is_behind = "silent", True
    world.exists(name)
    world.steps.clear()
    began = world.now

    assert world.exists(name) == [False]

    assert world.asked(Lookup) == [sorted([1, replica.number]), [owner.number]]
    assert world.now - began == pytest.approx(replica.latency_s + HEDGE_MIN_S)
    owner.mood = "up"
    held_by(world, name, owner)
    assert world.exists(name) == [True]


def test_a_member_under_suspicion_is_asked_last(world: World) -> None:
    """Other members have not received anything from it for seconds."""
    name, (owner, replica, _) = elsewhere(warmed(world))
    held_by(world, name, owner, replica)
    view = {i: m for i, m in world.cluster.members.items() if i != owner.number}
    world.cluster = world.seen(view | {owner.number: attrs.evolve(owner.member, state=SUSPECT)})
    owner.mood = "silent"
    began = world.now

    assert world.exists(name) == [True]

    assert world.asked(Lookup) == [sorted([1, replica.number])]
    assert world.now - began == pytest.approx(replica.latency_s)


def test_a_node_of_this_host_that_does_no_work_is_asked_last() -> None:
    """Its table shows that; a record in the table is good all the same."""
    world = warmed(World(3))
    name = next(
        name
        for name in map("page-{}".format, range(1000))
        if {owner.number for owner in world.owners(name)[:2]} == {2, 3}
    )
    stopped, other = world.owners(name)[:2]
    stopped.mood, stopped.table, stopped.is_at_work = "silent", "hint", False
    other.is_behind = True
    began = world.now

    assert world.exists(name) == [False]

    assert world.asked(Lookup) == [sorted([1, other.number]), [stopped.number]]
    assert world.now - began == pytest.approx(other.latency_s + HEDGE_MIN_S)


def test_owners_that_are_all_slow_get_few_requests_more(world: World) -> None:
    """A busy machine does not get twice the load; it gets the answers later."""
    name, owners = elsewhere(warmed(world))
    held_by(world, name, *owners)
    calls = 200
    for node in world.nodes.values():
        node.latency_s = 0.03
    for _ in range(calls):
        for node in world.nodes:  # The next answers are as unexpected as the first.
            for _ in range(50):
                world.breakers.times.answered(node, 0.001)
        world.cache.clear()
        assert world.exists(name) == [True]

    assert len(world.hedged) <= calls * HEDGES_PER_REQUEST + HEDGES_AT_ONCE


def test_answers_that_are_usual_for_a_distant_owner_are_no_reason_to_ask_another(
    world: World,
) -> None:
    """What is slow is measured by each peer's own answers."""
    name, owners = elsewhere(world)
    held_by(world, name, *owners)
    for node in world.nodes.values():
        node.latency_s = 0.03
    warmed(world)

    for _ in range(10):
        world.cache.clear()
        assert world.exists(name) == [True]

    assert world.hedged == []
