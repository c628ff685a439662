"""Reading what is on a holder's disk only: asked for, loaded, read in portions, or missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peercache.model.records import ON_DISK, RESIDENT, from_bytes
from peercache.observability import reasons
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Lookup, ReportStale
from peercache.wire.messages.pool import LOST, PROMOTED, Promote, Promoted
from peercache.wire.messages.session import Refused
from tests.unit.paths.world import PAGE, World, content_of, named

NAMES = [f"page-{number}" for number in range(6)]


def kept(world: World, holder: int, *names: str) -> None:
    """Let a node have pages on its disk, and their owners know."""
    for name in names:
        world.publish(world.nodes[holder].keep(name))


def asked_for_pages(world: World) -> int:
    """Return how many questions for pages on disk there were."""
    return len([peers for peers in world.asked(Promote) if peers])


def test_page_on_a_disk_is_promoted_and_read(world: World) -> None:
    """One question to its holder, one read under the fresh record, the very bytes.

    The holder loads no longer than the caller waits: its answer has to come before that.
    """
    kept(world, 2, "a")

    got = world.get("a", timeout_s=0.05)

    assert got.hits == [True]
    assert got.content() == content_of("a").tobytes()
    assert world.asked(Promote)[-1] == [2]
    asked = [message for message in world.nodes[2].received if isinstance(message, Promote)]
    assert [message.timeout_s < 0.05 for message in asked] == [True]
    assert world.fetched_from() == [[2]]


def test_copy_in_memory_is_read_before_one_on_a_disk() -> None:
    """Even where the disk is the home node's own and the memory another host's."""
    world = World(remote=frozenset({3}))
    kept(world, 1, "a")
    world.publish(world.nodes[3].hold("a"))

    got = world.get("a")

    assert got.hits == [True]
    assert world.fetched_from() == [[3]]
    assert not asked_for_pages(world)


def test_copy_in_memory_that_is_reported_later_wins_over_one_on_a_disk(world: World) -> None:
    """The first answer, of what is on disk, does not end the search for something better."""
    name = world.page_owned_by(2, 3)
    world.nodes[1].know(world.nodes[1].keep(name))
    world.nodes[2].know(world.nodes[3].hold(name))
    world.nodes[2].latency_s = 0.01

    got = world.get(name)

    assert got.hits == [True]
    assert world.fetched_from() == [[3]]


def test_copy_in_memory_is_not_given_up_for_one_on_a_nearer_disk() -> None:
    """What a slower peer reports of its disk changes nothing for a page that is in memory."""
    world = World(4, remote=frozenset({3}))
    first, second = world.page_owned_by(2, 3), world.page_owned_by(3, 4)
    world.nodes[1].know(world.nodes[3].hold(first))
    world.nodes[2].know(world.nodes[2].keep(first))
    world.nodes[3].know(world.nodes[3].hold(second))
    world.nodes[2].latency_s, world.nodes[3].latency_s = 0.002, 0.004

    got = world.get(first, second)

    assert got.hits == [True, True]
    assert not asked_for_pages(world)


def test_newer_word_of_one_holder_counts_wherever_the_page_is(world: World) -> None:
    """A page that was evicted to disk is not read under the older record of another owner."""
    name = world.page_owned_by(2, 3)
    world.nodes[2].know(world.nodes[3].hold(name))
    world.nodes[1].know(world.nodes[3].keep(name))

    got = world.get(name)

    assert got.hits == [True]
    assert world.asked(Promote)[-1] == [3]


def test_newer_word_of_one_holder_counts_among_answers_looked_at_together(world: World) -> None:
    """The first answer lacks a page, so both are looked at at once: the same must come of it."""
    name = world.page_owned_by(2, 3)
    other = next(each for i in range(99) if world.owners(each := f"other-{i}")[0].number == 2)
    world.nodes[1].know(world.nodes[3].hold(name))
    world.nodes[2].know(world.nodes[3].keep(name))
    world.nodes[2].know(world.nodes[3].hold(other))
    world.nodes[2].latency_s = 0.01

    got = world.get(name, other)

    assert got.hits == [True, True]
    assert world.asked(Promote)[-1] == [3]


def test_batch_comes_in_portions_that_are_read_before_the_next_is_asked_for(world: World) -> None:
    """What was promoted first may be evicted for what is promoted next."""
    kept(world, 2, *NAMES)
    holder = world.nodes[2]
    holder.portion = 2

    def serve(message: Message) -> Message | None:
        if isinstance(message, Promote):
            for record in holder.loaded.values():
                holder.evict(from_bytes(record), content_of("other"))
            holder.loaded.clear()
        return holder.serve(message)

    holder.script.extend([serve] * 10)

    got = world.get(*NAMES)

    assert got.hits == [True] * 6
    assert [page.tobytes() for page in got.pages] == [content_of(n).tobytes() for n in NAMES]
    assert asked_for_pages(world) == 3


def test_page_that_does_not_come_in_time_is_a_miss_with_its_reason(world: World) -> None:
    """The deadline covers the disk."""
    kept(world, 2, "a")
    world.nodes[2].portion = 0
    world.nodes[2].latency_s = 0.1
    started = world.now

    got = world.get("a", timeout_s=1.0)

    assert got.hits == [False]
    assert got.reasons == [reasons.NOT_PROMOTED]
    assert world.now - started <= 1.0
    assert got.is_untouched()


def test_pages_in_memory_are_hits_although_a_disk_is_too_slow(world: World) -> None:
    """They are read first."""
    kept(world, 2, "a")
    world.publish(world.nodes[3].hold("b"))
    world.nodes[2].portion = 0
    world.nodes[2].latency_s = 0.1

    got = world.get("a", "b", timeout_s=0.5)

    assert got.hits == [False, True]


def test_lost_page_is_disputed_and_looked_for_elsewhere(world: World) -> None:
    """A holder that lost what it reported is no end: another one may have the page."""
    name = world.page_owned_by(2, 3)
    world.nodes[2].know(world.nodes[1].keep(name))

    def lose(message: Message) -> Message | None:
        if not isinstance(message, Promote):
            return world.nodes[1].serve(message)
        world.nodes[2].know(world.nodes[3].hold(name))
        return Promoted(0, bytes([LOST]), b"")

    world.nodes[1].script.extend([lose] * 2)

    got = world.get(name)

    assert got.hits == [True]
    assert world.posts(ReportStale)


@pytest.mark.parametrize("mood", ["silent", "away"])
def test_holder_that_does_not_answer_is_given_up(world: World, mood: str) -> None:
    """Two silences open its breaker, and the rest of the time is for others."""
    kept(world, 2, "a")
    name = world.page_owned_by(1, 3)
    world.nodes[1].know(world.nodes[2].keep(name))
    world.nodes[2].mood = mood
    started = world.now

    got = world.get(name)

    assert got.hits == [False]
    assert got.reasons == [reasons.PEER_UNREACHABLE]
    assert world.now - started < 1.0


@pytest.mark.parametrize(
    "answer",
    [
        Refused(0, "role", "not you"),
        Promoted(0, b"", b""),
        Promoted(0, bytes([PROMOTED]), b""),
        Promoted(0, bytes([LOST]), b""),
    ],
)
def test_holder_that_answers_nonsense_is_not_asked_forever(world: World, answer: Message) -> None:
    """Whatever it returns, the call ends, and soon."""
    name = world.page_owned_by(1, 3)
    world.nodes[1].know(world.nodes[2].keep(name))
    world.nodes[2].script.extend([lambda _: answer] * 50)

    got = world.get(name)

    assert got.hits == [False]
    assert asked_for_pages(world) <= 3


def test_record_of_another_length_is_not_read_into_the_destination(world: World) -> None:
    """A holder that promotes another page than it reported has nothing for us."""
    name = world.page_owned_by(1, 3)
    record = world.nodes[2].keep(name)
    world.nodes[1].know(record)
    world.nodes[2].disk[named(name).tobytes()] = (name, content_of(name, 2 * PAGE))

    got = world.get(name)

    assert got.hits == [False]
    assert got.is_untouched()


@pytest.mark.parametrize(("field", "value"), [("holder", 3), ("flags", ON_DISK)])
def test_promoted_record_of_another_place_is_not_read(world: World, field: str, value: int) -> None:
    """A holder speaks for its own memory only, and what is still on disk is no page to read."""
    world.publish(world.nodes[2].keep("a"))
    sent = world.nodes[2].hold("a")
    sent[field] = value
    world.nodes[2].script.extend([_serving(world, Promoted(0, bytes([PROMOTED]), sent.tobytes()))])

    got = world.get("a")

    assert got.hits == [False]
    assert got.is_untouched()
    assert world.fetched_from() == []


def test_questions_for_pages_on_disk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder takes no longer ones; the rest is asked for when the first pages have come."""
    monkeypatch.setattr("peercache.paths.read.PROMOTE_KEYS_MAX", 4)
    monkeypatch.setattr("peercache.paths.read.WISHES_MAX", 3)
    world = World()
    kept(world, 2, *NAMES)

    world.exists(*NAMES)
    got = world.get(*NAMES)

    assert got.hits == [True] * len(NAMES)
    asked = [len(one.keys) // 16 for one in world.nodes[2].received if isinstance(one, Promote)]
    assert asked == [3, 4, 2]


def test_exists_counts_what_is_on_disk_and_wishes_for_it(world: World) -> None:
    """The get that follows finds it loaded; no caller waits for that."""
    kept(world, 2, *NAMES[:3])
    world.publish(world.nodes[3].hold(NAMES[3]))

    found = world.exists(*NAMES[:4])

    assert found == [True] * 4
    ((peer, wish),) = world.posts(Promote)
    assert (peer, wish.timeout_s, len(wish.keys)) == (2, 0.0, 3 * 16)
    assert len(world.nodes[2].loaded) == 3


def test_exists_wishes_for_nothing_behind_a_gap(world: World) -> None:
    """What comes after a page that is nowhere will not be read."""
    kept(world, 2, NAMES[0], NAMES[2])

    assert world.exists(*NAMES[:3]) == [True, False, True]

    ((_, wish),) = world.posts(Promote)
    assert wish.keys == named(NAMES[0]).tobytes()


def test_exists_of_pages_in_memory_wishes_for_nothing(world: World) -> None:
    """The hot way is as it was."""
    world.publish(*[world.nodes[2].hold(name) for name in NAMES])

    world.exists(*NAMES)
    steps = len(world.steps)

    assert world.exists(*NAMES) == [True] * 6
    assert len(world.steps) == steps
    assert not world.posts(Promote)


def test_remembered_page_on_disk_costs_no_lookup(world: World) -> None:
    """What `exists` has found is asked for at its holder at once."""
    kept(world, 2, "a")
    world.exists("a")
    lookups = len([peers for peers in world.asked(Lookup) if peers])

    got = world.get("a")

    assert got.hits == [True]
    assert len([peers for peers in world.asked(Lookup) if peers]) == lookups


def test_promoted_page_is_remembered_as_in_memory(world: World) -> None:
    """The next get reads it at once."""
    kept(world, 2, "a")
    world.get("a")
    asked = len(world.asked())

    assert world.get("a").hits == [True]

    assert len(world.asked()) == asked


def test_page_asked_for_twice_in_a_batch_is_read_into_both_destinations(world: World) -> None:
    """Both places get the bytes."""
    kept(world, 2, "a")

    got = world.get("a", "a")

    assert got.hits == [True, True]
    assert got.content(0) == got.content(1) == content_of("a").tobytes()


def _serving(world: World, promoted: Promoted) -> Callable[[Message], Message | None]:
    """Return an answer to the next message: this one where pages are asked for."""
    holder = world.nodes[2]

    def answer(message: Message) -> Message | None:
        if isinstance(message, Promote):
            return promoted
        holder.script.append(answer)
        return holder.serve(message)

    return answer


# --- loading ahead of a read ---------------------------------------------------------------------


def load(world: World, *names: str, timeout_s: float = 2.0) -> tuple[list[str], list[bool]]:
    """Load pages; return where each is, and which were loaded for that."""
    path = world.reader.load(named(*names), world.cluster, world.now + timeout_s)
    where, loaded, _ = world.run(path)
    tiers = {True: "memory", False: "disk"}
    resident = ((where.records["flags"] & RESIDENT) != 0).tolist()
    found = [
        tiers[here] if known else "" for known, here in zip(where.known, resident, strict=True)
    ]
    return found, loaded.tolist()


def test_pages_are_loaded_and_nothing_is_read(world: World) -> None:
    """Those in memory are left alone; the next read needs no question."""
    kept(world, 2, "a", "b")
    world.publish(world.nodes[3].hold("c"))

    assert load(world, "a", "b", "c", "nowhere") == (
        ["memory", "memory", "memory", ""],
        [True, True, False, False],
    )
    assert world.fetched_from() == []
    before = asked_for_pages(world)
    assert world.get("a", "b").hits == [True, True]
    assert asked_for_pages(world) == before


def test_pages_are_loaded_in_portions_until_the_deadline(world: World) -> None:
    """What is not loaded by then is on the disk, and no error."""
    kept(world, 2, *NAMES)
    world.nodes[2].portion = 2
    world.nodes[2].latency_s = 0.01

    assert load(world, *NAMES)[0] == ["memory"] * 6
    world.nodes[2].mood = "silent"
    kept(world, 2, "late")
    began = world.now
    assert load(world, "late", timeout_s=0.5)[0] == ["disk"]
    assert world.now <= began + 0.5


def test_a_page_that_a_holder_has_lost_is_nowhere(world: World) -> None:
    kept(world, 2, "a", "b")
    del world.nodes[2].disk[named("a").tobytes()]

    assert load(world, "a", "b") == (["", "memory"], [False, True])
