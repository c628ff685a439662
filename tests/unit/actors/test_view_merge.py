"""One node's membership, message by message: refuting, believing, leaving, forgetting."""

from __future__ import annotations

import pytest

from peercache.actors.effects import Send, SendTo, TellDirectory, TellPublisher, TellRing
from peercache.actors.mailboxes import PeerAnswered, Republish, ViewChanged
from peercache.actors.membership.actor import LEAVE_MAX, REPUBLISH_GAP_S
from peercache.actors.membership.candidates import AT_ONCE_MAX, LOST_S
from peercache.actors.membership.gossip import COUNTER_JUMP_MAX, FORGET_S
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT  # fmt: skip
from peercache.model.view import COUNTER_MAX
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    ShareView,
)
from tests.unit.actors.membership_cluster import DEAD_S, SUSPECT_S, member
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

# --- refuting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
def test_member_refutes_by_raising_its_counter(state: int) -> None:
    """Its masters hear it at once, and so does the accuser."""
    node = Node().knows(ONE, TWO, NINE)

    effects = node.told_by(NINE, member(NINE), member(ME, counter=4, state=state))

    refuted = member(ME, counter=5)
    assert node.actor.me == node.actor.member(ME) == refuted
    beats = sends(effects, Heartbeat)
    assert [(beat.to, beat.message.member) for beat in beats] == [(ONE, refuted), (TWO, refuted)]
    assert any(
        refuted in send.message.view for send in sends(effects, ShareView) if send.to == NINE
    )


def test_known_accuser_that_is_no_master_hears_the_refutation() -> None:
    """Else it would hold us dead until it asks its masters."""
    node = Node().knows(ONE, TWO, NINE)

    effects = node.told_by(NINE, member(NINE), member(ME, state=SUSPECT))

    assert sends(effects, ShareView) == [Send(NINE, ShareView(0, (member(ME, counter=1),)))]


def test_old_claim_against_us_is_ignored() -> None:
    """What we have refuted needs no second refutation."""
    node = Node().knows(ONE)
    node.told_by(ONE, member(ME, counter=2, state=DEAD))

    effects = node.told_by(ONE, member(ME, counter=2, state=DEAD))

    assert node.actor.me.counter == 3
    assert effects == []


def test_member_declared_dead_republishes_everything() -> None:
    """A node that held it dead dropped its records; one that only suspected it did not."""
    node = Node().knows(ONE, TWO)

    suspected = node.told_by(ONE, member(ME, state=SUSPECT))
    declared_dead = node.told_by(ONE, member(ME, counter=1, state=DEAD))

    assert republishes(suspected) == 0
    assert republishes(declared_dead) == 1
    kinds = [
        type(e.fact)
        for e in declared_dead
        if isinstance(e, (TellRing, TellDirectory, TellPublisher))
    ]
    assert kinds == [ViewChanged] * 2 + [Republish]


def test_republishing_again_and_again_waits() -> None:
    """A peer that loses us every few seconds must not keep all members busy; nothing is lost."""
    node = Node(ONE).knows(NINE)
    node.told_by(NINE, member(ONE, counter=0, state=DEAD))

    soon = node.told_by(NINE, member(ONE, counter=1, state=DEAD))
    soon += node.passes(REPUBLISH_GAP_S - 1.0, speaking=(NINE,))
    later = node.passes(2.0, speaking=(NINE,))

    assert republishes(soon) == 0
    assert republishes(later) == 1
    assert republishes(node.passes(100.0, speaking=(NINE,))) == 0


def test_irrefutable_claim_against_us_changes_nothing() -> None:
    """A counter at the end of the numbers is not followed there."""
    node = Node().knows(ONE)

    for counter in (COUNTER_MAX - 1, COUNTER_MAX, 2**64 - 1):
        node.told_by(ONE, member(ME, counter=counter, state=DEAD))

    assert node.actor.me == member(ME)


def test_heartbeat_of_one_held_dead_tells_it_so() -> None:
    """It gets the view with its own death in it, and refutes; its old counter is no life."""
    node = Node(ONE).knows(TWO, NINE)
    node.told_by(TWO, member(NINE, state=LEFT, counter=3))

    for message in (Heartbeat(member(NINE, counter=3), b""), Join(member(NINE, counter=3))):
        effects = node.hears(NINE, message)
        assert node.state(NINE) == LEFT
        told = sends(effects, ShareView)[0].message.view
        assert member(NINE, state=LEFT, counter=3) in told

    node.hears(NINE, Heartbeat(member(NINE, counter=4), b""))
    assert node.state(NINE) == ALIVE


