"""The read path: a hit is the page that was asked for, and what an attempt leaves for the next."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import attrs
import numpy as np
import pytest

from peercache.client.bridge import checksums_of
from peercache.model.keys import from_bytes
from peercache.model.member import DEAD
from peercache.model.records import (
    DROP,
    HAS_CHECKSUM,
    ON_DISK,
    RECORD,
    RECORD_BYTES,
    RESIDENT,
    Records,
)
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.observability.latency import ASKED, DISK, HOME, HOST, KNOWN, RDMA, TABLE, TCP
from peercache.paths import read as reading
from peercache.paths.read import TOUCHES_MAX, Touches
from peercache.paths.steps import Checksum, Fetch, Post
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup, ReportStale
from peercache.wire.messages.pool import Promote, Touched
from tests.unit.paths.world import PAGE, Node, World, content_of, named


def checksum_of(name: str) -> int:
    page = content_of(name)
    return int(checksums_of(PageRuns.of([[(page.ctypes.data, page.nbytes)]]), np.array([0]))[0])


def held(world: World, holder: int, name: str, **fields: int) -> Records:
    """Let a node hold a page, and its owners know."""
    record = world.nodes[holder].hold(name, content=None, **fields)
    world.publish(record)
    return record


def evict_between(world: World, record: Records, instead: str) -> None:
    """Once, after the bytes of the first page have been read and before its word is."""

    def between(node: Node, _page: int) -> None:
        world.between = lambda _node, _page: None
        node.evict(record, content_of(instead))

    world.between = between


def test_a_page_is_found_read_and_verified(world: World) -> None:
    """The plain case: one question, one read, the very bytes."""
    held(world, 2, "a")

    got = world.get("a")

    assert got.hits == [True]
    assert got.reasons == [""]
    assert got.content() == content_of("a").tobytes()
    assert got.pages_by_fabric == {"world": 1}


def test_a_page_evicted_between_its_bytes_and_its_word_is_a_miss(world: World) -> None:
    """The word is read last, so it shows that the bytes may be another page's."""
    record = held(world, 2, "a")
    evict_between(world, record, "b")
    for owner in world.owners("a"):
        owner.script.append(partial(_then_forget, owner, "a"))

    got = world.get("a")

    assert got.hits == [False]
    assert got.reasons == [reasons.EVICTED]


def test_a_page_overwritten_while_its_bytes_are_read_is_a_miss(world: World) -> None:
    """Even before the first byte: what is there is another page."""
    record = held(world, 2, "a")
    world.before = lambda node, _page: node.evict(record, content_of("b"))

    got = world.get("a")

    assert got.hits == [False]
    assert got.content() == content_of("b").tobytes()


def test_an_evict_between_exists_and_get_is_a_miss(world: World) -> None:
    """The fault of the field: 16 of 16 hits had another page's bytes."""
    names = [f"p{i}" for i in range(16)]
    records = [held(world, 2, name) for name in names]
    assert world.exists(*names) == [True] * 16
    for record in records:
        world.nodes[2].evict(record, content_of("other"))
    for name in names:
        for owner in world.owners(name):
            owner.forget(name)

    got = world.get(*names)

    assert got.hits == [False] * 16
    assert set(got.reasons) == {reasons.EVICTED}


def test_a_stale_cached_record_is_replaced_by_the_directorys(world: World) -> None:
    """The cache may be old: the word shows it, the directory knows better, the get is a hit."""
    old = held(world, 2, "a")
    assert world.get("a").hits == [True]
    world.nodes[2].evict(old, content_of("b"))
    for owner in world.owners("a"):
        owner.forget("a")
    held(world, 3, "a")
    world.steps.clear()

    got = world.get("a")

    assert got.hits == [True]
    assert got.content() == content_of("a").tobytes()
    assert world.fetched_from() == [[2], [3]]
    # What came from the cache is no evidence against the directory.
    assert world.posts(ReportStale) == []


def test_a_stale_directory_record_is_disputed_and_forgotten(world: World) -> None:
    """Its owners are notified, the cache does not keep it, and the page is a miss: evicted."""
    record = held(world, 2, "a")
    world.nodes[2].evict(record, content_of("b"))

    got = world.get("a")

    assert got.hits == [False]
    assert got.reasons == [reasons.EVICTED]
    sent = world.posts(ReportStale)
    assert [peer for peer, _ in sent] == sorted(node.number for node in world.owners("a")[:2])
    assert {message.records for _, message in sent} == {record.tobytes()}
    assert len(world.cache) == 0


