"""What one attempt of a get leaves for the next one, for the cache and for the owners."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import pytest

from peercache.client.bridge import checksums_of
from peercache.model.records import HAS_CHECKSUM, RECORD, RECORD_BYTES, RESIDENT
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, ReportStale
from peercache.wire.messages.pool import Promote
from tests.unit.paths.world import PAGE, Node, World, content_of, named


def checksum_of(name: str) -> int:
    page = content_of(name)
    return int(checksums_of(PageRuns.of([[(page.ctypes.data, page.nbytes)]]), np.array([0]))[0])


def test_page_without_a_checksum_is_not_disputed() -> None:
    """Its record is right, only it does not do for this reader."""
    world = World(verify="full")
    world.publish(world.nodes[2].hold("a"))

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.NO_CHECKSUM])
    assert world.posts(ReportStale) == []


def test_owner_that_leaves_a_checksum_out_does_not_hide_the_page() -> None:
    """A forged answer names the same commit as the true one, which must do in the next attempt."""
    world = World(verify="full")
    flags = RESIDENT | HAS_CHECKSUM
    world.publish(world.nodes[2].hold("a", checksum=checksum_of("a"), flags=flags))
    for owner in world.owners("a"):
        owner.script.append(partial(_without_checksums, owner))

    got = world.get("a")

    assert got.hits == [True]
    assert got.content() == content_of("a").tobytes()


def test_page_that_was_not_checked_in_time_is_not_disputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known against its record: its owners and the cache keep it."""
    monkeypatch.setattr("peercache.paths.verify.CHECKSUM_PORTION_BYTES", PAGE)
    world = World(verify="full")
    for name in ("a", "b"):
        flags = RESIDENT | HAS_CHECKSUM
        world.publish(world.nodes[2].hold(name, checksum=checksum_of(name), flags=flags))
    world.page_s = 0.1

    got = world.get("a", "b", timeout_s=0.2)

    assert (got.hits, got.reasons) == ([True, False], ["", reasons.DEADLINE])
    assert world.posts(ReportStale) == []
    assert len(world.cache) == 2


def test_record_whose_word_vouches_for_another_page_says_so() -> None:
    """The word fits and the key does not: no eviction does that, the record lies."""
    world = World()
    record = world.nodes[2].hold("b")
    record["key"] = named("a")
    world.publish(record)

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.WRONG_PAGE])


def test_remembered_record_of_another_size_is_forgotten() -> None:
    """The page is gone: what was remembered of it must not go on saying that it is there."""
    world = World()
    world.publish(world.nodes[2].hold("a", content=content_of("a", 2 * PAGE)))
    assert world.exists("a") == [True]
    for owner in world.owners("a"):
        owner.forget("a")

    assert world.get("a").reasons == [reasons.WRONG_SIZE]

    assert world.exists("a") == [False]


def test_nothing_is_read_after_the_deadline() -> None:
    """A table of this host tells of another copy at once, but there is no time to read it."""
    world = World()
    old = world.nodes[2].hold("a")
    world.publish(old)
    assert world.exists("a") == [True]
    world.nodes[1].table = "final"
    world.nodes[1].know(world.nodes[1].hold("a"))

    def between(node: Node, _page: int) -> None:
        node.evict(old, content_of("b"))
        world.now += 3.0

    world.between = between
    got = world.get("a", timeout_s=2.0)

    assert (got.hits, got.reasons) == ([False], [reasons.EVICTED])
    assert world.fetched_from() == [[2]]


def test_holder_that_cannot_be_asked_gives_way_to_another_disk() -> None:
    """The nearer disk's holder does not answer questions: the page is on another one, too."""
    world = World(remote=frozenset({3}))
    for holder in (2, 3):
        world.publish(world.nodes[holder].keep("a"))
    world.breakers.failed(2, world.now)

    got = world.get("a")

    assert got.hits == [True]
    assert world.fetched_from() == [[3]]


def test_page_that_its_holder_has_lost_is_asked_for_once() -> None:
    """Its owners tell of the record until the holder withdraws it."""
    world = World()
    world.publish(world.nodes[2].keep("a"))
    world.nodes[2].disk.clear()
    for owner in world.owners("a"):
        owner.script.extend([partial(_insisting, owner)] * 20)

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.EVICTED])
    assert len([peers for peers in world.asked(Promote) if peers]) == 1


def test_page_that_its_holder_has_lost_is_not_remembered() -> None:
    """The record that said "on disk" must not answer the next question."""
    world = World()
    world.cache.store(world.nodes[2].keep("a"), world.now)
    world.nodes[2].disk.clear()
    assert world.exists("a") == [True]

    assert world.get("a").hits == [False]

    assert world.exists("a") == [False]


def test_holder_loads_no_longer_than_the_caller_waits() -> None:
    """A longer timeout would bring the answer after the deadline, with pages that came in time."""
    world = World()
    world.publish(world.nodes[2].keep("a"))

    assert world.get("a", timeout_s=0.05).hits == [True]

    asked = [message for message in world.nodes[2].heard if isinstance(message, Promote)]
    assert [message.timeout_s < 0.05 for message in asked] == [True]


def test_a_dispute_is_one_message_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves out is found wrong by the next reader."""
    monkeypatch.setattr("peercache.paths.read.RECORDS_A_MESSAGE_MAX", 3)
    world = World()
    names = [f"p{i}" for i in range(20)]
    for name in names:
        record = world.nodes[2].hold(name)
        world.publish(record)
        world.nodes[2].evict(record, content_of("x"))

    world.get(*names)

    counts = [len(message.records) // RECORD_BYTES for _, message in world.posts(ReportStale)]
    assert counts
    assert max(counts) == 3


def _without_checksums(node: Node, message: Message) -> Message | None:
    """Answer a Lookup as if no page had a checksum."""
    answer = node.serve(message)
    if not isinstance(answer, Located):
        return answer
    records = np.frombuffer(answer.records, RECORD).copy()
    records["flags"] &= np.uint32(RESIDENT)
    records["checksum"] = 0
    return attrs.evolve(answer, records=records.tobytes())


def _insisting(node: Node, message: Message) -> Message | None:
    """Answer as ever, but hear of no dispute."""
    return None if isinstance(message, ReportStale) else node.serve(message)
