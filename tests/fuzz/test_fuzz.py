"""Every target with honest inputs, inputs that once failed, and some that are spoilt at random."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS, Target, corpus

SPOILT = 200


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """Return an input with bytes changed, left out, repeated or put in."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                del raw[at : at + rng.choice((1, 4, 100))]
            case 2:
                raw[at:at] = raw[at : at + rng.choice((1, 8, 64))]
            case _:
                raw[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
    return bytes(raw)


def run(target: Target, inputs: list[bytes]) -> None:
    """Run a target on inputs, and on spoilt ones."""
    rng = random.Random(1)
    for data in inputs:
        target.run(data)
    for _ in range(SPOILT):
        target.run(spoilt(rng.choice(inputs), rng))


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_of_bytes_refuses_what_it_does_not_take(name: str) -> None:
    """It raises nothing else, and does not crash."""
    run(TARGETS[name], list(corpus(name)))


def test_a_reader_that_fails_is_found() -> None:
    """One byte of an honest input is not as it was."""

    def fails(data: bytes) -> None:
        assert data[:4] == b"good"[: len(data)], "another beginning"

    with pytest.raises(AssertionError, match="another beginning"):
        run(Target(fails, lambda: iter(())), [b"good input"])
