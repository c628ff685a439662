"""The ring actor follows the view, and speaks only when the set of live members changes."""

from __future__ import annotations

import math
import time

import attrs

from peercache.actors.effects import BuildRing, TellDirectory, TellPublisher
from peercache.actors.mailboxes import RingBuilt, RingChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.ring.actor import RingActor
from peercache.model.hash_ring import HashRing
from peercache.model.member import DEAD, LEFT, SUSPECT
from tests.unit.actors.record_cluster import member, view


def ring_actor() -> RingActor:
    return RingActor(virtual_nodes=16, replicas=2)


def shown(actor: RingActor, seen: ViewChanged) -> list[HashRing]:
    """Show a view; return the rings that were told to the publisher and the directory."""
    effects = actor.on_message(Origin(1), seen, 0.0)
    actor.check()
    rings: dict[type, list[HashRing]] = {TellPublisher: [], TellDirectory: []}
    for effect in effects:
        assert isinstance(effect, (TellPublisher, TellDirectory))
        assert isinstance(effect.fact, RingChanged)
        assert isinstance(effect.fact.ring, HashRing)
        rings[type(effect)].append(effect.fact.ring)
    assert rings[TellPublisher] == rings[TellDirectory]
    return rings[TellPublisher]


def test_ring_begins_without_members() -> None:
    """Before the first view there are no owners, and nothing is due."""
    actor = ring_actor()

    assert actor.current.members == ()
    assert actor.deadline() == math.inf
    assert actor.on_tick(1.0) == []


def test_ring_has_the_alive_and_the_suspect() -> None:
    """A suspect member keeps its arcs; the dead and those who left have none."""
    actor = ring_actor()

    rings = shown(actor, view(1, member(2, SUSPECT), member(3, DEAD), member(4, LEFT)))

    assert [ring.members for ring in rings] == [(1, 2)]
    assert actor.current is rings[0]


def test_ring_is_silent_when_the_live_set_stays() -> None:
    """A change of states among the living moves no key, so nothing is said."""
    actor = ring_actor()
    shown(actor, view(1, 2))
    before = actor.current

    assert shown(actor, view(member(2, SUSPECT, counter=4), 1, member(9, DEAD))) == []
    assert actor.current is before


def test_ring_changes_when_a_suspect_dies() -> None:
    """Death takes a member's arcs away."""
    actor = ring_actor()
    shown(actor, view(1, member(2, SUSPECT)))

    rings = shown(actor, view(1, member(2, DEAD)))

    assert [ring.members for ring in rings] == [(1,)]


def test_ring_changes_with_the_host_of_a_member() -> None:
    """The owners depend on hosts, so one member's other host is another ring."""
    actor = RingActor(virtual_nodes=16, replicas="auto")
    elsewhere = attrs.evolve(member(3, counter=1), boot_id="another boot")
    shown(actor, view(1, 2, 3))

    (ring,) = shown(actor, view(1, 2, elsewhere))

    assert ring.members == (1, 2, 3)
    assert ring.hosts == ("boot", "boot", "another boot")


def test_the_ring_of_a_thousand_members_stops_no_loop() -> None:
    """It is made beside the loop; the old one serves meanwhile, and later views wait."""
    actor = RingActor(virtual_nodes=160, replicas=2)
    shown(actor, view(1, 2))
    old = actor.current
    thousand, more = view(*range(1, 1001)), view(*range(1, 1003))

    spent: list[float] = []
    for seen in (thousand, view(*range(1, 1002)), more):
        began = time.thread_time()
        effects = actor.on_message(Origin(1), seen, 0.0)
        spent.append(time.thread_time() - began)
        actor.check()
        assert actor.current is old
        assert len(effects) == (seen is thousand), "one ring at a time"
    assert max(spent) < 0.010

    first = BuildRing(tuple(range(1, 1001)), ("boot",) * 1000, 160, 2).ring()
    told, _, last = actor.on_message(Origin(0), RingBuilt(first), 0.0)
    assert isinstance(told, TellPublisher)
    assert isinstance(last, BuildRing)
    assert last.members == tuple(range(1, 1003))
    assert actor.current is first
    told, _ = actor.on_message(Origin(0), RingBuilt(last.ring()), 0.0)
    actor.check()
    assert actor.current.members == last.members


def test_a_view_that_returns_while_a_ring_is_made_brings_the_old_ring_back() -> None:
    """What comes last is the ring of the last view, also where that is the one from before."""
    actor = RingActor(virtual_nodes=16, replicas=2, tokens_at_once_max=32)
    shown(actor, view(1, 2))
    (build,) = actor.on_message(Origin(1), view(1, 2, 3), 0.0)
    assert isinstance(build, BuildRing)
    assert actor.on_message(Origin(1), view(1, 2), 0.0) == []

    actor.on_message(Origin(0), RingBuilt(build.ring()), 0.0)
    actor.check()

    assert actor.current.members == (1, 2)
