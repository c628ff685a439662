"""One node's membership, message by message: joining, heartbeats, silence, refuting, leaving."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.effects import (
    NotifyDirectory,
    NotifyPlacement,
    NotifyPool,
    NotifyPublisher,
    NotifyRemoval,
    NotifyRing,
    Send,
    SendTo,
)
from peercache.actors.mailboxes import HeldDead, PeerAnswered, Republish, ViewChanged
from peercache.actors.membership import actor as membership_module
from peercache.actors.membership.actor import LEAVE_MAX, REPUBLISH_GAP_S
from peercache.actors.membership.candidates import AT_ONCE_MAX, LOST_S
from peercache.actors.membership.gossip import COUNTER_JUMP_MAX, FORGET_S, SHARES_PER_BEAT
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT
from peercache.model.view import COUNTER_MAX, View
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    RequestView,
    ShareView,
)
from tests.unit.actors.membership_cluster import DEAD_S, HEARTBEAT_S, SUSPECT_S, member
from tests.unit.actors.membership_node import (
    ME,
    NINE,
    ONE,
    TEN,
    TWO,
    Node,
    calls,
    republishes,
    sends,
)

# --- alone, and joining ---------------------------------------------------------------------------


def test_node_starts_alone_and_calls_every_discovery_address_but_its_own() -> None:
    """It serves at once with itself as view and master, and does not call itself."""
    own = member(ME).control

    node = Node(discovery=("a:1", own, "b:2"))

    view = ViewChanged((member(ME),))
    facts = [NotifyRing(view), NotifyDirectory(view), NotifyRemoval(view), NotifyPlacement(view)]
    assert node.first[:4] == facts
    assert node.first[4:] == [SendTo("a:1", Join(member(ME))), SendTo("b:2", Join(member(ME)))]
    assert node.actor.masters() == (member(ME),)


def test_head_knows_its_own_address_by_its_rank() -> None:
    """A head that its list names by another name of its host does not call itself."""
    node = Node(me=member(ME, head_rank=0), discovery=("localhost:31998", "b:2"))

    assert calls(node.first) == ["b:2"]


def test_unanswered_discovery_address_is_called_forever_with_backoff() -> None:
    """Calls become rarer down to one in three heartbeats, and never end."""
    node = Node(discovery=("a:1",))

    early, later = calls(node.passes(3.0)), calls(node.passes(300.0))

    assert 2 <= len(early) <= 6
    assert 100 <= len(later) <= 220


def test_node_that_has_moved_sends_masters_and_heads_its_new_address() -> None:
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

    asked = node.take(NINE, Join(member(NINE)), pipe=77)
    before = node.state(NINE)
    effects = node.meets(member(NINE))

    assert asked == [SendTo(member(NINE).control, ShareView(0, (member(ME),)))]
    assert before is None
    answer = sends(effects, HeartbeatSeen)
    assert answer == [Send(NINE, HeartbeatSeen(node.actor.view.digest()))]
    (share,) = sends(
        node.take(NINE, CompareView(View.of([member(NINE)]).bucket_digests())), ShareView
    )
    assert share.to == NINE
    assert {m.incarnation for m in share.message.view} >= {ME, ONE, TWO}
    assert node.state(NINE) == ALIVE
    assert [
        e.fact for e in effects if isinstance(e, (NotifyRing, NotifyDirectory, NotifyPublisher))
    ] == [ViewChanged(node.actor.view.members())] * 2


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
    for message in (Join(member(ONE)), ShareView(0, (member(ONE),))):
        node.take(ONE, message)
    node.reported_by(ONE, member(ONE), member(ME, state=DEAD))
    assert not node.actor.is_joined

    node.take(ONE, shown)
    assert node.actor.is_joined

    until = node.now + DEAD_S + HEARTBEAT_S
    while node.now < until:
        node.meets(member(ONE))
        node.passes(HEARTBEAT_S)
    assert node.state(ONE) == ALIVE
    assert not node.actor.is_joined

    node.take(ONE, shown)
    node.reported_by(ONE, member(ONE, counter=1, state=LEFT))
    assert not node.actor.is_joined, "the last of the others has left"


def test_node_that_was_stopped_has_not_left_its_cluster() -> None:
    """It could not have received anything meanwhile."""
    node = Node().knows(ONE)
    node.take(ONE, HeartbeatSeen(b""))

    node.now += 10 * DEAD_S
    node.actor.on_tick(node.now)

    assert node.actor.is_joined


def test_newcomer_sends_hello_to_the_masters_before_a_heartbeat_has_passed() -> None:
    """Once it knows them it does not let them wait: their clocks are about to start."""
    node = Node()

    node.knows(TEN, ONE, TWO)
    beats = sends(node.passes(HEARTBEAT_S / 3), Heartbeat)

    assert [beat.to for beat in beats] == [ONE, TWO]


def test_join_in_the_name_of_another_is_ignored() -> None:
    """Only a member itself brings its entry by Join or Heartbeat, and it is not dead."""
    node = Node()

    assert node.take(NINE, Join(member(TEN))) == []
    assert node.take(NINE, Heartbeat(member(TEN), b"")) == []
    assert node.take(NINE, Join(member(NINE, state=DEAD))) == []
    assert node.take(ME, Join(member(ME, counter=7))) == []
    assert len(node.actor.view) == 1


def test_view_of_a_stranger_that_does_not_name_itself_is_ignored() -> None:
    """Who is not a member, and does not say that it is one, has no say."""
    node = Node()

    assert node.reported_by(NINE, member(TEN)) == []
    assert len(node.actor.view) == 1


def test_view_asked_is_answered_in_full_unless_the_digest_is_ours() -> None:
    """Clients poll with the digest of what they have; the answer repeats their number."""
    node = Node().knows(ONE)
    members = node.actor.view.members()

    assert node.take(77, RequestView(3, b""), pipe=4) == [
        Send(Origin(77, 4), ShareView(3, members))
    ]
    assert node.take(77, RequestView(4, node.actor.view.digest()), pipe=4) == [
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

    effects = node.take(NINE, Heartbeat(member(NINE), node.actor.view.digest()), pipe=3)

    assert effects == [Send(Origin(NINE, 3), HeartbeatSeen(node.actor.view.digest()))]


def test_peer_whose_view_differs_is_asked_for_what_differs() -> None:
    """A master that receives a heartbeat, and a member that receives its answer, ask each other."""
    master, plain = Node(ONE).knows(NINE), Node(NINE).knows(ONE)

    answers = master.take(NINE, Heartbeat(member(NINE), b"other"))
    answered = plain.take(ONE, HeartbeatSeen(b"other"))

    asked = CompareView(master.actor.view.bucket_digests())
    assert answers == [Send(NINE, HeartbeatSeen(master.actor.view.digest())), Send(NINE, asked)]
    assert answered == [Send(ONE, CompareView(plain.actor.view.bucket_digests()))]
    assert plain.take(ONE, HeartbeatSeen(plain.actor.view.digest())) == []
    assert plain.take(77, HeartbeatSeen(b"other")) == []


def test_one_peer_a_turn_is_asked_and_each_in_its_turn() -> None:
    """Else three masters would all answer with the same; and none is forgotten for another."""
    node = Node().knows(ONE, TWO, NINE)

    asked = [e.to for peer in (ONE, TWO, NINE) for e in node.take(peer, HeartbeatSeen(b"x"))]
    asked += [e.to for e in sends(node.passes(HEARTBEAT_S), CompareView)]

    assert asked == [ONE, TWO, NINE]


def test_peer_is_not_asked_for_what_another_has_sent_meanwhile() -> None:
    """Its view was another one, and is no longer."""
    node = Node().knows(ONE, TWO, NINE)
    after = View.of([*node.actor.view.members(), member(TEN)])
    for peer in (ONE, TWO):
        node.take(peer, HeartbeatSeen(after.digest()))

    node.meets(member(TEN))

    assert sends(node.passes(HEARTBEAT_S), CompareView) == []


def test_node_that_has_addresses_to_try_asks_rarely() -> None:
    """What it received is in its view when it answers: until then every master's view differs."""
    node = Node().knows(ONE)
    node.reported_by(ONE, member(ONE), *[member(n, f"127.9.0.{n}:1") for n in range(100, 200)])

    asked = [node.take(ONE, HeartbeatSeen(b"x")) for _ in range(10)]
    asked += [node.passes(1.0, speaking=()) + node.take(ONE, HeartbeatSeen(b"x")) for _ in range(7)]

    assert sum(len(sends(effects, CompareView)) for effects in asked) == 3


