"""Laws of the view: merging is a join, digests name the living, masters follow from the view."""

from __future__ import annotations

import hashlib
import random

import attrs
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import COUNTER_MAX, MEMBERS_MAX, View, is_newer


def member(incarnation: int, counter: int = 0, state: int = ALIVE, **fields: object) -> Member:
    """Return a member; `control` and `host_name` follow the incarnation unless named."""
    values: dict[str, object] = {
        "incarnation": incarnation,
        "counter": counter,
        "state": state,
        "head_rank": 255,
        "host_name": f"host-{incarnation:03d}",
        "control": f"host-{incarnation:03d}:31998",
        "data": "",
        "boot_id": "",
        "segment": "",
    }
    return Member(**(values | fields))  # type: ignore[arg-type]


# Few values, so that entries collide in every way.
members = st.builds(
    member,
    incarnation=st.integers(1, 4),
    counter=st.integers(0, 2),
    state=st.sampled_from([ALIVE, SUSPECT, DEAD, LEFT]),
    control=st.sampled_from(["a:1", "b:2"]),
)
views = st.lists(members, max_size=8).map(View.of)


def hash_of(number: int) -> int:
    """Return a number like an incarnation."""
    return int.from_bytes(
        hashlib.blake2b(bytes([number & 255, number >> 8])).digest()[:8], "little"
    )


def merged(one: View, other: View) -> View:
    return one.merge(other.members())[0]


@given(st.lists(members, max_size=12))
def test_merging_keeps_the_newest_entry_of_each_incarnation(entries: list[Member]) -> None:
    """The oracle: sort by counter, state and the rest, and take the last one of each."""

    def rank(entry: Member) -> tuple[object, ...]:
        rest = (entry.head_rank, entry.host_name, entry.control)
        return (entry.counter, entry.state, *rest)

    newest = {entry.incarnation: entry for entry in sorted(entries, key=rank)}

    assert View.of(entries).members() == tuple(newest[i] for i in sorted(newest))


@given(views, views)
def test_changed_reports_whether_an_entry_changed(one: View, other: View) -> None:
    """`changed` is exactly inequality, and what did not change is the very same object."""
    after, changed = one.merge(other.members())

    assert changed == (after != one)
    for entry in after.members():
        before = one.get(entry.incarnation)
        assert before is entry or before is None or is_newer(entry, before)


@given(views, views)
def test_digests_are_equal_exactly_for_equal_living(one: View, other: View) -> None:
    """The oracle: compare the living entries themselves."""
    assert (one.digest() == other.digest()) == (one.live() == other.live())


@given(views, st.sets(st.integers(1, 4)))
def test_digest_follows_a_forgotten_entry(view: View, gone: set[int]) -> None:
    """Taking entries out leaves the digest of a view that never had them."""
    rest = View.of(m for m in view.members() if m.incarnation not in gone)

    assert view.without(sorted(gone)) == rest


@given(views, views, st.sampled_from([0, 1, 4, 8]))
def test_the_differing_buckets_have_all_in_which_the_living_differ(
    one: View, other: View, count: int
) -> None:
    """Nothing that the other lacks is left out, and equal views have nothing to report."""
    found = set(one.differing(other.bucket_digests(count)))

    differ = {
        number
        for number in range(1, 5)
        if View.of(e for e in one.members() if e.incarnation == number).digest()
        != View.of(e for e in other.members() if e.incarnation == number).digest()
    }
    assert {e for e in one.members() if e.incarnation in differ} <= found
    if count == 8:  # Each member has a bucket of its own.
        assert {e.incarnation for e in found} <= differ


def test_a_thousand_members_and_one_report_about_one() -> None:
    """What is reported is in proportion to what differs, and so is its cost to both."""
    members = [member(hash_of(number)) for number in range(1001)]
    view, more = View.of(members[:-1]), View.of(members)

    found = more.differing(view.bucket_digests())

    assert members[-1] in found
    assert len(found) < 10
    assert len(view.bucket_digests()) == 8 * 1024


