"""The caller's buffers as page runs: used in place, or refused in words."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from peercache.model.runs import UnusableBuffers, runs_of_buffers


def content_of(runs: Any, place: int) -> bytes:
    return ctypes.string_at(int(runs.addresses[place]), int(runs.sizes[place]))


def closed_map() -> mmap.mmap:
    closed = mmap.mmap(-1, 4096)
    closed.close()
    return closed


def released_view() -> memoryview:
    view = memoryview(bytearray(4))
    view.release()
    return view


@pytest.mark.parametrize(
    "buffer",
    [
        b"abcdef",
        bytearray(b"abcdef"),
        memoryview(b"xabcdefx")[1:7],
        np.frombuffer(b"abcdef", np.uint8),
        np.frombuffer(b"abcdef", np.uint16).reshape(3, 1),
        array.array("H", b"abcdef"),
        ctypes.create_string_buffer(b"abcdef", 6),
    ],
)
def test_any_contiguous_buffer_is_used_in_place(buffer: Any) -> None:
    """Whatever its type, shape and items: its bytes, where they are."""
    held, runs = runs_of_buffers([buffer], writable=False)

    assert content_of(runs, 0) == b"abcdef"
    assert len(runs) == len(held) == 1


def test_writing_to_a_run_is_writing_to_the_buffer() -> None:
    """No copy in between."""
    buffer = bytearray(6)
    held, runs = runs_of_buffers([buffer], writable=True)

    ctypes.memmove(int(runs.addresses[0]), b"abcdef", 6)

    assert buffer == b"abcdef"
    del held


def test_a_buffer_cannot_move_while_it_is_held() -> None:
    """A bytearray that grew would leave us with an address of nothing."""
    buffer = bytearray(6)
    held, _ = runs_of_buffers([buffer], writable=True)

    with pytest.raises(BufferError):
        buffer.extend(bytes(10_000))
    del held
    buffer.extend(bytes(10_000))


def test_empty_buffers_and_batches_have_no_bytes() -> None:
    """They are refused further on, as pages of no size."""
    held, runs = runs_of_buffers([b"", bytearray()], writable=False)

    assert runs.lengths.tolist() == [0, 0]
    assert len(held) == 2
    assert len(runs_of_buffers([], writable=True)[1]) == 0


@pytest.mark.parametrize(
    ("buffer", "writable", "said"),
    [
        ("text", False, "gives no buffer"),
        (None, False, "gives no buffer"),
        ([1, 2], False, "gives no buffer"),
        (closed_map(), False, "gives no buffer"),
        (released_view(), False, "gives no buffer"),
        (np.zeros((4, 4), np.uint8)[:, 1], False, "not C-contiguous"),
        (np.zeros((4, 4), np.uint8).T[1:], False, "not C-contiguous"),
        (b"abcdef", True, "read-only"),
        (memoryview(bytearray(4)).toreadonly(), True, "read-only"),
        (np.array([None, {}], object), False, "references to objects"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(buffer: Any, writable: bool, said: str) -> None:
    """The message names the place in the batch; the client makes it a miss."""
    with pytest.raises(UnusableBuffers, match=said) as refused:
        runs_of_buffers([bytearray(4), buffer], writable=writable)

    assert "buffer 1" in str(refused.value)


def test_nothing_stays_held_after_a_refusal() -> None:
    """The buffers before the bad one are free again."""
    buffer = bytearray(4)

    with pytest.raises(UnusableBuffers):
        runs_of_buffers([buffer, None], writable=True)

    buffer.extend(b"more")