def test_views_to_one_peer_are_bounded_in_each_heartbeat() -> None:
    """A peer that asks again and again makes no storm, and one that is no member gets nothing."""
    node = Node(ONE).knows(NINE, TEN)
    node.passes(HEARTBEAT_S)

    for _ in range(2):
        effects = [e for _ in range(50) for e in node.take(NINE, CompareView(bytes(8)))]
        assert len(effects) == SHARES_PER_BEAT
        assert {m.incarnation for m in effects[0].message.view} == {ONE, NINE, TEN}
        node.passes(HEARTBEAT_S)
    assert node.take(77, CompareView(bytes(8))) == []
    assert [e.message.view for e in node.take(NINE, CompareView(bytes(7)))] == [(member(ONE),)]


def test_news_of_a_doubted_member_reach_the_masters_at_once() -> None:
    """It has time to refute, and its refutation comes to the other masters in time."""
    node = Node(ONE).knows(TWO, NINE)

    doubted = sends(node.passes(SUSPECT_S + 0.1, speaking=(TWO,)), ShareView)
    refuted = sends(node.take(NINE, Heartbeat(member(NINE, counter=1), b"")), ShareView)

    assert doubted == [Send(TWO, ShareView(0, (member(ONE), member(NINE, state=SUSPECT))))]
    assert refuted == [Send(TWO, ShareView(0, (member(ONE), member(NINE, counter=1))))]


