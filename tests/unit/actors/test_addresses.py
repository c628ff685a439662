"""Addresses: those of discovery are tried at little cost, lost members are redialled in turn."""

from __future__ import annotations

import random
from collections.abc import Iterable

from peercache.actors.effects import SendTo
from peercache.actors.mailboxes import AddressesFound
from peercache.actors.membership.candidates import (
    AGAIN_S,
    ALIAS_S,
    ANSWER_S,
    LOOKS_MAX,
    LOST_MAX,
    REDIALS_PER_TURN,
    TRIED_AT_ONCE_MAX,
    Candidates,
    FoundAddresses,
    Reconnect,
)
from peercache.actors.runtime import SELF
from peercache.wire.messages.membership import ShareView
from tests.unit.actors.membership_cluster import HEAL_S, Cluster, member
from tests.unit.actors.membership_node import ME, ONE, TWO, Node, calls


def found_of(addresses: Iterable[str]) -> FoundAddresses:
    found = FoundAddresses(rng=random.Random(1))
    found.replace(addresses, 0.0)
    return found


def tried(found: FoundAddresses, seconds: float, begin: float = 0.0) -> list[str]:
    """Return what is tried in some seconds, by the membership's turns, if nothing answers."""
    turns = [begin + 0.25 * turn for turn in range(int(4 * seconds))]
    return [address for now in turns for address in found.due(now, reached=(), own="")]


def test_every_address_is_tried_at_once_and_again_later() -> None:
    """Within the back-off it is left alone."""
    found = found_of(["a:1", "b:2"])

    assert sorted(found.due(0.0, reached=(), own="")) == ["a:1", "b:2"]
    assert sorted(found.tried) == ["a:1", "b:2"]
    assert not tried(found, AGAIN_S / 2 - 0.1)
    assert sorted(tried(found, AGAIN_S / 2 + 0.5, AGAIN_S / 2)) == ["a:1", "b:2"]


def test_no_address_of_a_live_member_or_of_the_node_itself_is_tried() -> None:
    """They are found already."""
    found = found_of(["a:1", "me:1", "b:2"])

    assert found.due(0.0, reached={"a:1"}, own="me:1") == ["b:2"]


def test_address_that_answers_for_another_one_is_tried_rarely() -> None:
    """A service's own address answers each time, and has no member of its own."""
    found = found_of(["vip:1"])
    assert found.due(0.0, reached=(), own="") == ["vip:1"]

    found.answered("vip:1", 0.1)

    assert not list(found.tried)
    assert not tried(found, ALIAS_S - 1, 0.25)
    assert tried(found, 2, ALIAS_S) == ["vip:1"]


def test_thousands_of_dead_addresses_are_tried_a_few_at_a_time_and_all_in_turn() -> None:
    """Each is a link; the newest come first, as they are the likeliest to live."""
    dead = [f"10.0.{n >> 8}.{n & 255}:1" for n in range(10_000)]
    found = found_of(dead)
    for now in (0.0, 0.25, 0.5):
        assert len(list(found.due(now, reached=(), own=""))) <= TRIED_AT_ONCE_MAX
        assert len(list(found.tried)) <= TRIED_AT_ONCE_MAX

    found.replace([*dead, "new:1"], 1.0)

    assert "new:1" in found.due(1.0 + ANSWER_S, reached=(), own="")
    assert {*tried(found, 10_000 / TRIED_AT_ONCE_MAX * ANSWER_S + 60, 3.0)} >= {*dead[:9000]}


def test_thousands_of_live_addresses_are_looked_at_a_few_at_a_time() -> None:
    """A turn of the membership stays short in the largest cluster."""
    looked = 0

    class Reached:
        def __contains__(self, address: object) -> bool:
            nonlocal looked
            looked += 1
            return True

    found = found_of([f"host-{n}:1" for n in range(10_000)])

    assert found.due(0.0, reached=Reached(), own="") == []
    assert looked == LOOKS_MAX


