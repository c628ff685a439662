"""The gate: every part of it runs, and the last lines say what failed.

`bash .ci/run` is what CI runs: all that is deterministic, and one real run of each kind of part.
`bash .ci/run --full` (`make full`) is what one runs before a release: all there is.

Owns    the table of parts below, the order in which they run, and the verdict.
Keeps   A part that fails ends neither the run nor the table. Parts run side by side, but those that
        measure time run alone. What cannot be fetched is NOT RUN, which fails a full run only.
        A test of tests/real_time.txt that failed because its time ran out (tests/second_chance.py)
        runs once more, alone, at the end: FLAKY, if it passes. More than FLAKY_MAX fail the run.
Limits  JOBS parts at a time; LIMIT_S for each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ".venv/bin/python"
JOBS = 2
LIMIT_S = 3600.0
FLAKY_MAX = 3
UNAVAILABLE = 125
"""The status of a command whose subject this machine cannot have: the RDMA rig's, for one."""
SECOND_CHANCE = "PEERCACHE_SECOND_CHANCE"

OK, FLAKY, FAILED, NOT_RUN = "ok", "flaky", "failed", "NOT RUN"


@dataclass(frozen=True)
class Part:
    """One line of the table.

    fetches:  it makes or installs something; where it fails, that cannot be had on this machine.
    without:  what is not tested then, for the line NOT RUN.
    provides: variables of all parts that begin after it.
    needs:    parts that must have passed; after: parts that must have ended.
    alone:    it measures time.
    is_copy:  it builds in the checkout, so it gets a copy of it.
    again:    the command that runs one test of it again, and nothing else; none: no second chance.
    """

    name: str
    command: tuple[str, ...]
    fetches: bool = False
    without: str = ""
    provides: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    alone: bool = False
    is_copy: bool = False
    again: tuple[str, ...] = ()


def make(*targets: str, flags: str = "") -> tuple[str, ...]:
    """Return a command of the Makefile; flags: for pytest."""
    return ("make", "--no-print-directory", *targets, *([f"PYTEST_FLAGS={flags}"] if flags else []))


PYTEST = (PYTHON, "-m", "pytest", "-q")
OLDER_SGLANG = (
    '"$(tests/integration/install_sglang.sh)"/bin/python tests/integration/older_sglang.py'
)
SGLANG_AGAIN = ("bash", "tests/integration/run_sglang_tests.sh", "-q")
SET_UP = "set-up"
SYSTEM = "system packages"
SGLANG_ENV, LMCACHE_ENV = "SGLang's environment", "LMCache's environment"
DYNAMO_ENV, VLLM_ENV = "Dynamo's environment", "vLLM's environment"
NEWER_VLLM = "a newer vLLM"
GUEST = "RDMA guest"

FIRST_SEEDS = 60
FUZZED = {
    "messages": "codec tcp events questions http",
    "TLS": "handshake tls answers certificate",
    "files": "slots index segment table",
}
"""Targets of tests/fuzz."""
ENGINE_PAIR = "test_sglang_engine"
GUEST_TESTS = "tests/rdma/test_verbs.py tests/rdma/test_fabric.py tests/rdma/test_full_path.py"


def can_make_environments(python: str) -> bool:
    """Return whether an interpreter runs, and has what a virtual environment takes."""
    command = [python, "-c", "import ensurepip, venv"]
    return not subprocess.run(command, capture_output=True, check=False).returncode  # noqa: S603


def oldest_python() -> str:
    """Return the interpreter of the oldest Python that README names, or "" where there is none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which("python3.10"), *sorted(versions.glob("3.10.*/bin/python"))):
        if python and can_make_environments(os.fspath(python)):
            return os.fspath(python)
    return ""


def environment_of(engine: str, name: str) -> Part:
    """Return the part that makes another engine's environment."""
    return Part(
        name,
        ("tests/integration/install_engine.sh", engine),
        fetches=True,
        without=f"the tests with {engine}: its environment cannot be made here",
        provides=((f"PEERCACHE_TEST_{engine.upper()}", "1"),),
    )


