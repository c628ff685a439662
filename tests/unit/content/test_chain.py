"""Content addresses: what is one address, what is another, and what has none."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.content.chain import (
    DTYPES,
    OTHER_NAMES,
    Chain,
    dtype_name,
    in_namespace,
    layer_keys_of,
    page_keys_of,
)
from peercache.errors import InvalidRequest
from peercache.model.keys import Namespace, page_keys
from tests.examples import examples

CHAIN = Chain("llama@abc", "bfloat16", 4, {"tenant": "a"})

# Recorded when version 1 of the addresses was made. Other hosts and other versions of PeerCache
# have pages under these: a change of one of them is a new version of the addresses.
FROZEN_SEED = "2fe7badee19cdabb1fa21fa2e7e29afd2bae990fb5380d0cc2a10942328c6376"
FROZEN_DIGESTS = [
    "d76c2bc72d59ba2402e65fe81f2a7c35ced007de6bd885f9e1f7c08586c9e03d",
    "381382e3786b55167ec4e3c8d4d5f869db65f7fea6cad7b9e406bb4407d67c38",
]
FROZEN_LAYERS = ["b58ddacaf86fc5a52fd593c3d42e279e", "a28cd86154261900416ffbd5a626cb9d"]

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXTS = st.text(max_size=5)
SALTS = st.dictionaries(TEXTS, TEXTS, max_size=3)
CHAINS = st.builds(
    Chain,
    st.text(min_size=1, max_size=5),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 8),
    SALTS,
)


def test_addresses_are_those_of_version_1() -> None:
    """A host of another version finds the pages of this one."""
    digests = CHAIN.digests([1, 2, 3, 4, 0, 2**32 - 1, 7, 8, 9])

    assert CHAIN.seed.hex() == FROZEN_SEED
    assert [digest.tobytes().hex() for digest in digests] == FROZEN_DIGESTS
    layers = layer_keys_of(digests[:1], 2)
    assert [key.hex() for key in layers[0].tolist()] == FROZEN_LAYERS


def test_addresses_follow_from_the_words_of_the_module() -> None:
    """What `chain` documents of its three modes is enough to compute an address elsewhere."""
    seed = blake3(derive_key_context="peercache content addresses, version 1: seed of a chain")
    for part in (b"llama@abc", b"bfloat16", b"4", b"tenant", b"a"):
        seed.update(len(part).to_bytes(8, "little") + part)
    page = blake3(np.array([1, 2, 3, 4], "<u4").tobytes(), key=seed.digest()).digest()

    assert CHAIN.digests([1, 2, 3, 4]).tobytes() == page


@pytest.mark.slow
def test_addresses_are_the_same_in_every_process() -> None:
    """Python's hash seed changes no address, nor does the order in which salts were given."""
    code = (
        "from peercache.content.chain import Chain\n"
        "salts = {name: 'x' for name in {'tenant', 'lora', 'a', 'b'}}\n"
        "print(Chain('m', 'bf16', 2, salts).digests([1, 2, 3, 4]).tobytes().hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }

    salts = dict.fromkeys(("b", "a", "lora", "tenant"), "x")
    expected = Chain("m", "bf16", 2, salts).digests([1, 2, 3, 4]).tobytes().hex()
    assert found == {expected.encode() + b"\n"}


@settings(max_examples=examples(60))
@given(CHAINS, TOKENS, st.integers(0, 40))
def test_a_prefix_has_the_addresses_of_a_prefix(chain: Chain, tokens: list[int], cut: int) -> None:
    """The pages of a shorter prompt are the first pages of a longer one."""
    whole = chain.digests(tokens)
    part = chain.digests(tokens[:cut])

    assert len(whole) == len(tokens) // chain.page_tokens
    assert (whole[: len(part)] == part).all()


@settings(max_examples=examples(60))
@given(CHAINS, TOKENS, st.integers(0, 40))
def test_a_chain_goes_on_from_a_parent(chain: Chain, tokens: list[int], pages: int) -> None:
    """A growing prompt is hashed from its last page on, and gets the addresses of the whole."""
    whole = chain.digests(tokens)
    pages = min(pages, len(whole))
    parent = whole[pages - 1].tobytes() if pages else None

    assert (chain.digests(tokens[pages * chain.page_tokens :], parent) == whole[pages:]).all()


@settings(max_examples=examples(100))
@given(CHAINS, CHAINS, TOKENS, TOKENS)
def test_two_framings_share_no_address(
    one: Chain, other: Chain, tokens: list[int], others: list[int]
) -> None:
    """Another model, dtype, page size, salt or prefix is another address."""
    facts = [
        (chain.model, chain.dtype, chain.page_tokens, dict(chain.salts)) for chain in (one, other)
    ]
    first = [tuple(tokens[: (i + 1) * one.page_tokens]) for i in range(len(one.digests(tokens)))]
    second = [
        tuple(others[: (i + 1) * other.page_tokens]) for i in range(len(other.digests(others)))
    ]
    keys, other_keys = one.keys(tokens).tolist(), other.keys(others).tolist()
    for prefix, key in zip(first, keys, strict=True):
        for other_prefix, other_key in zip(second, other_keys, strict=True):
            is_same = facts[0] == facts[1] and prefix == other_prefix
            assert (key == other_key) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Chain("ab", "int8", 4), Chain("a", "int8", 4)),
        (Chain("a", "int8", 4, {"b": "c"}), Chain("a", "int8", 4, {"bc": ""})),
        (Chain("a", "int8", 4, {"b": "c", "d": "e"}), Chain("a", "int8", 4, {"b": "cde"})),
        (Chain("a", "int8", 4, {"tenant": ""}), Chain("a", "int8", 4)),
        (Chain("a", "int8", 1), Chain("a", "int8", 2)),
        (Chain("a", "int8", 4), Chain("a", "uint8", 4)),
    ],
    ids=["model", "border of a salt", "two salts", "empty salt", "page size", "dtype"],
)
def test_near_chains_share_no_address(one: Chain, other: Chain) -> None:
    """Parts of a seed cannot run into each other."""
    assert one.seed != other.seed
    assert not set(one.keys([0] * 8).tolist()) & set(other.keys([0] * 8).tolist())


