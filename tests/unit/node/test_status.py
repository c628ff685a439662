"""What a node reports of itself: its health, its metrics, its process, its attached workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.config.settings import Config
from peercache.model.status import LISTED_MAX
from peercache.node.status import (
    MASKED,
    RATE_S,
    SILENT_S,
    THREADS_MAX,
    TRACKED_MAX,
    AttachedWorkers,
    NodeStatus,
    _counted,
    details,
    masked,
    shown,
    threads,
)
from peercache.observability.metrics import Metrics
from peercache.wire.messages.session import Counted


def trouble_of(**disk: Any) -> str:
    """Return what the health reports of a disk."""
    trouble = str(disk.pop("trouble", ""))
    parts: Any = SimpleNamespace()
    found: Any = SimpleNamespace(**disk) if disk else None
    status = NodeStatus(
        1, parts, found, parts, reach=parts, disk_trouble=lambda: trouble,
        config=Config.load({"disk_path": "/data"}), tls=None, is_leaving=bool,
    )  # fmt: skip
    return status._disk_trouble()


@pytest.fixture
def workers() -> AttachedWorkers:
    return AttachedWorkers()


@pytest.mark.parametrize(
    ("disk", "expected"),
    [
        ({}, ""),
        ({"problem": "", "is_opening": False}, ""),
        ({"problem": "it is being opened", "is_opening": True}, ""),
        ({"problem": "it is being opened", "is_opening": False}, "/data: it is being opened"),
        ({"problem": "/data is read-only", "is_opening": False}, "/data: /data is read-only"),
        ({"problem": "", "is_opening": False, "trouble": "it is full"}, "/data: it is full"),
    ],
)
def test_disk_that_takes_no_pages_is_named(disk: dict[str, Any], expected: str) -> None:
    """A disk that is being opened is no trouble, unless there is no room for a folder."""
    assert trouble_of(**disk).endswith(expected)
    assert bool(trouble_of(**disk)) is bool(expected)


def test_calls_of_all_tiers_are_one_histogram_of_their_operation() -> None:
    """Buckets that stood one set behind the other would have no quantile."""
    metrics = Metrics()
    metrics.latency_s.observe(("get", "home", "all"), np.array([0.00015, 0.003]))
    metrics.latency_s.observe(("get", "tcp", "some"), np.array([0.003]))
    metrics.latency_s.observe(("set", "home", "all"), np.array([0.02]))

    _, latency = _counted(metrics)

    assert set(latency) == {"get", "set"}
    get = latency["get"]
    assert len(get.counts) == len(get.bounds) + 1
    assert get.counts[-1] == 3
    assert round(get.seconds, 6) == 0.00615
    assert 0.0025 < get.quantile(0.99) <= 0.005


@pytest.mark.parametrize(
    "name",
    [
        "PEERCACHE_SECRET", "SGLANG_API_TOKEN", "NCCL_PASSWORD", "peercache_passwd",
        "SGLANG_CREDENTIALS", "PEERCACHE_PRIVATE", "SGLANG_API_KEY", "UCX_APIKEY",
    ],
)  # fmt: skip
def test_what_is_secret_by_its_name_is_masked(name: str) -> None:
    """An empty one is shown, as a person looks for that; keys of a cache are no secret."""
    assert masked({name: "hunter2"}) == {name: MASKED}
    assert masked({name: "", "PEERCACHE_KEYS_MAX": "7"}) == {name: "", "PEERCACHE_KEYS_MAX": "7"}


@pytest.mark.parametrize(
    ("value", "listed"),
    [
        ("etcd://ann:hunter2@10.0.0.7:2379", f"etcd://{MASKED}@10.0.0.7:2379"),
        ("http://ann:h@nter2@proxy/path@x", f"http://{MASKED}@proxy/path@x"),
        (
            "etcd://ann:hunter2@a:1,etcd://bob:secret@b:2",
            f"etcd://{MASKED}@a:1,etcd://{MASKED}@b:2",
        ),
        ("dns://peercache:31998", "dns://peercache:31998"),
        ("ann@example", "ann@example"),
    ],
)
def test_users_and_passwords_in_addresses_are_masked(value: str, listed: str) -> None:
    """Hosts and ports stay: they say where a node looks."""
    assert masked({"discovery_addr": value}) == {"discovery_addr": listed}


def test_only_variables_that_change_a_node_are_shown() -> None:
    """The others are no business of the cluster."""
    environment = {"PYTHONPATH": "/x", "HOME": "/root", "AWS_SECRET": "s", "PEERCACHE_HOME": "h"}

    assert shown(environment) == {"PEERCACHE_HOME": "h", "PYTHONPATH": "/x"}


def test_details_hold_settings_and_environment_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path of a file with a secret in it is shown, and its content is not read."""
    token = tmp_path / "token"
    token.write_text("hunter2")
    monkeypatch.setenv("SGLANG_API_KEY", "hunter2")
    monkeypatch.setenv("PEERCACHE_DISCOVERY_ADDR", "etcd://ann:hunter2@a:1/x")

    listed = details(Config.load({"http_token_file": str(token)}))

    assert listed.settings["http_token_file"] == str(token)
    assert listed.environment["PEERCACHE_DISCOVERY_ADDR"] == f"etcd://{MASKED}@a:1/x"
    assert listed.environment["SGLANG_API_KEY"] == MASKED
    assert "hunter2" not in repr(listed)


