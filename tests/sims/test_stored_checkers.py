"""The checkers of "stored is found" accuse an offender, and no owner that may lack a page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher.actor import Publisher
from peercache.model.member import DEAD, SUSPECT
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Lookup,
    Put,
    StreamSummary,
)
from sims import stored
from sims.canaries import planted_canary
from sims.memory import Noted, Truth
from sims.places import Place
from sims.trace import Violation
from tests.unit.actors.lone_publisher import commit_of, publisher_in, ring_of
from tests.unit.actors.record_cluster import (
    NO_RECORDS,
    drops_of,
    key_of,
    member,
    records_of,
    view,
)

HOLDER, OWNER, THIRD = 5, 11, 12
KEY, GENERATION = key_of(1), 10
RING = ring_of(HOLDER, OWNER, THIRD, replicas=3)
LOOKUP = Lookup(1, KEY)


def known_to_all() -> Truth:
    """Return a cluster in which HOLDER has a page that all owners have acknowledged."""
    truth = Truth()
    truth.rings = {HOLDER: RING, OWNER: RING}
    truth.living = {HOLDER, OWNER, THIRD}
    truth.live = {OWNER: {HOLDER, OWNER, THIRD}}
    truth.known = {KEY: {HOLDER: Noted(GENERATION)}}
    return truth


def with_authority() -> DirectoryShard:
    """Return OWNER's shard, which lacks nothing that it was notified of, and so holds nothing."""
    shard = DirectoryShard(incarnation=OWNER)
    for sender, message in (
        (OWNER, view(HOLDER, OWNER, THIRD)),
        (OWNER, RingChanged(RING)),
        (HOLDER, HandedOver(0, 0, 0, RING.version)),
        (THIRD, HandedOver(0, 0, 0, RING.version)),
    ):
        shard.on_message(Origin(sender), message, 0.0)
    assert shard.authority.ring == RING.version
    return shard


def asked(shard: DirectoryShard, truth: Truth) -> str:
    """Return the checker that accuses a shard's answer to a question, "" for none."""
    effects = shard.on_message(Origin(77), LOOKUP, 0.0)
    try:
        stored.check_absent(shard, LOOKUP, effects, truth)
    except Violation as violation:
        return violation.checker
    return ""


def test_an_owner_that_calls_a_known_page_absent_is_accused() -> None:
    """Unless it reports the page, or has said that it lacks some."""
    telling, behind = with_authority(), with_authority()
    telling.on_message(Origin(HOLDER), Put(1, records_of(HOLDER, [1], [10]).tobytes()), 0.0)
    behind.on_message(Origin(HOLDER), Put(7, records_of(HOLDER, [2], [10]).tobytes()), 0.0)

    found = [asked(shard, known_to_all()) for shard in (with_authority(), telling, behind)]

    assert found == ["stored-found", "", ""]


def unheard_while_stopped(truth: Truth) -> None:
    truth.unanswered, truth.known = {KEY: {HOLDER: Noted(GENERATION, {OWNER: 0})}}, {}


def reported_before_what_was_received(truth: Truth) -> None:
    truth.announced, truth.known = {KEY: {HOLDER: Noted(GENERATION, {OWNER: 3})}}, {}
    truth.received = {(HOLDER, OWNER): 4}


@pytest.mark.parametrize("lacks", [unheard_while_stopped, reported_before_what_was_received])
def test_an_owner_that_must_know_that_it_lacks_a_page_is_accused(
    lacks: Callable[[Truth], None],
) -> None:
    """A set has given it up while it was stopped; or a message before the last one was lost."""
    truth = known_to_all()
    lacks(truth)

    assert asked(with_authority(), truth) == "stored-found"


def nothing_is_noted(truth: Truth) -> None:
    truth.known = {}


def not_reported_to_this_owner(truth: Truth) -> None:
    reported_before_what_was_received(truth)
    truth.announced[KEY][HOLDER].owners = {THIRD: 3}


