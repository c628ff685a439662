"""Following a publisher: every answer in its order gives what the node held at that change."""

from __future__ import annotations

from typing import cast

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher import waiters as following
from peercache.actors.publisher.actor import Publisher
from peercache.events.following import Index, NodeFollower
from peercache.model.keys import KEY
from peercache.model.records import (
    DROP,
    GONE,
    IN_FILES,
    IN_MEMORY,
    ON_DISK,
    RESIDENT,
    Records,
    changes_from_bytes,
)
from peercache.wire.messages.directory import ALL_ROWS, ReportChanges, RequestChanges
from peercache.wire.messages.session import Refused
from tests.unit.actors.lone_publisher import ME, A, commit_of, publisher_in, ring_of
from tests.unit.actors.record_cluster import NO_DROPS, NO_RECORDS, key_of, records_of

ROUTER = Origin(77, 9)
NODE = "h1:7400"
BEGIN = RequestChanges(1, 0, 0, 0, 1.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 32 changes, and report 8 at once: rows of a table fill many answers."""
    monkeypatch.setattr(following, "CHANGES_KEPT", 32)
    monkeypatch.setattr(following, "CHANGES_A_MESSAGE_MAX", 8)


def reported(effects: list[Effect]) -> list[ReportChanges]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [send.message for send in sends if isinstance(send.message, ReportChanges)]


def asked(made: Publisher, question: RequestChanges, now: float) -> ReportChanges:
    """Return the answer to a question, now or when its timeout is over."""
    found = reported(made.on_message(ROUTER, question, now))
    made.check()
    while not found:
        now = made.deadline()
        found = reported(made.on_tick(now))
        assert made.deadline() > now
    assert len(found) == 1
    return found[0]


def drops_of(records: Records) -> Records:
    drops = np.zeros(len(records), DROP)
    drops["key"], drops["generation"] = records["key"], records["generation"]
    return drops


def store(made: Publisher, names: list[int], generation: int, now: float = 1.0) -> Records:
    records = records_of(ME, names, generation)
    made.on_message(Origin(ME), commit_of(records), now)
    return records


def remove(made: Publisher, records: Records, now: float = 1.0) -> None:
    made.on_message(Origin(ME), RecordsChanged(NO_RECORDS, drops_of(records)), now)


def keys_in(blob: bytes) -> list[bytes]:
    return cast("list[bytes]", changes_from_bytes(blob)["key"].tolist())


def publisher() -> Publisher:
    return publisher_in(ring_of(ME, A)).actor


def test_who_begins_gets_what_is_there() -> None:
    """Pages that were stored before the first question are in the slices of the answer."""
    made = publisher()
    store(made, [1, 2, 3], 2)

    answer = asked(made, BEGIN, 2.0)

    assert answer.again
    assert answer.changes == b""
    assert sorted(keys_in(answer.held)) == sorted(map(key_of, [1, 2, 3]))
    assert answer.row == ALL_ROWS


def test_changes_are_reported_in_their_order_with_their_tier() -> None:
    """Stored, moved to disk, removed: one change each, behind the number that is known."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    stored = store(made, [1], 2)
    on_disk = stored.copy()
    on_disk["generation"], on_disk["flags"] = 4, ON_DISK
    made.on_message(Origin(ME), RecordsChanged(on_disk, NO_DROPS), 1.0)
    remove(made, on_disk)

    answer = asked(made, RequestChanges(2, ME, begun.after, begun.row, 1.0), 2.0)

    changes = changes_from_bytes(answer.changes)
    assert changes["tier"].tolist() == [IN_MEMORY, IN_FILES, GONE]
    assert changes["length"].tolist() == [int(stored["length"][0])] * 2 + [0]
    assert set(keys_in(answer.changes)) == {key_of(1)}
    assert (answer.again, answer.held, answer.after) == (False, b"", begun.after + 3)


def test_a_question_waits_for_a_change_and_for_those_that_come_with_it() -> None:
    """One answer reports what came within GATHER_S, and none is made within a commit's message."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    question = RequestChanges(2, ME, begun.after, begun.row, 5.0)
    assert not reported(made.on_message(ROUTER, question, 1.0))
    assert made.followers == 1
    for at, name in enumerate([1, 2, 3]):
        effects = made.on_message(Origin(ME), commit_of(records_of(ME, [name], 2)), 1.5 + at / 1000)
        assert not reported(effects)
    assert made.deadline() <= 1.5 + following.GATHER_S

    (answer,) = reported(made.on_tick(1.5 + following.GATHER_S))

    assert keys_in(answer.changes) == [key_of(1), key_of(2), key_of(3)]
    assert made.followers == 0


def test_a_question_without_a_change_is_answered_after_its_timeout() -> None:
    """So a follower knows that the node is there, and the node keeps no question forever."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    question = RequestChanges(2, ME, begun.after, begun.row, 3600.0)

    assert not reported(made.on_message(ROUTER, question, 1.0))
    assert not reported(made.on_tick(1.0 + following.FOLLOW_TIMEOUT_MAX_S - 0.1))
    (answer,) = reported(made.on_tick(1.0 + following.FOLLOW_TIMEOUT_MAX_S))

    assert (answer.again, answer.changes, answer.after) == (False, b"", begun.after)


@pytest.mark.usefixtures("small")
def test_a_follower_that_was_stopped_too_long_begins_again() -> None:
    """What it has missed is kept no more; it is reported as such, and reads the whole table."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    for name in range(40):
        store(made, [name], 2)

    answer = asked(made, RequestChanges(2, ME, begun.after, begun.row, 1.0), 2.0)

    assert answer.again


@pytest.mark.usefixtures("small")
def test_a_follower_that_missed_just_what_is_kept_goes_on() -> None:
    """All kept changes are reported in several answers, around the end of the ring."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    for name in range(20):
        store(made, [name], 2)
    begun = asked(made, attrs.evolve(BEGIN, request=2), 1.0)
    while begun.row < ALL_ROWS:
        begun = asked(made, RequestChanges(3, ME, begun.after, begun.row, 1.0), 1.0)
    for name in range(100, 132):
        store(made, [name], 2)

    keys: list[bytes] = []
    after = begun.after
    for _ in range(4):
        answer = asked(made, RequestChanges(4, ME, after, ALL_ROWS, 1.0), 2.0)
        assert not answer.again
        keys += keys_in(answer.changes)
        after = answer.after

    assert keys == [key_of(name) for name in range(100, 132)]


def test_a_number_of_another_life_begins_again() -> None:
    """The node has started again: a number of its predecessor counts nothing."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)

    assert asked(made, RequestChanges(2, A, begun.after, ALL_ROWS, 1.0), 1.0).again
    assert asked(made, RequestChanges(2, ME, begun.after + 1, ALL_ROWS, 1.0), 1.0).again


def test_without_followers_nothing_is_kept_and_who_returns_begins_again() -> None:
    """The ring is let go; what comes then has no numbers, so the old number is not believed."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    made.on_tick(following.FOLLOWED_S)
    store(made, [1], 2, now=following.FOLLOWED_S + 1)

    answer = asked(made, RequestChanges(2, ME, begun.after, begun.row, 1.0), 100.0)

    assert answer.again
    assert keys_in(answer.held) == [key_of(1)]


def test_too_many_followers_are_refused() -> None:
    """A question more than FOLLOWERS_MAX is answered at once with the reason."""
    made = publisher()
    begun = asked(made, BEGIN, 0.0)
    question = RequestChanges(2, ME, begun.after, begun.row, 5.0)
    for pipe in range(following.FOLLOWERS_MAX):
        assert not made.on_message(Origin(1, pipe + 1), question, 1.0)

    (effect,) = made.on_message(Origin(1, 1000), question, 1.0)

    assert isinstance(effect, Send)
    assert isinstance(effect.message, Refused)
    assert effect.message.reason == "busy"
    made.check()


STEP = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True)),
    st.tuples(st.just("disk"), st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True)),
    st.tuples(st.just("ask"), st.just([0])),
)


