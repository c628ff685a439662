"""Page keys: the names of pages inside PeerCache.

A page key is 16 bytes: the first 16 of SGLang's SHA-256 page hash XOR a 16-byte BLAKE2b of the
namespace. A batch is one (n,) array of dtype V16, and travels as one byte string.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
KEY = np.dtype("V16")

PageKeys: TypeAlias = npt.NDArray[np.void]
Key: TypeAlias = str | bytes

_DIGEST = re.compile(rb"[0-9a-f]{64}", re.ASCII)


@attrs.frozen
class Namespace:
    """What separates pages that must never be mistaken for each other.

    name: for people: model, revision, tenant.
    geometry:    what the bytes of a page mean: dtype, layout, page size, layers, heads … One name
                 with two geometries is refused by every node that sees both.
    coordinates: which part of a page this process holds: tensor, pipeline, context-parallel rank.
    """

    name: str = "default"
    geometry: str = ""
    coordinates: str = ""

    @classmethod
    def of(
        cls, name: str, geometry: Mapping[str, object], coordinates: Mapping[str, object]
    ) -> Namespace:
        """Build from named facts, in an order of their names."""
        return cls(name, _facts(geometry), _facts(coordinates))

    def digest(self) -> bytes:
        """Return the 16 bytes that every page key of this namespace is XORed with."""
        parts = (self.name, self.geometry, self.coordinates)
        framed = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
        return hashlib.blake2b(framed, digest_size=KEY_BYTES, person=b"peercache.space").digest()

    def tag(self) -> int:
        """Return the 8 bytes that a pool keeps beside each page, so that `clear` finds them."""
        return int.from_bytes(self.digest()[:8], "little")


def _facts(facts: Mapping[str, object]) -> str:
    return ",".join(f"{name}={facts[name]}" for name in sorted(facts))


def page_keys(keys: Sequence[Key], namespace_digest: bytes) -> PageKeys:
    """Return the page keys of a batch, (n,) V16.

    A key of exactly 64 of [0-9a-f] is a digest already; any other is hashed whole. `str` and its
    UTF-8 bytes are the same key.
    """
    if not keys:
        return np.empty(0, KEY)
    raw = _digests(keys)
    mask = np.frombuffer(namespace_digest, np.uint64)
    return (raw.reshape(-1, 2) ^ mask).reshape(-1).view(KEY)


def _digests(keys: Sequence[Key]) -> npt.NDArray[np.uint64]:
    """Return the first 16 bytes of each key's digest, (2 n,) uint64."""
    if set(map(type, keys)) == {str} and set(map(len, keys)) == {64}:
        joined = "".join(keys).encode(errors="surrogatepass")  # type: ignore[arg-type]
        # One pass over the batch in C; translate deletes the digits, so nothing may be left over.
        if len(joined) == 64 * len(keys) and not joined.translate(None, b"0123456789abcdef"):
            whole = np.frombuffer(bytes.fromhex(joined.decode()), np.uint64)
            return np.ascontiguousarray(whole.reshape(-1, 4)[:, :2]).reshape(-1)
    return np.frombuffer(b"".join(_digest(key) for key in keys), np.uint64)


def _digest(key: Key) -> bytes:
    raw = key.encode(errors="surrogatepass") if isinstance(key, str) else bytes(key)
    if _DIGEST.fullmatch(raw):
        return bytes.fromhex(raw[: 2 * KEY_BYTES].decode())
    return hashlib.sha256(raw).digest()[:KEY_BYTES]


def from_bytes(blob: bytes) -> PageKeys:
    """Return the batch of page keys that came as one byte string."""
    return np.frombuffer(blob, KEY)


def split_keys(packed: bytes) -> list[bytes]:
    """Return the keys of a packed batch."""
    assert len(packed) % KEY_BYTES == 0, f"{len(packed)} bytes of keys"
    split: list[bytes] = np.frombuffer(packed, KEY).tolist()
    return split
