"""Addresses to try, views to share and who is back from the dead: the parts of membership."""

from __future__ import annotations

import random
from collections.abc import Iterable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.effects import Send, SendTo
from peercache.actors.mailboxes import AddressesFound
from peercache.actors.membership import gossip
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
from peercache.actors.membership.gossip import (
    CHANGES_SENT_MAX,
    ENDED_MAX,
    FORGET_S,
    LOG_MAX,
    PART_MEMBERS_MAX,
    FailureDetector,
    Tombstones,
    ViewLog,
    bytes_of,
    parts_of,
)
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
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
from tests.unit.actors.membership_cluster import HEAL_S, HEARTBEAT_S, Cluster, member
from tests.unit.actors.membership_node import ME, NINE, ONE, TEN, TWO, Node, calls, sends


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


def test_node_announces_who_it_is_at_the_addresses_that_it_is_given() -> None:
    """At once, and not at its own, nor where it knows a member."""
    node = Node().knows(ONE)
    given = (member(ME).control, member(ONE).control, member(TWO).control)

    effects = node.take(0, AddressesFound(given))

    assert effects == [SendTo(member(TWO).control, ShareView(0, (node.actor.me,)))]
    assert node.actor.dialled() == {member(TWO).control}


def test_empty_answer_ends_no_member() -> None:
    """Discovery gives addresses; membership alone decides what is a member."""
    node = Node()
    node.take(0, AddressesFound((member(ONE).control,)))
    node.knows(ONE)

    node.take(0, AddressesFound(()))

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
        cluster.perform(process, process.actor.on_message(SELF, message, cluster.now))


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


def test_head_that_is_reached_rests_and_is_called_at_once_when_lost() -> None:
    """Its backoff starts again each time."""
    calling = redial(a=0)
    calls_in(calling, 60.0)

    resting = calls_in(calling, 60.0, start=60.0, reached=("a",))
    again = calls_in(calling, 3.0, start=120.0)

    assert resting == []
    assert len(again) >= 3


def test_head_reached_under_another_address_is_called_rarely_until_it_is_lost() -> None:
    """Its rank is there: it is the same one, unless lists differ between hosts. The rare calls of
    good times do not delay the first one of bad times.
    """
    calling = redial(a=0)
    calling.due(0.0, reached=(), ranks=())

    calls = calls_in(calling, 10 * ALIAS_S, start=1.0, ranks=(0,))

    assert 5 <= len(calls) <= 30
    assert calls_in(calling, 3.5, start=1.0 + 10 * ALIAS_S)


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
    """A view that reports it again and again does not make calls more frequent."""
    calling = redial()
    calling.lost("x", 0.0)
    calls_in(calling, 60.0)
    calling.lost("x", 60.0)

    assert len(calls_in(calling, 30.0, start=60.0)) <= 21


CLIENT = 77


def changes_from(node: Node, digest: bytes) -> ReportViewChanges:
    (effect,) = node.take(CLIENT, RequestViewChanges(3, digest), pipe=4)
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
    """What is forgotten is not known, never reported in part."""
    log = ViewLog(heartbeat_s=1.0)
    for at in range(3 * LOG_MAX):
        log.changed(b"%d" % at, b"%d" % (at + 1), [at], 0.0)

    assert len(log) == LOG_MAX
    assert log.since(b"%d" % (3 * LOG_MAX - CHANGES_SENT_MAX)) == [
        *range(3 * LOG_MAX - CHANGES_SENT_MAX, 3 * LOG_MAX)
    ]
    assert log.since(b"%d" % (3 * LOG_MAX - CHANGES_SENT_MAX - 1)) is None
    assert log.since(b"0") is None


def test_a_member_whose_view_this_node_had_lately_receives_the_changes_alone() -> None:
    """A master answers a heartbeat with the entry that changed, and no views are compared."""
    master = Node(ONE).knows(TWO, NINE, TEN)
    plain = Node(NINE).knows(ONE, TWO, TEN)
    beat = Heartbeat(member(NINE), plain.actor.view.digest())
    assert master.actor.view.digest() == plain.actor.view.digest()
    assert sends(master.take(NINE, beat), ShareView) == []
    master.reported_by(TEN, member(TEN, counter=3, state=LEFT))

    answered = master.take(NINE, beat)

    assert [type(e.message) for e in answered if isinstance(e, Send)] == [ShareView, HeartbeatSeen]
    (share,) = sends(answered, ShareView)
    assert share.message.view == (master.actor.me, member(TEN, counter=3, state=LEFT))
    for effect in answered:
        assert isinstance(effect, Send)
        assert sends(plain.take(ONE, effect.message), CompareView) == []
    assert plain.state(TEN) == LEFT
    assert plain.actor.view.digest() == master.actor.view.digest()


@pytest.mark.parametrize("order", ["lost", "reordered"])
def test_changes_that_are_lost_or_late_heal(order: str) -> None:
    """The digest that follows them is one that the member does not know: it compares."""
    master = Node(ONE).knows(TWO, NINE, TEN)
    plain = Node(NINE).knows(ONE, TWO, TEN)
    plain.passes(gossip.BEHIND_BEATS * HEARTBEAT_S + 0.1, speaking=(ONE, TWO))
    master.reported_by(TEN, member(TEN, counter=3, state=LEFT))
    beat = Heartbeat(member(NINE), plain.actor.view.digest())
    changes, seen = [e.message for e in master.take(NINE, beat) if isinstance(e, Send)]

    asked = plain.take(ONE, seen)
    if order == "reordered":
        plain.take(ONE, changes)
    else:
        (compared,) = sends(asked, CompareView)
        for answer in sends(master.take(NINE, compared.message), ShareView):
            plain.take(ONE, answer.message)

    assert plain.actor.view.digest() == master.actor.view.digest()
    assert sends(plain.passes(HEARTBEAT_S), CompareView) == []


