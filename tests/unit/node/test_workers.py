"""Attached workers: rates and keys of each client, as it last reported them."""

from __future__ import annotations

import pytest

from peercache.model.status import LISTED_MAX
from peercache.node.status import RATE_S, SILENT_S, TRACKED_MAX, AttachedWorkers
from peercache.wire.messages.session import Counted

ONE = (7, "llama", 4711)


def counted(**counts: float) -> Counted:
    """Return a report, whose names stand before the first __: pages_hit__shm is pages_hit/shm."""
    return Counted({name.replace("__", "/"): value for name, value in counts.items()}, b"")


def test_a_rate_is_what_was_counted_between_two_reports() -> None:
    """Of all fabrics and reasons together; keys are those ever set."""
    workers = AttachedWorkers()
    workers.note(7, counted(pages_set=100), now=10.0)
    workers.note(
        7, counted(pages_hit__shm=60, pages_hit__tcp=20, pages_missed__absent=10, pages_set=4), 12.0
    )

    ((told,), more) = workers.listed([ONE], now=12.5)

    assert (told.name, told.namespace, told.pid) == ("0000000000000007", "llama", 4711)
    assert (told.hits, told.misses, told.sets, told.keys) == (40.0, 5.0, 52.0, 104)
    assert (told.heard_s, more) == (0.5, 0)


def test_reports_that_follow_at_once_make_one_rate() -> None:
    """A rate over a millisecond would be noise; nothing is lost meanwhile."""
    workers = AttachedWorkers()
    workers.note(7, counted(), now=0.0)
    for step in range(4):
        workers.note(7, counted(pages_hit__shm=10), now=RATE_S * (step + 1) / 4)

    ((told,), _) = workers.listed([ONE], now=RATE_S)

    assert told.hits == pytest.approx(40 / RATE_S)


def test_a_silent_client_has_no_rate_and_keeps_its_keys() -> None:
    """A client that counts nothing sends no report."""
    workers = AttachedWorkers()
    workers.note(7, counted(), now=0.0)
    workers.note(7, counted(pages_set=10), now=1.0)

    ((busy,), _) = workers.listed([ONE], now=1.0 + SILENT_S / 2)
    ((silent,), _) = workers.listed([ONE], now=1.0 + SILENT_S)

    assert (busy.sets, silent.sets, silent.keys) == (10.0, 0.0, 10)


def test_a_client_that_never_reported_is_listed() -> None:
    """It is attached; it has done nothing yet."""
    ((told,), _) = AttachedWorkers().listed([ONE], now=5.0)

    assert (told.pid, told.keys, told.hits, told.heard_s) == (4711, 0, 0.0, 0.0)


def test_a_client_that_has_left_is_forgotten() -> None:
    """Its number may come back, and begins at 0."""
    workers = AttachedWorkers()
    workers.note(7, counted(pages_set=10), now=0.0)

    assert workers.listed([], now=1.0) == ((), 0)
    ((told,), _) = workers.listed([ONE], now=2.0)
    assert told.keys == 0


def test_lists_and_memory_are_bounded() -> None:
    """A client beyond the bound is counted, or shown without figures."""
    workers = AttachedWorkers()
    clients = [(number, "n", number) for number in range(TRACKED_MAX + 1)]
    for number, _, _ in clients:
        workers.note(number, counted(pages_set=1), now=0.0)

    found, more = workers.listed(clients, now=0.0)
    ((beyond,), _) = workers.listed(clients[-1:], now=0.0)

    assert (len(found), more) == (LISTED_MAX, len(clients) - LISTED_MAX)
    assert beyond.keys == 0


def test_fabrics_of_all_clients_are_told_together() -> None:
    """The last one of each client; those of a client that has left are forgotten."""
    workers = AttachedWorkers()
    workers.note(7, Counted({"peer_fabric/aa": "rdma", "peer_fabric/bb": "tcp"}, b""), now=0.0)
    workers.note(7, Counted({"peer_fabric/aa": "tcp", "peer_fabric/cc": "smoke"}, b""), now=1.0)
    workers.note(8, Counted({"peer_fabric/aa": "shm"}, b""), now=1.0)

    assert workers.fabrics() == {"aa": "shm+tcp", "bb": "tcp"}
    workers.listed([ONE], now=2.0)
    assert workers.fabrics() == {"aa": "tcp", "bb": "tcp"}
    many = {f"peer_fabric/{number:x}": "tcp" for number in range(2 * LISTED_MAX)}
    workers.note(7, Counted({**many}, b""), now=3.0)
    assert len(workers.fabrics()) == LISTED_MAX


def test_figures_that_no_client_can_have_counted_are_left_out() -> None:
    """Two reports of 1e308 pages made the dashboard answer 500 from then on."""
    workers = AttachedWorkers()
    for at in range(3):
        workers.note(7, counted(pages_set=1e308, pages_hit__shm=-1e308, pages_hit__tcp=5), at)
        workers.note(7, counted(pages_set=float("inf"), pages_missed__x=float("nan")), at)

    ((told,), _) = workers.listed([ONE], now=2.5)
    assert (told.keys, told.hits, told.misses, told.sets) == (0, 5.0, 0.0, 0.0)
