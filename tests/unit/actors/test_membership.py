"""One node's membership, message by message: joining, heartbeats, and judging silence."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.effects import (
    Send,
    SendTo,
    TellDirectory,
    TellHandover,
    TellPublisher,
    TellRemoval,
    TellRing,
)
from peercache.actors.mailboxes import ViewChanged
from peercache.actors.membership import actor as membership_module
from peercache.actors.membership.gossip import SHARES_PER_BEAT
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT  # fmt: skip
from peercache.model.view import View
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    RequestView,
    ShareView,
)  # fmt: skip
from tests.unit.actors.membership_cluster import DEAD_S, HEARTBEAT_S, SUSPECT_S, member
from tests.unit.actors.membership_node import ME, NINE, ONE, TEN, TWO, Node, calls, sends

# --- alone, and joining ---------------------------------------------------------------------------


def test_node_starts_alone_and_calls_every_discovery_address_but_its_own() -> None:
    """It serves at once with itself as view and master, and does not call itself."""
    own = member(ME).control

    node = Node(discovery=("a:1", own, "b:2"))

    view = ViewChanged((member(ME),))
    tells = [TellRing(view), TellDirectory(view), TellRemoval(view), TellHandover(view)]
    assert node.first[:4] == tells
    assert node.first[4:] == [SendTo("a:1", Join(member(ME))), SendTo("b:2", Join(member(ME)))]
    assert node.actor.masters() == (member(ME),)


def test_head_knows_its_own_address_by_its_rank() -> None:
    """A head that its list names by another name of its host does not call itself."""
    node = Node(me=member(ME, head_rank=0), discovery=("localhost:31998", "b:2"))

    assert calls(node.first) == ["b:2"]


def test_unanswered_discovery_address_is_called_for_ever_with_backoff() -> None:
    """Calls become rarer down to one in three heartbeats, and never end."""
    node = Node(discovery=("a:1",))

    early, later = calls(node.passes(3.0)), calls(node.passes(300.0))

    assert 2 <= len(early) <= 6
    assert 100 <= len(later) <= 220


def test_node_that_has_moved_tells_masters_and_heads_its_new_address() -> None:
    """The higher counter wins everywhere; the address that is now its own is dialled no more."""
    node = Node(discovery=("a:1", "b:2", "c:3")).knows(ONE)

    effects = node.actor.move(node.now, control="b:2", data="b:9", head_rank=2)

    me = node.actor.me
    assert (me.control, me.data, me.head_rank, me.counter) == ("b:2", "b:9", 2, 1)
    assert node.actor.view.get(ME) == me
    assert [beat.message.member for beat in sends(effects, Heartbeat)] == [me]
    assert [e for e in effects if isinstance(e, SendTo)] == [SendTo("a:1", Join(me))]
    assert {"b:2", "c:3"}.isdisjoint(calls(node.passes(60.0)))


def test_node_that_has_left_moves_no_more() -> None:
    node = Node(discovery=("a:1",))
    node.actor.leave(node.now)

    assert node.actor.move(node.now, control="b:2", data="b:9", head_rank=255) == []


def test_any_node_answers_a_join_with_the_digest_of_its_view() -> None:
    """Also one that is no master; the newcomer is in the view, and asks for what it lacks."""
    node = Node().knows(ONE, TWO)

    asked = node.hears(NINE, Join(member(NINE)), pipe=77)
    before = node.state(NINE)
    effects = node.meets(member(NINE))

    assert asked == [SendTo(member(NINE).control, ShareView(0, (member(ME),)))]
    assert before is None
    answer = sends(effects, HeartbeatSeen)
    assert answer == [Send(NINE, HeartbeatSeen(node.actor.view.digest()))]
    (told,) = sends(
        node.hears(NINE, CompareView(View.of([member(NINE)]).bucket_digests())), ShareView
    )
    assert told.to == NINE
    assert {m.incarnation for m in told.message.view} >= {ME, ONE, TWO}
    assert node.state(NINE) == ALIVE
    assert [e.fact for e in effects if isinstance(e, (TellRing, TellDirectory, TellPublisher))] == [
        ViewChanged(node.actor.view.members())
    ] * 2


@pytest.mark.parametrize(
    "shown",
    [
        Heartbeat(member(ONE), b""),
        HeartbeatSeen(b""),
        ShareView(0, (member(ONE), member(ME))),
        ShareView(0, (member(ONE), member(ME, state=SUSPECT))),
    ],
    ids=["heartbeat", "heartbeat seen", "in its view", "suspect in its view"],
)
def test_node_has_joined_while_another_shows_that_it_is_a_member(shown: Heartbeat) -> None:
    """A member that answers, and holds this node for none, does not count: it cannot reach it."""
    node = Node().knows(ONE)
    for told in (Join(member(ONE)), ShareView(0, (member(ONE),))):
        node.hears(ONE, told)
    node.told_by(ONE, member(ONE), member(ME, state=DEAD))
    assert not node.actor.is_joined

    node.hears(ONE, shown)
    assert node.actor.is_joined

    until = node.now + DEAD_S + HEARTBEAT_S
    while node.now < until:
        node.meets(member(ONE))
        node.passes(HEARTBEAT_S)
    assert node.state(ONE) == ALIVE
    assert not node.actor.is_joined

    node.hears(ONE, shown)
    node.told_by(ONE, member(ONE, counter=1, state=LEFT))
    assert not node.actor.is_joined, "the last of the others has left"


def test_node_that_was_stopped_has_not_left_its_cluster() -> None:
    """It could not have heard the others meanwhile."""
    node = Node().knows(ONE)
    node.hears(ONE, HeartbeatSeen(b""))

    node.now += 10 * DEAD_S
    node.actor.on_tick(node.now)

    assert node.actor.is_joined


def test_newcomer_says_hello_to_the_masters_before_a_heartbeat_has_passed() -> None:
    """Once it knows them it does not let them wait: their clocks are about to start."""
    node = Node()

    node.knows(TEN, ONE, TWO)
    beats = sends(node.passes(HEARTBEAT_S / 3), Heartbeat)

    assert [beat.to for beat in beats] == [ONE, TWO]


def test_join_in_the_name_of_another_is_ignored() -> None:
    """Only a member itself brings its entry by Join or Heartbeat, and it is not dead."""
    node = Node()

    assert node.hears(NINE, Join(member(TEN))) == []
    assert node.hears(NINE, Heartbeat(member(TEN), b"")) == []
    assert node.hears(NINE, Join(member(NINE, state=DEAD))) == []
    assert node.hears(ME, Join(member(ME, counter=7))) == []
    assert len(node.actor.view) == 1


def test_view_of_a_stranger_that_does_not_name_itself_is_ignored() -> None:
    """Who is not a member, and does not say that it is one, has no say."""
    node = Node()

    assert node.told_by(NINE, member(TEN)) == []
    assert len(node.actor.view) == 1


def test_view_asked_is_answered_in_full_unless_the_digest_is_ours() -> None:
    """Clients poll with the digest of what they have; the answer repeats their number."""
    node = Node().knows(ONE)
    members = node.actor.view.members()

    assert node.hears(77, RequestView(3, b""), pipe=4) == [
        Send(Origin(77, 4), ShareView(3, members))
    ]
    assert node.hears(77, RequestView(4, node.actor.view.digest()), pipe=4) == [
        Send(Origin(77, 4), ShareView(4, ()))
    ]


# --- heartbeats and views -------------------------------------------------------------------------


def test_heartbeats_go_to_the_masters_only() -> None:
    """Once per heartbeat, with our entry and the digest of our view."""
    node = Node().knows(ONE, TWO, NINE, TEN)
    node.passes(1.0, speaking=(ONE, TWO))

    beats = sends(node.passes(3.0, speaking=(ONE, TWO)), Heartbeat)

    assert [beat.to for beat in beats] == [ONE, TWO] * 3
    assert beats[0].message == Heartbeat(member(ME), node.actor.view.digest())


def test_heartbeat_with_an_equal_digest_is_answered_without_a_view() -> None:
    """A cluster at rest sends digests, not views."""
    node = Node(ONE).knows(NINE)

    effects = node.hears(NINE, Heartbeat(member(NINE), node.actor.view.digest()), pipe=3)

    assert effects == [Send(Origin(NINE, 3), HeartbeatSeen(node.actor.view.digest()))]


def test_peer_whose_view_differs_is_asked_for_what_differs() -> None:
    """A master that hears a heartbeat, and a member that hears its answer, ask each other."""
    master, plain = Node(ONE).knows(NINE), Node(NINE).knows(ONE)

    heard = master.hears(NINE, Heartbeat(member(NINE), b"other"))
    answered = plain.hears(ONE, HeartbeatSeen(b"other"))

    asked = CompareView(master.actor.view.bucket_digests())
    assert heard == [Send(NINE, HeartbeatSeen(master.actor.view.digest())), Send(NINE, asked)]
    assert answered == [Send(ONE, CompareView(plain.actor.view.bucket_digests()))]
    assert plain.hears(ONE, HeartbeatSeen(plain.actor.view.digest())) == []
    assert plain.hears(77, HeartbeatSeen(b"other")) == []


def test_one_peer_a_turn_is_asked_and_each_in_its_turn() -> None:
    """Else three masters would all answer with the same; and none is forgotten for another."""
    node = Node().knows(ONE, TWO, NINE)

    asked = [e.to for peer in (ONE, TWO, NINE) for e in node.hears(peer, HeartbeatSeen(b"x"))]
    asked += [e.to for e in sends(node.passes(HEARTBEAT_S), CompareView)]

    assert asked == [ONE, TWO, NINE]


def test_peer_is_not_asked_for_what_another_has_told_meanwhile() -> None:
    """Its view was another one, and is no longer."""
    node = Node().knows(ONE, TWO, NINE)
    after = View.of([*node.actor.view.members(), member(TEN)])
    for peer in (ONE, TWO):
        node.hears(peer, HeartbeatSeen(after.digest()))

    node.meets(member(TEN))

    assert sends(node.passes(HEARTBEAT_S), CompareView) == []


def test_node_that_has_addresses_to_try_asks_rarely() -> None:
    """What it was told is in its view when it answers: until then every master's view differs."""
    node = Node().knows(ONE)
    node.told_by(ONE, member(ONE), *[member(n, f"127.9.0.{n}:1") for n in range(100, 200)])

    asked = [node.hears(ONE, HeartbeatSeen(b"x")) for _ in range(10)]
    asked += [
        node.passes(1.0, speaking=()) + node.hears(ONE, HeartbeatSeen(b"x")) for _ in range(7)
    ]

    assert sum(len(sends(effects, CompareView)) for effects in asked) == 3