def test_view_that_brings_nothing_new_is_not_announced() -> None:
    """The ring is not made again for what is known."""
    node = Node().knows(ONE, TWO)

    assert node.reported_by(ONE, member(ONE), member(TWO)) == []


def test_metrics_count_the_members_by_state() -> None:
    """The gauge follows the view."""
    metrics = Metrics()
    node = Node(metrics=metrics)

    node.knows(ONE, NINE, TEN)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE,))
    node.reported_by(ONE, member(ONE), member(NINE, state=DEAD), member(TEN, state=LEFT))

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
    """It gets messages of masters only, so the silence of others shows nothing."""
    node = Node().knows(ONE, TWO, NINE, TEN)

    node.passes(4.0, speaking=(TWO,))
    suspected = [node.state(i) for i in (ONE, TWO, NINE, TEN)]
    node.passes(3.0, speaking=(TWO,))

    assert suspected == [SUSPECT, ALIVE, ALIVE, ALIVE]
    assert [node.state(i) for i in (ONE, TWO, NINE, TEN)] == [DEAD, ALIVE, ALIVE, ALIVE]


def test_new_master_gives_every_member_the_full_time() -> None:
    """It got no heartbeats before it was one: silence counts from now."""
    node = Node().knows(ONE, TWO, NINE, TEN)
    node.passes(10.0, speaking=(ONE, TWO))

    node.reported_by(TWO, member(ONE, state=LEFT), member(TWO, state=LEFT))
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
        node.take(NINE, HeartbeatSeen(node.actor.view.digest()))
    node.actor.on_tick(node.now)
    node.passes(SUSPECT_S - 0.3)

    assert [node.state(i) for i in (NINE, TEN)] == [ALIVE, ALIVE]
    node.passes(DEAD_S)
    assert [node.state(i) for i in (NINE, TEN)] == [DEAD, DEAD]


def test_member_that_refuted_elsewhere_gets_the_full_time() -> None:
    """A raised counter is a sign of life, even if it reached us through another."""
    node = Node(ONE).knows(TWO, NINE)
    node.passes(5.5, speaking=(TWO,))

    node.reported_by(TWO, member(NINE, counter=1))
    node.passes(2.5, speaking=(TWO,))

    assert node.state(NINE) == ALIVE


def test_times_that_cannot_work_are_refused() -> None:
    """Two lost heartbeats must not look like silence."""
    assert membership_module.TICKS_PER_BEAT >= 2
    with pytest.raises(AssertionError):
        Node(suspect_s=1.5)
    with pytest.raises(AssertionError):
        Node(me=attrs.evolve(member(ME), state=SUSPECT))


# --- refuting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
def test_member_refutes_by_raising_its_counter(state: int) -> None:
    """Its masters receive it at once, and so does the accuser."""
    node = Node().knows(ONE, TWO, NINE)

    effects = node.reported_by(NINE, member(NINE), member(ME, counter=4, state=state))

    refuted = member(ME, counter=5)
    assert node.actor.me == node.actor.member(ME) == refuted
    beats = sends(effects, Heartbeat)
    assert [(beat.to, beat.message.member) for beat in beats] == [(ONE, refuted), (TWO, refuted)]
    assert any(
        refuted in send.message.view for send in sends(effects, ShareView) if send.to == NINE
    )


