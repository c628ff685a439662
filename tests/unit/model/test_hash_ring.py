"""The consistent-hash ring: a pure function of the live set, that moves few keys."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.model import keys
from peercache.model.hash_ring import HashRing, _tokens

MEMBERS = st.sets(st.integers(1, 2**64 - 1), min_size=0, max_size=8)


def some_keys(count: int, seed: int = 1) -> keys.PageKeys:
    return keys.from_bytes(random.Random(seed).randbytes(16 * count))


def ring_of(members: object, replicas: int = 2, virtual_nodes: int = 32) -> HashRing:
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


def test_version_tells_sets_apart() -> None:
    """Another set has another version."""
    versions = {ring_of(members).version for members in ([], [1], [2], [1, 2], [1, 2, 3])}

    assert len(versions) == 5


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
