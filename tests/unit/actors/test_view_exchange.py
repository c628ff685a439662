"""What a peer gets of a view: what has changed, exact and bounded, and in parts that fit."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.effects import Send
from peercache.actors.membership import gossip as view_exchange
from peercache.actors.membership.gossip import (
    LOG_MAX,
    PART_MEMBERS_MAX,
    TOLD_MAX,
    ViewLog,
    bytes_of,
    parts_of,
)
from peercache.actors.origin import Origin
from peercache.model.member import DEAD, LEFT, SUSPECT
from peercache.model.view import View
from peercache.paths.home_tie import changed_view
from peercache.wire.codec import MESSAGE_BYTES_MAX, decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    ReportViewChanges,
    RequestView,
    RequestViewChanges,
    ShareView,
)
from tests.unit.actors.membership_cluster import HEARTBEAT_S, member
from tests.unit.actors.membership_node import ME, NINE, ONE, TEN, TWO, Node, sends

CLIENT = 77


def changes_from(node: Node, digest: bytes) -> ReportViewChanges:
    (effect,) = node.hears(CLIENT, RequestViewChanges(3, digest), pipe=4)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ReportViewChanges)
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
    assert sends(master.hears(NINE, beat), ShareView) == []
    master.told_by(TEN, member(TEN, counter=3, state=LEFT))

    answered = master.hears(NINE, beat)

    assert [type(e.message) for e in answered if isinstance(e, Send)] == [ShareView, HeartbeatSeen]
    (told,) = sends(answered, ShareView)
    assert told.message.view == (master.actor.me, member(TEN, counter=3, state=LEFT))
    for effect in answered:
        assert isinstance(effect, Send)
        assert sends(plain.hears(ONE, effect.message), CompareView) == []
    assert plain.state(TEN) == LEFT
    assert plain.actor.view.digest() == master.actor.view.digest()


@pytest.mark.parametrize("order", ["lost", "reordered"])
def test_changes_that_are_lost_or_late_heal(order: str) -> None:
    """The digest that follows them is one that the member does not know: it compares."""
    master = Node(ONE).knows(TWO, NINE, TEN)
    plain = Node(NINE).knows(ONE, TWO, TEN)
    plain.passes(view_exchange.BEHIND_BEATS * HEARTBEAT_S + 0.1, speaking=(ONE, TWO))
    master.told_by(TEN, member(TEN, counter=3, state=LEFT))
    beat = Heartbeat(member(NINE), plain.actor.view.digest())
    changes, seen = [e.message for e in master.hears(NINE, beat) if isinstance(e, Send)]

    asked = plain.hears(ONE, seen)
    if order == "reordered":
        plain.hears(ONE, changes)
    else:
        (compared,) = sends(asked, CompareView)
        for answer in sends(master.hears(NINE, compared.message), ShareView):
            plain.hears(ONE, answer.message)

    assert plain.actor.view.digest() == master.actor.view.digest()
    assert sends(plain.passes(HEARTBEAT_S), CompareView) == []


def test_a_member_that_stays_behind_is_compared_with_after_all() -> None:
    """Two logs might each take the other side for the late one."""
    node = Node(ONE).knows(TWO, NINE, TEN)
    before = node.actor.view.digest()
    node.told_by(TEN, member(TEN, counter=3, state=LEFT))
    assert sends(node.hears(NINE, Heartbeat(member(NINE), before)), CompareView) == []

    node.passes(view_exchange.BEHIND_BEATS * HEARTBEAT_S + 0.1)

    assert len(sends(node.hears(NINE, Heartbeat(member(NINE), before)), CompareView)) == 1


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
    right = ReportViewChanges(0, base.digest(), after.digest(), (member(TEN),), ())
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
    changes = ReportViewChanges(0, suspected.digest(), refuted.digest(), (member(TWO),), ())

    changed = changed_view(suspected, changes)

    assert changed is not None
    assert changed.digest() == refuted.digest()
    assert DEAD not in {entry.state for entry in changed.members()}


LARGE = {"host_name": "h" * 200, "boot_id": "b" * 36, "segment": "/dev/shm/" + "s" * 400}


def size_of(message: ShareView) -> int:
    return len(encode(Envelope(2**64 - 1, 2**64 - 1, message), cluster="c" * 200))


@pytest.mark.parametrize("more", [{}, LARGE])
def test_every_part_of_a_view_of_thousands_fits_into_a_message(more: dict[str, str]) -> None:
    """Entries keep their order, and each is in one part."""
    members = [member(number, nonce=bytes(16), name="n" * 60, **more) for number in range(1, 4000)]

    parts = parts_of(members)

    assert [entry for part in parts for entry in part] == members
    assert all(len(part) <= PART_MEMBERS_MAX for part in parts)
    for part in parts:
        raw = encode(Envelope(1, 2, ShareView(0, part)), cluster="c")
        assert len(raw) <= MESSAGE_BYTES_MAX
        assert decode(raw, cluster="c").message == ShareView(0, part)


@given(
    st.integers(1, 2**64 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.binary(max_size=20),
)
def test_the_size_of_an_entry_is_never_less_than_on_the_wire(
    number: int, text: str, nonce: bytes
) -> None:
    """Texts count as UTF-8."""
    entry = member(number, counter=number, segment=text, name=text, nonce=nonce)

    assert size_of(ShareView(0, (entry,))) - size_of(ShareView(0, ())) <= bytes_of(entry)


def test_a_large_view_is_shared_in_parts_that_each_say_whose_they_are() -> None:
    """A node that does not know the sender learns it from whichever part comes first."""
    node = Node(ONE).knows(TWO)
    node.actor._merge([member(number) for number in range(100, 3000)], node.now)

    shares = sends(node.hears(TWO, CompareView(View.of([member(TWO)]).bucket_digests())), ShareView)

    assert len(shares) > 1
    assert all(node.actor.me in share.message.view for share in shares)
    told = {entry.incarnation for share in shares for entry in share.message.view}
    assert told == {ONE, TWO, *range(100, 3000)}
    assert all(size_of(share.message) <= MESSAGE_BYTES_MAX for share in shares)


def test_a_client_gets_a_large_view_part_by_part() -> None:
    """It asks for what comes after the last entry that it has."""
    node = Node(ME).knows(ONE, TWO)
    node.actor._merge([member(number) for number in range(100, 3000)], node.now)
    got: list[ShareView] = []
    after = 0
    while not got or got[-1].more:
        asked = RequestView(1, b"", after)
        (effect,) = node.actor.on_message(Origin(77, 5), asked, node.now)
        answer = effect.message  # type: ignore[union-attr]
        assert isinstance(answer, ShareView)
        got.append(answer)
        after = answer.view[-1].incarnation

    members = [entry for part in got for entry in part.view]

    assert len(got) > 1
    assert View.of(members).digest() == node.actor.view.digest()
    assert all(size_of(part) <= MESSAGE_BYTES_MAX for part in got)