def reported_with_the_last_message(truth: Truth) -> None:
    reported_before_what_was_received(truth)
    truth.received = {(HOLDER, OWNER): 3}


def holder_is_dead(truth: Truth) -> None:
    truth.living.remove(HOLDER)


def holder_is_not_in_the_owners_view(truth: Truth) -> None:
    truth.live[OWNER].remove(HOLDER)


def holder_has_a_ring_without_the_owner(truth: Truth) -> None:
    truth.rings[HOLDER] = ring_of(HOLDER, THIRD)


def stream_is_forged(truth: Truth) -> None:
    truth.forged.add((HOLDER, OWNER))


def it_is_the_owners_own(truth: Truth) -> None:
    truth.known = {KEY: {OWNER: Noted(GENERATION)}}


@pytest.mark.parametrize(
    "excuse",
    [
        nothing_is_noted,
        not_reported_to_this_owner,
        reported_with_the_last_message,
        holder_is_dead,
        holder_is_not_in_the_owners_view,
        holder_has_a_ring_without_the_owner,
        stream_is_forged,
        it_is_the_owners_own,
    ],
)
def test_an_owner_that_may_lack_a_page_is_not_accused(excuse: Callable[[Truth], None]) -> None:
    """Each of these alone clears it."""
    truth = known_to_all()
    excuse(truth)

    assert asked(with_authority(), truth) == ""


def test_who_does_not_own_a_page_may_lack_it() -> None:
    """And a holder that the asker's ring has not is none that its answer must name."""
    alone = ring_of(HOLDER, THIRD)

    assert stored.lacking(OWNER, KEY, alone, known_to_all()) == {}
    assert stored.lacking(OWNER, KEY, ring_of(OWNER, THIRD), known_to_all()) == {}
    assert stored.lacking(OWNER, KEY, RING, known_to_all()) == {HOLDER: (GENERATION, 0)}


def test_a_table_that_lacks_a_page_all_the_time_is_accused() -> None:
    """Not one that reports it, nor one whose holder has ended or stored again during the look."""
    truth = known_to_all()
    before = {KEY: stored.lacking(OWNER, KEY, RING, truth)}

    with pytest.raises(Violation) as caught:
        stored.check_table(OWNER, set(), before, RING, truth)
    stored.check_table(OWNER, {KEY}, before, RING, truth)
    truth.ended[HOLDER, OWNER] = 1
    stored.check_table(OWNER, set(), before, RING, truth)
    truth.ended.clear()
    truth.known[KEY][HOLDER] = Noted(GENERATION + 2)
    stored.check_table(OWNER, set(), before, RING, truth)

    assert caught.value.checker == "stored-found"


def test_authority_next_to_a_suspect_is_accused() -> None:
    """The planted owner takes suspects for alive; one that does not has no authority."""
    shown = view(OWNER, THIRD, member(HOLDER, SUSPECT))
    found = []
    for canary in ("suspect-in-sync", ""):
        truth, shard = known_to_all(), with_authority()
        with planted_canary(canary):
            stored.note_message(shard, OWNER, shown, truth)
            shard.on_message(Origin(OWNER), shown, 0.0)
        try:
            stored.check_authority(shard, truth)
        except Violation as violation:
            found.append(violation.checker)

    assert found == ["authority"]


# --- what is noted --------------------------------------------------------------------------------


def say(publisher: Publisher, message: object, truth: Truth, *, sender: int = HOLDER) -> None:
    """Let a publisher hear something, as a watched actor does."""
    stored.note_message(publisher, sender, message, truth)
    stored.note_effects(publisher, publisher.on_message(Origin(sender), message, 0.0), truth)  # type: ignore[arg-type]


