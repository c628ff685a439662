"""Garbage of every kind, drawn from one seed: bytes, broken frames, and messages that lie."""

from __future__ import annotations

import random
import struct
from typing import Any

import attrs

from peercache.fabric.tcp import wire as tcp_wire
from peercache.model.keys import COPIES, TAG_BYTES
from peercache.model.member import Member
from peercache.net.sockets import PAIR1_GREETING
from peercache.wire.codec import _BY_NAME, MEMBER_TEXT_MAX, encode
from peercache.wire.envelope import MESSAGES, WIRE_VERSION, Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello

EDGES = (0, 1, 2, 255, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
UNITS = {"keys": 16, "records": 56, "drops": 24, "calls": 5, "regions": 24}
TEXTS = (
    "", "x", "127.0.0.1:1", "127.0.0.1:0", "127.0.0.1:99999", "[::1]:9", "no port", "\0", "a/../b",
    "é" * 2000, "pages_hit/shm", "latency_s", "0.0.0.0:1",
)  # fmt: skip
CONVERSATIONS = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 60_000,
    b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 500,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200,  # a TLS greeting
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\0SP\0\0\x20\0\0",  # nng's greeting, of another protocol
    PAIR1_GREETING[:5],
    PAIR1_GREETING + b"\xff" * 8,  # and then a message of 16 exbibytes
    PAIR1_GREETING + b"\x01" + b"\xff" * 8,
    PAIR1_GREETING + struct.pack(">Q", 2**31) + b"abc",
    PAIR1_GREETING + b"\x01" + struct.pack(">Q", 2**31) + b"abc",
    PAIR1_GREETING + struct.pack(">Q", 1) + b"a",
    PAIR1_GREETING + struct.pack(">Q", 0),
    tcp_wire.encode_greeting(tcp_wire.Greeting(16384, 1, bytes(16))),
    tcp_wire.encode_greeting(tcp_wire.Greeting(16384, 1, bytes(16)))[:30],
    b"PCtg\xff\xff\xff\xff" + b"\0" * 100,
)  # fmt: skip
"""What wrong clients, scanners and attackers begin with, on whatever port."""


def noise(rng: random.Random, longest: int = 300) -> bytes:
    """Return random bytes."""
    return rng.randbytes(rng.randrange(longest))


def conversation(rng: random.Random) -> bytes:
    """Return a message of a misplaced or broken sender."""
    said = rng.choice(CONVERSATIONS)
    return noise(rng) if rng.random() < 0.3 else said + noise(rng, 40)


def number(rng: random.Random) -> int:
    """Return an unsigned 64-bit number, mostly where arithmetic ends."""
    return rng.choice(EDGES) if rng.random() < 0.7 else rng.getrandbits(rng.randrange(1, 65))


def value(kind: str, name: str, rng: random.Random) -> Any:
    """Return a value that a field of that type may have on the wire."""
    if kind == "bytes":
        unit = 8 if name in _BY_NAME and name not in UNITS else UNITS.get(name, 1)
        return rng.randbytes(unit * rng.choice((0, 1, 2, 3, 256)))
    if kind == "Member":
        return any_member(rng)
    many = range(rng.randrange(4))
    return {
        "int": lambda: number(rng),
        "Tag": lambda: rng.choice((number(rng), COPIES, rng.getrandbits(8 * TAG_BYTES))),
        "bool": lambda: rng.random() < 0.5,
        "float": lambda: rng.choice((0.0, -1.0, 1e-300, 1e308, -1e308, 0.01)),
        "str": lambda: rng.choice(TEXTS),
        "tuple[int, ...]": lambda: tuple(number(rng) for _ in many),
        "tuple[Member, ...]": lambda: tuple(any_member(rng) for _ in many),
        "dict[str, int | float | str]": lambda: {
            rng.choice(TEXTS): rng.choice((1, -1, 1e308, float("nan"), "x", 2**70)) for _ in many
        },
    }[kind]()


def any_member(rng: random.Random) -> Member:
    """Return an entry of a view that passes the codec."""
    fields = {f.name: value(str(f.type), f.name, rng) for f in attrs.fields(Member)}
    texts = [name for name, text in fields.items() if isinstance(text, str)]
    while sum(len(fields[name]) for name in texts) > MEMBER_TEXT_MAX:
        fields[rng.choice(texts)] = ""
    return Member(**{**fields, "incarnation": number(rng) or 1, "state": rng.randrange(4)})


def any_message(rng: random.Random, kinds: tuple[type[Any], ...] = MESSAGES) -> Message:
    """Return a message as it may pass the codec, with fields that make no sense together."""
    kind = rng.choice(kinds)
    message: Message = kind(**{f.name: value(str(f.type), f.name, rng) for f in attrs.fields(kind)})
    return message


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Return a real message with something wrong in it: flipped, cut, doubled or spliced."""
    wrong = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(wrong)) if wrong else 0
        match rng.randrange(5):
            case 0 if wrong:
                wrong[at] ^= 1 << rng.randrange(8)
            case 1:
                del wrong[at:]
            case 2:
                wrong[at:at] = noise(rng, 20)
            case 3:
                wrong[at : at + 8] = rng.choice(EDGES).to_bytes(8, "big")
            case _:
                wrong += wrong[at:]
    return bytes(wrong[:60_000])


def hello(cluster: str, *, is_node: bool = False, lock: str = "", **other: Any) -> Hello:
    """Return a Hello that a node with default settings accepts."""
    known = {
        "request": 1, "wire_oldest": WIRE_VERSION, "wire_newest": WIRE_VERSION, "cluster": cluster,
        "is_node": is_node, "granule": 16384, "name": "", "nonce": b"", "namespace": "",
        "geometry": "", "lock": lock, "secret": b"",
    }  # fmt: skip
    return Hello(**{**known, **other})


def enveloped(message: Message, *, cluster: str, sender: int, target: int = 0) -> bytes:
    """Return a message as it travels."""
    return encode(Envelope(sender, target, message), cluster=cluster)