def parts(*, full: bool) -> list[Part]:
    """Return the parts in the order in which they begin, as far as `needs` and `after` let them."""
    python = oldest_python()
    fast = make("fast", f"PYTHON={python}") if python else make("types-oldest")
    chosen = [
        Part(SYSTEM, ("bash", ".ci/packages.sh"), fetches=True, without="what needs packages"),
        Part(
            SGLANG_ENV,
            ("tests/integration/install_sglang.sh",),
            fetches=True,
            without="the SGLang tests: their environment cannot be made here",
            provides=(("PEERCACHE_TEST_SGLANG", "1"),),
        ),
        Part(SET_UP, make(".venv/.installed", ".venv/.docs"), after=(SYSTEM,)),
        Part(
            "tools of deploy/",
            ("bash", "tests/deploy/get_tools.sh"),
            fetches=True,
            without="the tests of the chart: helm and the schemas cannot be fetched here",
        ),
        Part(
            "make test",
            make("test"),
            needs=(SET_UP,),
            after=(SGLANG_ENV, "tools of deploy/"),
            again=PYTEST,
        ),
        environment_of("lmcache", LMCACHE_ENV),
        environment_of("dynamo", DYNAMO_ENV),
        Part(
            GUEST,
            (PYTHON, "-m", "tests.rdma.rig", "prepare"),
            needs=(SET_UP,),
        ),
        Part(
            "Python 3.10",
            fast,
            is_copy=bool(python),
            after=(SYSTEM,) if python else (SET_UP,),
        ),
    ]  # fmt: skip
    if full:
        chosen += [
            Part(
                "older versions of SGLang",
                ("bash", "-c", OLDER_SGLANG),
                fetches=True,
                without="the SGLang tests with older versions: they cannot be fetched here",
                needs=(SGLANG_ENV,),
            ),
            Part(
                "Kubernetes' API server",
                ("bash", "tests/deploy/get_apiserver.sh"),
                fetches=True,
                without="the chart on an API server: its sources cannot be had or compiled here",
            ),
            environment_of("vllm", VLLM_ENV),
            Part(
                NEWER_VLLM,
                (PYTHON, "-m", "tests.integration.newer_vllm", "0.33.0"),
                fetches=True,
                without="the tests with a newer vLLM: it cannot be fetched here",
                needs=(SET_UP, VLLM_ENV),
            ),
        ]  # fmt: skip
    # Not one flag, so that a test which is run again alone takes the same way.
    engines = make("sglang-engines", flags="" if full else f"-k {ENGINE_PAIR}")
    guest_tests = make("test-rdma", flags="" if full else GUEST_TESTS)
    seeds = [] if full else [f"SIMS_SEEDS={FIRST_SEEDS}"]
    chosen += [
        # The longest ones first: nothing waits for one that begins last.
        Part("make sims", make("sims", *seeds), needs=(SET_UP,)),
        Part("make sglang-engines", engines, needs=(SET_UP, SGLANG_ENV), again=SGLANG_AGAIN),
        Part("make lmcache", make("lmcache"), needs=(SET_UP, LMCACHE_ENV), again=PYTEST),
        Part("make dynamo", make("dynamo"), needs=(SET_UP, DYNAMO_ENV), again=PYTEST),
        Part("make test-rdma", guest_tests, needs=(GUEST,), after=(SGLANG_ENV,)),
        Part("make spec", make("spec"), needs=(SET_UP,)),
        Part("make demo", make("demo"), needs=(SET_UP,)),
        Part("make docs-site", make("docs-site"), needs=(SET_UP,)),
        Part("make release-check", make("release-check"), needs=(SET_UP,), is_copy=True),
    ]
    if full:
        chosen += [
            Part("make vllm", make("vllm"), needs=(SET_UP, VLLM_ENV), again=PYTEST),
            Part("make vllm-newer", make("vllm-newer"), needs=(SET_UP, NEWER_VLLM)),
            *(
                Part(f"fuzz {of}", make("fuzz", f"FUZZ={names}", "MINUTES=10"), needs=(SET_UP,))
                for of, names in FUZZED.items()
            ),
            Part("kill points", make("kill-points"), needs=(SET_UP,)),
            Part("make soak", make("soak", "MINUTES=25"), needs=(SET_UP,)),
            Part("make slow", make("slow"), needs=(SET_UP,), after=tuple(
                part.name for part in chosen if part.fetches), alone=True, again=PYTEST),
        ]  # fmt: skip
    return chosen


@dataclass
class Running:
    """A part that runs: its process, its output in a file, and what came of it."""

    part: Part
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    folder: Path
    began: float = field(default_factory=time.monotonic)
    is_late: bool = False

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Row:
    """What the table says of a part.

    postponed: tests that get a second chance, with how they failed.
    """

    name: str
    verdict: str
    status: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    postponed: dict[str, str] = field(default_factory=dict)


FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S+\.py\S*.*?)(?: - (.*))?$", re.MULTILINE)
REPRODUCE_LINE = re.compile(r"^reproduce: (.*)$", re.MULTILINE)
NOT_RUN_LINE = re.compile(r"^NOT RUN: (.*)$", re.MULTILINE)


