"""What reads cost: learned from reads, and how much of a prefix that makes worth reading."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from peercache.paths.costs import (
    MEASURED_S,
    Line,
    Mask,
    ReadCosts,
    cheapest,
)
from tests.unit.paths.pages import Clock, content_of
from tests.unit.paths.world import World

MIB = 2**20
MEMORY, DISK = (3, False), (3, True)


def seconds(line: Line | None, size: int) -> float:
    """Return what a read of so many bytes is expected to take."""
    assert line is not None
    return line[0] + line[1] * size


def test_reads_of_two_sizes_show_latency_and_throughput() -> None:
    """A distant holder is slow for a page, and fast for many."""
    costs = ReadCosts(salt=0, clock=Clock())
    for size in (MIB, 8 * MIB):
        costs.add(MEMORY, size, 0.05 + size * 1e-9)

    assert costs.line_of(MEMORY) == pytest.approx((0.05, 1e-9))


def test_reads_of_one_size_may_take_all_their_time_for_their_bytes() -> None:
    """Latency and throughput cannot be separated: more bytes are expected to take longer."""
    costs = ReadCosts(salt=0, clock=Clock())
    for _ in range(2):
        costs.add(MEMORY, 4096, 0.01)

    assert costs.line_of(MEMORY) == pytest.approx((0.0, 0.01 / 4096))


def test_noise_never_makes_more_bytes_cheaper() -> None:
    """A small read may take longer than a large one."""
    costs = ReadCosts(salt=0, clock=Clock())
    costs.add(MEMORY, MIB, 0.05)
    costs.add(MEMORY, 8 * MIB, 0.01)

    line = costs.line_of(MEMORY)

    assert 0.01 < seconds(line, MIB) <= seconds(line, 64 * MIB) < 0.05


def test_the_last_reads_count_most_and_old_ones_not_at_all() -> None:
    """A holder that was slow is fast after a few reads, or at once after a pause."""
    clock = Clock()
    costs = ReadCosts(salt=0, clock=clock)
    for took_s in (*[1.0] * 5, *[0.001] * 20):
        costs.add(MEMORY, MIB, took_s)
    assert seconds(costs.line_of(MEMORY), MIB) < 0.01

    costs.add(MEMORY, MIB, 1.0)
    clock.now += MEASURED_S
    assert costs.line_of(MEMORY) is None
    assert costs.line_of(MEMORY, age_max_s=np.inf) is not None

    costs.add(MEMORY, MIB, 0.001)
    assert seconds(costs.line_of(MEMORY), MIB) == pytest.approx(0.001)


@pytest.mark.parametrize(("size", "took_s"), [(0, 1.0), (MIB, 0.0)])
def test_a_read_of_nothing_or_in_no_time_shows_nothing(size: int, took_s: float) -> None:
    """The clock of a machine may be coarse."""
    costs = ReadCosts(salt=0, clock=Clock())
    costs.add(MEMORY, size, took_s)

    assert costs.line_of(MEMORY) is None


def test_a_get_measures_each_source_that_it_reads() -> None:
    """Memory and disk of a holder are two; a read that was cut off counts what has arrived."""
    world = World(remote=frozenset({2, 3}))
    world.page_s = 0.01
    world.publish(*[world.nodes[3].hold(name) for name in "abcd"])
    world.publish(world.nodes[2].keep("e"))
    world.nodes[2].latency_s = 0.03

    assert all(world.get(*"abcd").hits)
    assert seconds(world.costs.line_of(MEMORY), 4 * 512) == pytest.approx(0.04)
    assert world.costs.line_of((2, False)) is None
    assert all(world.get("e").hits)
    assert seconds(world.costs.line_of((2, True)), 512) == pytest.approx(0.04)
    assert seconds(world.costs.line_of((2, False)), 512) == pytest.approx(0.01)


def test_a_read_that_the_deadline_cut_off_refutes_faster_measurements() -> None:
    """How much has arrived is not known, unless it was a single page."""
    world = World(remote=frozenset({3}))
    world.page_s = 0.01
    world.publish(*[world.nodes[3].hold(name) for name in "abcd"])
    assert all(world.get(*"abcd").hits)

    world.get(*"abcd", timeout_s=0.015)
    assert world.costs.line_of(MEMORY) is not None
    world.page_s = 1.0
    world.get(*"abcd", timeout_s=0.5)
    assert world.costs.line_of(MEMORY) is None

    costs = ReadCosts(salt=0, clock=Clock())
    costs.add_cut_off(MEMORY, [MIB], 2.0)
    costs.add_cut_off(MEMORY, [MIB, MIB], 1.0)
    assert seconds(costs.line_of(MEMORY), MIB) == pytest.approx(2.0)


def test_a_disk_that_loads_nothing_in_time_is_known_as_slow() -> None:
    """It takes at least that long for a page."""
    world = World(remote=frozenset({3}))
    world.publish(world.nodes[3].keep("a"))
    world.nodes[3].portion, world.nodes[3].latency_s = 0, 0.1

    assert world.get("a", timeout_s=0.5).hits == [False]
    assert seconds(world.costs.line_of(DISK), len(content_of("a"))) >= 0.4


def mask(text: str) -> Mask:
    return np.array([letter == "x" for letter in text])


SLOW, FAST, FAR = (0.0, 2.0), (0.0, 0.5), (3.0, 0.5)
"""In units of the time to compute a page of one byte."""


@pytest.mark.parametrize(
    ("sources", "run"),
    [
        ([], 8),
        ([(FAST, None)], 8),
        ([(SLOW, None)], 0),
        ([(FAR, None)], 8),
        ([(FAR, mask("xxxx...."))], 8),
        ([(SLOW, mask("....xxxx"))], 4),
        ([((4.0, 0.0), mask("xxxx....")), (SLOW, mask("....xxxx"))], 6),
        ([(FAST, mask("xxxx....")), ((0.0, 9.0), mask("....xxxx"))], 4),
        ([((9.0, 0.0), mask(".......x"))], 7),
        ([((0.0, 1.0), None)], 8),
    ],
)
def test_a_prefix_is_worth_reading_as_far_as_reading_and_computing_take_least(
    sources: list[tuple[Line, Mask | None]], run: int
) -> None:
    """Eight pages; what is read while another source is slower costs nothing."""
    assert cheapest(np.ones(8, np.uint32), sources, np.ones(8), 100.0) == run


@attrs.frozen(eq=False)
class Prefix:
    """Pages of three sources at random costs."""

    lengths: npt.NDArray[np.uint32]
    compute_s: npt.NDArray[np.float64]
    owners: npt.NDArray[np.int64]
    lines: list[Line]

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Prefix:
        pages = int(rng.integers(1, 12))
        return cls(
            rng.integers(1, 9, pages).astype(np.uint32),
            rng.uniform(0, 5, pages),
            rng.integers(0, 3, pages),
            [(rng.uniform(0, 6), rng.uniform(0, 1)) for _ in range(3)],
        )

    def total_s(self, run: int) -> float:
        """Return the time to read so many pages within 20 s, and to compute the others."""
        owners, lengths = self.owners[:run], self.lengths[:run]
        reads = [
            latency_s + byte_s * lengths[owners == at].sum()
            for at, (latency_s, byte_s) in enumerate(self.lines)
            if (owners == at).any()
        ]
        read_s = max(reads, default=0.0)
        return float(read_s + self.compute_s[run:].sum()) if read_s <= 20.0 else np.inf


def test_the_chosen_run_is_the_best_of_all() -> None:
    """Compared with each prefix on its own."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        prefix = Prefix.drawn(rng)
        masks = [prefix.owners == at for at in range(3)]
        sources = [(line, m) for line, m in zip(prefix.lines, masks, strict=True) if m.any()]

        run = cheapest(prefix.lengths, sources, prefix.compute_s, 20.0)

        best_s = min(map(prefix.total_s, range(len(masks[0]) + 1)))
        assert prefix.total_s(run) == pytest.approx(best_s)