def test_address_that_is_given_no_longer_is_tried_no_longer() -> None:
    """One that is still given keeps its back-off."""
    found = found_of(["a:1", "b:2"])
    found.due(0.0, reached=(), own="")

    found.replace(["b:2", "c:3"], 0.1)

    assert found.due(0.2, reached=(), own="") == ["c:3"]
    assert "a:1" not in tried(found, 30, 1.0)
    assert len(found) == 2


def test_dead_addresses_of_discovery_do_not_make_the_candidates_busy() -> None:
    """A node with candidates asks for no views: wrong addresses must not keep it from that."""
    candidates = Candidates(rng=random.Random(1))

    candidates.found([f"dead-{n}:1" for n in range(100)], 0.0)
    due = candidates.due(0.0)
    candidates.name("peer:1", 7, 0.0)

    assert len(due) == TRIED_AT_ONCE_MAX
    assert candidates.dialled == set(due)
    assert "peer:1" in candidates.due(0.1)
    assert len(candidates) == 0


def test_node_says_who_it_is_at_the_addresses_that_it_is_given() -> None:
    """At once, and not at its own, nor where it knows a member."""
    node = Node().knows(ONE)
    given = (member(ME).control, member(ONE).control, member(TWO).control)

    effects = node.hears(0, AddressesFound(given))

    assert effects == [SendTo(member(TWO).control, ShareView(0, (node.actor.me,)))]
    assert node.actor.dialled() == {member(TWO).control}


def test_empty_answer_ends_no_member() -> None:
    """Discovery gives addresses; membership alone says what is a member."""
    node = Node()
    node.hears(0, AddressesFound((member(ONE).control,)))
    node.knows(ONE)

    node.hears(0, AddressesFound(()))

    assert node.state(ONE) == 0
    assert not calls(node.passes(1.0, speaking=(ONE,)))


def cluster_of(count: int) -> tuple[Cluster, list[str]]:
    """Start nodes that have no discovery address at all."""
    cluster = Cluster(7)
    names = [f"host-{n}:31998" for n in range(count)]
    for name in names:
        cluster.start(name)
    return cluster, names


def give(cluster: Cluster, to: Iterable[str], addresses: Iterable[str]) -> None:
    for name in to:
        process = cluster.processes[name]
        message = AddressesFound(tuple(addresses))
        cluster._perform(process, process.actor.on_message(SELF, message, cluster.now))


def test_nodes_find_each_other_by_discovery_alone() -> None:
    """All are members for all, among addresses at which nothing is."""
    cluster, names = cluster_of(5)

    give(cluster, names, [*names, *[f"dead-{n}:1" for n in range(30)]])

    assert cluster.seconds_until(cluster.agrees, at_most=20) < 20


def test_partition_heals_by_discovery_after_the_lost_are_forgotten() -> None:
    """No partition is too long, as with addresses that the settings name."""
    cluster, names = cluster_of(4)
    give(cluster, names, names)
    cluster.seconds_until(cluster.agrees, at_most=20)
    cluster.partition(names[:2], names[2:])
    cluster.run(700)
    assert not cluster.agrees()

    cluster.heal()

    cluster.seconds_until(cluster.agrees, at_most=2 * HEAL_S)


def test_one_that_speaks_for_itself_is_tried_after_a_second() -> None:
    """Another process was there and failed three times: gossip waits longer than its successor."""
    candidates, now = Candidates(rng=random.Random(1)), 0.0
    for _ in range(3):
        candidates.name("a:1", 7, now)
        assert candidates.due(now) == ["a:1"]
        now += ANSWER_S
        candidates.due(now)
        now += 4.0
    failed_at = now - 4.0

    candidates.name("a:1", 7, failed_at + 1.1)
    assert candidates.due(failed_at + 1.1) == []
    candidates.name("a:1", 7, failed_at + 1.1, is_own=True)
    assert candidates.due(failed_at + 1.1) == ["a:1"]


