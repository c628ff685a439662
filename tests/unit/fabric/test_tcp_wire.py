"""The bytes of the tcp fabric: what is written is read, and nothing else is."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peercache.errors import RemoteProtocolError
from peercache.fabric.tcp import wire
from peercache.model.records import PAGE_BYTES_MAX
from peercache.model.runs import U64

U64S = st.integers(0, 2**64 - 1)


def u64(values: list[int]) -> U64:
    """Return an array as the wire's functions take it."""
    return np.array(values, np.uint64)


@given(granule=U64S, incarnation=U64S, cluster=st.text())
def test_greeting_survives_the_wire(granule: int, incarnation: int, cluster: str) -> None:
    """What a client says is what the server hears."""
    greeting = wire.greet(cluster=cluster, granule=granule, incarnation=incarnation)

    raw = wire.encode_greeting(greeting)
    wire.check_opening(raw[: wire.OPENING_BYTES])
    heard = wire.decode_greeting(raw[wire.OPENING_BYTES :])

    assert heard == greeting


@pytest.mark.parametrize("reason", wire.REASONS)
def test_reason_survives_the_wire(reason: str) -> None:
    """Both answers carry every reason, and neither is taken for the other."""
    answer, status = wire.encode_answer(reason), wire.encode_status(reason)

    assert wire.decode_answer(answer) == reason
    assert wire.decode_status(status) == reason
    with pytest.raises(RemoteProtocolError):
        wire.decode_status(answer)
    with pytest.raises(RemoteProtocolError):
        wire.decode_answer(status)


@given(raw=st.binary(min_size=wire.OPENING_BYTES, max_size=wire.OPENING_BYTES))
@example(raw=struct.pack("<4sHH", b"PCtg", 2, 2**16 - 1))
@example(raw=struct.pack("<4sHH", b"PCtg", 1, wire.GREETING_REST_BYTES))
def test_opening_of_anything_else_is_refused(raw: bytes) -> None:
    """Another magic, version or length is refused by the first 8 bytes."""
    with pytest.raises(wire.Refusal) as refusal:
        wire.check_opening(raw)

    assert refusal.value.what in (wire.MALFORMED, wire.VERSION)


@given(raw=st.binary(min_size=wire.ANSWER_BYTES, max_size=wire.ANSWER_BYTES))
@example(raw=struct.pack("<4sI", b"PCta", len(wire.REASONS)))
def test_answer_of_anything_else_is_an_error_of_the_peer(raw: bytes) -> None:
    """A client that reached some other service says so, whatever that service sends."""
    with pytest.raises(RemoteProtocolError):
        wire.decode_answer(raw)


@given(
    lengths=st.lists(st.integers(1, 200) | st.integers(1, PAGE_BYTES_MAX), max_size=60),
    bytes_max=st.integers(1, 2**33),
    pages_max=st.integers(1, 10),
)
def test_cuts_are_the_greedy_ones(lengths: list[int], bytes_max: int, pages_max: int) -> None:
    """The vectorised cut is that of the obvious loop: as much as fits, and at least a page."""
    expected, size, count = [0], 0, 0
    for index, length in enumerate(lengths):
        if count and (count == pages_max or size + length > bytes_max):
            expected.append(index)
            size = count = 0
        size, count = size + length, count + 1
    if lengths:
        expected.append(len(lengths))

    found = wire.cuts(u64(lengths), bytes_max=bytes_max, pages_max=pages_max)

    assert found == expected


def test_largest_page_fits_into_a_request() -> None:
    """No page that a record can describe is unreadable over tcp."""
    lengths = u64([PAGE_BYTES_MAX] * 4)

    cut = wire.cuts(lengths, bytes_max=wire.REQUEST_BYTES_MAX, pages_max=wire.COUNT_MAX)

    assert PAGE_BYTES_MAX <= wire.REQUEST_BYTES_MAX
    assert cut == [0, 2, 4]


def test_portion_and_its_words_fit_into_one_system_call() -> None:
    """IOV_MAX pieces: the pages of a portion, and the words of the one before."""
    pieces = wire.PORTION_PAGES_MAX + 1

    assert pieces <= 1024