def test_a_record_that_failed_is_not_read_again(world: World) -> None:
    """Its owners report it until the holder has withdrawn it; the reader has seen it fail."""
    record = held(world, 2, "a")
    world.nodes[2].evict(record, content_of("b"))
    for owner in world.owners("a"):
        owner.script.extend([partial(_insisted, owner)] * 20)

    got = world.get("a")

    assert got.hits == [False]
    assert len(world.fetched_from()) == 1


def test_a_directory_with_forged_records_costs_three_attempts(world: World) -> None:
    """Attempts are bounded, whatever new records the owners make up."""
    record = held(world, 2, "a")
    world.nodes[2].evict(record, content_of("b"))

    def forge(message: Message) -> Message | None:
        if not isinstance(message, Lookup):
            return None
        record["generation"] += np.uint64(1000)
        return Located(message.request, record.tobytes())

    for owner in world.owners("a"):
        owner.script.extend([forge] * 20)

    got = world.get("a")

    assert got.hits == [False]
    assert len(world.fetched_from()) == 3


def test_a_destination_of_another_size_is_left_untouched(world: World) -> None:
    """Not one byte is read for it, and the others of the batch are hits."""
    held(world, 2, "a")
    world.publish(world.nodes[2].hold("long", content=content_of("long", 2 * PAGE)))

    got = world.get("long", "a")

    assert got.hits == [False, True]
    assert got.reasons == [reasons.WRONG_SIZE, ""]
    assert got.is_untouched(0)


def test_a_remembered_record_of_another_size_is_asked_about_again(world: World) -> None:
    """The page may have been set again since: a record that never fits must not hide it."""
    old = world.nodes[2].hold("a", content=content_of("a", 2 * PAGE))
    world.publish(old)
    assert world.exists("a") == [True]
    world.nodes[2].evict(old, content_of("b"))
    for owner in world.owners("a"):
        owner.forget("a")
    held(world, 3, "a")

    got = world.get("a")

    assert got.hits == [True]
    assert got.content() == content_of("a").tobytes()


@pytest.mark.parametrize(("data_mood", "opened"), [("away", 1), ("refusing", 0)])
def test_a_holder_that_cannot_be_read_gives_way_to_another(data_mood: str, opened: int) -> None:
    """One failed read, then the copy elsewhere; a holder that refuses is well, so nothing opens."""
    world = World(4)
    held(world, 2, "a")
    held(world, 3, "a")
    world.nodes[2].data_mood = data_mood
    world.cache.store(world.nodes[2].hold("a"), world.now)

    got = world.get("a")

    assert got.hits == [True]
    assert got.content() == content_of("a").tobytes()
    assert world.fetched_from() == [[2], [3]]
    assert world.breakers.opened_count == opened


def test_what_the_cache_knows_is_not_asked_twice_in_one_call(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may have put the stale record back: the second attempt asks the directory."""
    old = held(world, 2, "a")
    assert world.get("a").hits == [True]
    world.nodes[2].evict(old, content_of("b"))
    for owner in world.owners("a"):
        owner.forget("a")
    held(world, 3, "a")
    monkeypatch.setattr(world.cache, "drop", lambda _records: None)

    assert world.get("a").hits == [True]


@pytest.mark.parametrize(
    ("data_mood", "reason"), [("away", reasons.PEER_UNREACHABLE), ("refusing", reasons.REFUSED)]
)
def test_a_page_whose_only_holder_cannot_be_read_reports_why(
    world: World, data_mood: str, reason: str
) -> None:
    """The directory's fresh record of the same holder is no reason to ask it again."""
    held(world, 2, "a")
    world.nodes[2].data_mood = data_mood

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reason])
    assert world.fetched_from() == [[2]]
    assert world.posts(ReportStale) == []


def test_the_nearest_holder_is_read() -> None:
    """The home node before another process of this host, that before another host."""
    world = World(3, remote=frozenset({3}))
    for holder in (3, 2, 1):
        held(world, holder, "a")
        held(world, holder, "b") if holder > 1 else None
        held(world, holder, "c") if holder > 2 else None
    for node in world.nodes.values():
        node.latency_s = 0.0

    for name, holder in (("a", 1), ("b", 2), ("c", 3)):
        world.steps.clear()
        assert world.get(name).hits == [True]
        assert world.fetched_from() == [[holder]], name


def test_of_one_holders_records_the_newest_is_read(world: World) -> None:
    """Two owners may know different commits of one holder."""
    old = held(world, 2, "a")
    world.nodes[2].evict(old, content_of("b"))
    held(world, 2, "a")

    assert world.get("a").hits == [True]
    assert world.fetched_from() == [[2]]


