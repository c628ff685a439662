"""The standalone node: how it starts, what it prints, how it joins and leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import LocalCluster, free_port, keys_of, pages_of, read


def run_node(
    *flags: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to refuse to start."""
    return subprocess.run(
        [sys.executable, "-m", "peercache.node", "--metrics-port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **(environment or {})},
    )


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (("--pool-size", "lots"), {}, "pool_size"),
        (("--listen", "nowhere:port"), {}, "listen"),
        (("--home", "/not/an/address"), {}, "home"),
        (("--home", "ipc://" + "x" * 200), {}, "home"),
        (("--suspect-s", "1.5"), {}, "suspect_s"),
        (("--config", "/does/not/exist.toml"), {}, "config"),
        ((), {"PEERCACHE_FABRIC": "pigeon"}, "fabric"),
        (("--listen", "203.0.113.7:0"), {}, "listen"),
        (("--shm-dir", "/does/not/exist", "--listen", "127.0.0.1:0"), {}, "/does/not/exist"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    flags: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    """Before anything starts: exit status 2, one clear sentence, no traceback."""
    done = run_node(*flags, environment=environment)

    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_named_and_taken_is_an_error() -> None:
    """Only a default gives way."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        control = run_node("--listen", f"127.0.0.1:{port}", "--pool-size", "1MiB")
        data = run_node(
            "--listen", "127.0.0.1:0", "--data-port", str(port), "--pool-size", "1MiB"
        )  # fmt: skip

    for done, name in ((control, "listen"), (data, "data_port")):
        assert done.returncode == 2, done.stderr
        assert f"{name} = 127.0.0.1:{port} is in use" in done.stderr


def test_a_pool_that_does_not_fit_is_an_error_at_start(tmp_path: Path) -> None:
    """A file system too small for the pool is reported with its name and figures, not by a bus
    error.
    """
    free = os.statvfs("/dev/shm")
    too_much = free.f_bavail * free.f_frsize + 2**30

    done = run_node("--listen", "127.0.0.1:0", "--pool-size", str(too_much))

    assert done.returncode == 2
    # Of a host whose /dev/shm is as large as its memory, that is the bound that is reported.
    assert "/dev/shm" in done.stderr or "memory that this" in done.stderr
    assert "lower pool_size" in done.stderr


def test_the_ready_line_and_file_say_where_the_node_serves(tmp_path: Path) -> None:
    """One JSON line on stdout, the same in the file; every address in it answers."""
    file = tmp_path / "ready.json"
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--ready-file", str(file), "--metrics-port", free_port()))
        ready = node.ready

        assert json.loads(file.read_text()) == ready
        assert ready["event"] == "node.ready"
        # Collectors put both streams into one log.
        assert "pool.populated" in node.said()
        assert "node.ready" not in node.said()
        assert len(ready["node"]) == 16
        assert ready["home"].startswith("ipc://")
        for name in ("control", "data"):
            host, _, port = ready[name].rpartition(":")
            socket.create_connection((host, int(port)), TIMEOUT_S).close()
        assert json.loads(node.page("/healthz"))["status"] == "ok"
        assert "peercache_pool_bytes" in node.page("/metrics")
        with urllib.request.urlopen(f"http://{ready['http']}/nodes/{ready['control']}") as shown:
            page = shown.read().decode()
        assert shown.headers["content-type"] == "text/html; charset=utf-8"
        assert ready["node"] in page
        assert ready["control"] in page


def test_health_reports_nothing_good_while_the_node_is_paused() -> None:
    """A paused node answers nothing, and is well again when it goes on."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--metrics-port", free_port()))
        url = f"http://{node.ready['http']}/healthz"
        node.pause()
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(url, timeout=0.5)
        node.resume()
        assert node.page("/healthz")


def test_sigterm_is_a_goodbye_that_the_others_receive_at_once() -> None:
    """A graceful leave needs no failure detector: exit status 0, and all are notified."""
    # No member is missed that soon: a member gone from a view has left.
    patient = ("--suspect-s", "300", "--dead-s", "600")
    with LocalCluster() as cluster:
        first, second, third = [cluster.start(flags=patient) for _ in range(3)]
        for node in (first, second, third):
            cluster.wait_for_members(node, 3)
        watcher = cluster.client(first)

        assert third.terminate() == 0

        wait_until(lambda: watcher.stats()["home_members_alive"] == 2)
        assert not Path(third.ready["home"].removeprefix("ipc://")).exists()
        assert "node.stopped" in third.said()
        del second