def committed(truth: Truth) -> tuple[Publisher, list[Effect]]:
    """Return HOLDER's publisher, which waits for the owners of a page, and what it has sent."""
    publisher = publisher_in(RING).actor
    commit = commit_of(records_of(HOLDER, [1], [GENERATION]))
    stored.note_message(publisher, HOLDER, commit, truth)
    effects = publisher.on_message(Origin(HOLDER), commit, 0.0)
    stored.note_effects(publisher, effects, truth)
    return publisher, effects


def test_what_all_owners_have_acknowledged_is_noted_until_it_is_dropped() -> None:
    """From the answer of the commit on, and not from the first acknowledgement."""
    truth = known_to_all()
    truth.known = {}
    publisher, effects = committed(truth)
    seen = []
    for owner in (OWNER, THIRD):
        number = next(
            e.message.number
            for e in effects
            if isinstance(e, Send) and e.to == owner and isinstance(e.message, Put)
        )
        seen.append(bool(truth.known.get(KEY)))
        say(publisher, Acknowledged(number), truth, sender=owner)

    noted = truth.known[KEY][HOLDER].generation
    say(publisher, RecordsChanged(NO_RECORDS, drops_of([1], [GENERATION - 2])), truth)
    older = HOLDER in truth.known[KEY]
    say(publisher, RecordsChanged(NO_RECORDS, drops_of([1], [GENERATION])), truth)

    assert (seen, noted, older) == ([False, False], GENERATION, True)
    assert HOLDER not in truth.known[KEY]


def test_what_a_set_returned_with_is_noted_of_owners_that_were_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They must doubt themselves; one that only did not answer may not know of it."""
    truth = known_to_all()
    truth.known = {}
    truth.places = {OWNER: Place("n1", "h1"), THIRD: Place("n2", "h2")}
    truth.places[OWNER].pause(0.0, 2.0)
    monkeypatch.setattr("sims.memory.trio.current_time", lambda: 1.0)
    publisher, _ = committed(truth)

    stored.note_effects(publisher, publisher.on_tick(1.0), truth)

    assert truth.known.get(KEY) is None
    assert truth.unanswered[KEY][HOLDER].owners == {OWNER: 0}


def test_messages_of_streams_are_noted_and_forged_ones_known() -> None:
    """A number that the holder never sent is another sender's; their next comparison settles it."""
    truth, shard = known_to_all(), with_authority()
    truth.known = {}
    committed(truth)
    number = truth.announced[KEY][HOLDER].owners[OWNER]
    seen = []
    for message in (
        Put(number, b""),
        Put(number + 1, b""),
        StreamSummary(number, 0, 0),
        Delete(number + 9, b""),
        HandedOver(number, 0, 0, RING.version),
    ):
        stored.note_message(shard, HOLDER, message, truth)
        seen.append(((HOLDER, OWNER) in truth.forged, truth.received[HOLDER, OWNER] - number))

    assert seen == [(False, 0), (True, 1), (False, 1), (True, 9), (False, 1)]


def test_what_a_holder_withdraws_it_has_not_reported() -> None:
    """The owner may forget it."""
    truth = known_to_all()
    committed(truth)
    publisher = publisher_in(RING).actor
    delete = Send(OWNER, Delete(9, drops_of([1], [GENERATION]).tobytes()))

    stored.note_effects(publisher, [delete], truth)

    assert OWNER not in truth.announced[KEY][HOLDER].owners
    assert THIRD in truth.announced[KEY][HOLDER].owners


def test_a_holder_that_an_owners_view_has_lost_is_noted() -> None:
    """What it had is not served from then on, though it may be alive and come back."""
    truth, shard = known_to_all(), with_authority()

    stored.note_message(shard, OWNER, view(OWNER, THIRD, member(HOLDER, DEAD)), truth)
    lost = dict(truth.ended), set(truth.live[OWNER])
    stored.note_message(shard, OWNER, RingChanged(ring_of(OWNER, THIRD)), truth)

    assert lost == ({(HOLDER, OWNER): 1}, {OWNER, THIRD})
    assert truth.rings[OWNER].members == (OWNER, THIRD)