def test_threads_of_this_process_are_notified() -> None:
    """The first has used the most time."""
    found = threads()

    assert 1 <= len(found) <= THREADS_MAX
    assert found[0].name
    assert found[0].cpu_s == max(thread.cpu_s for thread in found) > 0


ONE = (7, "llama", 4711)


def counted(**counts: float) -> Counted:
    """Return a report, whose names stand before the first __: pages_hit__shm is pages_hit/shm."""
    return Counted({name.replace("__", "/"): value for name, value in counts.items()}, b"")


def test_a_rate_is_what_was_counted_between_two_reports(workers: AttachedWorkers) -> None:
    """Of all fabrics and reasons together; keys are those ever set."""
    workers.note(7, counted(pages_set=100), now=10.0)
    workers.note(
        7, counted(pages_hit__shm=60, pages_hit__tcp=20, pages_missed__absent=10, pages_set=4), 12.0
    )

    ((listed,), more) = workers.listed([ONE], now=12.5)

    assert (listed.name, listed.namespace, listed.pid) == ("0000000000000007", "llama", 4711)
    assert (listed.hits, listed.misses, listed.sets, listed.keys) == (40.0, 5.0, 52.0, 104)
    assert (listed.report_age_s, more) == (0.5, 0)


def test_reports_that_follow_at_once_make_one_rate(workers: AttachedWorkers) -> None:
    """A rate over a millisecond would be noise; nothing is lost meanwhile."""
    workers.note(7, counted(), now=0.0)
    for step in range(4):
        workers.note(7, counted(pages_hit__shm=10), now=RATE_S * (step + 1) / 4)

    ((listed,), _) = workers.listed([ONE], now=RATE_S)

    assert listed.hits == pytest.approx(40 / RATE_S)


def test_a_silent_client_has_no_rate_and_keeps_its_keys(workers: AttachedWorkers) -> None:
    """A client that counts nothing sends no report."""
    workers.note(7, counted(), now=0.0)
    workers.note(7, counted(pages_set=10), now=1.0)

    ((busy,), _) = workers.listed([ONE], now=1.0 + SILENT_S / 2)
    ((silent,), _) = workers.listed([ONE], now=1.0 + SILENT_S)

    assert (busy.sets, silent.sets, silent.keys) == (10.0, 0.0, 10)


def test_a_client_that_never_reported_is_listed() -> None:
    """It is attached; it has done nothing yet."""
    ((listed,), _) = AttachedWorkers().listed([ONE], now=5.0)

    assert (listed.pid, listed.keys, listed.hits, listed.report_age_s) == (4711, 0, 0.0, 0.0)


def test_a_client_that_has_left_is_forgotten(workers: AttachedWorkers) -> None:
    """Its number may come back, and begins at 0."""
    workers.note(7, counted(pages_set=10), now=0.0)

    assert workers.listed([], now=1.0) == ((), 0)
    ((listed,), _) = workers.listed([ONE], now=2.0)
    assert listed.keys == 0


def test_lists_and_memory_are_bounded(workers: AttachedWorkers) -> None:
    """A client beyond the bound is counted, or shown without figures."""
    clients = [(number, "n", number) for number in range(TRACKED_MAX + 1)]
    for number, _, _ in clients:
        workers.note(number, counted(pages_set=1), now=0.0)

    found, more = workers.listed(clients, now=0.0)
    ((beyond,), _) = workers.listed(clients[-1:], now=0.0)

    assert (len(found), more) == (LISTED_MAX, len(clients) - LISTED_MAX)
    assert beyond.keys == 0


def test_fabrics_of_all_clients_are_notified_together(workers: AttachedWorkers) -> None:
    """The last one of each client; those of a client that has left are forgotten."""
    workers.note(7, Counted({"peer_fabric/aa": "rdma", "peer_fabric/bb": "tcp"}, b""), now=0.0)
    workers.note(7, Counted({"peer_fabric/aa": "tcp", "peer_fabric/cc": "smoke"}, b""), now=1.0)
    workers.note(8, Counted({"peer_fabric/aa": "shm"}, b""), now=1.0)

    assert workers.fabrics() == {"aa": "shm+tcp", "bb": "tcp"}
    workers.listed([ONE], now=2.0)
    assert workers.fabrics() == {"aa": "tcp", "bb": "tcp"}
    many = {f"peer_fabric/{number:x}": "tcp" for number in range(2 * LISTED_MAX)}
    workers.note(7, Counted({**many}, b""), now=3.0)
    assert len(workers.fabrics()) == LISTED_MAX


def test_figures_that_no_client_can_have_counted_are_left_out(workers: AttachedWorkers) -> None:
    """Two reports of 1e308 pages made the dashboard answer 500 from then on."""
    for at in range(3):
        workers.note(7, counted(pages_set=1e308, pages_hit__shm=-1e308, pages_hit__tcp=5), at)
        workers.note(7, counted(pages_set=float("inf"), pages_missed__x=float("nan")), at)

    ((listed,), _) = workers.listed([ONE], now=2.5)
    assert (listed.keys, listed.hits, listed.misses, listed.sets) == (0, 5.0, 0.0, 0.0)