def failed_tests(output: str) -> list[str]:
    """Return the failed tests of a part, each with why, and what runs a failed simulation again."""
    found: dict[str, str] = dict(FAILED_LINE.findall(output))
    tests = [f"{test} - {why}" if why else test for test, why in found.items()]
    return tests + REPRODUCE_LINE.findall(output)


def row_of(part: Part, status: int, seconds: float, output: str, postponed: dict[str, str]) -> Row:
    """Judge a part that has ended."""
    row = Row(part.name, OK, status, seconds, not_run=NOT_RUN_LINE.findall(output))
    row.postponed = postponed
    # A postponed test stands in pytest's summary, too.
    row.failed = [line for line in failed_tests(output) if line.split(" - ")[0] not in postponed]
    if status == 0:
        return row
    if part.fetches or status == UNAVAILABLE:
        row.verdict = NOT_RUN
        row.not_run.append(part.without or f"{part.name}: for the reason that it printed")
    else:
        row.verdict = FAILED
    return row


class Gate:
    """Runs parts, and keeps the table."""

    def __init__(
        self, chosen: Sequence[Part], *, jobs: int, say: IO[str], root: Path = ROOT
    ) -> None:
        """Begin with no part running. say: where everything is printed."""
        self._waiting = list(chosen)
        self._parts = {part.name: part for part in chosen}
        self._jobs = jobs
        self._say = say
        self._root = root
        self._running: list[Running] = []
        self._variables: dict[str, str] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="peercache-gate-"))
        self._began = time.monotonic()
        self.rows: list[Row] = []

    def run(self) -> None:
        """Run all parts, then the tests that get a second chance."""
        try:
            while self._waiting or self._running:
                self._begin_what_can()
                self._end_what_has()
                time.sleep(0.1)
            self._second_chances()
        finally:
            for running in self._running:
                running.end()
                self._show(running, f"ended after {time.monotonic() - running.began:.0f} s")
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _print(self, text: str) -> None:
        self._say.write(text + "\n")
        self._say.flush()

    def _begin_what_can(self) -> None:
        verdicts = {row.name: row.verdict for row in self.rows}
        for part in list(self._waiting):
            wanted = [name for name in (*part.needs, *part.after) if name in self._parts]
            if any(name not in verdicts for name in wanted):
                continue
            lacking = [name for name in part.needs if verdicts.get(name) in (FAILED, NOT_RUN)]
            if lacking:
                self._waiting.remove(part)
                self.rows.append(Row(part.name, NOT_RUN, not_run=[f"{part.name}: no {lacking[0]}"]))
                continue
            if part.alone and (self._running or len(self._waiting) > 1):
                continue
            if len(self._running) >= self._jobs:
                return
            self._waiting.remove(part)
            self._running.append(self._begin(part))

    def _begin(self, part: Part) -> Running:
        number = len(self.rows) + len(self._running)
        folder = self._root
        if part.is_copy:
            folder = self._scratch / f"copy-{number}"
            copy_checkout(self._root, folder)
        variables = self._environment()
        if part.again:
            variables[SECOND_CHANCE] = os.fspath(self._scratch / f"{part.name}.jsonl")
        self._print(f"=== {self._at()} {part.name} begins: {shlex.join(part.command)}")
        output = (self._scratch / f"{number}.log").open("w+b")
        process = subprocess.Popen(  # noqa: S603 - the commands of the table
            part.command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        return Running(part, process, output, folder)

    def _environment(self) -> dict[str, str]:
        """Return the variables of a command; a gate within a gate's part postpones nothing.

        Nor does PYTHONPATH reach a part: it would be tested with the sources of another checkout.
        """
        variables = {**os.environ, **self._variables}
        variables.pop(SECOND_CHANCE, None)
        variables.pop("PYTHONPATH", None)
        return variables

    def _end_what_has(self) -> None:
        for running in list(self._running):
            seconds = time.monotonic() - running.began
            if seconds > LIMIT_S and not running.is_late:
                running.is_late = True
                running.end()
            status = running.process.poll()
            if status is None:
                continue
            self._running.remove(running)
            running.end()  # What it left behind.
            part = running.part
            text = self._show(running, f"ended with {status} after {seconds:.0f} s")
            row = row_of(part, abs(status), seconds, text, self._postponed(part))
            if running.is_late:
                row.failed.append(f"{part.name}: not within {LIMIT_S:g} s")
            if row.verdict == OK:
                self._variables.update(part.provides)
            self.rows.append(row)
            if part.is_copy:
                # An environment has ten thousands of files: no part shall wait for that.
                threading.Thread(target=shutil.rmtree, args=(running.folder, True)).start()

    def _postponed(self, part: Part) -> dict[str, str]:
        path = self._scratch / f"{part.name}.jsonl"
        if not path.exists():
            return {}
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["test"]: line["failure"] for line in lines}

    def _show(self, running: Running, how: str) -> str:
        running.output.seek(0)
        text = running.output.read().decode(errors="replace")
        running.output.close()
        self._print(f"=== {self._at()} {running.part.name} {how}; its output:")
        self._print(text)
        return text

    def _at(self) -> str:
        return f"[{time.monotonic() - self._began:5.0f} s]"

    def _second_chances(self) -> None:
        postponed = [(row, test) for row in self.rows for test in row.postponed]
        if len(postponed) > FLAKY_MAX:
            for row, test in postponed:
                row.verdict, row.status = FAILED, row.status or 1
                row.failed.append(f"{test} - {row.postponed[test]}")
            return
        for row, test in postponed:
            again = subprocess.run(  # noqa: S603 - a command of the table
                [*self._parts[row.name].again, test],
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=self._environment(),
                check=False,
            )
            self._print(f"=== {self._at()} {test}, once more and alone:")
            self._print((again.stdout + again.stderr).decode(errors="replace"))
            if again.returncode:
                row.verdict, row.status = FAILED, row.status or 1
                row.failed.append(f"{test} - {row.postponed[test]}; failed again, alone")
            elif row.verdict == OK:
                row.verdict = FLAKY

    def status(self, *, full: bool) -> int:
        """Return the worst status; in a full run, what is not run is a failure."""
        lacking = any(row.not_run for row in self.rows) or len(self.rows) < len(self._parts)
        worst = max((row.status for row in self.rows if row.verdict == FAILED), default=0)
        return worst or int(lacking and full)

    def summary(self) -> Iterator[str]:
        """Yield the last lines: the table, and what a reader must know."""
        yield "=== seconds of each part"
        for row in self.rows:
            how = f"exit status {row.status}" if row.verdict == FAILED else row.verdict
            yield f"{row.seconds:6.0f} s  {row.name:32} {how}"
        yield f"{time.monotonic() - self._began:6.0f} s  in all"
        for row in self.rows:
            yield from (f"NOT RUN: {reason}" for reason in row.not_run)
        for row in self.rows:
            if row.verdict == FAILED:
                yield f"FAILED: {row.name}"
            yield from (f"FAILED: {line}" for line in row.failed)
            if row.verdict != FAILED:
                yield from (f"FLAKY: {test} - {why}" for test, why in row.postponed.items())


