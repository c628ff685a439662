"""Details: what a status shows of a process, and what it never shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.config.settings import Config
from peercache.node.status import MASKED, THREADS_MAX, details, masked, shown, threads


@pytest.mark.parametrize(
    "name",
    [
        "PEERCACHE_SECRET", "SGLANG_API_TOKEN", "NCCL_PASSWORD", "peercache_passwd",
        "SGLANG_CREDENTIALS", "PEERCACHE_PRIVATE", "SGLANG_API_KEY", "UCX_APIKEY",
    ],
)  # fmt: skip
def test_what_is_secret_by_its_name_is_masked(name: str) -> None:
    """An empty one is shown: that it is not set is what a person looks for."""
    assert masked({name: "hunter2"}) == {name: MASKED}
    assert masked({name: ""}) == {name: ""}


@pytest.mark.parametrize(
    ("value", "told"),
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
def test_users_and_passwords_in_addresses_are_masked(value: str, told: str) -> None:
    """Hosts and ports stay: they say where a node looks."""
    assert masked({"discovery_addr": value}) == {"discovery_addr": told}


def test_names_that_only_sound_secret_are_shown() -> None:
    """Keys of a cache are no keys of a lock."""
    assert masked({"PEERCACHE_KEYS_MAX": "7"}) == {"PEERCACHE_KEYS_MAX": "7"}


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

    told = details(Config.load({"http_token_file": str(token)}))

    assert told.settings["http_token_file"] == str(token)
    assert told.environment["PEERCACHE_DISCOVERY_ADDR"] == f"etcd://{MASKED}@a:1/x"
    assert told.environment["SGLANG_API_KEY"] == MASKED
    assert "hunter2" not in repr(told)


def test_threads_of_this_process_are_told() -> None:
    """The first has used the most time."""
    found = threads()

    assert 1 <= len(found) <= THREADS_MAX
    assert found[0].name
    assert found[0].cpu_s == max(thread.cpu_s for thread in found) > 0
