"""The history: rates from totals, what is unknown, and its bounds."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from peercache.http import history
from peercache.http.history import COLUMNS, HISTORY_BYTES_MAX, POINTS, STEP_S, History
from peercache.model.status import Latencies, MemberStatus, Status, Tier
from tests.unit.http.statuses import BOUNDS, dead, latencies


def node(
    name: str = "a:1", incarnation: str = "01", latency: Latencies | None = None, **counters: float
) -> MemberStatus:
    """Return a member with these totals."""
    reported = {key.replace("__", "/"): value for key, value in counters.items()}
    calls = {} if latency is None else {"get": latency}
    status = Status(
        name=name, incarnation=incarnation, state="ok", counters=reported, latency=calls,
        pool=Tier(evicted=int(counters.get("evicted", 0))),
    )  # fmt: skip
    return MemberStatus(seen="alive", answers=True, status=status)


@pytest.fixture
def kept() -> History:
    return History()


def test_totals_become_rates_of_each_member_and_of_all(kept: History) -> None:
    """A counter with a label counts for its value and for the whole counter."""
    kept.take(0.0, [node("a:1", pages_hit__shm=10), node("b:1", pages_hit__tcp=5)])
    kept.take(
        STEP_S,
        [
            node("a:1", pages_hit__shm=20, pages_hit__tcp=5, evicted=50),
            node("b:1", pages_hit__tcp=10),
        ],
    )

    assert kept.series("pages_hit")[-1] == pytest.approx(4.0)
    assert kept.series("pages_hit", "a:1")[-1] == pytest.approx(3.0)
    assert kept.series("pages_hit/tcp", "b:1")[-1] == pytest.approx(1.0)
    assert kept.series("evicted")[-1] == pytest.approx(10.0)
    assert np.isnan(kept.series("pages_hit")[:-1]).all()
    assert np.isnan(kept.series("pages_hit", "unknown:1")).all()
    assert kept.seconds == STEP_S


def test_restart_counts_from_zero_and_silence_is_unknown(kept: History) -> None:
    """No rate is negative, no gap is zero, and a gap of steps stays as wide as it was."""
    first = node(pages_set=1000)
    kept.take(0.0, [first])
    kept.take(STEP_S, [node(incarnation="02", pages_set=10)])
    kept.take(2 * STEP_S, [dead(first)])
    kept.take(3 * STEP_S, [node(incarnation="02", pages_set=30)])
    kept.take(6 * STEP_S, [node(incarnation="02", pages_set=0)])

    rates = kept.series("pages_set", "a:1")
    assert rates[-6] == pytest.approx(10 / STEP_S)
    assert np.isnan(rates[-5])
    assert rates[-4] == pytest.approx(20 / (2 * STEP_S))
    assert np.isnan(rates[-3:-1]).all()
    assert rates[-1] == 0
    assert kept.mean("pages_set", 2 * STEP_S) == 0


def test_it_forgets_what_is_older_than_its_window(kept: History) -> None:
    """And members that have reported nothing in it, with their memory."""
    for step in range(POINTS + 3):
        kept.take(step * STEP_S, [node("a:1", pages_set=step), *([node("b:1")] * (step < 2))])

    assert kept.series("pages_set").shape == (POINTS,)
    assert kept.seconds == pytest.approx((POINTS - 1) * STEP_S)
    assert np.isfinite(kept.series("pages_set", "a:1")).any()
    assert np.isnan(kept.series("pages_set", "b:1")).all()
    kept.take(10 * POINTS * STEP_S, [node("a:1", pages_set=10_000)])
    assert np.isfinite(kept.series("pages_set")).sum() == 1


def test_quantiles_are_those_of_each_step(kept: History) -> None:
    """Interpolated as Prometheus does: of the calls of a step, not since the start."""
    slow = Latencies(bounds=(0.001, 0.01), counts=(0, 100, 100))
    kept.take(0.0, [node(latency=slow)])
    kept.take(STEP_S, [node(latency=attrs.evolve(slow, counts=(80, 180, 200)))])

    # Of the 100 calls of the step 80 took at most 1 ms, and 20 longer than 10 ms.
    p40, p80, p90 = (kept.quantiles("get", share)[-1] for share in (0.4, 0.8, 0.9))
    assert p40 == pytest.approx(0.0005)
    assert p80 == pytest.approx(0.001)
    assert p90 == pytest.approx(0.01)
    assert np.isnan(kept.quantiles("get", 0.5)[-2])
    assert np.isnan(kept.quantiles("set", 0.5)).all()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_agree_with_those_of_a_status(share: float) -> None:
    """Two pieces of code, one definition."""
    reported = latencies(10_000, 0.004)
    kept = History()
    kept.take(0.0, [node(latency=attrs.evolve(reported, counts=(0,) * len(reported.counts)))])
    kept.take(STEP_S, [node(latency=reported)])

    assert kept.quantiles("get", share)[-1] == pytest.approx(reported.quantile(share), rel=1e-4)
    assert kept.quantile("get", share, 60.0) == pytest.approx(reported.quantile(share), rel=1e-4)


@pytest.mark.parametrize(
    "reported",
    [
        Latencies(bounds=(1.0,), counts=(1, 2)),
        Latencies(bounds=BOUNDS, counts=(1,)),
        Latencies(bounds=tuple(range(100)), counts=tuple(range(101))),
        Latencies(),
    ],
)
def test_histogram_of_other_bounds_is_left_out(kept: History, reported: Latencies) -> None:
    """Another version's buckets must not spoil the figures of the cluster."""
    for step in range(2):
        right = node("a:1", latency=latencies(100 * step, 0.004))
        kept.take(step * STEP_S, [right, node("b:1", latency=reported)])
    assert kept.quantiles("get", 0.5)[-1] == pytest.approx(0.004, rel=0.5)


def test_false_reports_of_members_end_nothing(kept: History) -> None:
    """The largest numbers, and the smallest, of any sign."""
    for step, value in enumerate((0.0, 1.8e19, -1.8e19, 1.7e308, 5.0)):
        kept.take(step * 0.0, [node(pages_hit__shm=value, pages_missed__absent=-value)])

    assert (kept.series("pages_hit")[-4:] >= 0).all()


def test_memory_is_bounded_and_the_sum_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members beyond the bound have no charts of their own."""
    monkeypatch.setattr(history, "MEMBERS_MAX", 2)
    kept = History()
    names = [f"n{number}:1" for number in range(50)]
    for step in range(2):
        kept.take(step * STEP_S, [node(name, pages_set=5 * step) for name in names])

    shown = [name for name in names if np.isfinite(kept.series("pages_set", name)).any()]
    assert len(shown) == 2
    assert kept.series("pages_set")[-1] == pytest.approx(20 * 5 / STEP_S)


def test_bound_is_of_bytes(kept: History) -> None:
    """What one member takes times how many are kept."""
    kept.take(0.0, [node()])
    (track,) = kept._tracks.values()
    assert track.rates is not None
    assert track.rates.shape == (POINTS, len(COLUMNS))
    assert history.MEMBERS_MAX * track.rates.nbytes <= HISTORY_BYTES_MAX
    assert history.MEMBERS_MAX > 100
