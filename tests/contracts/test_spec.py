"""The models: spin finds nothing in them, and finds every planted bug.

Needs spin and gcc, and skips without them. With PEERCACHE_TEST_SPEC=1, as in CI, they must be
there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SPEC = Path(__file__).parents[2] / "docs" / "spec"

# Not bugs: how much there is, what may happen, and what is checked.
OPTIONS = {"EXITS", "RULES", "ALL", "FORGED", "LOOKS_WORD_FIRST", "BYZANTINE", "REPEATED"}
OPTIONS |= {"REPAIRS", "LATE_ANSWERS", "SUMMARIES", "OTHERS", "MAY_GO_BACK"}
OPTIONS |= {"REMOVAL", "REVOCATION", "BYZANTINE_GIVER", "BYZANTINE_TAKER", "WRONG_COPY"}
OPTIONS |= {"UNREACHABLE"}


def load_check() -> ModuleType:
    """Import docs/spec/check.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("spec_check", SPEC / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up.
    spec.loader.exec_module(module)
    return module


check = load_check()


@pytest.fixture
def tools() -> None:
    """Skip where there is no spin or no gcc, unless they were promised."""
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing and os.environ.get("PEERCACHE_TEST_SPEC") != "1":
        pytest.skip(f"no {' and no '.join(missing)}: apt-get install spin gcc")


@pytest.mark.slow
@pytest.mark.usefixtures("tools")
def test_the_protocol_holds_and_every_planted_bug_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole table is as it must be; it is shown, so that a log of CI has it."""
    done = subprocess.run(
        [sys.executable, SPEC / "check.py"], capture_output=True, text=True, check=False
    )

    with capsys.disabled():
        print(f"\n{done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("tools")
def test_a_bug_that_is_not_found_is_a_wrong_answer(tmp_path: Path) -> None:
    """A true model where a bug is expected, and a bug where the truth is, both are reported."""
    survivor = check.Case("survivor", check.SMALLEST, "promise")
    broken = check.Case("broken", (*check.SMALLEST, "NO_FENCE"), check.HOLDS)
    other_rule = check.bug("FREED_BY_TIME", check.SMALLEST, "unique value")

    verdicts = [
        check.verdict(check.made(tmp_path / case.name), case)
        for case in (survivor, broken, other_rule)
    ]

    assert [right for right, _ in verdicts] == [False, False, False]
    assert all("WRONG" in line for _, line in verdicts)


@pytest.mark.usefixtures("tools")
def test_a_model_that_spin_refuses_has_no_answer(tmp_path: Path) -> None:
    """A checker that was never made proves nothing."""
    with pytest.raises(check.Unanswered):
        check.ask(tmp_path / "refused", (*check.SMALLEST, "PROMISE=("))


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("limit", ["MEMORY_MIB_MAX", "RUN_S_MAX"])
def test_a_search_that_ends_early_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Nothing found in a part of the states is not nothing to be found."""
    monkeypatch.setattr(check, limit, 1)

    with pytest.raises(check.Unanswered):
        check.ask(tmp_path / "early", ("PAGES=3", "GRANULES=2", "LARGE=2"))


def test_without_spin_it_reports_what_is_missing(tmp_path: Path) -> None:
    """Nothing is installed and nothing passes silently."""
    done = subprocess.run(
        [sys.executable, SPEC / "check.py"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path)},
    )

    assert done.returncode == 2
    assert "missing: spin, gcc" in done.stderr


@pytest.mark.parametrize("model", check.MODELS)
def test_every_mutation_in_a_model_is_checked(model: str) -> None:
    """A bug that is never planted would still be described as found."""
    text = (SPEC / f"{model}.pml").read_text()
    used = re.findall(r"^#(?:if(?:n?def)?|elif) (.*)$", text, re.MULTILINE)
    switches = {name for line in used for name in re.findall(r"[A-Z][A-Z_]+", line)}
    numbers = set(re.findall(r"^#ifndef ([A-Z_]+)\d?\n#define ", text, re.MULTILINE))
    bugs = [case for case in check.BUGS if case.model == model]
    planted = {define for case in bugs for define in case.defines if "=" not in define}

    assert switches - numbers - OPTIONS == planted - OPTIONS


@pytest.mark.parametrize("model", check.MODELS)
def test_every_option_of_a_model_is_used_where_a_promise_must_hold(model: str) -> None:
    """What a model allows only together with a planted bug is not shown to be harmless."""
    cases = [case for case in (*check.TRUTHS, *check.WITNESSES) if case.model == model]
    bugs = [case for case in check.BUGS if case.model == model]
    used = {define for case in cases for define in case.defines if "=" not in define}

    assert {define for case in bugs for define in case.defines} & OPTIONS <= used


def test_the_readme_names_every_planted_bug() -> None:
    """Its table is where people look one up."""
    readme = (SPEC / "README.md").read_text()

    named = set(re.findall(r"^\| `([A-Z_]+)`", readme, re.MULTILINE))

    assert named == {case.name.partition(" ")[0] for case in check.BUGS}