def test_views_to_one_peer_are_bounded_in_each_heartbeat() -> None:
    """A peer that asks again and again makes no storm, and one that is no member gets nothing."""
    node = Node(ONE).knows(NINE, TEN)
    node.passes(HEARTBEAT_S)

    for _ in range(2):
        effects = [e for _ in range(50) for e in node.hears(NINE, CompareView(bytes(8)))]
        assert len(effects) == SHARES_PER_BEAT
        assert {m.incarnation for m in effects[0].message.view} == {ONE, NINE, TEN}
        node.passes(HEARTBEAT_S)
    assert node.hears(77, CompareView(bytes(8))) == []
    assert [e.message.view for e in node.hears(NINE, CompareView(bytes(7)))] == [(member(ONE),)]


def test_news_of_a_doubted_member_reach_the_masters_at_once() -> None:
    """It has time to refute, and its refutation comes to the other masters in time."""
    node = Node(ONE).knows(TWO, NINE)

    doubted = sends(node.passes(SUSPECT_S + 0.1, speaking=(TWO,)), ShareView)
    refuted = sends(node.hears(NINE, Heartbeat(member(NINE, counter=1), b"")), ShareView)

    assert doubted == [Send(TWO, ShareView(0, (member(ONE), member(NINE, state=SUSPECT))))]
    assert refuted == [Send(TWO, ShareView(0, (member(ONE), member(NINE, counter=1))))]