def test_records_of_dead_holders_are_not_read(world: World) -> None:
    """Neither the directory's nor the cache's."""
    record = held(world, 3, "a")
    world.cache.store(record, world.now)
    view = {node.number: node.member for node in world.nodes.values()}
    view[3] = attrs.evolve(view[3], state=DEAD)
    world.cluster = world.seen(view)
    for number in (1, 2):
        world.nodes[number].know(record)

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.PEER_UNREACHABLE])
    assert world.fetched_from() == []
    assert 3 not in [peer for peers in world.asked() for peer in peers]


def test_a_repeated_key_fills_every_destination_of_it(world: World) -> None:
    """It is looked up once and read as often as it is wanted."""
    held(world, 2, "a")
    held(world, 3, "b")

    got = world.get("a", "b", "a", "none", "a")

    assert got.hits == [True, True, True, False, True]
    assert [got.content(i) for i in (0, 2, 4)] == [content_of("a").tobytes()] * 3
    assert got.reasons[3] == reasons.ABSENT
    lookups = [m for node in world.nodes.values() for m in node.received if isinstance(m, Lookup)]
    assert max(len(lookup.keys) for lookup in lookups) == 3 * 16


def test_an_empty_batch_asks_no_node(world: World) -> None:
    """No keys, no steps, no answers."""
    got = world.get()

    assert got.hits == []
    assert world.steps == []
    assert world.exists() == []


def test_pages_finished_at_the_deadline_are_a_leading_run(world: World) -> None:
    """What is in place and verified counts; the rest reports that time was up."""
    names = [f"p{i}" for i in range(10)]
    for name in names:
        held(world, 2, name)
    world.page_s = 0.1

    got = world.get(*names, timeout_s=0.45)

    leading = got.hits.index(False)
    assert 0 < leading < 10
    assert got.hits == [True] * leading + [False] * (10 - leading)
    assert got.reasons == [""] * leading + [reasons.DEADLINE] * (10 - leading)
    # A deadline is no evidence against the holder, nor against what is known of its pages.
    assert world.breakers.opened_count == 0
    assert len(world.cache) == 10


def test_a_deadline_that_has_passed_asks_no_node(world: World) -> None:
    """A call that comes too late is a miss at once."""
    held(world, 2, "a")

    got = world.get("a", timeout_s=0.0)

    assert (got.hits, got.reasons) == ([False], [reasons.DEADLINE])
    assert world.steps == []


def test_another_checksum_is_a_miss_and_never_a_hit() -> None:
    """The word was right and the bytes were not: a miss, disputed, distinguished from an
    eviction.
    """
    world = World(verify="full")
    flags = RESIDENT | HAS_CHECKSUM
    held(world, 2, "good", checksum=checksum_of("good"), flags=flags)
    held(world, 2, "bad", checksum=checksum_of("good"), flags=flags)
    held(world, 2, "without")

    got = world.get("good", "bad", "without")

    assert got.hits == [True, False, False]
    assert got.reasons == ["", reasons.VERIFY_FAILED, reasons.NO_CHECKSUM]
    assert {message.records[:16] for _, message in world.posts(ReportStale)} == {
        named("bad").tobytes()
    }


def test_checksums_are_sampled_by_key() -> None:
    """Writer and reader choose the same keys, about one in 64."""
    world = World(verify="sampled")
    names = [f"p{i}" for i in range(512)]
    wrong = next(name for name in names if named(name)[0].tobytes()[15] % 64 == 0)
    held(world, 2, wrong, checksum=1, flags=RESIDENT | HAS_CHECKSUM)
    held(world, 2, "p1", checksum=1, flags=RESIDENT | HAS_CHECKSUM)

    got = world.get(wrong, "p1")

    assert named("p1")[0].tobytes()[15] % 64 != 0
    assert got.hits == [False, True]