TURN_S = 0.25


def redial(**discovery: int) -> Reconnect:
    return Reconnect(discovery, first_s=0.5, longest_s=3.0, rng=random.Random(1))


def calls_in(
    calling: Reconnect,
    seconds: float,
    *,
    start: float = 0.0,
    reached: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (),
) -> list[str]:
    """Return whom it calls, turn by turn."""
    turns = int(seconds / TURN_S)
    return [
        address
        for turn in range(turns)
        for address in calling.due(start + turn * TURN_S, reached=reached, ranks=ranks)
    ]


def test_every_head_is_called_at_once() -> None:
    """A starting node asks all of them, in their order."""
    assert redial(a=0, b=1).due(7.0, reached=(), ranks=()) == ["a", "b"]


def test_head_that_is_reached_rests_and_is_called_at_once_when_lost() -> None:
    """Its backoff starts again each time."""
    calling = redial(a=0)
    calls_in(calling, 60.0)

    resting = calls_in(calling, 60.0, start=60.0, reached=("a",))
    again = calls_in(calling, 3.0, start=120.0)

    assert resting == []
    assert len(again) >= 3


def test_head_reached_under_another_address_is_called_rarely() -> None:
    """Its rank is there: it is the same one, unless lists differ between hosts."""
    calling = redial(a=0)
    calling.due(0.0, reached=(), ranks=())

    calls = calls_in(calling, 10 * ALIAS_S, start=1.0, ranks=(0,))

    assert 5 <= len(calls) <= 30


def test_head_reached_under_another_address_is_called_soon_when_it_is_lost() -> None:
    """The rare calls of good times do not delay the first one of bad times."""
    calling = redial(a=0)
    calls_in(calling, 10 * ALIAS_S, ranks=(0,))

    assert calls_in(calling, 3.5, start=10 * ALIAS_S)


def test_lost_are_called_in_turn_and_never_all_at_once() -> None:
    """A hundred lost members get their calls one after the other, each as often as the rest."""
    calling = redial()
    for number in range(100):
        calling.lost(f"n{number}", 0.0)

    for turn in range(200):
        assert len(calling.due(turn * TURN_S, reached=(), ranks=())) <= REDIALS_PER_TURN
    calls = calls_in(calling, 500.0, start=50.0)

    counts = [calls.count(f"n{number}") for number in range(100)]
    assert max(counts) - min(counts) <= 3
    assert min(counts) >= 38


def test_heads_are_called_however_many_are_lost() -> None:
    """They do not wait behind the lost."""
    calling = redial(a=0)
    for number in range(LOST_MAX):
        calling.lost(f"n{number}", 0.0)

    assert calls_in(calling, 10.0).count("a") >= 4


def test_lost_addresses_are_bounded_and_the_oldest_makes_room() -> None:
    """Crashes of years do not fill the memory."""
    calling = redial(a=0)
    for number in range(LOST_MAX + 5):
        calling.lost(f"n{number}", 0.0)
    calling.lost("a", 0.0)

    assert len(calling) == LOST_MAX
    called = set(calls_in(calling, 300.0))
    assert called == {"a", *(f"n{number}" for number in range(5, LOST_MAX + 5))}


def test_found_address_is_called_no_longer() -> None:
    """A live member is at the address, or it left."""
    calling = redial()
    calling.lost("x", 0.0)

    calling.found("x")
    calling.found("never lost")

    assert calls_in(calling, 30.0) == []


def test_losing_again_what_is_lost_does_not_start_its_backoff_again() -> None:
    """A view that says so again and again does not make calls more frequent."""
    calling = redial()
    calling.lost("x", 0.0)
    calls_in(calling, 60.0)
    calling.lost("x", 60.0)

    assert len(calls_in(calling, 30.0, start=60.0)) <= 21
