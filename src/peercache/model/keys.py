"""Page keys: the names of pages inside PeerCache.

A page key is 16 bytes: the first 16 of SGLang's SHA-256 page hash XOR a 16-byte BLAKE2b of the
namespace. A batch is one (n,) array of dtype V16, and travels as one byte string.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function

KEY_BYTES = 16
KEY = np.dtype("V16")

DEFAULT_NAME = "default"
"""The default namespace of a client."""

PageKeys: TypeAlias = npt.NDArray[np.void]
Key: TypeAlias = str | bytes

Tag: TypeAlias = int
"""The 96-bit tag of a namespace: the low 64 bits depend on its name and are its space tag; the
other 32 distinguish geometries, ranks and weights of the name."""

SPACE_TAG_BYTES = 8
TAG_BYTES = 12
TAG = np.dtype([("space", "<u8"), ("variant", "<u4")])
Tags: TypeAlias = npt.NDArray[np.void]
"""A batch of tags, (n,) TAG."""

_SPACE_BITS: int = 2 ** (8 * SPACE_TAG_BYTES) - 1

COPIES: Tag = 2 ** (8 * TAG_BYTES) - 1
"""In place of a tag in a removal: all pages that came from another node, handed over or mirrored.
Such pages only have their space tag; pages that clients have set have the whole tag."""

_HEX_BYTES = 64
_DIGEST = re.compile(rb"[0-9a-f]{64}", re.ASCII)


@attrs.frozen
class Namespace:
    """What separates pages that must never be mistaken for each other.

    name:        a name for operators, to which rights are given: a model, a tenant.
    geometry:    what determines the bytes of a page: dtype, layout, page size, layers, heads …
                 Several may share one name; they share no page.
    coordinates: the part of a page that this process holds: tensor, pipeline, context-parallel
                 rank.
    weights:     the identity of the weights that computed the bytes. Two may share one name, while
                 a new version replaces the old one; they share no page.
    """

    name: str = DEFAULT_NAME
    geometry: str = ""
    coordinates: str = ""
    weights: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        geometry: Mapping[str, object],
        coordinates: Mapping[str, object],
        weights: Mapping[str, object] = MappingProxyType({}),
    ) -> Namespace:
        """Build from named facts; their order does not matter.

        geometry, coordinates, weights: values by name; their texts (`str`) count.
        """
        return cls(name, _facts(geometry), _facts(coordinates), _facts(weights))

    def digest(self) -> bytes:
        """Return the 16 bytes with which every page key of this namespace is XORed."""
        # Missing weights are left out: keys without weights are those of version 0.1.
        parts = [self.name, self.geometry, self.coordinates, *filter(None, [self.weights])]
        framed = b"".join(len(raw).to_bytes(4, "little") + raw for raw in map(_encoded, parts))
        return hashlib.blake2b(framed, digest_size=KEY_BYTES, person=b"peercache.space").digest()

    def space_tag(self) -> int:
        """Return 64 bits that depend only on the name: rights to read and to clear are by name.

        A page's seal carries them, so that a reader never takes the page of another name. With
        fewer bits, a tenant could search for a name that has another tenant's tag.
        """
        hashed = hashlib.blake2b(
            _encoded(self.name), digest_size=SPACE_TAG_BYTES, person=b"peercache.name"
        )
        return int.from_bytes(hashed.digest(), "little")

    def tag(self) -> Tag:
        """Return the bits that a pool stores with each page, so that `clear` finds it.

        Two geometries may have the same 32 bits above the space tag: a clear of one then drops the
        pages of both, which have the same name and owner.
        """
        variant = self.digest()[: TAG_BYTES - SPACE_TAG_BYTES]
        return tag_of(self.space_tag(), int.from_bytes(variant, "little"))


def covers(wanted: Tag, tag: Tag) -> bool:
    """Return whether a removal from `wanted` applies to pages with this tag.

    wanted: a tag, or a space tag: then every geometry, rank and weights of that name; or COPIES.
    tag:    that of a page; a copy, which only has its space tag, may be of any geometry.
    """
    space = space_of(tag)
    is_copy = tag == space
    return wanted in (tag, space) or (is_copy and (space_of(wanted) == tag or wanted == COPIES))


def space_of(tag: Tag) -> int:
    """Return the space tag in a namespace's tag, which rights and seals use.

    A page with the right key is a hit for every client of its space: the key covers the rest.
    """
    return tag & _SPACE_BITS


def parts_of(tag: Tag) -> tuple[int, int]:
    """Return the space tag in a namespace's tag, and the bits above it: an item of TAG."""
    return space_of(tag), tag >> 8 * SPACE_TAG_BYTES


