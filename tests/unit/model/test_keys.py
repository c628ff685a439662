"""Page keys: SGLang's hashes under a namespace, sixteen bytes each."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peercache.model.keys import (
    KEY,
    KEY_BYTES,
    Key,
    Namespace,
    from_bytes,
    page_keys,
    page_keys_of,
    parts_of,
    space_of,
)

NAMESPACE = Namespace("model", "dtype=bf16", "tp=0")
HEX = hashlib.sha256(b"page").hexdigest()

any_key = st.one_of(
    st.text(max_size=80),
    st.binary(max_size=80),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.binary(min_size=32, max_size=32).map(lambda digest: digest.hex().encode()),
)


def slow_page_key(key: Key, namespace: Namespace) -> bytes:
    """Say the definition once more, a byte at a time."""
    raw = key.encode(errors="surrogatepass") if isinstance(key, str) else key
    is_digest = len(raw) == 64 and all(byte in b"0123456789abcdef" for byte in raw)
    digest = bytes.fromhex(raw.decode())[:16] if is_digest else hashlib.sha256(raw).digest()[:16]
    return bytes(a ^ b for a, b in zip(digest, namespace.digest(), strict=True))


@given(st.lists(any_key, max_size=20))
def test_batch_is_the_definition_page_by_page(keys: list[Key]) -> None:
    """The fast path for hex digests and the general one give what the slow oracle gives."""
    expected = b"".join(slow_page_key(key, NAMESPACE) for key in keys)

    found = page_keys(keys, NAMESPACE.digest())

    assert found.dtype == KEY
    assert found.tobytes() == expected


@given(st.text(max_size=80))
def test_text_and_its_bytes_are_the_same_key(key: str) -> None:
    """An engine that hands out str finds what one that hands out bytes has stored."""
    try:
        raw = key.encode()
    except UnicodeEncodeError:
        raw = key.encode(errors="surrogatepass")
    both = page_keys([key, raw], NAMESPACE.digest())

    assert both[0] == both[1]


@pytest.mark.parametrize(
    "other",
    [
        HEX.upper(),
        HEX[:-1],
        HEX + "0",
        HEX[:-1] + "\n",
        " " + HEX[1:],
        HEX[:-1] + "g",
        "\u0660" * 64,
    ],
)
def test_what_is_not_exactly_a_digest_is_hashed_whole(other: str) -> None:
    """A key that merely looks like a digest shares no page with the digest it resembles."""
    keys = page_keys([HEX, other], NAMESPACE.digest())

    assert keys[0] != keys[1]
    assert keys[1].tobytes() == slow_page_key(other, NAMESPACE)


def test_each_character_counts_at_each_place() -> None:
    """Only [0-9a-f] makes a digest: any other character anywhere makes a name, hashed whole."""
    digest = hashlib.sha256(b"page").hexdigest()
    for place in range(64):
        for code in range(128):
            other = digest[:place] + chr(code) + digest[place + 1 :]
            # Alone: another one that is no digest would take the whole batch off the fast path.
            key = page_keys([other], bytes(16)).tobytes()
            whole = hashlib.sha256(other.encode()).digest()[:16]
            assert key == (bytes.fromhex(other[:32]) if chr(code) in "0123456789abcdef" else whole)


def test_one_odd_key_does_not_change_its_neighbours() -> None:
    """A batch that leaves the fast path names the same pages as the fast path."""
    hashes = [hashlib.sha256(bytes([i])).hexdigest() for i in range(8)]

    alone = page_keys(hashes, NAMESPACE.digest())
    mixed = page_keys([*hashes, "odd"], NAMESPACE.digest())

    assert np.array_equal(alone, mixed[:8])


def test_namespaces_share_no_key() -> None:
    """Name, geometry and coordinates each separate: two ranks of one model share no page."""
    spaces = [
        NAMESPACE,
        Namespace("model2", "dtype=bf16", "tp=0"),
        Namespace("model", "dtype=fp8", "tp=0"),
        Namespace("model", "dtype=bf16", "tp=1"),
        Namespace("model", "dtype=bf16", "tp=0", "commit=1"),
        Namespace("model", "dtype=bf16", "tp=0", "commit=2"),
        Namespace("modeld", "type=bf16", "tp=0"),  # the same letters, cut elsewhere
    ]

    keys = {page_keys([HEX], space.digest()).tobytes() for space in spaces}
    tags = {space.tag() for space in spaces}

    assert len(keys) == len(tags) == len(spaces)


PARTS = st.tuples(*(st.text("a,b", max_size=3) for _ in range(3)))


@given(one=PARTS, other=PARTS)
@example(one=("a,b", "c", ""), other=("a", "b,c", ""))
def test_parts_of_a_namespace_end_where_they_end(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    """No sign in a name, a comma for example, can move what stands after it."""
    spaces = Namespace(*one), Namespace(*other)

    assert (spaces[0].digest() == spaces[1].digest()) == (one == other)


def test_namespace_does_not_depend_on_the_order_of_facts() -> None:
    """Two processes that list the same facts in another order mean the same namespace."""
    one = Namespace.of("m", {"a": 1, "b": 2}, {"tp": 0, "pp": 1})
    two = Namespace.of("m", {"b": 2, "a": 1}, {"pp": 1, "tp": 0})

    assert one == two
    assert one.digest() == two.digest()


def test_keys_travel_as_one_byte_string() -> None:
    """Sixteen bytes a key, and back."""
    keys = page_keys([HEX, "x", b"y"], NAMESPACE.digest())

    assert len(keys.tobytes()) == 3 * KEY_BYTES
    assert np.array_equal(from_bytes(keys.tobytes()), keys)
    assert len(page_keys([], NAMESPACE.digest())) == 0


FACTS = st.dictionaries(st.text("a%2C=,1", max_size=4), st.text("a%2C=,1", max_size=6), max_size=3)


@given(one=FACTS, other=FACTS)
@example(one={"a": "1,b=2"}, other={"a": "1", "b": "2"})
@example(one={"a": "1%2Cb=2"}, other={"a": "1,b=2"})
@example(one={"a=1": "2"}, other={"a": "1=2"})
def test_other_facts_make_another_namespace(one: dict[str, str], other: dict[str, str]) -> None:
    same = Namespace.of("m", one, {}).digest() == Namespace.of("m", other, {}).digest()

    assert same == (one == other)
    assert same == (Namespace.of("m", {}, one).tag() == Namespace.of("m", {}, other).tag())


def test_tags_of_one_name_share_their_space_tag_and_no_other() -> None:
    one, other = Namespace("model", "dtype=bf16", "tp=0"), Namespace("model", "dtype=bf16", "tp=1")

    assert space_of(one.tag()) == space_of(other.tag()) == one.space_tag()
    assert parts_of(one.tag())[1] != parts_of(other.tag())[1]
    assert Namespace("model2", "dtype=bf16", "tp=0").space_tag() != one.space_tag()
    assert 0 <= one.tag() < 1 << 96


def test_one_batch_in_several_namespaces() -> None:
    """Each row is what the namespace's own batch is."""
    keys = ["0" * 64, "a", "ab" * 32]
    digests = [Namespace("m", pool).digest() for pool in ("kv", "swa")]

    rows = page_keys_of(keys, digests)

    assert [row.tolist() for row in rows] == [page_keys(keys, d).tolist() for d in digests]
    assert page_keys_of([], digests).shape == (2, 0)
    assert page_keys_of(keys, []).shape == (0, 3)