def test_pages_whose_checksum_there_was_no_time_for_are_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checksums are made in portions; the first always, the others only before the deadline."""
    monkeypatch.setattr("peercache.paths.verify.CHECKSUM_PORTION_BYTES", PAGE)
    world = World(verify="full")
    names = [f"p{i}" for i in range(4)]
    for name in names:
        held(world, 2, name, checksum=checksum_of(name), flags=RESIDENT | HAS_CHECKSUM)
    world.page_s = 0.1

    got = world.get(*names, timeout_s=0.4)

    assert got.hits == [True, False, False, False]
    assert got.reasons[1:] == [reasons.DEADLINE] * 3
    assert sum(isinstance(step, Checksum) for step in world.steps) == 1
    # Nothing is known against the records: their owners and the cache keep them.
    assert world.posts(ReportStale) == []
    assert len(world.cache) == 4


def test_several_holders_are_read_in_one_step(world: World) -> None:
    """One Fetch for the batch, one read a holder, in the order of the keys."""
    held(world, 3, "a")
    held(world, 2, "b")
    held(world, 3, "c")

    got = world.get("a", "b", "c")

    assert got.hits == [True] * 3
    assert world.fetched_from() == [[3, 2]]
    assert [got.content(i) for i in range(3)] == [content_of(n).tobytes() for n in "abc"]


def test_disputes_of_one_attempt_are_posted_together() -> None:
    """One message an owner and attempt, however many holders were wrong."""
    world = World(5)
    for i in range(20):
        record = held(world, 2 + i % 4, f"p{i}")
        world.nodes[2 + i % 4].evict(record, content_of("x"))

    world.get(*[f"p{i}" for i in range(20)])

    posts = [step for step in world.steps if isinstance(step, Post)]
    assert len(posts) == 1
    assert len(posts[0].messages) <= 5


def test_readers_remember_what_they_read_from_whom(world: World) -> None:
    """Hits and only hits are reported to their holders, keys and generations."""
    records = {name: held(world, 2, name) for name in "ab"}
    world.nodes[2].evict(records["b"], content_of("x"))

    world.get("a", "b")

    sent = world.reader.touches.take()
    record = records["a"]
    assert sent == {2: record["key"].tobytes() + record["generation"].tobytes()}
    assert world.reader.touches.take() == {}


def reported_hottest_first(world: World) -> dict[int, list[str]]:
    """Return which pages each holder is notified were read, the hottest first."""
    names = {named(name).tobytes(): name for name in "abcdef"}
    return {
        holder: [names[drop["key"].tobytes()] for drop in np.frombuffer(drops, DROP)]
        for holder, drops in world.reader.touches.take().items()
    }


def test_what_was_read_last_is_the_hottest_and_the_first_pages_of_a_prefix(world: World) -> None:
    """Holders evict the batch that was read first before the others, and of it the last page."""
    for name in "abcdef":
        held(world, 3 if name == "e" else 2, name)

    for batch in ("ab", "cde", "f"):
        assert all(world.get(*batch).hits)

    assert reported_hottest_first(world) == {2: ["f", "c", "d", "a", "b"], 3: ["e"]}


def test_pages_that_a_get_has_waited_for_keep_their_place_in_its_prefix(world: World) -> None:
    """They are loaded in portions, and read after those that were in memory."""
    node = world.nodes[2]
    node.portion = 1
    for name in "bd":
        held(world, 2, name)
    for name in "ac":
        world.publish(node.keep(name))

    assert world.get(*"abcd").hits == [True] * 4

    assert reported_hottest_first(world) == {2: ["a", "b", "c", "d"]}


def test_touches_are_bounded() -> None:
    """A holder that gets no report costs no more than its share."""
    touches = Touches()
    records = np.repeat(World().nodes[1].hold("a"), TOUCHES_MAX - 1)

    for _ in range(10):
        touches.add(1, records)

    assert len(touches.take()[1]) == 24 * TOUCHES_MAX


def test_exists_notifies_each_holder_at_once_what_it_reports(world: World) -> None:
    """One message a holder and call, in the order of the prefix; pages on disk are not in it."""
    records = {name: held(world, 2 + (name == "b"), name) for name in "abc"}
    held(world, 2, "d", flags=ON_DISK)
    keys = named("a", "b", "absent", "c", "d")

    for _ in range(2):
        world.posted.clear()
        path = world.reader.exists(keys, world.cluster, world.now + 0.1, touch=True)
        known, _, _ = world.run(path)

        sent = {peer: m.drops for peer, m in world.posted if isinstance(m, Touched)}
        drops = {n: r["key"].tobytes() + r["generation"].tobytes() for n, r in records.items()}
        assert known.tolist() == [True, True, False, True, True]
        assert sent == {2: drops["a"] + drops["c"], 3: drops["b"]}

    world.posted.clear()
    world.exists("a", "b", "c")
    assert world.posted == []


def test_what_exists_reports_to_a_holder_is_bounded(world: World) -> None:
    """A prompt longer than a message: its head is notified."""
    names = [f"p{i}" for i in range(20)]
    for name in names:
        held(world, 2, name)

    with patch.object(reading, "TOUCHES_MAX", 5):
        world.run(world.reader.exists(named(*names), world.cluster, world.now + 1, touch=True))

    sent = [m.drops for _, m in world.posted if isinstance(m, Touched)]
    assert [from_bytes(d[:16])[0] for d in sent] == [named("p0")[0]]
    assert len(sent[0]) == 5 * 24


def test_a_page_without_residence_is_not_read(world: World) -> None:
    """A record of a page on disk names no bytes in memory."""
    held(world, 2, "a", flags=2)

    assert world.get("a").hits == [False]
    assert not any(isinstance(step, Fetch) for step in world.steps)


def _insisted(node: Node, message: Message) -> Message | None:
    """Answer as ever, but learn of no dispute."""
    return None if isinstance(message, ReportStale) else node.serve(message)


def _then_forget(node: Node, name: str, message: Message) -> Message | None:
    answer = node.serve(message)
    node.forget(name)
    return answer


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


def test_record_whose_word_vouches_for_another_page_reports_it(world: World) -> None:
    """The word fits and the key does not: no eviction does that, the record is forged."""
    record = world.nodes[2].hold("b")
    record["key"] = named("a")
    world.publish(record)

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.WRONG_PAGE])


def test_remembered_record_of_another_size_is_forgotten(world: World) -> None:
    """The page is gone: what was remembered of it must not go on saying that it is there."""
    world.publish(world.nodes[2].hold("a", content=content_of("a", 2 * PAGE)))
    assert world.exists("a") == [True]
    for owner in world.owners("a"):
        owner.forget("a")

    assert world.get("a").reasons == [reasons.WRONG_SIZE]

    assert world.exists("a") == [False]


def test_nothing_is_read_after_the_deadline(world: World) -> None:
    """A table of this host has another copy at once, but there is no time to read it."""
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


def test_page_that_its_holder_has_lost_is_asked_for_once(world: World) -> None:
    """Its owners report the record until the holder withdraws it."""
    world.publish(world.nodes[2].keep("a"))
    world.nodes[2].disk.clear()
    for owner in world.owners("a"):
        owner.script.extend([partial(_insisted, owner)] * 20)

    got = world.get("a")

    assert (got.hits, got.reasons) == ([False], [reasons.EVICTED])
    assert len([peers for peers in world.asked(Promote) if peers]) == 1


def test_page_that_its_holder_has_lost_is_not_remembered(world: World) -> None:
    """The record that said "on disk" must not answer the next question."""
    world.cache.store(world.nodes[2].keep("a"), world.now)
    world.nodes[2].disk.clear()
    assert world.exists("a") == [True]

    assert world.get("a").hits == [False]

    assert world.exists("a") == [False]


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


@pytest.mark.parametrize(
    ("holders", "fabric", "tier"),
    [
        ((1,), "shm", HOME),
        ((2,), "shm", HOST),
        ((1, 2), "shm", HOST),
        ((2,), "rdma", RDMA),
        ((2,), "tcp", TCP),
        # The home node itself, where its memory cannot be mapped.
        ((1,), "tcp", TCP),
    ],
)
def test_a_get_is_counted_for_the_farthest_place(
    world: World, holders: tuple[int, ...], fabric: str, tier: str
) -> None:
    """Own memory, another node's, or a network."""
    world.fabric = fabric
    names = [f"of-{holder}" for holder in holders]
    for holder, name in zip(holders, names, strict=True):
        world.publish(world.nodes[holder].hold(name))

    got = world.get(*names)

    assert got.hits == [True] * len(names)
    assert got.tier == tier


def test_a_get_that_waited_for_a_disk_is_counted_for_it(world: World) -> None:
    """However near the page was at last; and a get without a hit has no tier."""
    world.publish(world.nodes[1].keep("a"))

    assert world.get("a").tier == DISK
    assert world.get("absent").tier == ""


def test_an_exists_is_counted_for_what_answered_it() -> None:
    """An owner, the client's memory, the tables of this host."""
    asked, with_table = World(), World()
    for world in (asked, with_table):
        world.publish(world.nodes[2].hold("a"))
    with_table.nodes[1].table = with_table.nodes[2].table = with_table.nodes[3].table = "final"

    assert asked.exists("a") == [True]
    assert asked.answered_by == ASKED
    assert asked.exists("a") == [True]
    assert asked.answered_by == KNOWN
    assert with_table.exists("a") == [True]
    assert with_table.answered_by == TABLE
