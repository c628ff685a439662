"""The consistent-hash ring: a pure function of the live set, that moves few keys."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.model import keys
from peercache.model.hash_ring import AUTO, HashRing, _tokens

MEMBERS = st.sets(st.integers(1, 2**64 - 1), min_size=0, max_size=8)


def test_a_ring_with_as_many_owners_as_members_is_everywhere() -> None:
    """Not one without members, nor one whose hosts have more than one node each."""
    assert HashRing([1, 2, 3], virtual_nodes=4, replicas=3).is_everywhere
    assert HashRing([1, 2, 3], virtual_nodes=4, replicas=8).is_everywhere
    assert not HashRing([1, 2, 3], virtual_nodes=4, replicas=2).is_everywhere
    assert not HashRing([], virtual_nodes=4, replicas=2).is_everywhere
    pairs = {1: "a", 2: "a", 3: "b", 4: "b"}
    assert not HashRing(pairs, virtual_nodes=4, replicas=AUTO).is_everywhere


def some_keys(count: int, seed: int = 1) -> keys.PageKeys:
    return keys.from_bytes(random.Random(seed).randbytes(16 * count))


def ring_of(members: object, replicas: int | str = 2, virtual_nodes: int = 32) -> HashRing:
    return HashRing(members, virtual_nodes=virtual_nodes, replicas=replicas)  # type: ignore[arg-type]


def slow_owners(members: set[int], replicas: int, key: bytes) -> list[int]:
    """Walk the circle from the key's point, token by token."""
    point = int.from_bytes(key[:8], "little")
    placed = sorted((token, member) for member in members for token in _tokens(member, 32).tolist())
    clockwise = [m for t, m in placed if t >= point] + [m for t, m in placed if t < point]
    return list(dict.fromkeys(clockwise))[:replicas]


@given(members=MEMBERS, replicas=st.integers(1, 4), blob=st.binary(min_size=64, max_size=64))
def test_owners_are_the_next_distinct_members_clockwise(
    members: set[int], replicas: int, blob: bytes
) -> None:
    """Dynamo §4.3, against a walk over the whole circle."""
    owners = ring_of(members, replicas).owners(keys.from_bytes(blob))

    expected = [slow_owners(members, replicas, blob[at : at + 16]) for at in range(0, 64, 16)]
    assert owners.tolist() == expected
    assert owners.shape == (4, min(replicas, len(members)))


@given(members=MEMBERS.filter(bool), data=st.data())
def test_ring_depends_on_the_set_only(members: set[int], data: st.DataObject) -> None:
    """Order and repetition of the members are no part of it, nor is anything before."""
    shuffled = data.draw(st.permutations(sorted(members)))
    batch = some_keys(50)

    one, other = ring_of(members), ring_of([*shuffled, *shuffled])

    assert one.version == other.version
    assert np.array_equal(one.owners(batch), other.owners(batch))


def test_version_distinguishes_sets() -> None:
    """Another set has another version."""
    versions = {ring_of(members).version for members in ([], [1], [2], [1, 2], [1, 2, 3])}

    assert len(versions) == 5


HOSTED = st.dictionaries(st.integers(1, 2**64 - 1), st.integers(1, 12).map(str), max_size=14)


def slow_auto_owners(hosted: dict[int, str], key: bytes) -> list[int]:
    """Walk the circle, and take the first member of each new host."""
    walk, hosts = slow_owners(set(hosted), len(hosted), key), len(set(hosted.values()))
    if hosts < 2:
        return walk[:2]
    first_of: dict[str, int] = {}
    for member in walk:
        first_of.setdefault(hosted[member], member)
    return list(first_of.values())[: 2 if hosts > 8 else hosts]


@given(hosted=HOSTED, blob=st.binary(min_size=64, max_size=64))
def test_auto_owners_are_the_first_of_each_host_clockwise(
    hosted: dict[int, str], blob: bytes
) -> None:
    """One on each of up to eight hosts, two hosts beyond, and two nodes of a single host."""
    ring = ring_of(hosted, "auto")

    expected = [slow_auto_owners(hosted, blob[at : at + 16]) for at in range(0, 64, 16)]
    assert ring.owners(keys.from_bytes(blob)).tolist() == expected
    assert ring.replicas == len(expected[0])


@given(hosted=HOSTED, replicas=st.sampled_from([1, 2, 3, "auto"]), data=st.data())
def test_spares_follow_the_owners_and_change_nothing_else(
    hosted: dict[int, str], replicas: int | str, data: st.DataObject
) -> None:
    """A client's ring has one more column than a node's, and is the same ring."""
    batch = some_keys(20)
    shuffled = dict(data.draw(st.permutations(sorted(hosted.items()))))
    plain = HashRing(hosted, virtual_nodes=32, replicas=replicas)

    spared = HashRing(shuffled, virtual_nodes=32, replicas=replicas, spares=1)

    assert spared.version == plain.version
    assert np.array_equal(spared.owners(batch), plain.owners(batch))
    assert spared.table.shape[1] == min(plain.replicas + 1, len(hosted))
    for row in spared.table.tolist():
        assert len(set(row)) == len(row)


def test_version_distinguishes_hosts_replicas_and_tokens() -> None:
    """All that owners depend on is in it."""
    rings = [
        ring_of({1: "a", 2: "b"}, "auto"),
        ring_of({1: "a", 2: "a"}, "auto"),
        ring_of({1: "ab", 2: ""}, "auto"),
        ring_of({1: "a", 2: "b"}, 2),
        ring_of({1: "a", 2: "b"}, 1),
        ring_of({1: "a", 2: "b"}, 1, virtual_nodes=31),
    ]

    assert len({ring.version for ring in rings}) == len(rings)


def test_removing_a_node_moves_only_its_arcs() -> None:
    """A key keeps every owner that is still there (Karger et al. 1997)."""
    members = [random.Random(n).getrandbits(64) for n in range(10)]
    batch = some_keys(2000)
    gone = members[3]

    before = ring_of(members, virtual_nodes=160).owners(batch)
    after = ring_of([m for m in members if m != gone], virtual_nodes=160).owners(batch)

    touched = (before == gone).any(axis=1)
    assert np.array_equal(before[~touched], after[~touched])
    for old, new in zip(before[touched].tolist(), after[touched].tolist(), strict=True):
        assert set(old) - {gone} <= set(new)
    assert 0.1 < touched.mean() < 0.3  # 2 owners of 10


def test_keys_spread_evenly() -> None:
    """With 160 tokens no member owns much more than its share."""
    members = [random.Random(n).getrandbits(64) for n in range(8)]

    owners = ring_of(members, replicas=1, virtual_nodes=160).owners(some_keys(20_000))

    _, counts = np.unique(owners, return_counts=True)
    assert len(counts) == 8
    assert counts.max() < 1.4 * 20_000 / 8
    assert counts.min() > 0.6 * 20_000 / 8


def test_ring_without_members_has_no_owners() -> None:
    """An empty ring answers with an empty row for each key."""
    ring = ring_of([])

    assert len(ring) == 0
    assert ring.owners(some_keys(3)).shape == (3, 0)


def test_no_keys_have_no_owners() -> None:
    """An empty batch has an empty answer of the right shape."""
    assert ring_of([1, 2]).owners(some_keys(0)).shape == (0, 2)
