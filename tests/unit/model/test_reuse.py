"""The estimate of reuse agrees with a cache that has every block of the same trace."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from peercache.cli.traces import LRU, Prompt, hit_rate
from peercache.model.reuse import (
    HALVED_S,
    ONE_USE_S,
    SAMPLE_MAX,
    SHORT_USES,
    WAITING_MAX,
    ReuseSample,
)

BLOCKS = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 24_000, 32_000)
ERROR_MAX = 0.02


def conversations(seed: int, count: int) -> list[Prompt]:
    """Return requests that begin a conversation, or go on with one: most of them a late one.

    Half of the conversations begin with the same block, as those of one system prompt.
    """
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    names = iter(range(1, 10**9))
    requests = []
    for number in range(count):
        if prompts and rng.random() < 0.7:
            prompt = prompts.pop(-1 - min(int(rng.expovariate(1 / 80)), len(prompts) - 1))
        else:
            prompt = [0] if rng.random() < 0.5 else []
        prompt = prompt + [next(names) for _ in range(rng.randint(1, 30))]
        prompts.append(prompt)
        requests.append(Prompt(number, prompt))
    return requests


def hashes_of(blocks: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return 64 evenly spread bits for each block."""
    return np.array([random.Random(f"{seed}/{one}").getrandbits(64) for one in blocks], np.uint64)


def use(sample: ReuseSample, blocks: Sequence[int], client: int = 0, now: float = 0.0) -> None:
    """Use blocks of size 1 in one call."""
    sample.use(hashes_of(blocks), 1, client, now)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_estimate_is_right_at_eight_sizes(seed: int) -> None:
    """As an LRU that has every block, though the sample has a tenth of them."""
    requests = conversations(seed, 3_000)
    sample = ReuseSample()
    hash_of = dict(
        zip(blocks := list({one for request in requests for one in request.blocks}),
            hashes_of(blocks, seed), strict=True)
    )  # fmt: skip
    for number, request in enumerate(requests):
        hashes = np.array([hash_of[one] for one in request.blocks], np.uint64)
        sample.use(hashes, 1, client=number)

    exact = [hit_rate(requests, LRU(size, is_deepest_first=True)) for size in BLOCKS]

    assert len(blocks) > 8 * SAMPLE_MAX
    assert exact[0] < 0.5 < exact[-1]
    assert np.abs(np.array(sample.hit_rates(BLOCKS)) - exact).max() <= ERROR_MAX


def test_distances_are_in_the_sizes_of_the_pages() -> None:
    """A page is a hit if all that was used since then fits with it."""
    sample, blocks = ReuseSample(), range(4 * SHORT_USES)
    for client in range(20):
        sample.use(hashes_of(blocks), 100, client)

    # The pages at the begin of a call are the last ones to be evicted.
    rates = sample.hit_rates([100 * len(blocks) // 2, 101 * len(blocks)])
    assert rates == pytest.approx([0.475, 0.95], abs=0.03)


def test_the_uses_of_a_busy_hour_count_alike_however_many_there_were_before() -> None:
    """Pages that are used twice in a row, then as many that never come back: a quarter are hits."""
    sample, rng = ReuseSample(), np.random.default_rng(1)
    for turn in range(6_000):
        once = rng.integers(0, 2**64, 100, np.uint64)
        for client in (1, 2):
            sample.use(once, 1, client)
            if turn >= 3_000:
                once = rng.integers(0, 2**64, 100, np.uint64)

    assert sample.uses() == 1_200_000
    assert sample.hit_rates([1_000]) == pytest.approx([0.25], abs=ERROR_MAX)


def test_a_call_of_more_pages_than_wait_together_counts_whole() -> None:
    sample = ReuseSample()
    for client in (1, 2):
        use(sample, range(2 * WAITING_MAX), client)

    assert sample.uses() == 4 * WAITING_MAX
    assert sample.hit_rates([2 * WAITING_MAX + 100]) == pytest.approx([0.5], abs=ERROR_MAX)


def test_nothing_is_estimated_before_any_use() -> None:
    """Not a hit rate of 0."""
    sample = ReuseSample()
    assert math.isnan(sample.hit_rates([1.0])[0])
    use(sample, [])
    assert math.isnan(sample.hit_rates([1.0])[0])
    assert sample.uses() == 0


def test_what_a_client_asks_for_and_then_reads_is_one_use() -> None:
    """Of another client, or later, it is another one."""
    pages = 4 * SHORT_USES

    def rate(*calls: tuple[int, float]) -> tuple[float, float]:
        sample = ReuseSample()
        for client, now in calls:
            use(sample, range(pages), client, now)
        return sample.uses(), sample.hit_rates([10.0 * pages])[0]

    assert rate((7, 1.0), (7, 1.5)) == (pages, 0.0)
    twice = pytest.approx((2 * pages, 0.5), rel=0.1)
    assert rate((7, 1.0), (8, 1.5)) == twice
    assert rate((7, 1.0), (7, 1.5 + ONE_USE_S)) == twice


def test_a_page_twice_in_one_call_is_harmless() -> None:
    """A client may send what it wants."""
    sample = ReuseSample()
    for client in range(2):
        use(sample, [1, 2, 1, 3, 2] * SHORT_USES, client)
    assert 0.0 <= sample.hit_rates([10.0])[0] <= 1.0


def test_what_was_long_ago_counts_less() -> None:
    """A new workload shows within hours, and a cold start is forgotten."""
    sample = ReuseSample()
    for number in range(20):
        use(sample, range(number * 1_000, number * 1_000 + 1_000), client=number)
    before = sample.hit_rates([1_000_000.0])
    for number in range(100, 120):
        use(sample, range(2_000), client=number, now=4 * HALVED_S * (number - 99))

    assert before == [0.0]
    assert sample.hit_rates([1_000_000.0])[0] > 0.95


def test_pages_that_never_come_back_do_not_thin_the_sample() -> None:
    """Without a bound of what is remembered, each day would leave less of the next one."""
    working = hashes_of(range(1_000))
    sample, rng = ReuseSample(reach=20_000), np.random.default_rng(1)
    for number in range(400):
        sample.use(rng.integers(0, 2**64, 1_000, np.uint64), 1, client=number)
        sample.use(working, 1, client=number)

    assert sample.hit_rates([900, 2_200]) == pytest.approx([0.0, 0.5], abs=0.02)