@pytest.mark.slow
def test_every_signal_that_ends_a_node_ends_it_cleanly() -> None:
    """SIGUSR1 and SIGUSR2 end nothing; SIGHUP, of a closed terminal, is a goodbye."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, LocalCluster() as cluster:
        node = cluster.start(flags=("--shm-dir", folder))
        node.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: '"signal": "SIGUSR1"' in node.said())
        node.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: '"signal": "SIGUSR2"' in node.said())

        node.process.send_signal(signal.SIGHUP)

        assert node.process.wait(TIMEOUT_S) == 0
        assert "node.stopped" in node.said()
        assert list(Path(folder).iterdir()) == []


@pytest.mark.slow
def test_too_few_open_files_are_an_error_at_start() -> None:
    """A node with 64 would refuse connections at random, without a word."""
    limited = ["prlimit", "--nofile=64:64", sys.executable, "-m", "peercache.node"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 2
    assert "64 open files are too few for a node" in done.stderr
    assert "ulimit -n 65536" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_leaves_no_segment_behind() -> None:
    """SIGTERM removes it and its table; a killed node's go when the next one starts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, LocalCluster() as cluster:
        first = cluster.start(flags=("--shm-dir", folder))
        killed = cluster.start(flags=("--shm-dir", folder))
        killed.kill()
        assert len(list(Path(folder).iterdir())) == 4

        third = cluster.start(flags=("--shm-dir", folder))
        left = {path.name for path in Path(folder).iterdir()}
        first.terminate()
        third.terminate()

        assert left == {
            f"peercache-{kind}{node.ready['node']}"
            for node in (first, third)
            for kind in ("", "table-")
        }
        assert list(Path(folder).iterdir()) == []


def test_the_first_node_starts_alone_when_its_discovery_address_is_silent() -> None:
    """No other node: it serves at once, logs that it is alone, and is joined later."""
    head = f"127.0.0.1:{free_port()}"
    with LocalCluster() as cluster:
        alone = cluster.start(flags=("--discovery-addr", head))
        client = cluster.client(alone)
        keys = keys_of("alone", 4)
        assert client.batch_set(keys, pages_of(keys)) == [True] * 4
        assert client.stats()["home_members_alive"] == 1
        wait_until(lambda: "node.started_alone" in alone.said())

        late_head = cluster.start(flags=("--listen", head))

        wait_until(lambda: client.stats()["home_members_alive"] == 2)
        reader = cluster.client(late_head)
        wait_until(lambda: read(reader, keys) == [True] * 4)
        wait_until(lambda: "membership.member_changed" in alone.said())


def test_with_a_dead_head_a_newcomer_joins_through_any_other_address() -> None:
    """Any live node answers: the head is no single point of failure."""
    with LocalCluster() as cluster:
        head, second = cluster.start_many(2)
        head.kill()

        both = f"{head.ready['control']},{second.ready['control']}"
        newcomer = cluster.start(flags=("--discovery-addr", both))
        client = cluster.client(newcomer)

        wait_until(lambda: client.stats()["members"] >= 2)


def test_nodes_of_two_clusters_refuse_each_other_loudly() -> None:
    """A node with a wrong cluster name joins no node, and both logs say why."""
    with LocalCluster() as cluster, LocalCluster() as other:
        node = cluster.start()
        stranger = other.start(flags=("--discovery-addr", node.ready["control"]))

        wait_until(lambda: "node.peer_refused" in node.said())
        wait_until(lambda: "node.join_rejected" in stranger.said())
        assert cluster.client(node).stats()["home_members_alive"] == 1


def test_nodes_with_two_granules_refuse_each_other_loudly() -> None:
    """A granule that does not fit is reported on both sides, by its figures."""
    with LocalCluster() as cluster:
        node = cluster.start()
        other = cluster.start(flags=("--granule", "32KiB"))

        wait_until(lambda: "your granule is 32768" in node.said())
        wait_until(lambda: "your granule is 32768" in other.said())


def test_control_and_data_are_served_over_ipv6() -> None:
    """Nodes on ::1 share pages as those on 127.0.0.1 do."""
    with LocalCluster() as cluster:
        first = cluster.start(flags=("--listen", "[::1]:0"))
        second = cluster.start(flags=("--listen", "[::1]:0"))
        keys = keys_of("six", 4)
        assert first.ready["control"].startswith("[::1]:")
        cluster.client(first).batch_set(keys, pages_of(keys))
        reader = cluster.client(second, fabric="tcp")

        wait_until(lambda: read(reader, keys) == [True] * 4)


def test_pages_survive_the_end_of_the_engine_that_set_them() -> None:
    """A standalone node keeps them: the next engine on the host finds them."""
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1)
        keys = keys_of("survivors", 4)
        first = cluster.client(node)
        first.batch_set(keys, pages_of(keys))
        first.close()

        assert read(cluster.client(node), keys) == [True] * 4