def test_bytes_that_are_no_digests_differ_in_nothing() -> None:
    """A peer may send any bytes."""
    view = View.of([member(1)])

    for size in (0, 1, 7, 9, 24, 8 * 8192):
        assert view.differing(b"x" * size) == []
    assert view.differing(b"x" * 8) == [member(1)]


def test_old_suspicion_is_ignored() -> None:
    """A member that has raised its counter since is not suspect again by an older claim."""
    view = View.of([member(1, counter=2)])

    after, changed = view.merge([member(1, counter=1, state=DEAD)])

    assert not changed
    assert after.members() == (member(1, counter=2),)


def test_the_dead_do_not_count_in_a_digest() -> None:
    """A node that has forgotten a dead member agrees with one that has not yet."""
    living = View.of([member(1), member(2)])

    remembers = View.of([member(1), member(2), member(3, state=DEAD), member(4, state=LEFT)])

    assert remembers != living
    assert remembers.digest() == living.digest()


def test_irrefutable_counter_is_ignored() -> None:
    """An entry that leaves its member no higher counter is ignored."""
    view = View.of([member(1)])

    assert view.merge([member(1, counter=COUNTER_MAX, state=DEAD)]) == (view, False)
    assert view.merge([member(2, counter=2**64 - 1)]) == (view, False)


def test_full_view_takes_news_but_no_strangers() -> None:
    """A view is bounded, and one that is full still follows its members."""
    view = View.of(member(i) for i in range(1, MEMBERS_MAX + 1))

    same, grew = view.merge([member(MEMBERS_MAX + 1)])
    after, changed = view.merge([member(7, state=SUSPECT), member(MEMBERS_MAX + 2)])

    assert (same, grew) == (view, False)
    assert changed
    assert len(after) == MEMBERS_MAX
    assert after.get(7) == member(7, state=SUSPECT)


@given(st.lists(members, max_size=8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_equal_views_name_equal_masters(
    entries: list[Member], max_masters: int, rng: random.Random
) -> None:
    """Masters follow from the view alone, in whatever order it was learned."""
    shuffled = list(entries)
    rng.shuffle(shuffled)

    assert View.of(entries).masters(max_masters) == View.of(shuffled).masters(max_masters)


def test_heads_are_masters_first_then_host_names() -> None:
    """Head rank goes before host name, and suspects stay in office."""
    view = View.of(
        [
            member(1, host_name="a"),
            member(2, host_name="z", head_rank=1),
            member(3, host_name="y", head_rank=0, state=SUSPECT),
            member(4, host_name="b"),
            member(5, host_name="0", state=DEAD, head_rank=0),
            member(6, host_name="0", state=LEFT),
        ]
    )

    assert [m.incarnation for m in view.masters(3)] == [3, 2, 1]
    assert [m.incarnation for m in view.masters(9)] == [3, 2, 1, 4]


def test_host_name_ties_are_broken_by_port() -> None:
    """Several nodes of one host stand in the order of their ports, as numbers."""
    view = View.of(
        [
            member(1, host_name="a", control="10.0.0.1:31998"),
            member(2, host_name="a", control="10.0.0.1:9000"),
            member(3, host_name="a", control="[::1]:20000"),
            member(4, host_name="a", control="nonsense"),
        ]
    )

    assert [m.incarnation for m in view.masters(4)] == [4, 2, 3, 1]


def test_head_rank_beyond_the_last_is_no_head() -> None:
    """A rank of 255 or more gives no precedence over host names."""
    view = View.of(
        [member(1, host_name="b", head_rank=255), member(2, host_name="a", head_rank=999)]
    )

    assert [m.incarnation for m in view.masters(1)] == [2]


def test_views_are_never_changed_in_place() -> None:
    """A holder of a view keeps the view it saw."""
    view = View.of([member(1)])

    view.merge([member(2), attrs.evolve(member(1), counter=5)])
    view.without([1])

    assert view.members() == (member(1),)
