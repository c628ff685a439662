"""The chain: from a model and token ids to the addresses of pages.

Version 1 of the addresses. BLAKE3 in three of its modes, so that no hash of one step is a hash of
another step:

    seed    derive_key(context "… seed", model identity, dtype, page size, salts; each framed)
    page    keyed_hash(key = the page before, or the seed; message = the page's token ids)
    layers  derive_key(context "… layers", the page), read on and on: 16 bytes a layer

A page's digest has 32 bytes and identifies the whole prefix that ends with the page. Its first 16
bytes are the page's hash. The key of a layer does not depend on how many layers there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

import attrs
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from peercache.errors import InvalidRequest
from peercache.model.keys import KEY, KEY_BYTES, PageKeys

Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any]
TokenIds: TypeAlias = npt.NDArray[np.uint32]

TOKEN = np.dtype("<u4")
TOKEN_MAX = 2**32 - 1
TOKENS_MAX = 2**27
"""Tokens of one list: half a GiB of token ids. A longer list is a mistake, not a prompt."""


def token_ids(tokens: Tokens) -> TokenIds:
    """Return token ids as (n,) little-endian uint32; an array that is this already is not copied.

    tokens: a list of int, or a one-dimensional numpy array of any integer dtype.

    Raises InvalidRequest for tokens of another kind or shape, negative ones, those above 2**32 - 1,
    and more than 2**27 of them.
    """
    if isinstance(tokens, np.ndarray):
        return _of_array(tokens)
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, array)):
        raise InvalidRequest(
            f"token ids are a list of int or an array, not {type(tokens).__name__}"
        )
    _check_length(len(tokens))
    try:
        # Twice as fast as numpy for a list, and it accepts neither 1.5 nor "1" as a token.
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        raise InvalidRequest(_first_wrong(tokens)) from None
    return np.frombuffer(packed, np.uint32).astype(TOKEN, copy=False)


def _of_array(tokens: npt.NDArray[Any]) -> TokenIds:
    if tokens.ndim != 1:
        raise InvalidRequest(f"token ids have one dimension, not the shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids are integers, not {tokens.dtype}")
    _check_length(len(tokens))
    if tokens.dtype != TOKEN and len(tokens):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > TOKEN_MAX:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"{wrong} is no token id: 0 to {TOKEN_MAX} are")
    ids: TokenIds = np.ascontiguousarray(tokens, TOKEN)
    return ids


def _check_length(count: int) -> None:
    if count > TOKENS_MAX:
        raise InvalidRequest(f"{count} token ids in one list, at most {TOKENS_MAX} are taken")


def _first_wrong(tokens: Sequence[Any]) -> str:
    place = next(place for place, token in enumerate(tokens) if not _is_token(token))
    return f"token {place} is {tokens[place]!r:.40}: a token id is an int from 0 to {TOKEN_MAX}"


def _is_token(token: Any) -> bool:
    try:
        return bool(array("I", [token]))
    except (OverflowError, TypeError):
        return False


def is_whole_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or numpy; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


DIGEST_BYTES = 32

PAGE_TOKENS_MAX = 2**20
LAYERS_MAX = 2**16

Digests: TypeAlias = npt.NDArray[np.uint8]
"""(pages, 32) uint8: the digest of each page of a prefix."""

SEED_CONTEXT = "peercache content addresses, version 1: seed of a chain"
LAYERS_CONTEXT = "peercache content addresses, version 1: layers of a page"

DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float4_e2m1fn_x2", "int8", "uint8", "int4", "uint4"),
    }
)
"""The element types of a KV cache, by their names in numpy and torch."""

OTHER_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4_e2m1": "float4_e2m1fn_x2",
}
"""Their names on the command lines of engines."""


def dtype_name(dtype: object) -> str:
    """Return the canonical name of a dtype: "bfloat16" for `torch.bfloat16`, "bf16" and "bfloat16".

    dtype: a text, or a dtype of numpy or torch.

    Raises InvalidRequest for anything that is not a dtype of a KV cache.
    """
    name = np.dtype(dtype).name if isinstance(dtype, (np.dtype, type)) else str(dtype)
    name = name.removeprefix("torch.").lower()
    name = OTHER_NAMES.get(name, name)
    if name not in DTYPES:
        raise InvalidRequest(f"{str(dtype)!r:.60} is no dtype of a KV cache: {sorted(DTYPES)} are")
    return name


def _identity(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"a model's identity is a text, not {value!r:.60}")
    return value


def _page_tokens(value: object) -> int:
    if not is_whole_number(value) or not 1 <= value <= PAGE_TOKENS_MAX:
        raise InvalidRequest(f"a page has 1 to {PAGE_TOKENS_MAX} tokens, not {value!r:.40}")
    return int(value)


def _salts(value: object) -> Mapping[str, str]:
    """Return a copy: the address of a chain must not change with the caller's dictionary."""
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for salt in value.items() for part in salt
    ):
        raise InvalidRequest(f"salts are texts by name, not {value!r:.60}")
    return MappingProxyType(dict(value))