def test_known_accuser_that_is_no_master_receives_the_refutation() -> None:
    """Else it would hold us dead until it asks its masters."""
    node = Node().knows(ONE, TWO, NINE)

    effects = node.reported_by(NINE, member(NINE), member(ME, state=SUSPECT))

    assert sends(effects, ShareView) == [Send(NINE, ShareView(0, (member(ME, counter=1),)))]


def test_old_claim_against_us_is_ignored() -> None:
    """What we have refuted needs no second refutation."""
    node = Node().knows(ONE)
    node.reported_by(ONE, member(ME, counter=2, state=DEAD))

    effects = node.reported_by(ONE, member(ME, counter=2, state=DEAD))

    assert node.actor.me.counter == 3
    assert effects == []


def test_member_declared_dead_republishes_everything() -> None:
    """A node that held it dead dropped its records; one that only suspected it did not."""
    node = Node().knows(ONE, TWO)

    suspected = node.reported_by(ONE, member(ME, state=SUSPECT))
    declared_dead = node.reported_by(ONE, member(ME, counter=1, state=DEAD))

    assert republishes(suspected) == 0
    assert republishes(declared_dead) == 1
    kinds = [
        type(e.fact)
        for e in declared_dead
        if isinstance(e, (NotifyRing, NotifyDirectory, NotifyPool, NotifyPublisher))
    ]
    assert kinds == [HeldDead] * 2 + [ViewChanged] * 2 + [Republish]


def test_republishing_again_and_again_waits() -> None:
    """A peer that loses us every few seconds must not keep all members busy; nothing is lost."""
    node = Node(ONE).knows(NINE)
    node.reported_by(NINE, member(ONE, counter=0, state=DEAD))

    soon = node.reported_by(NINE, member(ONE, counter=1, state=DEAD))
    soon += node.passes(REPUBLISH_GAP_S - 1.0, speaking=(NINE,))
    later = node.passes(2.0, speaking=(NINE,))

    assert republishes(soon) == 0
    assert republishes(later) == 1
    assert republishes(node.passes(100.0, speaking=(NINE,))) == 0


def test_irrefutable_claim_against_us_changes_nothing() -> None:
    """A counter at the end of the numbers is not followed there."""
    node = Node().knows(ONE)

    for counter in (COUNTER_MAX - 1, COUNTER_MAX, 2**64 - 1):
        node.reported_by(ONE, member(ME, counter=counter, state=DEAD))

    assert node.actor.me == member(ME)


def test_heartbeat_of_one_held_dead_notifies_it_of_that() -> None:
    """It gets the view with its own death in it, and refutes; its old counter is no life."""
    node = Node(ONE).knows(TWO, NINE)
    node.reported_by(TWO, member(NINE, state=LEFT, counter=3))

    for message in (Heartbeat(member(NINE, counter=3), b""), Join(member(NINE, counter=3))):
        effects = node.take(NINE, message)
        assert node.state(NINE) == LEFT
        shared = sends(effects, ShareView)[0].message.view
        assert member(NINE, state=LEFT, counter=3) in shared

    node.take(NINE, Heartbeat(member(NINE, counter=4), b""))
    assert node.state(NINE) == ALIVE


# --- believing others -----------------------------------------------------------------------------


def test_one_that_spoke_lately_is_not_dead_whatever_others_say() -> None:
    """It is notified instead, and refutes; a node that was cut off cannot empty a whole view."""
    node = Node(ONE).knows(NINE, TEN)
    node.take(NINE, Heartbeat(member(NINE), b""))

    effects = node.reported_by(TEN, member(NINE, state=DEAD))

    assert node.state(NINE) == ALIVE
    claim = ShareView(0, (member(ONE), member(NINE, state=DEAD)))
    assert effects == [Send(NINE, claim)]


def test_one_that_did_not_speak_lately_is_dead_when_a_judge_reports_it() -> None:
    """Without evidence of its own a master takes another master's word, and no other's."""
    node = Node(ONE).knows(TWO, NINE, TEN)
    node.take(NINE, Heartbeat(member(NINE), b""))
    node.passes(SUSPECT_S + 0.1, speaking=(TWO, TEN))

    node.reported_by(TEN, member(NINE, state=DEAD))
    by_a_member = node.state(NINE)
    node.reported_by(TWO, member(NINE, state=DEAD))

    assert by_a_member == SUSPECT
    assert node.state(NINE) == DEAD


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
def test_only_masters_are_believed_about_others(state: int) -> None:
    """A plain member reports nothing that counts about a third one."""
    node = Node().knows(ONE, TWO, NINE, TEN)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE, TWO))

    node.reported_by(NINE, member(TEN, counter=1, state=state))
    by_a_member = node.state(TEN)
    node.reported_by(ONE, member(TEN, counter=1, state=state))

    assert by_a_member == ALIVE
    assert node.state(TEN) == state