def with_needs(chosen: Sequence[Part], wanted: str) -> list[Part]:
    """Return the parts whose name contains `wanted`, and all that must come before them."""
    by_name = {part.name: part for part in chosen}
    names = before = {name for name in by_name if wanted in name}
    while before:
        every = {n for name in before for n in (*by_name[name].needs, *by_name[name].after)}
        before = (every & set(by_name)) - names
        names |= before
    return [part for part in chosen if part.name in names]


def copy_checkout(root: Path, folder: Path) -> None:
    """Copy what git tracks or would track, as it is in the checkout now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def prepare() -> None:
    """Set what all parts share: caches outside the checkout, retries, mappings for the guest."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for variable, value in (
        ("CI", "true"),
        ("PIP_CACHE_DIR", os.fspath(cache / "pip")),
        ("PIP_RETRIES", "10"),
        ("PIP_DEFAULT_TIMEOUT", "60"),
        ("PYTHONUNBUFFERED", "1"),
    ):
        os.environ.setdefault(variable, value)
    if os.geteuid() == 0:
        # SGLang in the guest of the RDMA tests wants more mappings than a process may have.
        subprocess.run(["sysctl", "-qw", "vm.max_map_count=262144"], check=False)  # noqa: S607


def main() -> int:
    """Run the gate; return its exit status."""
    parser = argparse.ArgumentParser(prog=".ci/run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--full", action="store_true", help="all there is, before a release")
    parser.add_argument("--jobs", type=int, default=JOBS, help="parts at a time")
    parser.add_argument("--only", default="", help="parts so named, and what they need")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    prepare()
    chosen = parts(full=options.full)
    if options.only:
        chosen = with_needs(chosen, options.only)
    gate = Gate(chosen, jobs=options.jobs, say=sys.stdout)
    try:
        gate.run()
    finally:
        for line in gate.summary():
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return gate.status(full=options.full)


if __name__ == "__main__":
    sys.exit(main())
