"""Runs: where a batch of pages is in the caller's memory, and the buffers they are made of."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.runs import PageRuns, UnusableBuffers, runs_of_buffers

pages_of_runs = st.lists(
    st.lists(st.tuples(st.integers(0, 2**48), st.integers(0, 2**20)), max_size=5), max_size=12
)


def listed(runs: PageRuns) -> list[list[tuple[int, int]]]:
    """Write the arrays out as lists again."""
    return [
        [
            (int(runs.addresses[i]), int(runs.sizes[i]))
            for i in range(runs.starts[page], runs.starts[page + 1])
        ]
        for page in range(len(runs))
    ]


@given(pages_of_runs)
def test_arrays_hold_the_lists_they_were_made_from(pages: list[list[tuple[int, int]]]) -> None:
    """Nothing is lost or reordered, empty pages included."""
    runs = PageRuns.of(pages)

    assert listed(runs) == pages
    assert runs.lengths.tolist() == [sum(size for _, size in page) for page in pages]


@given(pages_of_runs, st.data())
def test_take_chooses_pages_in_the_order_given(
    pages: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Any choice, with repetitions, equals indexing the list."""
    index = st.integers(0, len(pages) - 1)
    chosen = data.draw(st.lists(index, max_size=15)) if pages else []

    taken = PageRuns.of(pages).take(np.array(chosen, np.intp))

    assert listed(taken) == [pages[page] for page in chosen]


@given(pages_of_runs, st.data())
def test_the_pages_between_two_places_are_those_of_the_list(
    pages: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """They begin with their own first run, and can be cut again."""
    begin = data.draw(st.integers(0, len(pages)))
    end = data.draw(st.integers(begin, len(pages)))

    some = PageRuns.of(pages).between(begin, end)

    assert listed(some) == pages[begin:end]
    assert some.lengths.tolist() == [sum(size for _, size in page) for page in pages[begin:end]]
    assert listed(some.between(0, len(some))) == pages[begin:end]
    assert listed(PageRuns.joined([some, some])) == 2 * pages[begin:end]


@given(st.integers(0, 6), st.integers(1, 4))
def test_regular_batch_equals_its_lists(page_count: int, run_count: int) -> None:
    """Flat lists with the same number of runs a page are cut evenly."""
    addresses = [1000 * i for i in range(page_count * run_count)]
    sizes = list(range(page_count * run_count))

    runs = PageRuns.regular(addresses, sizes, page_count)

    flat = list(zip(addresses, sizes, strict=True))
    assert listed(runs) == [
        flat[page * run_count : (page + 1) * run_count] for page in range(page_count)
    ]
    assert runs.lengths.tolist() == [sum(size for _, size in page) for page in listed(runs)]


def test_addresses_above_two_to_the_63_survive() -> None:
    """Addresses are unsigned: the upper half of the space is no negative number."""
    runs = PageRuns.of([[(2**64 - 4096, 4096)]])

    assert listed(runs) == [[(2**64 - 4096, 4096)]]


def test_batches_of_several_sizes_are_joined_page_by_page() -> None:
    """Pages keep their runs, whatever stands before them."""
    first = PageRuns.of([[(1, 10), (2, 20)], [(3, 30), (4, 40)]])
    second = PageRuns.of([[(5, 1)], [], [(6, 2)]])

    joined = PageRuns.joined([first, second])

    assert joined.addresses.tolist() == [1, 2, 3, 4, 5, 6]
    assert joined.lengths.tolist() == [30, 70, 1, 0, 2]
    assert joined.take(np.array([3, 1, 4])).addresses.tolist() == [3, 4, 6]
    assert PageRuns.joined([first]) is first
    assert len(PageRuns.joined([])) == 0


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
