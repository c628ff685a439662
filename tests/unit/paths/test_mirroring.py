"""Mirroring: what is kept at home is what was verified, and a get is no later for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peercache.client.bridge import checksums_of
from peercache.model.records import HAS_CHECKSUM, RESIDENT, Records
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.paths import mirror as mirroring
from peercache.paths.mirror import (
    COPY_S,
    HOT_S,
    PAUSE_S,
    TIMEOUT_S,
    Recent,
    overlap,
)
from peercache.paths.steps import Fetch, Place
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    HERE,
    REFUSED_FULL,
    RESERVED,
    Abort,
    Commit,
    Granted,
    Promote,
    ReserveMirror,
)
from peercache.wire.messages.session import Refused
from tests.unit.paths.world import PAGE, World, content_of, named


def far_world(pulls: str = "all", **options: str) -> World:
    """Return three nodes: 1 at home, 2 on the same host, 3 on another host."""
    return World(remote=frozenset({3}), mirror_pulls=pulls, **options)


def held(world: World, holder: int, *names: str, **fields: int) -> None:
    for name in names:
        world.publish(world.nodes[holder].hold(name, **fields))


def asked_home(world: World, kind: type[Any]) -> list[Any]:
    return [message for message in world.nodes[1].received if type(message) is kind]


def at_home(world: World, name: str) -> bytes:
    """Return what a read of the copy at home brings, whatever its holder reports."""
    world.nodes[3].data_mood = "refusing"
    return world.get(name).content()


@pytest.fixture
def world() -> World:
    return far_world()


def test_what_is_read_from_another_host_is_read_at_home_the_next_time(world: World) -> None:
    """Its slot was asked for before it was read, and it was copied after that."""
    held(world, 3, "a", "b")

    got = world.get("a", "b")

    assert got.hits == [True, True]
    assert got.mirrored == 2
    fetched = next(at for at, step in enumerate(world.steps) if isinstance(step, Fetch))
    asked = next(
        at
        for at, step in enumerate(world.steps)
        if ReserveMirror in [type(m) for _, m in getattr(step, "questions", ())]
    )
    assert asked < fetched
    world.steps.clear()
    assert world.get("a").content() == content_of("a").tobytes()
    assert world.fetched_from() == [[1]]
    assert world.reservations.report(0.0).sequences == ()


def test_what_is_on_this_host_is_not_mirrored(world: World) -> None:
    """It is read from shared memory as it is."""
    held(world, 2, "a")

    assert world.get("a").mirrored == 0
    assert asked_home(world, ReserveMirror) == []


def test_hot_is_the_second_read_within_a_minute() -> None:
    """The first read alone shows nothing about a third one."""
    world = far_world("hot")
    held(world, 3, "a", "b")

    assert world.get("a").mirrored == 0
    world.now += HOT_S / 2
    assert world.get("a", "b").mirrored == 1
    world.now += 3 * HOT_S
    assert world.get("b").mirrored == 0


def test_without_the_setting_nothing_is_asked() -> None:
    """The path is that of a client that mirrors nothing."""
    world = far_world("")
    held(world, 3, "a")

    assert world.get("a", "a").mirrored == 0
    assert asked_home(world, ReserveMirror) == []
    assert not [step for step in world.steps if isinstance(step, Place)]


def test_a_page_that_was_not_verified_is_not_kept(world: World) -> None:
    """It was evicted while it was read; the other one is kept."""
    held(world, 3, "a")
    evicted = world.nodes[3].hold("b")
    world.publish(evicted)
    world.between = lambda node, page: node.evict(evicted, content_of("x")) if page else None
    for node in world.nodes.values():
        node.forget("b")
    world.publish(evicted)

    got = world.get("a", "b")

    assert got.hits == [True, False]
    assert got.mirrored == 1
    (commit,) = asked_home(world, Commit)
    assert isinstance(commit, Commit)
    assert commit.written == b"\1\0"


def test_nothing_verified_gives_the_slots_back(world: World) -> None:
    """At once, and not with the next list of reservations."""
    held(world, 3, "a")
    world.nodes[3].data_mood = "refusing"

    assert world.get("a").hits == [False]

    assert asked_home(world, Abort)
    assert asked_home(world, Commit) == []


def test_destinations_that_overlap_are_not_copied_from(world: World) -> None:
    """The bytes of a page in them may be another page's when the call has read both."""
    held(world, 3, "a", "b")
    whole = np.zeros(PAGE + 8, np.uint8)

    got = world.get_into(["a", "b"], [whole[:PAGE], whole[8:]])

    assert got.hits == [True, True]
    assert got.mirrored == 0
    assert asked_home(world, ReserveMirror) == []


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 8), (8, 8)], False),
        ([(8, 8), (0, 8)], False),
        ([(0, 9), (8, 8)], True),
        ([(0, 100), (10, 1), (50, 1)], True),
        ([(0, 8), (4, 0)], False),
        ([(4, 4), (4, 4)], True),
        ([], False),
    ],
)
def test_overlapping_runs_are_found(runs: list[tuple[int, int]], expected: bool) -> None:
    """In any order; a run without bytes has no place."""
    assert overlap(PageRuns.of([[run] for run in runs])) is expected