# --- believing others -----------------------------------------------------------------------------


def test_one_that_spoke_lately_is_not_dead_whatever_others_say() -> None:
    """It is told instead, and refutes; a node that was cut off cannot empty a whole view."""
    node = Node(ONE).knows(NINE, TEN)
    node.hears(NINE, Heartbeat(member(NINE), b""))

    effects = node.told_by(TEN, member(NINE, state=DEAD))

    assert node.state(NINE) == ALIVE
    claim = ShareView(0, (member(ONE), member(NINE, state=DEAD)))
    assert effects == [Send(NINE, claim)]


def test_one_that_did_not_speak_lately_is_dead_when_a_judge_says_so() -> None:
    """Without evidence of its own a master takes another master's word, and no other's."""
    node = Node(ONE).knows(TWO, NINE, TEN)
    node.hears(NINE, Heartbeat(member(NINE), b""))
    node.passes(SUSPECT_S + 0.1, speaking=(TWO, TEN))

    node.told_by(TEN, member(NINE, state=DEAD))
    told_by_a_member = node.state(NINE)
    node.told_by(TWO, member(NINE, state=DEAD))

    assert told_by_a_member == SUSPECT
    assert node.state(NINE) == DEAD


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
def test_only_masters_are_believed_about_others(state: int) -> None:
    """A plain member says nothing that counts about a third one."""
    node = Node().knows(ONE, TWO, NINE, TEN)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE, TWO))

    node.told_by(NINE, member(TEN, counter=1, state=state))
    told_by_a_member = node.state(TEN)
    node.told_by(ONE, member(TEN, counter=1, state=state))

    assert told_by_a_member == ALIVE
    assert node.state(TEN) == state


def test_a_counter_that_no_member_can_have_is_not_believed() -> None:
    """At the end of its range the member could not refute it; not even a master says so."""
    node = Node().knows(ONE, TWO, NINE)
    node.passes(SUSPECT_S + 0.1, speaking=(ONE, TWO))

    for counter in (COUNTER_JUMP_MAX + 1, COUNTER_MAX - 1):
        node.told_by(ONE, member(NINE, counter=counter, state=DEAD))
    beyond = node.state(NINE)
    node.told_by(ONE, member(NINE, counter=COUNTER_JUMP_MAX, state=DEAD))

    assert beyond == ALIVE
    assert node.state(NINE) == DEAD


def test_goodbye_is_believed_at_once() -> None:
    """Only the member itself says that it has left, so lately heard or not does not matter."""
    node = Node(ONE).knows(TWO, NINE)
    node.hears(NINE, Heartbeat(member(NINE), b""))

    node.told_by(TWO, member(NINE, state=LEFT, counter=1))

    assert node.state(NINE) == LEFT


def test_successor_at_an_address_ends_its_predecessor_at_once() -> None:
    """One process binds an address: who comes with it took it over. Lately heard or not."""
    node = Node(ONE).knows(NINE, TEN)
    node.hears(NINE, Heartbeat(member(NINE), b""))
    successor = member(11, member(NINE).control)

    asked = node.hears(11, Join(successor))
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
    node.told_by(11, member(11), member(12, member(ONE).control))

    assert [node.state(i) for i in (NINE, 12)] == [DEAD, None]
    assert calls(node.passes(10.0, speaking=(11,))) == []


def test_successor_is_believed_when_a_master_tells_of_it() -> None:
    """The claim against the predecessor comes with the successor at its address."""
    node = Node(ONE).knows(TWO, NINE)
    node.hears(NINE, Heartbeat(member(NINE), b""))

    effects = node.told_by(TWO, member(NINE, state=DEAD), member(11, member(NINE).control))

    assert node.state(NINE) == DEAD
    assert calls(effects) == [member(NINE).control]


def test_two_that_advertise_one_address_do_not_end_each_other_for_ever() -> None:
    """Predecessors are judged at first sight; a misconfigured twin then stays, and so do we."""
    node = Node(ONE).knows(NINE)
    twin = member(11, member(NINE).control)
    node.meets(twin)
    node.hears(NINE, Heartbeat(member(NINE, counter=1), b""))

    node.hears(11, Heartbeat(twin, b""))
    own = node.hears(12, Join(member(12, member(ONE).control)))

    assert [node.state(i) for i in (ONE, NINE, 11, 12)] == [ALIVE] * 3 + [None]
    assert calls(own) == []