def test_a_counter_that_no_member_can_have_is_not_believed() -> None:
    """At the end of its range the member could not refute it; not even a master reports it."""
    node = Node().knows(ONE, TWO, NINE)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE, TWO))

    for counter in (COUNTER_JUMP_MAX + 1, COUNTER_MAX - 1):
        node.reported_by(ONE, member(NINE, counter=counter, state=DEAD))
    beyond = node.state(NINE)
    node.reported_by(ONE, member(NINE, counter=COUNTER_JUMP_MAX, state=DEAD))

    assert beyond == ALIVE
    assert node.state(NINE) == DEAD


def test_successor_at_an_address_ends_its_predecessor_at_once() -> None:
    """One process binds an address: who comes with it took it over, at once."""
    node = Node(ONE).knows(NINE, TEN)
    node.take(NINE, Heartbeat(member(NINE), b""))
    successor = member(11, member(NINE).control)

    asked = node.take(11, Join(successor))
    before = node.state(NINE), node.state(11)
    node.meets(successor)

    assert calls(asked) == [successor.control]
    assert before == (ALIVE, None)
    assert node.state(NINE) == DEAD
    assert node.state(11) == ALIVE


def test_address_of_a_successor_or_of_ours_is_not_called_for_its_predecessor() -> None:
    """A live member is there, maybe this node itself: no member is lost."""
    node = Node(ONE).knows(NINE)

    node.meets(member(11, member(NINE).control))
    node.reported_by(11, member(11), member(12, member(ONE).control))

    assert [node.state(i) for i in (NINE, 12)] == [DEAD, None]
    assert calls(node.passes(10.0, speaking=(11,))) == []


def test_successor_is_believed_when_a_master_reports_it() -> None:
    """The claim against the predecessor comes with the successor at its address."""
    node = Node(ONE).knows(TWO, NINE)
    node.take(NINE, Heartbeat(member(NINE), b""))

    effects = node.reported_by(TWO, member(NINE, state=DEAD), member(11, member(NINE).control))

    assert node.state(NINE) == DEAD
    assert calls(effects) == [member(NINE).control]


def test_two_that_advertise_one_address_do_not_end_each_other_forever() -> None:
    """Predecessors are judged at first sight; a misconfigured twin then stays, and so do we."""
    node = Node(ONE).knows(NINE)
    twin = member(11, member(NINE).control)
    node.meets(twin)
    node.take(NINE, Heartbeat(member(NINE, counter=1), b""))

    node.take(11, Heartbeat(twin, b""))
    own = node.take(12, Join(member(12, member(ONE).control)))

    assert [node.state(i) for i in (ONE, NINE, 11, 12)] == [ALIVE] * 3 + [None]
    assert calls(own) == []


def test_two_sides_that_meet_compare_their_views() -> None:
    """A newcomer receives the digest; one that is dead is asked before it refutes, not after."""
    node = Node(ONE).knows(TWO, TEN)

    stranger = node.reported_by(NINE, member(NINE))
    asked = node.take(NINE, Join(member(NINE)))
    met = node.meets(member(NINE))
    known = node.reported_by(NINE, member(NINE))
    node.reported_by(TWO, member(TEN, state=LEFT, counter=1))
    dead = node.take(TEN, Heartbeat(member(TEN), b""))
    returned = node.reported_by(TEN, member(TEN, counter=2))

    assert stranger == [SendTo(member(NINE).control, ShareView(0, (member(ONE),)))]
    assert asked == []
    assert [send.to for send in sends(met, HeartbeatSeen)] == [NINE]
    assert sends(known, ShareView) == []
    assert [type(e.message) for e in dead if isinstance(e, Send)][:2] == [CompareView, ShareView]
    assert [send.to for send in sends(returned, HeartbeatSeen)] == [TEN]
    assert sends(returned, CompareView) == [], "what it reports of this side would be believed"