def test_a_member_that_stays_behind_is_compared_with_after_all() -> None:
    """Two logs might each take the other side for the late one."""
    node = Node(ONE).knows(TWO, NINE, TEN)
    before = node.actor.view.digest()
    node.reported_by(TEN, member(TEN, counter=3, state=LEFT))
    assert sends(node.take(NINE, Heartbeat(member(NINE), before)), CompareView) == []

    node.passes(gossip.BEHIND_BEATS * HEARTBEAT_S + 0.1)

    assert len(sends(node.take(NINE, Heartbeat(member(NINE), before)), CompareView)) == 1


def test_a_client_is_notified_of_what_changed_and_not_the_view() -> None:
    node = Node(ONE).knows(TWO, NINE, TEN)
    client = View.of(node.actor.view.live())
    same = changes_from(node, client.digest())
    assert (same.base, same.digest, same.view, same.gone) == (client.digest(),) * 2 + ((), ())
    assert changed_view(client, same) is client

    node.reported_by(TEN, member(TEN, counter=3, state=LEFT))
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
    """A client that was notified of a suspicion by another node follows its home node again."""
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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten members stand for a thousand."""
    monkeypatch.setattr(gossip, "PART_MEMBERS_MAX", 10)


@pytest.mark.usefixtures("small_parts")
def test_a_large_view_is_shared_in_parts_that_each_say_whose_they_are() -> None:
    """A node that does not know the sender learns it from whichever part comes first."""
    node = Node(ONE).knows(TWO, *range(100, 140))

    shares = sends(node.take(TWO, CompareView(View.of([member(TWO)]).bucket_digests())), ShareView)

    assert len(shares) > 1
    assert all(node.actor.me in share.message.view for share in shares)
    shared = {entry.incarnation for share in shares for entry in share.message.view}
    assert shared == {ONE, TWO, *range(100, 140)}
    assert all(size_of(share.message) <= MESSAGE_BYTES_MAX for share in shares)


@pytest.mark.usefixtures("small_parts")
def test_a_client_gets_a_large_view_part_by_part() -> None:
    """It asks for what comes after the last entry that it has."""
    node = Node(ME).knows(ONE, TWO, *range(100, 140))
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


A, B = 11, 12


def test_a_member_is_back_for_a_while() -> None:
    """Others never were away."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    seen = [detector.back_within(one, now, 3.0) for one, now in ((A, 102.9), (A, 103.0), (B, 100))]

    assert seen == [True, False, False]


def test_a_member_that_ends_again_is_back_no_more() -> None:
    """And is remembered no longer than others that are gone."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    detector.ended(A)

    assert not detector.back_within(A, 100.1, 3.0)


DEAD_MEMBER = Member(1, 3, DEAD, 255, "host", "host:1", "", "", "")


def test_ended_is_due_after_its_time_and_oldest_first() -> None:
    """Each keeps the time at which it was first seen to have ended."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.ended(2, 10.0)
    tombstones.ended(1, 20.0)

    assert tombstones.due(FORGET_S - 1.0) == []
    assert tombstones.due(FORGET_S) == [1]
    assert tombstones.due(FORGET_S + 10.0) == [1, 2]


def test_too_many_ended_are_due_early() -> None:
    """Views stay small whatever happens to a cluster."""
    tombstones = Tombstones()
    for incarnation in range(ENDED_MAX + 3):
        tombstones.ended(incarnation, 5.0)

    assert tombstones.due(5.0) == [0, 1, 2]


def test_a_tombstone_holds_entries_that_are_not_newer() -> None:
    """A higher counter is of its own making, so it lives."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.set(DEAD_MEMBER)

    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, state=ALIVE))
    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, counter=2, state=ALIVE))
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, counter=4, state=ALIVE))
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))
    assert tombstones.as_dead(attrs.evolve(DEAD_MEMBER, counter=2, state=ALIVE)) == DEAD_MEMBER


def test_a_member_that_lives_again_is_not_due_and_has_no_tombstone() -> None:
    """It refuted: nothing of its death is left."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.lives(1)
    tombstones.ended(2, 0.0)
    tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=2))
    tombstones.lives(2)

    assert tombstones.due(2 * FORGET_S) == []
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))


def test_tombstones_are_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the dead does not grow forever."""
    monkeypatch.setattr(gossip, "TOMBSTONES_MAX", 3)
    tombstones = Tombstones()
    for incarnation in range(5):
        tombstones.ended(incarnation, 0.0)
        tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=incarnation))

    assert len(tombstones) == 3
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=1))
    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=30))
def test_a_tombstone_is_always_dead_and_never_older(ends: list[tuple[int, int]]) -> None:
    """The oracle: the last counter with which each tombstone was set."""
    tombstones = Tombstones()
    last: dict[int, int] = {}
    for incarnation, counter in ends:
        tombstones.ended(incarnation, 0.0)
        tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=incarnation, counter=counter))
        last[incarnation] = counter

    for incarnation, counter in last.items():
        entry = attrs.evolve(DEAD_MEMBER, incarnation=incarnation, counter=0, state=ALIVE)
        assert tombstones.holds(entry)
        assert tombstones.as_dead(entry) == attrs.evolve(entry, counter=counter, state=DEAD)
