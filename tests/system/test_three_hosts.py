"""The walk-through over three hosts: the test does what the page shows, and reads what it states.

Before each block of docs/tutorials/three-hosts.md a comment names where it belongs:

    <!-- on: HOST -->                 a shell block runs there; `each host`: on one after the other
    <!-- on: admin, for: each host --> on the machine with the authority, with HOST set to each
    <!-- file: PATH, on: each host -->  the block is the content of a file
    <!-- repeat: step N, on: HOST -->   the first shell block of that step runs there again

`with: SGLang` after the host: test_sglang_three_hosts.py in tests/integration runs the block.
`exit: N` is the exit status. The `text` block that follows is the output, in which `…` stands for
any text. Hosts are network namespaces; `ssh` and `scp` are stand-ins that reach their folders.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from tests.pace import TIMEOUT_S
from tests.system.separate_hosts import Host, separate_hosts, skip_reason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "three-hosts.md").read_text()
NAMES = ("prefill-1", "decode-1", "decode-2")
EACH = "each host"
POOL = "64MiB"
"""In place of the page's 64 GiB: the environment overrides a file."""

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- (on|file|repeat): (.*?) -->\n", re.MULTILINE)
CAN_MAKE_HOSTS = pytest.mark.skipif(
    bool(skip_reason()), reason=skip_reason() or "hosts can be made"
)


