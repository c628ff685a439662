"""What has changed since a peer's view: told alone, exact, bounded, and never trusted blindly."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.effects import Send
from peercache.actors.membership import view_log
from peercache.actors.membership.view_log import LOG_MAX, TOLD_MAX, ViewLog
from peercache.model.member import DEAD, LEFT, SUSPECT
from peercache.model.view import View
from peercache.paths.home_tie import changed_view
from peercache.wire.messages.membership import (
    Heartbeat,
    HeartbeatSeen,
    ViewChanges,
    ViewChangesAsked,
    ViewCompared,
    ViewShared,
)
from tests.unit.actors.membership_cluster import HEARTBEAT_S, member
from tests.unit.actors.membership_node import NINE, ONE, TEN, TWO, Node, sends

CLIENT = 77


def changes_from(node: Node, digest: bytes) -> ViewChanges:
    (effect,) = node.hears(CLIENT, ViewChangesAsked(3, digest), pipe=4)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ViewChanges)
    assert effect.message.request == 3
    return effect.message


def test_a_log_knows_what_changed_since_each_digest() -> None:
    log = ViewLog(heartbeat_s=1.0)
    log.changed(b"a", b"b", [1], 0.0)
    log.changed(b"b", b"b", [7], 0.0)  # An entry of the ended.
    log.changed(b"b", b"c", [2, 3], 1.0)
    log.changed(b"c", b"d", [1], 2.0)

    assert log.since(b"a") == [1, 2, 3]
    assert log.since(b"b") == [2, 3, 1]
    assert log.since(b"c") == [1]
    assert log.since(b"d") is None
    assert log.since(b"x") is None
    assert log.was(b"b", 3.9)
    assert not log.was(b"b", 4.0)
    assert not log.was(b"x", 3.9)


def test_a_digest_that_comes_back_is_left_where_it_was_left_last() -> None:
    """A member came and went: the views before and after have the same live entries."""
    log = ViewLog(heartbeat_s=1.0)
    log.changed(b"a", b"b", [1], 0.0)
    log.changed(b"b", b"a", [1], 1.0)
    log.changed(b"a", b"c", [2], 2.0)

    assert log.since(b"a") == [2]


def test_a_log_is_bounded() -> None:
    """What is forgotten is not known, never told in part."""
    log = ViewLog(heartbeat_s=1.0)
    for at in range(3 * LOG_MAX):
        log.changed(b"%d" % at, b"%d" % (at + 1), [at], 0.0)

    assert len(log) == LOG_MAX
    assert len(log._left) <= LOG_MAX
    assert log.since(b"%d" % (3 * LOG_MAX - TOLD_MAX)) == [
        *range(3 * LOG_MAX - TOLD_MAX, 3 * LOG_MAX)
    ]
    assert log.since(b"%d" % (3 * LOG_MAX - TOLD_MAX - 1)) is None
    assert log.since(b"0") is None
    for at in range(3 * LOG_MAX):
        log.changed(b"home", b"away %d" % at, [at], 0.0)
        log.changed(b"away %d" % at, b"home", [at], 0.0)
    assert len(log._left) <= LOG_MAX


def test_a_member_whose_view_this_node_had_lately_is_told_the_changes_alone() -> None:
    """A master answers a heartbeat with the entry that changed, and no views are compared."""
    master = Node(ONE).knows(TWO, NINE, TEN)
    plain = Node(NINE).knows(ONE, TWO, TEN)
    beat = Heartbeat(member(NINE), plain.actor.view.digest())
    assert master.actor.view.digest() == plain.actor.view.digest()
    assert sends(master.hears(NINE, beat), ViewShared) == []
    master.told_by(TEN, member(TEN, counter=3, state=LEFT))

    answered = master.hears(NINE, beat)

    assert [type(e.message) for e in answered if isinstance(e, Send)] == [ViewShared, HeartbeatSeen]
    (told,) = sends(answered, ViewShared)
    assert told.message.view == (master.actor.me, member(TEN, counter=3, state=LEFT))
    for effect in answered:
        assert isinstance(effect, Send)
        assert sends(plain.hears(ONE, effect.message), ViewCompared) == []
    assert plain.state(TEN) == LEFT
    assert plain.actor.view.digest() == master.actor.view.digest()


@pytest.mark.parametrize("order", ["lost", "reordered"])
def test_changes_that_are_lost_or_late_heal(order: str) -> None:
    """The digest that follows them is one that the member does not know: it compares."""
    master = Node(ONE).knows(TWO, NINE, TEN)
    plain = Node(NINE).knows(ONE, TWO, TEN)
    plain.passes(view_log.BEHIND_BEATS * HEARTBEAT_S + 0.1, speaking=(ONE, TWO))
    master.told_by(TEN, member(TEN, counter=3, state=LEFT))
    beat = Heartbeat(member(NINE), plain.actor.view.digest())
    changes, seen = [e.message for e in master.hears(NINE, beat) if isinstance(e, Send)]

    asked = plain.hears(ONE, seen)
    if order == "reordered":
        plain.hears(ONE, changes)
    else:
        (compared,) = sends(asked, ViewCompared)
        for answer in sends(master.hears(NINE, compared.message), ViewShared):
            plain.hears(ONE, answer.message)

    assert plain.actor.view.digest() == master.actor.view.digest()
    assert sends(plain.passes(HEARTBEAT_S), ViewCompared) == []


def test_a_member_that_stays_behind_is_compared_with_after_all() -> None:
    """Two logs might each take the other side for the late one."""
    node = Node(ONE).knows(TWO, NINE, TEN)
    before = node.actor.view.digest()
    node.told_by(TEN, member(TEN, counter=3, state=LEFT))
    assert sends(node.hears(NINE, Heartbeat(member(NINE), before)), ViewCompared) == []

    node.passes(view_log.BEHIND_BEATS * HEARTBEAT_S + 0.1)

    assert len(sends(node.hears(NINE, Heartbeat(member(NINE), before)), ViewCompared)) == 1


def test_a_client_is_told_what_changed_and_not_the_view() -> None:
    node = Node(ONE).knows(TWO, NINE, TEN)
    client = View.of(node.actor.view.live())
    same = changes_from(node, client.digest())
    assert (same.base, same.digest, same.view, same.gone) == (client.digest(),) * 2 + ((), ())
    assert changed_view(client, same) is client

    node.told_by(TEN, member(TEN, counter=3, state=LEFT))
    node.meets(member(12))
    changes = changes_from(node, client.digest())

    assert changes.gone == (TEN,)
    assert changes.view == (member(12),)
    changed = changed_view(client, changes)
    assert changed is not None
    assert changed.members() == node.actor.view.live()
    assert changes_from(node, b"never seen").base == b""


def test_changes_on_a_wrong_base_are_not_applied() -> None:
    """Else a client would lack members, or keep dead ones, until the next whole view."""
    members = [member(each) for each in (ONE, TWO, NINE)]
    base, after = View.of(members), View.of([*members, member(TEN)])
    right = ViewChanges(0, base.digest(), after.digest(), (member(TEN),), ())
    other = View.of(members[:2])

    good = changed_view(base, right)

    assert good is not None
    assert good.members() == after.members()
    assert changed_view(other, right) is None
    assert changed_view(other, attrs.evolve(right, base=other.digest())) is None
    assert changed_view(base, attrs.evolve(right, view=())) is None
    assert changed_view(base, attrs.evolve(right, gone=(ONE,))) is None
    assert changed_view(base, attrs.evolve(right, base=b"", digest=b"")) is None


def test_changes_bring_a_state_that_another_view_has_taken_back() -> None:
    """A client that was told of a suspicion by another node follows its home node again."""
    suspected = View.of([member(ONE), member(TWO, state=SUSPECT)])
    refuted = View.of([member(ONE), member(TWO)])
    changes = ViewChanges(0, suspected.digest(), refuted.digest(), (member(TWO),), ())

    changed = changed_view(suspected, changes)

    assert changed is not None
    assert changed.digest() == refuted.digest()
    assert DEAD not in {entry.state for entry in changed.members()}