def tag_of(space: int, variant: int) -> Tag:
    """Return the tag that has these parts."""
    return variant << 8 * SPACE_TAG_BYTES | space


def packed_tag(tag: Tag) -> bytes:
    """Return a tag as messages carry it: TAG_BYTES, little-endian."""
    return tag.to_bytes(TAG_BYTES, "little")


def tags_of(tags: Sequence[Tag]) -> Tags:
    """Return a batch of tags, (n,) TAG."""
    return np.array(list(map(parts_of, tags)), TAG)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _facts(facts: Mapping[str, object]) -> str:
    """Return facts as readable, unique text: `{"a": "1,b=2"}` is `a=1%2Cb=2`."""
    return ",".join(f"{_quoted(name)}={_quoted(facts[name])}" for name in sorted(facts))


def _quoted(value: object) -> str:
    return str(value).replace("%", "%25").replace(",", "%2C").replace("=", "%3D")


def page_keys(keys: Sequence[Key], namespace_digest: bytes) -> PageKeys:
    """Return the page keys of a batch, (n,) V16.

    namespace_digest: the 16 bytes of `Namespace.digest()`.

    A key of exactly 64 of [0-9a-f] is a digest already; any other key is hashed. `str` and its
    UTF-8 bytes are the same key.
    """
    return _page_keys(keys, namespace_digest)


def page_keys_of(keys: Sequence[Key], namespace_digests: Sequence[bytes]) -> PageKeys:
    """Return the page keys of a batch in several namespaces, (namespaces, n) V16."""
    named = _page_keys(keys, b"".join(namespace_digests))
    return named.reshape(len(namespace_digests), len(keys))


def _page_keys(keys: Sequence[Key], masks: bytes) -> PageKeys:
    """Return the page keys of a batch under each mask, one mask after the other."""
    spaces = len(masks) // KEY_BYTES
    named: PageKeys = np.empty(spaces * len(keys), KEY)
    digits = _digits(keys)
    if digits and _of_hex()(
        digits, len(keys), masks, spaces, ctypes.addressof(Begin.from_buffer(named))
    ):
        return named
    digests = np.frombuffer(b"".join(map(_digest, keys)), np.uint64).reshape(1, -1, 2)
    mixed = digests ^ np.frombuffer(masks, np.uint64).reshape(-1, 1, 2)
    return mixed.reshape(-1).view(KEY)


def _digits(keys: Sequence[Key]) -> bytes:
    """Return the text of the batch if each key has the length of a digest, else b""."""
    try:
        joined = "".join(keys)  # type: ignore[arg-type]
    except TypeError:
        return b""  # Some are bytes.
    if set(map(len, keys)) != {_HEX_BYTES} or not joined.isascii():
        return b""
    return joined.encode()


@functools.cache
def _of_hex() -> Callable[..., int]:
    """Return the compiled function, which is loaded with the first batch."""
    compiled: Callable[..., int] = function(
        "peercache_keys_of_hex",
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        keeps_gil=True,
    )
    return compiled


def _digest(key: Key) -> bytes:
    raw = key.encode(errors="surrogatepass") if isinstance(key, str) else bytes(key)
    if _DIGEST.fullmatch(raw):
        return bytes.fromhex(raw[: 2 * KEY_BYTES].decode())
    return hashlib.sha256(raw).digest()[:KEY_BYTES]


def from_bytes(blob: bytes) -> PageKeys:
    """Return the batch of page keys in one byte string."""
    return np.frombuffer(blob, KEY)


def split_keys(packed: bytes) -> list[bytes]:
    """Return the keys of a packed batch."""
    assert len(packed) % KEY_BYTES == 0, f"{len(packed)} bytes of keys"
    split: list[bytes] = np.frombuffer(packed, KEY).tolist()
    return split