def test_what_others_say_of_a_node_is_an_address_to_try() -> None:
    """Neither a master nor a plain member can bring in what does not answer, nor its end."""
    node = Node().knows(ONE, TWO, NINE)
    invented = [member(number, f"127.9.0.{number}:1") for number in range(100, 200)]

    effects = node.reported_by(ONE, member(ONE), *invented)
    effects += node.reported_by(NINE, member(NINE), *invented, member(300, state=DEAD))

    assert len(node.actor.view) == 4
    assert len(calls(effects)) == AT_ONCE_MAX
    assert len(set(calls(node.passes(30.0, speaking=(ONE, TWO))))) <= 31 * AT_ONCE_MAX
    assert len(node.actor.view) == 4


def test_what_answers_at_another_address_than_its_own_is_looked_for_there() -> None:
    """Else a process could bring in members at addresses that are not theirs."""
    node = Node().knows(ONE)

    effects = node.take(0, PeerAnswered("somewhere:1", member(NINE)))

    assert node.state(NINE) is None
    assert calls(effects) == [member(NINE).control]
    node.meets(member(NINE))
    assert node.state(NINE) == ALIVE
    assert node.take(0, PeerAnswered(member(ME).control, member(ME))) == []


# --- leaving, losing, forgetting ------------------------------------------------------------------


def test_leaving_notifies_the_masters_first_and_a_bounded_number() -> None:
    """The goodbye is one entry, and final: nothing is received or sent afterwards."""
    node = Node().knows(ONE, TWO, *range(100, 100 + LEAVE_MAX))

    effects = node.actor.leave(node.now)

    gone = member(ME, counter=1, state=LEFT)
    goodbyes = sends(effects, ShareView)
    assert [g.to for g in goodbyes][:3] == [ONE, TWO, 100]
    assert len(goodbyes) == LEAVE_MAX
    assert {g.message for g in goodbyes} == {ShareView(0, (gone,))}
    assert node.reported_by(ONE, member(ME, counter=9, state=DEAD)) == []
    assert node.actor.on_tick(node.now + 5) == []
    assert node.actor.leave(node.now) == []
    assert node.actor.deadline() == float("inf")
    assert node.actor.member(ME) == gone


def test_member_lost_without_goodbye_is_called_for_a_while_and_one_that_left_is_not() -> None:
    """Later another cluster may have its address; a goodbye is an answer."""
    node = Node(ONE).knows(NINE, TEN)
    node.reported_by(TEN, member(TEN, state=LEFT, counter=1))
    node.passes(DEAD_S + 1.0)

    called = calls(node.passes(FORGET_S + 100.0))

    assert node.actor.member(NINE) is None
    assert set(called) == {member(NINE).control}
    assert len(called) > 100
    node.passes(LOST_S)
    assert calls(node.passes(100.0)) == []


def test_successor_is_looked_for_as_soon_as_a_member_is_suspect() -> None:
    """A restarted head is found before its old incarnation is dead."""
    node = Node().knows(ONE, TWO)

    called = calls(node.passes(SUSPECT_S + 1.0, speaking=(TWO,)))

    assert set(called) == {member(ONE).control}


def test_ended_entry_is_forgotten_and_an_old_view_does_not_bring_it_back() -> None:
    """It comes up again as dead when it answers, so that it refutes; alive by its own counter."""
    node = Node(ONE).knows(NINE, TEN)
    node.reported_by(TEN, member(TEN, state=LEFT, counter=1))
    node.passes(DEAD_S + FORGET_S + 1.0)
    forgotten = len(node.actor.view)

    node.knows(11)
    asked = node.reported_by(11, member(11), member(NINE), member(TEN, counter=1, state=LEFT))
    reported = node.state(NINE), node.state(TEN)
    node.meets(member(NINE))
    answered = node.state(NINE)
    node.take(NINE, Heartbeat(member(NINE, counter=1), b""))

    assert forgotten == 1
    assert calls(asked) == [member(NINE).control]
    assert (reported, answered) == ((None, None), DEAD)
    assert node.state(NINE) == ALIVE


def test_forgotten_one_that_joins_learns_that_it_was_dead() -> None:
    """Else its neighbours would hold it alive and we not, forever."""
    node = Node(ONE).knows(NINE)
    node.passes(DEAD_S + FORGET_S + 1.0)

    effects = node.take(NINE, Join(member(NINE)))

    shared = sends(effects, ShareView)[0].message.view
    assert member(NINE, state=DEAD) in shared
    assert node.state(NINE) == DEAD
