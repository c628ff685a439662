"""The gate: all parts run, the verdict is the worst, and second chances are given to few."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

from tests import second_chance
from tests.pace import TIMEOUT_S, TimedOut, paced, wait_until
from tests.system.nodes import NodeDied, state_of

ROOT = Path(__file__).parents[2]


def load_gate() -> Any:
    """Import .ci/gate.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("gate", ROOT / ".ci" / "gate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up.
    spec.loader.exec_module(module)
    return module


gate = load_gate()


def shell(name: str, script: str, **more: Any) -> Any:
    """Return a part that runs a line of shell."""
    return gate.Part(name, ("sh", "-c", script), **more)


def run(*parts: Any, folder: Path) -> tuple[Any, list[str], str]:
    """Run parts; return the gate, its last lines, and what it printed before."""
    said = io.StringIO()
    runner = gate.Gate(parts, jobs=2, say=said, root=folder)
    runner.run()
    return runner, list(runner.summary()), said.getvalue()


def verdicts(runner: Any) -> dict[str, str]:
    """Return what the table states of each part."""
    return {row.name: row.verdict for row in runner.rows}


def test_a_part_that_fails_ends_neither_the_run_nor_the_table(tmp_path: Path) -> None:
    """The exit status is that of the worst, and the failed tests are named at the very end."""
    runner, last, said = run(
        shell("one", "echo 'FAILED tests/x.py::test_y[a b] - AssertionError: z'; exit 1"),
        shell("two", "echo 'reproduce: python -m sims run --seed 7'; exit 3", after=("one",)),
        shell("three", "echo fine"),
        folder=tmp_path,
    )

    assert verdicts(runner) == {"one": "failed", "two": "failed", "three": "ok"}
    assert runner.status(full=False) == 3
    assert "fine" in said
    assert [line for line in last if line.startswith("FAILED")] == [
        "FAILED: one",
        "FAILED: tests/x.py::test_y[a b] - AssertionError: z",
        "FAILED: two",
        "FAILED: python -m sims run --seed 7",
    ]


def test_what_cannot_be_fetched_is_not_run_and_fails_a_full_run_only(tmp_path: Path) -> None:
    """What needs it is not run either; a part may say so itself."""
    runner, last, _ = run(
        shell("engine", "exit 1", fetches=True, without="the tests with an engine"),
        shell("its tests", "exit 0", needs=("engine",)),
        shell("others", "exit 0", after=("engine",)),
        shell("packages", "echo 'NOT RUN: the tests of TLS'", fetches=True),
        shell("guest", "exit 125"),
        folder=tmp_path,
    )

    assert verdicts(runner)["its tests"] == "NOT RUN"
    assert verdicts(runner)["others"] == "ok"
    assert verdicts(runner)["guest"] == "NOT RUN"
    assert runner.status(full=False) == 0
    assert runner.status(full=True) == 1
    assert "NOT RUN: the tests with an engine" in last
    assert "NOT RUN: its tests: no engine" in last
    assert "NOT RUN: the tests of TLS" in last


def test_parts_run_side_by_side_but_one_that_measures_time_alone(tmp_path: Path) -> None:
    """Two wait for each other's file; the lone one sees that no other runs."""
    meet = "touch {0}; for i in $(seq 600); do [ -e {1} ] && exit 0; sleep 0.1; done; exit 1"
    runner, _, _ = run(
        shell("alone", "[ -e a ] && [ -e b ] && [ ! -e running ]", alone=True),
        shell("a", meet.format("a", "b")),
        shell("b", meet.format("b", "a")),
        shell("c", "touch running; sleep 0.3; rm running"),
        folder=tmp_path,
    )

    assert set(verdicts(runner).values()) == {"ok"}


def test_a_part_may_give_variables_to_later_ones(tmp_path: Path) -> None:
    """An environment that is there is asked for by its tests."""
    runner, _, _ = run(
        shell("makes", "exit 0", fetches=True, provides=(("PEERCACHE_TEST_X", "1"),)),
        shell("uses", '[ "$PEERCACHE_TEST_X" = 1 ]', after=("makes",)),
        folder=tmp_path,
    )

    assert verdicts(runner)["uses"] == "ok"


def test_the_python_path_of_the_caller_is_not_that_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests would import other sources than those of the checkout."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/src")

    runner, _, _ = run(shell("part", '[ -z "$PYTHONPATH" ]'), folder=tmp_path)

    assert verdicts(runner)["part"] == "ok"


