"""Status: what travels comes back, and what a node of another version reports does no harm."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from peercache.model.member import DEAD, LEFT, Member
from peercache.model.reuse import MEMORY_NAMES
from peercache.model.status import (
    NO_ANSWER,
    Detail,
    Latencies,
    MemberStatus,
    Reuse,
    Shard,
    Status,
    Thread,
    Tier,
    Worker,
    decoded_status,
    decoded_statuses,
    encoded,
    reuse_of,
    to_plain,
    unanswered,
)

FULL = Status(
    name="10.0.0.7:31998",
    wire=(2, 3),
    state="degraded",
    reasons=("the disk is full",),
    pool=Tier(size=8, used=3, problem="no"),
    workers=(Worker(name="a", pid=7, hits=1.5), Worker(name="b")),
    counters={"pages_hit/shm": 3.0, "pages_hit/tcp": 1.0, "pages_missed/absent": 4.0},
    latency={"get": Latencies(bounds=(0.001, 0.01), counts=(1, 3, 4), seconds=0.5)},
    reuse=Reuse(uses=9.0, hit_rates={"0.5": 0.25, "1": 0.5}),
    shard=Shard(records=5, share=0.25, authority=True),
    detail=Detail(threads=(Thread(name="loop", cpu_s=1.0),), settings={"pool_size": "4GiB"}),
)


def test_a_status_comes_back_whole() -> None:
    """Every field, nested ones too."""
    assert decoded_status(encoded(FULL)) == FULL
    members = (MemberStatus(seen="alive", answers=True, status=FULL), MemberStatus(seen="dead"))
    assert decoded_statuses(encoded(members)) == members


def test_a_newer_nodes_status_is_read_as_far_as_it_is_known() -> None:
    """Fields that are unknown, or of another kind, leave the others alone."""
    plain = to_plain(FULL)
    plain["telepathy"] = {"range": 7}
    plain["pool"]["colour"] = "red"
    plain["age_s"] = "old"
    plain["workers"] = {"not": "a list"}
    plain["counters"]["words"] = "many"

    read = decoded_status(json.dumps(plain).encode())

    assert (read.name, read.pool, read.shard) == (FULL.name, FULL.pool, FULL.shard)
    assert (read.age_s, read.workers, read.counters) == (0.0, (), FULL.counters)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"7", b"[" * 100_000, b'{"a":'])
def test_what_is_no_status_is_a_value_error(raw: bytes) -> None:
    """A peer's bytes never end the reader in another way."""
    with pytest.raises(ValueError):  # noqa: PT011 - whichever way it is broken
        decoded_status(raw)


@pytest.mark.parametrize("value", [None, True, "x", [], [[]], {"a": []}, 10**400, -1])
def test_any_value_in_any_field_is_read_or_left(value: Any) -> None:
    """Whatever a peer puts into a field, the status is made of values of the right kinds."""
    names = to_plain(FULL)
    read = decoded_status(json.dumps(dict.fromkeys(names, value)).encode())

    assert decoded_status(encoded(read)) == read
    assert isinstance(read.name, str)
    assert isinstance(read.pool, Tier)


def test_figures_that_are_no_numbers_are_not_sent() -> None:
    """JSON has no NaN: a strict reader would refuse the whole status."""
    raw = encoded(Status(certificate_days=math.nan, age_s=math.inf))

    assert b"NaN" not in raw
    assert b"Infinity" not in raw
    assert decoded_status(raw).certificate_days == -1.0


def test_the_estimate_of_a_cluster_is_the_mean_by_uses() -> None:
    """A node without uses, or of a version that estimates something else, does not count."""

    def reported(uses: float, rate: float) -> Status:
        return Status(reuse=Reuse(uses=uses, hit_rates=dict.fromkeys(MEMORY_NAMES, rate)))

    both = reuse_of([reported(300, 0.5), FULL, reported(100, 0.9), reported(0, 0.1), Status()])

    assert both.uses == 400
    assert both.hit_rates == pytest.approx(dict.fromkeys(MEMORY_NAMES, 0.6))
    assert reuse_of([FULL, Status(), reported(0, 0.5)]) == Reuse()


def test_totals_and_the_hit_rate_are_of_all_labels() -> None:
    """A counter without a label is its own total; none asked for is no rate."""
    assert FULL.total("pages_hit") == 4
    assert FULL.hit_share() == 0.5
    assert math.isnan(Status().hit_share())
    assert Status(counters={"pages_evicted": 3.0}).total("pages_evicted") == 3


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.25, 0.001), (0.5, 0.0055), (0.75, 0.01), (0.99, 0.01)]
)
def test_quantiles_are_interpolated_in_their_bucket(share: float, seconds: float) -> None:
    """One call in the first bucket, two in the second, one beyond the last bound."""
    assert FULL.latency["get"].quantile(share) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "found", [Latencies(), Latencies(bounds=(1.0,), counts=(0, 0)), Latencies(counts=(3,))]
)
def test_no_calls_have_no_quantile(found: Latencies) -> None:
    """Nor has a histogram whose parts do not fit."""
    assert math.isnan(found.quantile(0.5))


@pytest.mark.parametrize(("state", "shown"), [(DEAD, NO_ANSWER), (LEFT, "left"), (1, NO_ANSWER)])
def test_a_member_that_reports_nothing_is_listed(state: int, shown: str) -> None:
    """By its address, and with what the view has of it."""
    member = Member(7, 1, state, 255, "host-a", "10.0.0.7:1", "10.0.0.7:2", "", "")

    found = unanswered(member)

    assert not found.answers
    assert (found.status.name, found.status.host) == ("10.0.0.7:1", "host-a")
    assert found.status.state == shown


def test_pages_of_hints_are_shown_by_hint_and_outcome() -> None:
    counters = {"hint_pages/retain/done": 3.0, "hint_pages/demote/missing": 1.0, "hints": 2.0}

    assert Status(counters=counters).hints() == {"demote missing": 1.0, "retain done": 3.0}
