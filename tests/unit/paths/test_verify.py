"""The one verification, against the obvious slow one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.records import HAS_CHECKSUM, RECORD, Records
from peercache.model.seal import SEAL, Seals, unread_seals
from peercache.paths.verify import (
    CHECKSUM_PORTION_BYTES,
    checksum_portions,
    checksums_agree,
    names_another,
    owed_checksums,
    verified,
    wants_checksum,
)
from tests.unit.paths.world import named

SPACE = 0xABCD


def sealing(records: Records) -> Seals:
    """Return the seals that these records describe."""
    seals = np.zeros(len(records), SEAL)
    seals["word"], seals["key"] = records["generation"], records["key"]
    seals["space"], seals["length"] = SPACE, records["length"]
    return seals


WORDS = st.sampled_from([0, 1, 2, 3, 4, 6, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1])


@given(st.lists(st.tuples(WORDS, WORDS), max_size=20))
def test_a_hit_is_an_even_generation_that_the_word_still_equals(
    pairs: list[tuple[int, int]],
) -> None:
    """Odd generations and zero were never committed; another word is another page."""
    records = np.zeros(len(pairs), RECORD)
    records["generation"] = [generation for generation, _ in pairs]
    seals = sealing(records)
    seals["word"] = [word for _, word in pairs]

    expected = [g == w and g % 2 == 0 and g != 0 for g, w in pairs]
    assert verified(records, SPACE, seals).tolist() == expected
    assert names_another(records, seals).tolist() == [g == w for g, w in pairs]


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", b"b" * 16), ("key", b"a" * 15 + b"b"), ("key", b"b" + b"a" * 15),
     ("space", SPACE + 1), ("space", SPACE + 2**63), ("length", 101), ("length", 0)],
)  # fmt: skip
def test_a_seal_of_another_page_is_no_hit(field: str, value: bytes | int) -> None:
    """The word alone does not vouch for a page: its key, namespace and length must fit too."""
    records = np.zeros(2, RECORD)
    records["key"], records["generation"], records["length"] = b"a" * 16, [8, 10], 100
    seals = sealing(records)
    assert verified(records, SPACE, seals).tolist() == [True, True]

    seals[field][1] = value

    assert verified(records, SPACE, seals).tolist() == [True, False]
    assert names_another(records, seals)[1]


def test_a_page_that_did_not_arrive_is_no_hit_under_any_record() -> None:
    """What word buffers are filled with before a read is odd."""
    records = np.zeros(3, RECORD)
    records["generation"] = [0, 2, 2**64 - 1]

    seals = unread_seals(3)
    seals["space"] = SPACE

    assert not verified(records, SPACE, seals).any()


def test_every_record_has_a_seal_of_its_own() -> None:
    """One seal for a whole batch would be compared with each record of it."""
    records = np.zeros(3, RECORD)
    records["generation"] = 2

    with pytest.raises(AssertionError, match="1"):
        verified(records, SPACE, sealing(records)[:1])


def test_sampling_chooses_by_key_one_in_sixty_four() -> None:
    """Any two processes choose the same, about as many as the name states."""
    keys = named(*[f"p{i}" for i in range(6400)])

    sampled = wants_checksum(keys, "sampled")

    assert 50 < len(sampled) < 150
    assert (
        keys[sampled].tolist() == keys[sampled][wants_checksum(keys[sampled], "sampled")].tolist()
    )
    assert wants_checksum(keys, "full").tolist() == list(range(6400))
    assert wants_checksum(keys, "generation").tolist() == []


def owed(records: Records, hits: npt.NDArray[np.bool_], mode: str) -> tuple[list[int], list[int]]:
    """Return the hits that are refused and those to be checked; of three keys one is sampled."""
    keys = np.array([bytes(15) + bytes([last]) for last in (1, 64, 2)], "V16")
    lacking, checked = owed_checksums(keys, records, hits, mode)
    return lacking.tolist(), checked.tolist()


def test_a_record_without_a_checksum_agrees_where_not_every_page_must_have_one() -> None:
    """Its flag shows whether there is one; a checksum of 0 with the flag is one."""
    records = np.zeros(3, RECORD)
    records["checksum"] = [5, 5, 0]
    records["flags"] = [0, HAS_CHECKSUM, HAS_CHECKSUM]

    wrong, right = np.array([6, 6, 6], np.uint64), np.array([5, 5, 0], np.uint64)
    assert checksums_agree(records, wrong).tolist() == [True, False, False]
    assert checksums_agree(records, right).all()
    hits, misses = np.ones(3, np.bool_), np.zeros(3, np.bool_)
    assert owed(records, hits, "full") == ([0], [1, 2])
    assert owed(records, misses, "full") == ([], [])
    assert owed(records, np.array([False, False, True]), "full") == ([], [2])
    assert owed(records, hits, "generation") == ([], [])
    assert owed(records, hits, "sampled") == ([], [1])


@given(st.lists(st.integers(1, 3 * CHECKSUM_PORTION_BYTES), max_size=12))
def test_portions_are_all_places_in_order_and_no_larger_than_a_page_more(sizes: list[int]) -> None:
    """Nothing is left out, nothing twice, and each part is bounded."""
    lengths = np.array(sizes, np.uint64)
    places = np.arange(len(sizes))

    parts = checksum_portions(places, lengths)

    assert [int(place) for part in parts for place in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part)
        assert int(lengths[part[:-1]].sum()) < CHECKSUM_PORTION_BYTES
