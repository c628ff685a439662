"""Commands of the how-to pages, typed as they stand on a host of their own, from top to bottom.

Each page has a host with a node; the node is the page's, if it starts one. Only sizes and folders
that this machine may not have are others, and `FILES` are there. Commands with `…`, of other
programs, and pages with tests of their own are not here: tests/house/test_blocks_shown.py has the
list.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import TIMEOUT_S
from tests.shown import BLOCK, ROOT, commands_in
from tests.system.separate_hosts import Host, separate_hosts, skip_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made"),
]

OURS = ("peercache ", "/opt/peercache/bin/peercache ", "python examples/", "eval ", "curl ")
NODE = "peercache node"
HERE = {"64GiB": "64MiB", "1GiB": "64MiB", "500GB": "64MB", "/data": "/run/peercache/data",
        "/opt/peercache/bin/": ""}  # fmt: skip
FILES = ("FILE", "requests.jsonl", "conversation_trace.jsonl")
"""Traces of requests, which a user has."""
STATUSES = {
    "peercache events": {124},  # It has no end, and is ended.
    "peercache doctor": {0, 1},  # This machine may have fewer descriptors than a node wants.
    "peercache size": {0, 1},  # No page was used yet.
}

PAGES = (
    "docs/explanation/disk-tier.md",
    "docs/how-to/choose-embedded-or-standalone.md",
    "docs/how-to/follow-what-nodes-hold.md",
    "docs/how-to/install.md",
    "docs/how-to/read-the-metrics.md",
    "docs/how-to/size-and-check-the-disk.md",
    "docs/how-to/size-the-pool.md",
    "docs/how-to/use-idle-memory.md",
    "docs/how-to/use-the-connector.md",
    "docs/reference/cli.md",
)


def typed(page: str) -> list[str]:
    """Return the commands of a page that this module types."""
    found = [
        command
        for language, text in BLOCK.findall((ROOT / page).read_text())
        if language == "sh"
        for command in commands_in(text)
        # `source` is of another shell than the machine of a test may have.
        if command.startswith(OURS) and "…" not in command and not command.endswith("| source")
    ]
    for shown, here in HERE.items():
        found = [command.replace(shown, here) for command in found]
    return found


def start(host: Host, command: str) -> subprocess.Popen[str]:
    """Start a node; return once it is ready."""
    node = host.start(f"env -C {ROOT} {command}")
    assert node.stdout is not None
    line = node.stdout.readline()
    assert '"node.ready"' in line, (command, host.said())
    return node


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_end_well(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, on a host at the address that pages name."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    trace = [{"timestamp": at, "input_length": 1024, "output_length": 8, "hash_ids": [at % 3, 3]}
             for at in range(20)]  # fmt: skip
    for name in FILES:
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in trace))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = typed(page)
    assert commands
    with separate_hosts("host-a", network="10.0.0") as ((host,), _):
        host.path("/run/peercache/data").mkdir()
        nodes = []
        if not any(command.startswith(NODE) for command in commands):
            nodes.append(start(host, f"{NODE} --insecure --pool-size 64MiB"))
        for command in commands:
            if command.startswith(NODE):
                nodes.append(start(host, command))
                continue
            if command.startswith("peercache disk check"):
                for node in nodes:
                    node.terminate()
                    node.wait(TIMEOUT_S)
            limit = "timeout 5 " if command.startswith("peercache events") else ""
            text = shlex.quote(f"cd {tmp_path}\n{limit}{command}")
            done = host.run(f"bash -c {text}")
            allowed = STATUSES.get(" ".join(command.split()[:2]), {0})
            assert done.returncode in allowed, (command, done.stdout, done.stderr)
