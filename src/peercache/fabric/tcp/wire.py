"""The bytes of the tcp fabric: pure functions, shared by the client and the server side.

All numbers are little-endian. A connection opens with one greeting and one answer:

    greeting   magic "PCtg" · version u16 · bytes that follow u16 ·
               granule u64 · incarnation meant u64 · cluster digest 16
    answer     magic "PCta" · code u32                      0 is accepted, else an index of REASONS

Then any number of requests, which may be sent ahead, each answered in its turn:

    request    magic "PCtr" · count u32 · incarnation meant u64 · total bytes u64 ·
               count × (offset u64 · length u64 · generation u64)
    response   magic "PCts" · code u32; after code 0, for each *portion* of the pages:
               the portion's bytes · one seal of 64 bytes per page

The seal is that of the slot, loaded after the page's last byte (model/seal.py). If the slot does
not hold that generation, holds a shorter page, or one of a space that this client may not read, the
page's bytes and its seal are zeros.

A portion is a run of consecutive pages. Both sides cut the pages by the same function of the
lengths, so nothing on the wire marks the end of a portion. After a refusal the server closes.

Wire version history:
    1  the first.
    2  requests name generations, seals follow the pages, and the greeting has no proof.
    3  seals of 64 bytes, with 64 bits of the page's space.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import attrs
import numpy as np

from peercache.errors import RemoteProtocolError
from peercache.model.runs import U64

TCP_WIRE_VERSION = 3

COUNT_MAX = 4096
"""Pages of one request: 96 KiB of entries, the most that a request can make the server buffer."""
REQUEST_BYTES_MAX = 2**33
"""Page bytes of one request. They are never buffered; it bounds how long one request can last, and
is twice the largest page, so that every page fits into some request."""
PORTION_BYTES_MAX = 4 * 2**20
"""Bytes after which a portion ends, so that a deadline wastes at most this much."""
PORTION_PAGES_MAX = 256
"""Pages after which a portion ends: with its seals it is one `sendmsg` (1024 pieces at most)."""

REASONS = (
    "",
    "malformed",
    "version",
    "cluster",
    "granule",
    "incarnation",
    "bounds",
    "busy",
    "role",
    "revoked",
    "certificate",
    "owner",
)
"""Why the server refuses; the index is the code on the wire, so: append only."""
MALFORMED, VERSION, CLUSTER, GRANULE, INCARNATION, BOUNDS, BUSY = REASONS[1:8]
ROLE, REVOKED, CERTIFICATE, OWNER = REASONS[8:]

OPENING = struct.Struct("<4sHH")
REST = struct.Struct("<QQ16s")
ANSWER = struct.Struct("<4sI")
REQUEST = struct.Struct("<4sIQQ")
ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8"), ("generation", "<u8")])

_GREETING_MAGIC = b"PCtg"
_ANSWER_MAGIC = b"PCta"
_REQUEST_MAGIC = b"PCtr"
_RESPONSE_MAGIC = b"PCts"

PAGES_FOLLOW = ANSWER.pack(_RESPONSE_MAGIC, 0)
"""The first bytes of a response with pages."""

OPENING_BYTES = OPENING.size
GREETING_REST_BYTES = REST.size
ANSWER_BYTES = ANSWER.size
REQUEST_BYTES = REQUEST.size
ENTRY_BYTES = ENTRY.itemsize


@attrs.define(eq=False)
class Refusal(RemoteProtocolError):
    """The message is refused. what: one of REASONS."""


@attrs.frozen
class Greeting:
    """The first message of a client: its cluster, and the incarnation that it reads from.

    cluster: digest of the cluster's name, 16 bytes. It proves nothing: certificates do.
    """

    granule: int
    incarnation: int
    cluster: bytes


def greet(*, cluster: str, granule: int, incarnation: int) -> Greeting:
    """Return the greeting of an honest client for the server of that incarnation."""
    digest = hashlib.blake2b(cluster.encode(), digest_size=16).digest()
    return Greeting(granule, incarnation, digest)


def encode_greeting(greeting: Greeting) -> bytes:
    """Return the first bytes of a connection."""
    opening = OPENING.pack(_GREETING_MAGIC, TCP_WIRE_VERSION, GREETING_REST_BYTES)
    rest = REST.pack(greeting.granule, greeting.incarnation, greeting.cluster)
    return opening + rest


def check_opening(raw: bytes | bytearray) -> None:
    """Check the OPENING_BYTES with which every version begins; raise Refusal."""
    magic, version, follows = OPENING.unpack(raw)
    if magic != _GREETING_MAGIC:
        raise Refusal(MALFORMED)
    if version != TCP_WIRE_VERSION:
        raise Refusal(VERSION)
    if follows != GREETING_REST_BYTES:
        raise Refusal(MALFORMED)


def decode_greeting(raw: bytes | bytearray) -> Greeting:
    """Return the greeting from the GREETING_REST_BYTES after its opening."""
    return Greeting(*REST.unpack(raw))


def encode_answer(reason: str) -> bytes:
    """Return the answer to a greeting; reason "" accepts."""
    return ANSWER.pack(_ANSWER_MAGIC, REASONS.index(reason))


def decode_answer(raw: bytes | bytearray) -> str:
    """Return "" or the reason of a refusal; raise RemoteProtocolError for anything else."""
    return _reason(raw, _ANSWER_MAGIC)


def encode_status(reason: str) -> bytes:
    """Return the beginning of a response; reason "" means that the request is served."""
    return ANSWER.pack(_RESPONSE_MAGIC, REASONS.index(reason))


def decode_status(raw: bytes | bytearray) -> str:
    """Return "" or the reason of a refusal; raise RemoteProtocolError for anything else."""
    return _reason(raw, _RESPONSE_MAGIC)


@attrs.frozen(eq=False)
class PageRequest:
    """One request of a read, encoded.

    first:    index of its first page in the read.
    raw:      its bytes.
    portions: the starts of the portions of its response, and the number of its pages at the end.
    """

    first: int
    raw: bytes
    portions: list[int]


def requests(offsets: U64, lengths: U64, generations: U64, incarnation: int) -> list[PageRequest]:
    """Return the requests for a read of these pages, in order; there must be at least one page."""
    return [
        PageRequest(
            first,
            encode_request(
                offsets[first:last], lengths[first:last], generations[first:last], incarnation
            ),
            portions(lengths[first:last]),
        )
        for first, last in pairwise(cuts(lengths, bytes_max=REQUEST_BYTES_MAX, pages_max=COUNT_MAX))
    ]


def encode_request(offsets: U64, lengths: U64, generations: U64, incarnation: int) -> bytes:
    """Return one request for at most COUNT_MAX pages and REQUEST_BYTES_MAX bytes."""
    assert 0 < len(offsets) <= COUNT_MAX, len(offsets)
    entries = np.empty(len(offsets), ENTRY)
    entries["offset"] = offsets
    entries["length"] = lengths
    entries["generation"] = generations
    total = int(lengths.sum(dtype=np.uint64))
    return REQUEST.pack(_REQUEST_MAGIC, len(offsets), incarnation, total) + entries.tobytes()


def cuts(lengths: U64, *, bytes_max: int, pages_max: int) -> list[int]:
    """Return the starts of consecutive groups of pages, and len(lengths) at the end.

    A group holds as many pages as fit into both limits, and at least one.
    """
    ends = np.cumsum(lengths, dtype=np.uint64)
    found = [0]
    while found[-1] < len(lengths):
        first = found[-1]
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, np.uint64(before + bytes_max), side="right"))
        found.append(min(max(fitting, first + 1), first + pages_max, len(lengths)))
    return found


def portions(lengths: U64) -> list[int]:
    """Return the starts of the portions of one response, and len(lengths) at the end."""
    return cuts(lengths, bytes_max=PORTION_BYTES_MAX, pages_max=PORTION_PAGES_MAX)


def _reason(raw: bytes | bytearray, expected: bytes) -> str:
    magic, code = ANSWER.unpack(raw)
    if magic != expected or code >= len(REASONS):
        raise RemoteProtocolError("an invalid answer of the tcp fabric")
    return REASONS[code]