@pytest.mark.usefixtures("small")
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=60))
def test_an_index_equals_the_table_once_all_is_reported(
    steps: list[tuple[str, list[int]]],
) -> None:
    """A follower that has read all holds what the node does, however questions and changes mix.

    One that still reads never holds a page that is not there.
    """
    made, held, generation = publisher(), dict[bytes, int](), 0
    follower, index, now = NodeFollower(NODE), Index(), 0.0
    for step, names in [*steps, *[("ask", [0])] * 12]:
        generation, now = generation + 100, now + 0.001
        records = records_of(ME, names, generation)
        if step == "ask":
            answer = asked(made, follower.question(0.0), now)
            batch = follower.take(answer)
            if batch is not None:
                index.apply(batch)
            if answer.held or not answer.changes:
                assert index.pages(NODE).items() <= held.items()
        elif step == "remove":
            remove(made, records, now)
            held = {key: tier for key, tier in held.items() if key not in set(keys_of(records))}
        else:
            records["flags"] = RESIDENT if step == "store" else ON_DISK
            made.on_message(Origin(ME), RecordsChanged(records, NO_DROPS), now)
            held |= dict.fromkeys(keys_of(records), int(records["flags"][0]))

    assert index.pages(NODE) == held


def keys_of(records: Records) -> list[bytes]:
    return cast("list[bytes]", records["key"].astype(KEY).tolist())