CRASHING = """
import os, pytest

@pytest.mark.parametrize("number", range(60))
def test_crashes(number):
    if number == 20:
        os._exit(3)
"""


def test_a_worker_that_crashed_ends_the_tests(tmp_path: Path) -> None:
    """With the Makefile's flags; pytest-xdist otherwise waits for the worker's tests forever."""
    (tmp_path / "test_suite.py").write_text(CRASHING)
    flags = re.findall(r"^PARALLEL := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pytest_again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]

    ended = subprocess.run(
        [*pytest_again, *flags[0].split(), "2", "test_suite.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )

    assert ended.returncode == 1
    assert b"crashed while running 'test_suite.py::test_crashes[20]" in ended.stdout


def test_a_part_that_builds_gets_a_copy_of_the_checkout(tmp_path: Path) -> None:
    """Of all that is not ignored, as it is now."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").touch()
    (tmp_path / "new").touch()

    runner, _, _ = run(
        shell("copy", "[ -e new ] && [ ! -e ignored ] && touch built", is_copy=True),
        folder=tmp_path,
    )

    assert verdicts(runner)["copy"] == "ok"
    assert not (tmp_path / "built").exists()


def test_a_part_that_outlives_its_limit_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the table shows it."""
    started = tmp_path / "child"

    def story(limit_s: float) -> dict[str, str]:
        started.write_text("")
        monkeypatch.setattr(gate, "LIMIT_S", limit_s)
        runner, last, _ = run(
            shell("hangs", "sleep 1000 & echo $! > child; wait"),
            shell("next", "exit 0"),
            folder=tmp_path,
        )
        assert f"FAILED: hangs: not within {limit_s:g} s" in last
        return verdicts(runner)

    # On a busy machine a shell takes as long to start.
    found = paced(story, lambda seen: seen["next"] == "ok" and bool(started.read_text()))

    assert found == {"hangs": "failed", "next": "ok"}
    child = Path("/proc") / started.read_text().strip()
    wait_until(lambda: not child.exists() or state_of(child) == "Z", "the child has ended")


SUITE = """
from pathlib import Path
from tests.pace import TimedOut

def test_late():
    ran = Path(__file__).parent / "ran"
    if not ran.exists():
        ran.touch()
        raise TimedOut("the state: not within 60 s")

def test_always_late():
    raise TimedOut("the state: not within 60 s")

def test_wrong_bytes():
    assert b"a" == b"b"

def test_unlisted():
    raise TimedOut("the state: not within 60 s")

def test_passes():
    pass
"""
CONFTEST = """
from tests import second_chance

def pytest_configure(config):
    names = ("late", "always_late", "wrong_bytes")
    second_chance.register(config, {f"test_it.py::test_{name}": "a cause" for name in names})
"""


def gate_of(folder: Path, *tests: str, workers: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Run a gate of one part, a real pytest over some of the suite above."""
    (folder / "test_it.py").write_text(SUITE)
    (folder / "conftest.py").write_text(CONFTEST)
    ini = f"[pytest]\naddopts = -ra -p no:randomly\npythonpath = {ROOT}\n"
    (folder / "pytest.ini").write_text(ini)
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    chosen = [f"test_it.py::test_{name}" for name in tests]
    part = gate.Part("suite", (*pytest_here, *workers, *chosen), again=pytest_here)
    runner, last, said = run(part, folder=folder)
    print(said)  # Pytest shows it where the test fails.
    return runner, last


@pytest.fixture
def own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite above be no part of the run of these tests."""
    for variable in [name for name in os.environ if name.startswith(("COV_", "PYTEST_"))]:
        monkeypatch.delenv(variable)


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_listed_test_whose_time_ran_out_runs_once_more(
    tmp_path: Path, workers: Sequence[str]
) -> None:
    """It passes alone: the run goes on, and its last line reports FLAKY, with the first failure."""
    runner, last = gate_of(tmp_path, "late", "passes", workers=workers)

    assert verdicts(runner) == {"suite": "flaky"}
    assert runner.status(full=True) == 0
    assert last[-1].startswith("FLAKY: test_it.py::test_late - ")
    assert "the state: not within 60 s" in last[-1]


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize("name", ["always_late", "unlisted"])
def test_nothing_else_gets_a_second_chance(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that is late for good fails; the others do not run again at all.

    So it is where the gate itself is tested by a part of a gate.
    """
    monkeypatch.setenv(gate.SECOND_CHANCE, os.fspath(tmp_path / "outer.jsonl"))
    runner, last = gate_of(tmp_path, name)

    assert verdicts(runner) == {"suite": "failed"}
    assert runner.status(full=False) == 1
    assert [line for line in last if line.startswith("FLAKY")] == []


@pytest.mark.usefixtures("own_run")
def test_a_late_test_runs_again_only_where_nothing_else_has_failed(tmp_path: Path) -> None:
    """The run has failed anyway."""
    runner, last = gate_of(tmp_path, "late", "wrong_bytes")

    assert verdicts(runner) == {"suite": "failed"}
    failed = [line for line in last if line.startswith("FAILED: test_it.py")]
    assert len(failed) == 2


@pytest.mark.usefixtures("own_run")
def test_too_many_flaky_tests_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which many are late shows something that is to be fixed."""
    monkeypatch.setattr(gate, "FLAKY_MAX", 0)

    runner, last = gate_of(tmp_path, "late")

    assert verdicts(runner) == {"suite": "failed"}
    assert any(line.startswith("FAILED: test_it.py::test_late") for line in last)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("wrong bytes"),
        NodeDied("the node ended with -11"),
        TimeoutError("out of a call of the client"),
        trio.TooSlowError(),
        ExceptionGroup("", [TimedOut("the state"), AssertionError("a hit after a removal")]),
    ],
)
def test_what_a_test_saw_is_no_lack_of_time(error: Exception) -> None:
    """A call that raises as its time runs out is a broken promise, and no slow machine."""
    assert not second_chance.ran_out_of_time(error)
    assert second_chance.ran_out_of_time(ExceptionGroup("", [TimedOut("the state")]))


@pytest.mark.parametrize("full", [False, True])
def test_the_table_names_what_is_there(*, full: bool) -> None:
    """Each target of the Makefile, each script, each part that another one needs."""
    parts = gate.parts(full=full)
    names = [part.name for part in parts]
    lines = re.findall(r"^([\w$()./ -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for line in lines for name in line.replace("$(VENV)", ".venv").split()}
    targets.add(".venv/.installed")

    assert len(names) == len(set(names))
    for part in parts:
        assert set(part.needs + part.after) <= set(names), part.name
        assert not part.fetches or part.without, part.name
        if part.command[0] == "make":
            goals = [word for word in part.command[1:] if "=" not in word and word[0] != "-"]
            assert set(goals) <= targets, part.name
        for word in part.command:
            if word.endswith((".sh", ".py")) and " " not in word:
                assert (ROOT / word).exists(), word
    for path in (*gate.GUEST_TESTS.split(), f"tests/integration/{gate.ENGINE_PAIR}.py"):
        assert (ROOT / path).exists(), path


def test_listed_tests_are_there_and_have_a_cause() -> None:
    """A list that only grows would hide what is broken."""
    for test, cause in second_chance.listed().items():
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text()
        assert re.search(rf"^(async )?def {re.escape(name)}\(", source, re.MULTILINE), test
        assert len(cause) > 20, f"{test} has no cause"
        assert path.split("/")[1] in {"system", "hostile", "integration", "deploy"}, test