def test_salts_replace_and_add() -> None:
    """A request's LoRA joins the chain's tenant."""
    salted = CHAIN.salted({"lora": "x"})

    assert salted.seed == Chain("llama@abc", "bfloat16", 4, {"lora": "x", "tenant": "a"}).seed
    assert CHAIN.salted({"tenant": "b"}).salts == {"tenant": "b"}
    assert CHAIN.salts == {"tenant": "a"}


def test_a_chain_keeps_its_salts() -> None:
    """The caller's dictionary may change, the chain's address does not."""
    salts = {"tenant": "a"}
    chain = Chain("m", "int8", 4, salts)
    salts["tenant"] = "b"

    assert chain.salts == {"tenant": "a"}
    assert chain.salted({}).seed == chain.seed


@settings(max_examples=examples(40))
@given(TOKENS.filter(lambda tokens: max(tokens, default=0) < 2**15), st.data())
def test_every_form_of_tokens_is_one_prefix(tokens: list[int], data: st.DataObject) -> None:
    """Lists, tuples and arrays of every integer type, strided ones too, have one address."""
    dtype = data.draw(st.sampled_from(["<u4", ">u4", "i2", "u2", "i4", "<i8", ">i8", "u8"]))
    expected = CHAIN.digests(tokens)
    array = np.array(tokens, dtype)
    strided = np.repeat(array, 2)[::2]
    frozen = array.copy()
    frozen.flags.writeable = False

    for form in (tuple(tokens), array, strided, frozen):
        assert (CHAIN.digests(form) == expected).all()


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([1, -1], "token 1 is -1"),
        ([1, 2, 2**32], "token 2 is 4294967296"),
        ([1.0], "token 0 is 1.0"),
        (["1"], "token 0 is '1'"),
        ([None], "token 0 is None"),
        ([[1]], r"token 0 is \[1\]"),
        ("1234", "not str"),
        (b"1234", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
        ({1, 2}, "not set"),
        (np.array([[1]]), r"one dimension, not the shape \(1, 1\)"),
        (np.array(1), r"one dimension, not the shape \(\)"),
        (np.array([1.0]), "integers, not float64"),
        (np.array([True]), "integers, not bool"),
        (np.array(["a"]), "integers, not <U1"),
        (np.array([-5, 1]), "-5 is no token id"),
        (np.array([1, 2**32]), "4294967296 is no token id"),
    ],
)
def test_what_are_no_tokens_is_said(tokens: Any, why: str) -> None:
    """The caller reads which token is wrong, and nothing is hashed."""
    with pytest.raises(InvalidRequest, match=why):
        CHAIN.digests(tokens)