def test_two_sides_that_meet_compare_their_views() -> None:
    """A newcomer hears the digest; one that is dead is asked before it refutes, not after."""
    node = Node(ONE).knows(TWO, TEN)

    stranger = node.told_by(NINE, member(NINE))
    asked = node.hears(NINE, Join(member(NINE)))
    met = node.meets(member(NINE))
    known = node.told_by(NINE, member(NINE))
    node.told_by(TWO, member(TEN, state=LEFT, counter=1))
    dead = node.hears(TEN, Heartbeat(member(TEN), b""))
    returned = node.told_by(TEN, member(TEN, counter=2))

    assert stranger == [SendTo(member(NINE).control, ShareView(0, (member(ONE),)))]
    assert asked == []
    assert [send.to for send in sends(met, HeartbeatSeen)] == [NINE]
    assert sends(known, ShareView) == []
    assert [type(e.message) for e in dead if isinstance(e, Send)][:2] == [CompareView, ShareView]
    assert [send.to for send in sends(returned, HeartbeatSeen)] == [TEN]
    assert sends(returned, CompareView) == [], "what it says of this side would be believed"


def test_what_others_say_of_a_node_is_an_address_to_try() -> None:
    """Neither a master nor a plain member can bring in what does not answer, nor its end."""
    node = Node().knows(ONE, TWO, NINE)
    invented = [member(number, f"127.9.0.{number}:1") for number in range(100, 200)]

    effects = node.told_by(ONE, member(ONE), *invented)
    effects += node.told_by(NINE, member(NINE), *invented, member(300, state=DEAD))

    assert len(node.actor.view) == 4
    assert len(calls(effects)) == AT_ONCE_MAX
    assert len(set(calls(node.passes(30.0, speaking=(ONE, TWO))))) <= 31 * AT_ONCE_MAX
    assert len(node.actor.view) == 4


def test_what_answers_at_another_address_than_its_own_is_looked_for_there() -> None:
    """Else a process could bring in members at addresses that are not theirs."""
    node = Node().knows(ONE)

    effects = node.hears(0, PeerAnswered("somewhere:1", member(NINE)))

    assert node.state(NINE) is None
    assert calls(effects) == [member(NINE).control]
    node.meets(member(NINE))
    assert node.state(NINE) == ALIVE
    assert node.hears(0, PeerAnswered(member(ME).control, member(ME))) == []


# --- leaving, losing, forgetting ------------------------------------------------------------------


def test_leaving_tells_the_masters_first_and_a_bounded_number() -> None:
    """The goodbye is one entry, and final: nothing is heard or said afterwards."""
    node = Node().knows(ONE, TWO, *range(100, 100 + LEAVE_MAX))

    effects = node.actor.leave(node.now)

    gone = member(ME, counter=1, state=LEFT)
    goodbyes = sends(effects, ShareView)
    assert [g.to for g in goodbyes][:3] == [ONE, TWO, 100]
    assert len(goodbyes) == LEAVE_MAX
    assert {g.message for g in goodbyes} == {ShareView(0, (gone,))}
    assert node.told_by(ONE, member(ME, counter=9, state=DEAD)) == []
    assert node.actor.on_tick(node.now + 5) == []
    assert node.actor.leave(node.now) == []
    assert node.actor.deadline() == float("inf")
    assert node.actor.member(ME) == gone


def test_member_lost_without_goodbye_is_called_for_a_while_and_one_that_left_is_not() -> None:
    """Later another cluster may have its address; a goodbye is an answer."""
    node = Node(ONE).knows(NINE, TEN)
    node.told_by(TEN, member(TEN, state=LEFT, counter=1))
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
    node.told_by(TEN, member(TEN, state=LEFT, counter=1))
    node.passes(DEAD_S + FORGET_S + 1.0)
    forgotten = len(node.actor.view)

    node.knows(11)
    asked = node.told_by(11, member(11), member(NINE), member(TEN, counter=1, state=LEFT))
    told = node.state(NINE), node.state(TEN)
    node.meets(member(NINE))
    answered = node.state(NINE)
    node.hears(NINE, Heartbeat(member(NINE, counter=1), b""))

    assert forgotten == 1
    assert calls(asked) == [member(NINE).control]
    assert (told, answered) == ((None, None), DEAD)
    assert node.state(NINE) == ALIVE


def test_forgotten_one_that_joins_hears_that_it_was_dead() -> None:
    """Else its neighbours would hold it alive and we not, for ever."""
    node = Node(ONE).knows(NINE)
    node.passes(DEAD_S + FORGET_S + 1.0)

    effects = node.hears(NINE, Join(member(NINE)))

    told = sends(effects, ShareView)[0].message.view
    assert member(NINE, state=DEAD) in told
    assert node.state(NINE) == DEAD