@attrs.frozen
class Step:
    """A block of the page. facts: what its mark states. output: None if the page shows none."""

    facts: dict[str, str]
    text: str
    output: str | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of its hosts."""
        return NAMES if self.facts["on"] == EACH else tuple(self.facts["on"].split(" and "))

    @property
    def is_run_here(self) -> bool:
        """Whether this module runs it."""
        return "with" not in self.facts


def facts_of(kind: str, rest: str) -> dict[str, str]:
    """Return the facts of a mark: `on: decode-1, exit: 1`."""
    pairs = (fact.partition(": ") for fact in f"{kind}: {rest}".split(", "))
    return {name: value for name, _, value in pairs}


def steps(page: str) -> list[Step]:
    """Return the blocks of a page in their order. ValueError: a block without a mark."""
    found, marked = [], set()
    for mark in MARK.finditer(page):
        facts = facts_of(mark[1], mark[2])
        if "repeat" in facts:
            number = facts["repeat"].removeprefix("step ")
            section = page.partition(f"\n## {number}. ")[2].partition("\n## ")[0]
            text = next(each[2] for each in BLOCK.finditer(section) if each[1] == "sh")
            found.append(Step(facts, text, None))
            continue
        block = BLOCK.match(page, mark.end())
        if block is None:
            raise ValueError(f"no block after {mark[0]}")
        marked.add(block.start())
        after = BLOCK.search(page, block.end())
        shows = (
            after is not None
            and after[1] == "text"
            and not page[block.end() : after.start()].strip()
        )
        found.append(Step(facts, block[2], after[2] if shows and after else None))
    unmarked = [b[2] for b in BLOCK.finditer(page) if b[1] != "text" and b.start() not in marked]
    if unmarked:
        raise ValueError(f"blocks without a mark: {unmarked}")
    return found


def matches(stated: str, said: str) -> bool:
    """Return whether an output is the stated one: `…` is any text; spaces are not compared."""
    parts = [re.escape(" ".join(part.split())) for part in stated.split("…")]
    pattern = r"\s*.*?\s*".join(part.replace(r"\ ", r"\s+") for part in parts)
    return re.fullmatch(rf"\s*{pattern}\s*", " ".join(said.split()), re.DOTALL) is not None


@attrs.define
class Site:
    """Three hosts, and the machine with the authority. folder: of that machine."""

    folder: Path
    hosts: dict[str, Host]
    bin: Path = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Put the stand-ins of ssh and scp where the shell finds them first."""
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        roots = "".join(f"{name}) root={host.root};; " for name, host in self.hosts.items())
        programs = {
            "ssh": f'case $1 in {roots}esac; shift 3\nfor each; do mkdir -p "$root$each"; done\n',
            "scp": f'case ${{3%%:*}} in {roots}esac\ncp -p "$2" "$root${{3#*:}}"\n',
        }
        for name, text in programs.items():
            (self.bin / name).write_text(f"#!/bin/sh -e\n{text}")
            (self.bin / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of all commands."""
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PEERCACHE_POOL_SIZE": POOL, "COLUMNS": "200"}

    def do(self, step: Step) -> None:
        """Do a step on each of its hosts."""
        if "file" in step.facts:
            for name in step.hosts:
                self.hosts[name].path(step.facts["file"]).write_text(step.text)
        elif step.facts["on"] == "admin":
            for name in NAMES if step.facts.get("for") == EACH else NAMES[:1]:
                self._repeat(step, ["env", "-C", str(self.folder)], f"HOST={NAMES[0]}", name)
        else:
            for name in step.hosts:
                self._repeat(step, self.hosts[name].wrapped([]))

    def _repeat(self, step: Step, prefix: list[str], old: str = "", name: str = "") -> None:
        """Run a block until its output is the stated one: a node needs a moment to be ready."""
        text = step.text.replace(old, f"HOST={name}") if old else step.text
        until = time.monotonic() + (TIMEOUT_S if step.output else 0)
        while True:
            done = subprocess.run(
                [*prefix, "bash", "-e", "-c", f"exec 2>&1\n{text}"],
                stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False,
                timeout=2 * TIMEOUT_S, env=self.environment,
            )  # fmt: skip
            is_right = done.returncode == int(step.facts.get("exit", "0"))
            if is_right and matches(step.output or "…", done.stdout):
                return
            assert time.monotonic() < until, (
                f"{prefix}: exit {done.returncode}\n{text}\nstated:\n{step.output}\n"
                f"was:\n{done.stdout}\n{self.logs()}"
            )
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of the nodes' logs."""
        files = [host.path("/run/peercache/node.log") for host in self.hosts.values()]
        return "\n".join(file.read_text()[-2000:] for file in files if file.exists())

    def nodes(self) -> Iterator[int]:
        """Yield the process ids of the nodes that live."""
        for host in self.hosts.values():
            file = host.path("/run/peercache/node.pid")
            number = int(file.read_text()) if file.exists() else 0
            if number and b"peercache" in _command_of(number):
                yield number

    def end(self) -> None:
        """Kill the nodes that a failed step left."""
        for number in self.nodes():
            os.kill(number, signal.SIGKILL)


def _command_of(number: int) -> bytes:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@CAN_MAKE_HOSTS
def test_the_page_does_what_it_states(tmp_path: Path) -> None:
    """From the certificates to the end: every block on its host, with the output shown."""
    with separate_hosts(*NAMES, network="10.0.0") as (hosts, _):
        site = Site(tmp_path, {host.name: host for host in hosts})
        try:
            done = [step for step in steps(PAGE) if step.is_run_here]
            for step in done:
                site.do(step)
            until = time.monotonic() + TIMEOUT_S
            while list(site.nodes()):
                assert time.monotonic() < until, "a stopped node lives"
                time.sleep(0.1)
        finally:
            site.end()
    assert len(done) > 12


def test_a_block_without_a_mark_is_found() -> None:
    """A new block is run, or states why not; so is a mark without a block."""
    assert [step.facts for step in steps("<!-- on: decode-1, exit: 1 -->\n```sh\nls\n```\n")] == [
        {"on": "decode-1", "exit": "1"}
    ]
    for wrong in ("```sh\nls\n```\n", "<!-- on: admin -->\nls\n"):
        with pytest.raises(ValueError, match=r"mark|block"):
            steps(wrong)


def test_a_reader_sees_on_which_host_a_block_runs() -> None:
    """The first line states what the mark states, which a browser does not show."""
    for step in steps(PAGE):
        if "file" not in step.facts:
            place = "your own machine" if step.facts["on"] == "admin" else step.facts["on"]
            is_repeated = "repeat" in step.facts
            assert step.text.startswith(f"# on {EACH if is_repeated else place}\n"), step.text


def test_output_is_read_with_its_gaps() -> None:
    """Other text, a missing line and another order are differences; columns may be wider."""
    assert matches("a …\n…\nc\n", "a    1 2\nb\n c \n")
    assert matches('"node": "…", "x"', '"node": "5f", "x"')
    for said in ("a 1\nb", "c\na 1", "b\nc"):
        assert not matches("a …\nc", said), said


def test_what_is_not_run_here_is_run_with_sglang() -> None:
    """All of it is in one step of the page, which the other module runs."""
    other = [step for step in steps(PAGE) if not step.is_run_here]

    assert {step.facts["with"] for step in other} == {"SGLang"}
    assert all(step.text in PAGE.partition("\n## 7. ")[2].partition("\n## ")[0] for step in other)
