"""A new user, who reads README from top to bottom in an empty folder, and types what it shows.

The first test does so on this machine, with addresses and a pool of its own by the environment. The
others do so on a host with a network of its own, with every default: ports, home, and a wheel that
is installed as README shows. Programs of other projects and what changes a registry or a cluster is
not run here; `ELSEWHERE` names what does.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from peercache.config.settings import Config
from tests.pace import TIMEOUT_S, wait_until
from tests.shown import BLOCK, commands_in
from tests.system.installed import install_wheel
from tests.system.nodes import CALL_S
from tests.system.separate_hosts import PYTHON, Host, separate_hosts, skip_reason

README = (Path(__file__).parents[2] / "README.md").read_text()
NODE = "peercache node"

ELSEWHERE = {
    "pip": "below, with a wheel; tests/release/check.sh in a fresh environment",
    "python -m sglang.launch_server": "tests/integration/test_sglang_pages.py",
    "vllm": "tests/integration/test_vllm_pages.py",
    "lmcache": "tests/integration/test_lmcache_pages.py",
    "podman": "deploy/container/try.sh",
    "helm": "tests/deploy/test_chart.py renders and validates the chart",
    "kubectl": "tests/deploy/test_api_server.py",
}
"""Commands that are not run here, by their first words, and what runs their like."""

needs_hosts = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made"),
]


@attrs.frozen
class Step:
    """What a user types: a command of a shell, or a block of Python."""

    language: str
    text: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether another test runs it."""
        return self.language == "sh" and any(self.text.startswith(f"{each} ") for each in ELSEWHERE)

    def command(self, python: str, folder: Path) -> str:
        """Return the command for a shell; Python comes from a file in the folder."""
        if self.language == "sh":
            return self.text
        (folder / "block.py").write_text(self.text)
        return f"{python} {folder / 'block.py'}"


def steps() -> list[Step]:
    """Return all that README shows to type, in its order."""
    found: list[Step] = []
    for language, text in BLOCK.findall(README):
        if language == "python":
            found.append(Step(language, text))
            continue
        assert language == "sh", f"a block of {language}"
        found += [Step(language, command) for command in commands_in(text)]
    return found


def engine_settings(step: Step) -> list[dict[str, object]]:
    """Return the settings of PeerCache in the JSON that a command of an engine has."""

    def within(value: object) -> Iterator[dict[str, object]]:
        if isinstance(value, dict):
            if "insecure" in value:
                yield {k: v for k, v in value.items() if k not in ("type", "module_path")}
            for inner in value.values():
                yield from within(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from within(inner)

    words = shlex.split(step.text.replace("\\\n", " "))
    return [found for word in words if word.startswith("{") for found in within(json.loads(word))]


def test_a_new_user_can_type_what_readme_shows() -> None:
    """From an empty folder, each command ends well, and Python runs as it stands."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as name:
        folder = Path(name)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": name,
            # What a machine with other nodes, and other tests, needs.
            "PEERCACHE_HOME": f"ipc://{name}/home.ipc",
            "PEERCACHE_LISTEN": "127.0.0.1:0",
            "PEERCACHE_HTTP_LISTEN": "127.0.0.1:0",
            "PEERCACHE_POOL_SIZE": "64MiB",
            "PEERCACHE_OP_TIMEOUT_S": f"{CALL_S}",
        }
        nodes = []
        typed = 0
        try:
            for step in steps():
                if step.is_elsewhere:
                    continue
                typed += 1
                if step.text.startswith(NODE):
                    nodes.append(_serving(step.text, environment, folder))
                    continue
                done = subprocess.run(
                    ["sh", "-c", step.command("python", folder)],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
                assert done.returncode == 0, (step.text, done.stdout, done.stderr)
        finally:
            for node in nodes:
                node.kill()
                node.communicate()
    assert typed == 4, "the node, two commands, Python"
    assert len(nodes) == 1


def _serving(command: str, environment: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start README's node; return it once it has printed its addresses."""
    node = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert node.stdout is not None
    assert '"node.ready"' in node.stdout.readline()
    return node


def test_each_engine_uses_the_node_of_its_host() -> None:
    """As in the trial, and without an address or a node of its own."""
    trials = [found for step in steps() for found in engine_settings(step)]

    assert len(trials) == 3, "SGLang, vLLM, LMCache"
    for settings in trials:
        config = Config.load(settings)
        assert (config.insecure, config.home, config.embedded) == (True, "", False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Yield a host on which README's node runs, as README installs and starts it."""
    commands = [step.text for step in steps() if step.language == "sh"]
    assert commands[0] == "pip install ."
    environment = install_wheel(tmp_path_factory.mktemp("user"))
    (command,) = [each for each in commands if each.startswith(NODE)]
    with separate_hosts("host-a") as ((host,), _):
        # The machine of these tests may have less than the default pool.
        node = host.start(f"env PEERCACHE_POOL_SIZE=64MiB {environment}/{command}")
        assert node.stdout is not None
        ready = json.loads(node.stdout.readline() or "{}")
        assert ready, host.said()
        assert ready["home"] == "ipc:///run/peercache/home.ipc"
        assert ready["data"].endswith(":31999")
        assert ready["control"].endswith(":31998")
        yield host


def output(host: Host, command: str, *statuses: int) -> str:
    """Return what a command of this user prints; it must exit with one of these, by default 0."""
    done = host.run(f"{PYTHON} -m {command}")
    assert done.returncode in (statuses or (0,)), (command, done.stdout, done.stderr)
    return str(done.stdout)


class TestOnAHost:
    """Every default of README, on a host with a network of its own."""

    pytestmark = needs_hosts

    @pytest.mark.parametrize("command", ["status", "members", "health", "slo"])
    def test_the_bare_commands_reach_the_node(self, host: Host, command: str) -> None:
        """Without an address, a cluster or a certificate: it is the node of this host and user."""
        wait_until(lambda: json.loads(output(host, "peercache health --json"))["status"] == "ok")

        # On a busy machine the calls of the other test miss an objective, which is a status of 1.
        output(host, f"peercache {command}", *((0, 1) if command == "slo" else (0,)))

    def test_python_reaches_the_node_without_an_address(self, host: Host, tmp_path: Path) -> None:
        """The block as it stands; a second host has no node, and its user reads what to do."""
        (block,) = [step for step in steps() if step.language == "python"]
        done = host.run(block.command(PYTHON, tmp_path))
        assert done.returncode == 0, done.stderr

        with separate_hosts("host-b") as ((other,), _):
            done = other.run(block.command(PYTHON, tmp_path))
        assert "start one with `peercache node --insecure`" in done.stderr.splitlines()[-1]

    def test_no_command_without_the_cluster_is_refused_first(self, host: Host) -> None:
        """The cluster is asked for, and neither counted nor logged as a peer's wrong setting."""
        assert "cluster default" in output(host, "peercache status")

        read = "from urllib.request import urlopen as o; print(o('http://127.0.0.1:31997/metrics').read().decode())"
        counted = host.run(f'{PYTHON} -c "{read}"').stdout.splitlines()
        assert any('dropped_total{reason="unknown_cluster"}' in line for line in counted)
        assert 'peercache_messages_dropped_total{reason="cluster"} 0.0' in counted
        assert "node.peer_refused" not in host.said()