@attrs.frozen
class Chain:
    """The addresses of one model's pages.

    model:       the model that computed the KV cache: its name with the identity of its weights.
                 Models with the same identity share pages.
    dtype:       the type of the elements of the KV cache, by any name that `dtype_name` knows.
    page_tokens: tokens in a page, 1 to 2**20.
    salts:       what else separates pages: {"tenant": …, "lora": …}. An empty salt counts, too.

    Raises InvalidRequest for a field that cannot be used.
    """

    model: str = attrs.field(converter=_identity)
    dtype: str = attrs.field(converter=dtype_name)
    page_tokens: int = attrs.field(converter=_page_tokens)
    salts: Mapping[str, str] = attrs.field(converter=_salts, factory=dict, hash=False)
    seed: bytes = attrs.field(init=False, repr=False)

    @seed.default
    def _seed(self) -> bytes:
        # In the order of names, each part after its length: different fields never give the same
        # text.
        named = [part for name in sorted(self.salts) for part in (name, self.salts[name])]
        parts = [self.model, self.dtype, str(self.page_tokens), *named]
        hasher = blake3(derive_key_context=SEED_CONTEXT)
        for raw in (part.encode(errors="surrogatepass") for part in parts):
            hasher.update(len(raw).to_bytes(8, "little") + raw)
        return hasher.digest()

    def salted(self, salts: Mapping[str, str]) -> Chain:
        """Return the chain with these additional salts; a salt of the same name is replaced."""
        return attrs.evolve(self, salts={**self.salts, **_salts(salts)})

    def digests(self, tokens: Tokens, parent: bytes | None = None) -> Digests:
        """Return the digest of each whole page of a prefix, (pages, 32) uint8.

        tokens: those after the parent; tokens after the last whole page are ignored.
        parent: the digest of the page before, 32 bytes; None: `tokens` begin the prompt.

        Raises InvalidRequest for invalid tokens, or a parent that is not a digest.
        """
        digest = self.seed if parent is None else bytes(parent)
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequest(f"a parent is a digest of {DIGEST_BYTES} bytes, not {len(digest)}")
        ids = token_ids(tokens)
        size = self.page_tokens * ids.itemsize
        pages = len(ids) // self.page_tokens
        raw = ids.tobytes()
        found = []
        for begin in range(0, pages * size, size):
            digest = blake3(raw[begin : begin + size], key=digest).digest()
            found.append(digest)
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)

    def keys(self, tokens: Tokens, parent: bytes | None = None) -> PageKeys:
        """Return the page key of each whole page of a prefix, (pages,) V16; as `digests`."""
        return page_keys_of(self.digests(tokens, parent))


def page_keys_of(digests: Digests) -> PageKeys:
    """Return the page keys of digests, (pages,) V16: the first half of each.

    digests: (pages, 32) uint8, as `Chain.digests` returns them.
    """
    return np.ascontiguousarray(digests[:, :KEY_BYTES]).view(KEY).reshape(-1)


def layer_keys_of(digests: Digests, layers: int) -> PageKeys:
    """Return the page key of each layer of each page, (pages, layers) V16.

    For stores of one layer at a time. No key of a layer is the key of a page.

    digests: (pages, 32) uint8. layers: 1 to 65,536.

    Raises InvalidRequest for another number of layers.
    """
    if not 1 <= layers <= LAYERS_MAX:
        raise InvalidRequest(f"a model has 1 to {LAYERS_MAX} layers, not {layers}")
    length = layers * KEY_BYTES
    read = (blake3(digest.tobytes(), derive_key_context=LAYERS_CONTEXT) for digest in digests)
    joined = b"".join(hasher.digest(length=length) for hasher in read)
    return np.frombuffer(joined, KEY).reshape(-1, layers)


def in_namespace(keys: PageKeys, namespace_digest: bytes) -> PageKeys:
    """Return the keys within a namespace, in the given shape.

    The same as `Client` computes from the hexadecimal text of the keys; it uses arrays of keys
    unchanged.

    keys: (n,) V16, or of any other shape.
    namespace_digest: the 16 bytes of `Namespace.digest()`.
    """
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    mixed = words ^ np.frombuffer(namespace_digest, np.uint64)
    return mixed.view(KEY).reshape(keys.shape)