def test_a_home_node_that_is_silent_costs_its_timeout_once(world: World) -> None:
    """The get is a hit as ever, and the next gets do not ask for a while."""
    held(world, 3, "a", "b")
    world.nodes[1].script.append(world.nodes[1].serve)  # its Lookup is answered
    world.nodes[1].script.append(lambda _: None)
    before = world.now

    assert world.get("a").hits == [True]

    assert world.now - before < TIMEOUT_S + 0.005
    world.now += PAUSE_S / 2
    world.get("b")
    assert len(asked_home(world, ReserveMirror)) == 1
    world.now += PAUSE_S
    assert world.get("b").mirrored == 1
    assert world.reservations.report(0.0).sequences == ()


def test_a_silent_home_node_costs_a_short_get_little(world: World) -> None:
    """Its timeout is a part of what is left: most of that is for the reading."""
    world.cache.store(world.nodes[3].hold("a"), world.now)
    world.nodes[1].mood = "silent"
    before = world.now

    assert world.get("a", timeout_s=0.008).hits == [True]

    assert world.now - before <= 0.0021


@pytest.mark.parametrize("answer", ["full", "refused", "other", "short", "long", "placeless"])
def test_a_home_node_without_room_is_not_asked_for_a_while(world: World, answer: str) -> None:
    """Nor one that refuses, or answers nonsense."""
    held(world, 3, "a", "b")

    def grant(message: Message) -> Message:
        assert isinstance(message, ReserveMirror)
        if answer == "refused":
            return Refused(0, "namespace", "not yours")
        if answer == "other":
            return message
        if answer == "long":
            return Granted(0, message.sequence, bytes((RESERVED, RESERVED)), bytes(8))
        if answer == "placeless":
            return Granted(0, message.sequence, bytes((RESERVED,)), b"")
        states = bytes((REFUSED_FULL,)) if answer == "full" else b""
        return Granted(0, message.sequence, states, bytes(8 * len(states)))

    world.nodes[1].script.extend([world.nodes[1].serve, grant])

    assert world.get("a").hits == [True]
    assert world.get("b").hits == [True]

    assert len(asked_home(world, ReserveMirror)) == 1


@pytest.mark.parametrize("refusing", [2, 3])
def test_a_get_that_reads_a_page_again_asks_for_slots_once(refusing: int) -> None:
    """A second reservation would leave the first one's slots taken."""
    world = World(remote=frozenset({2, 3}), mirror_pulls="all")
    held(world, 2, "a")
    held(world, 3, "a")
    world.nodes[refusing].data_mood = "refusing"

    assert world.get("a").hits == [True]

    assert len(asked_home(world, ReserveMirror)) == 1
    assert world.reservations.report(0.0).sequences == ()


def test_a_get_mirrors_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home node's answer fits into a message, and the others come with the next get."""
    monkeypatch.setattr(mirroring, "PAGES_MAX", 2)
    world = far_world()
    held(world, 3, "a", "b", "c")

    assert world.get("a", "b", "c").mirrored == 2
    assert world.get("a", "b", "c").mirrored == 1


def test_a_page_that_another_client_has_mirrored_is_read_at_home() -> None:
    """The client still remembers the other host's record; the answer ends that."""
    world = far_world("hot")
    held(world, 3, "a")
    world.get("a")
    held(world, 1, "a")
    world.nodes[1].know(world.nodes[1].hold("a"))

    def here(message: Message) -> Message:
        assert isinstance(message, ReserveMirror)
        return Granted(0, message.sequence, bytes((HERE,)), bytes(8))

    world.nodes[1].script.append(here)
    assert world.get("a").mirrored == 0
    world.steps.clear()

    assert world.get("a").hits == [True]
    assert world.fetched_from() == [[1]]


def test_the_copy_takes_a_part_of_the_time_that_the_reading_took(world: World) -> None:
    """What is not copied by then is not committed."""
    names = [f"p{number}" for number in range(40)]
    held(world, 3, *names)
    world.page_s = 0.001

    got = world.get(*names)

    assert got.hits == [True] * 40
    assert 9 <= got.mirrored <= 11
    assert COPY_S < 0.01