def test_view_that_brings_nothing_new_is_not_announced() -> None:
    """The ring is not made again for what is known."""
    node = Node().knows(ONE, TWO)

    assert node.told_by(ONE, member(ONE), member(TWO)) == []


def test_metrics_count_the_members_by_state() -> None:
    """The gauge follows the view."""
    metrics = Metrics()
    node = Node(metrics=metrics)

    node.knows(ONE, NINE, TEN)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE,))
    node.told_by(ONE, member(ONE), member(NINE, state=DEAD), member(TEN, state=LEFT))

    def count(state: str) -> float | None:
        return metrics.registry.get_sample_value("peercache_members", {"state": state})

    assert [count(s) for s in ("alive", "suspect", "dead", "left")] == [2, 0, 1, 1]


# --- silence --------------------------------------------------------------------------------------


def test_master_suspects_a_silent_member_and_then_declares_it_dead() -> None:
    """After suspect_s and dead_s of its own clock, and not before."""
    node = Node(ONE).knows(NINE, TEN)

    states = []
    for _ in range(4):
        node.passes(1.5, speaking=(TEN,))
        states.append(node.state(NINE))

    assert states == [ALIVE, SUSPECT, SUSPECT, DEAD]
    assert node.state(TEN) == ALIVE


def test_member_judges_only_the_masters() -> None:
    """It hears only masters, so the silence of others says nothing."""
    node = Node().knows(ONE, TWO, NINE, TEN)

    node.passes(4.0, speaking=(TWO,))
    suspected = [node.state(i) for i in (ONE, TWO, NINE, TEN)]
    node.passes(3.0, speaking=(TWO,))

    assert suspected == [SUSPECT, ALIVE, ALIVE, ALIVE]
    assert [node.state(i) for i in (ONE, TWO, NINE, TEN)] == [DEAD, ALIVE, ALIVE, ALIVE]