def test_an_absurd_list_is_refused_before_it_is_read() -> None:
    """A list as long as a model's whole training takes no memory and no time here."""
    with pytest.raises(InvalidRequest, match="at most 134217728"):
        CHAIN.digests(range(2**40))
    with pytest.raises(InvalidRequest, match="at most 134217728"):
        CHAIN.digests(np.broadcast_to(np.uint32(1), (2**31,)))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": ""}, "model's identity"),
        ({"model": 7}, "model's identity"),
        ({"dtype": "bfloat17"}, "'bfloat17' is no dtype"),
        ({"dtype": None}, "no dtype"),
        ({"dtype": "object"}, "no dtype"),
        ({"page_tokens": 0}, "1 to 1048576 tokens, not 0"),
        ({"page_tokens": 2**21}, "1 to 1048576"),
        ({"page_tokens": True}, "not True"),
        ({"page_tokens": 1.5}, "not 1.5"),
        ({"salts": {"tenant": 7}}, "salts are texts"),
        ({"salts": "abc"}, "salts are texts"),
    ],
)
def test_what_is_no_chain_is_said(fields: dict[str, Any], why: str) -> None:
    """A wrong identity would be a wrong page: each field is checked."""
    with pytest.raises(InvalidRequest, match=why):
        Chain(**{"model": "m", "dtype": "int8", "page_tokens": 4, **fields})


@pytest.mark.parametrize("parent", [b"", b"short", bytes(33)])
def test_a_parent_that_is_invalid_is_said(parent: bytes) -> None:
    """The 16 bytes of a page key do not go on: all 32 of the digest do."""
    with pytest.raises(InvalidRequest, match="digest of 32 bytes"):
        CHAIN.digests([1, 2, 3, 4], parent)


def test_dtypes_have_one_name() -> None:
    """What torch, numpy and command lines call a dtype is one dtype."""

    class Torch:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert {dtype_name(name) for name in (Torch(), "bf16", "bfloat16", "BFloat16")} == {"bfloat16"}
    assert {dtype_name(n) for n in (np.float16, np.dtype("f2"), "half", "fp16")} == {"float16"}
    assert set(OTHER_NAMES.values()) <= DTYPES


def test_layers_have_keys_of_their_own() -> None:
    """A layer's key is no page's, and the number of layers changes none."""
    digests = CHAIN.digests(range(16))
    few, many = layer_keys_of(digests, 3), layer_keys_of(digests, 40)

    assert few.shape == (4, 3)
    assert many[:, :3].tolist() == few.tolist()
    pages = page_keys_of(digests).tolist()
    assert len({*pages, *many.reshape(-1).tolist()}) == 4 + 4 * 40
    for layers in (0, -1, 2**16 + 1):
        with pytest.raises(InvalidRequest, match="1 to 65536 layers"):
            layer_keys_of(digests, layers)


def test_nothing_has_no_address() -> None:
    """A prompt shorter than a page has none, and what is left over counts for nothing."""
    assert CHAIN.digests([]).shape == (0, 32)
    assert CHAIN.keys([1, 2, 3]).shape == (0,)
    assert layer_keys_of(CHAIN.digests([]), 3).shape == (0, 3)
    assert (CHAIN.digests([1, 2, 3, 4, 5]) == CHAIN.digests([1, 2, 3, 4])).all()


def test_a_namespace_has_the_keys_that_the_client_makes_of_the_text() -> None:
    """`peercache get HEX` finds the page that a connector stored."""
    digest = Namespace("tenant").digest()
    digests = CHAIN.digests(range(8))
    texts = [raw.tobytes().hex() for raw in digests]

    mixed = in_namespace(page_keys_of(digests), digest)

    assert mixed.tolist() == page_keys(texts, digest).tolist()
    layers = layer_keys_of(digests, 3)
    assert in_namespace(in_namespace(layers, digest), digest).tolist() == layers.tolist()