def test_a_get_that_has_no_time_left_mirrors_nothing_and_is_not_late(world: World) -> None:
    """The deadline is the caller's."""
    names = [f"p{number}" for number in range(40)]
    held(world, 3, *names)
    world.page_s = 0.001
    until = world.now + 0.0435

    got = world.get(*names, timeout_s=0.0435)

    assert sum(got.hits) >= 38
    assert got.mirrored < 5
    assert world.now <= until + world.page_s


def test_the_checksum_of_the_record_goes_with_the_page() -> None:
    """Under `full` a copy without one would be refused by every reader."""
    world = far_world(verify="full")
    page = content_of("a")
    digest = int(checksums_of(PageRuns.of([[(page.ctypes.data, page.nbytes)]]), np.array([0]))[0])
    held(world, 3, "a", flags=RESIDENT | HAS_CHECKSUM, checksum=digest)

    assert world.get("a").mirrored == 1
    assert at_home(world, "a") == page.tobytes()


def test_a_checksum_that_the_record_does_not_claim_is_not_kept(world: World) -> None:
    """Nothing vouches for it: a copy that names it would fail for every reader that looks."""
    held(world, 3, "a", checksum=5)

    assert world.get("a").mirrored == 1

    assert [commit.checksums for commit in asked_home(world, Commit)] == [bytes(8)]


def test_a_page_with_a_wrong_checksum_is_not_kept() -> None:
    """Memory or a network has changed its bytes."""
    world = far_world(verify="full")
    held(world, 3, "a", flags=RESIDENT | HAS_CHECKSUM, checksum=5)

    got = world.get("a")

    assert got.reasons == [reasons.VERIFY_FAILED]
    assert asked_home(world, Commit) == []


def test_a_commit_without_an_answer_is_not_repeated(world: World) -> None:
    """Its slot is free again with the next list of reservations."""
    held(world, 3, "a")
    home = world.nodes[1]
    home.script.extend([home.serve, home.serve, lambda _: None])

    got = world.get("a")

    assert got.hits == [True]
    assert got.mirrored == 0
    assert len(asked_home(world, Commit)) == 1
    assert world.reservations.report(0.0).sequences == ()


def test_a_home_node_whose_breaker_is_open_is_not_asked(world: World) -> None:
    """Its probe is for a call that needs it."""
    held(world, 3, "a")
    world.breakers.failed(1, world.now)

    assert world.get("a").hits == [True]
    assert asked_home(world, ReserveMirror) == []


def test_a_home_node_that_is_gone_from_the_view_is_not_written_to(world: World) -> None:
    """Its reservations are those of another incarnation."""
    held(world, 3, "a")
    world.cluster = world.seen({n: node.member for n, node in world.nodes.items() if n != 1})

    assert world.get("a").hits == [True]
    assert asked_home(world, ReserveMirror) == []


def test_the_filter_of_pages_read_forgets() -> None:
    """It knows what was read in the last minute, and at most in the one before."""
    recent = Recent()
    keys = named("a", "b")

    assert recent.read(keys, 0.0).tolist() == [False, False]
    assert recent.read(keys[:1], HOT_S - 1).tolist() == [True]
    assert recent.read(keys, HOT_S + 1).tolist() == [True, True]
    assert recent.read(named("c"), 3 * HOT_S).tolist() == [False]
    assert recent.read(keys, 4 * HOT_S + 2).tolist() == [False, False]


def test_few_pages_are_taken_for_read_that_were_not() -> None:
    """Ten thousand pages in a minute: about one in six hundred."""
    recent = Recent()
    rng = np.random.default_rng(7)
    keys: Records = rng.integers(0, 256, (20_000, 16), np.uint8).view("V16").reshape(-1)
    recent.read(keys[:10_000], 0.0)

    assert recent.read(keys[10_000:], 1.0).mean() < 0.005 * 2


def test_slots_for_copies_are_given_back_before_a_page_is_awaited_from_a_disk(world: World) -> None:
    """The home node may need their room to load it, and would wait until the get gives up."""
    held(world, 3, "a", "b")
    world.publish(world.nodes[1].keep("c"))

    got = world.get("a", "b", "c")

    kinds = [type(message) for message in world.nodes[1].received]
    assert got.hits == [True, True, True]
    assert got.mirrored == 2
    assert kinds.index(ReserveMirror) < kinds.index(Commit) < kinds.index(Promote)
    assert kinds.count(Commit) == 1