def test_outage_of_all_masters_empties_no_view() -> None:
    """Three masters that fall silent are replaced; their members stay."""
    node = Node().knows(ONE, TWO, NINE, TEN)

    node.passes(DEAD_S + 1.0)

    # Now we are a master ourselves, and count from here.
    assert [m.incarnation for m in node.actor.masters()] == [ME, NINE]
    assert [node.state(i) for i in (NINE, TEN)] == [ALIVE, ALIVE]


def test_new_master_gives_every_member_the_full_time() -> None:
    """It got no heartbeats before it was one: silence counts from now."""
    node = Node().knows(ONE, TWO, NINE, TEN)
    node.passes(10.0, speaking=(ONE, TWO))

    node.told_by(TWO, member(ONE, state=LEFT), member(TWO, state=LEFT))
    node.passes(SUSPECT_S - 0.3)

    assert [m.incarnation for m in node.actor.masters()] == [ME, NINE]
    assert [node.state(i) for i in (NINE, TEN)] == [ALIVE, ALIVE]


@pytest.mark.parametrize("first", ["tick", "message"])
def test_paused_node_that_wakes_accuses_no_member(first: str) -> None:
    """It did not listen either: after a stop of a minute every silence starts again."""
    node = Node(ONE).knows(NINE, TEN)
    node.passes(1.0, speaking=(NINE, TEN))

    node.now += 60.0
    if first == "message":
        node.hears(NINE, HeartbeatSeen(node.actor.view.digest()))
    node.actor.on_tick(node.now)
    node.passes(SUSPECT_S - 0.3)

    assert [node.state(i) for i in (NINE, TEN)] == [ALIVE, ALIVE]
    node.passes(DEAD_S)
    assert [node.state(i) for i in (NINE, TEN)] == [DEAD, DEAD]


def test_member_that_refuted_elsewhere_gets_the_full_time() -> None:
    """A raised counter is a sign of life, even if it reached us through another."""
    node = Node(ONE).knows(TWO, NINE)
    node.passes(5.5, speaking=(TWO,))

    node.told_by(TWO, member(NINE, counter=1))
    node.passes(2.5, speaking=(TWO,))

    assert node.state(NINE) == ALIVE


def test_checks_find_a_lost_own_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant that a view never drops its owner can fail."""
    node = Node()
    monkeypatch.setattr(node.actor, "_view", node.actor.view.without([ME]))

    with pytest.raises(AssertionError, match="own entry"):
        node.actor.check()


def test_times_that_cannot_work_are_refused() -> None:
    """Two lost heartbeats must not look like silence."""
    assert membership_module.TICKS_PER_BEAT >= 2
    with pytest.raises(AssertionError):
        Node(suspect_s=1.5)
    with pytest.raises(AssertionError):
        Node(me=attrs.evolve(member(ME), state=SUSPECT))
