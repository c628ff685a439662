"""The litmus tests of the C parts: what they state holds, and they have the barriers of the code.

herd7, where it is installed, must agree. With a compiler for aarch64 the machine code is compared
as well as the sources.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
PACKAGE = ROOT / "src" / "peercache"
COMPILER = "aarch64-linux-gnu-gcc"


def load_litmus() -> ModuleType:
    """Import docs/spec/litmus.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("spec_litmus", SPEC / "litmus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up.
    spec.loader.exec_module(module)
    return module


litmus = load_litmus()
FILES = sorted((SPEC / "litmus").glob("*.litmus"))


class Mirrored(NamedTuple):
    """A line of a test: which instructions of a processor are those of a function."""

    thread: int
    function: str
    symbol: str
    source: Path
    instructions: list[str]


def mirrored(path: Path) -> list[Mirrored]:
    """Return what a test states about the code."""
    found = re.findall(
        r"^ +P(\d): (\w+)(?: \((\w+)\))? in (\S+): (.*)$", path.read_text(), re.MULTILINE
    )
    return [
        Mirrored(int(thread), function, symbol or function, PACKAGE / source, listed.split(", "))
        for thread, function, symbol, source, listed in found
    ]


OF_FENCE = {"ACQUIRE": "DMB ISHLD", "RELEASE": "DMB ISH", "SEQ_CST": "DMB ISH"}
OF_ACCESS = {("load", "ACQUIRE"): "LDAR", ("store", "RELEASE"): "STLR"}


def in_source(source: Path, function: str) -> list[str]:
    """Return the instructions that keep order, in the order of a C function's atomic operations."""
    text = source.read_text()
    body = re.search(
        rf"^[^\n;{{}}]*\b{function}\([^;{{]*\)\n{{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL
    )
    assert body is not None, f"{function} is not in {source}"
    atomic = (
        r"__atomic_(thread_fence|load_n|store_n)\((?:(?!__atomic_).)*?__ATOMIC_(\w+)|\bload\(r,"
    )
    listed = []
    for kind, order in re.findall(atomic, body[1], re.DOTALL):
        if kind == "thread_fence":
            listed.append(OF_FENCE[order])
        elif not kind:  # `load` of memory/_table_reading.c
            listed.append("LDAR")
        elif (kind.removesuffix("_n"), order) in OF_ACCESS:
            listed.append(OF_ACCESS[kind.removesuffix("_n"), order])
    return listed


def has_in_order(listed: list[str], wanted: list[str]) -> bool:
    """Return whether `wanted` is `listed` without some of its instructions."""
    left = iter(listed)
    return all(each in left for each in wanted)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_must_not_happen_never_does_and_each_missing_barrier_lets_it(path: Path) -> None:
    """The checker enumerates all executions; a planted bug without effect would be no barrier."""
    test = litmus.parse(path.read_text())

    assert test.name == path.stem
    assert litmus.verdict(test) == litmus.NEVER
    assert test.bugs
    for bug in test.bugs:
        assert litmus.verdict(test.with_bug(bug)) == litmus.SOMETIMES, bug


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_litmus_test_has_the_barriers_of_the_sources(path: Path) -> None:
    """A barrier that the code loses, or a test that invents one, is noticed."""
    test = litmus.parse(path.read_text())
    lines = mirrored(path)

    assert lines
    for thread in {line.thread for line in lines}:
        ordering = [
            each.name
            for each in test.threads[thread]
            if each.name in litmus.BARRIERS or each.name in litmus.WEAKER
        ]
        assert ordering == [
            each for line in lines if line.thread == thread for each in line.instructions
        ]
    for line in lines:
        found = in_source(line.source, line.function)
        assert has_in_order(found, line.instructions), (line.function, found)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_litmus_test_has_the_barriers_of_the_machine_code(path: Path, tmp_path: Path) -> None:
    """The compiler turns the atomic operations into these instructions, in this order."""
    for line in mirrored(path):
        built = tmp_path / "built.o"
        command = (COMPILER, "-std=gnu11", "-O3", "-c", line.source, "-o", built)
        subprocess.run(command, check=True)
        listing = subprocess.run(
            ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", built],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        code = re.search(rf"<{line.symbol}>:\n(.*?)(?:\n\n|\Z)", listing, re.DOTALL)
        assert code is not None, line.symbol
        found = [
            f"{name} {domain}".strip().upper()
            for name, domain in re.findall(r"\t(ldar|stlr|dmb)\t(ish\w*)?", code[1])
        ]
        assert has_in_order(found, line.instructions), (line.symbol, found)


@pytest.mark.skipif(shutil.which("herd7") is None, reason="no herd7")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_herd7_agrees(path: Path) -> None:
    """Another implementation of Arm's model, by its authors."""
    test = litmus.parse(path.read_text())

    for case in (test, *map(test.with_bug, test.bugs)):
        assert litmus.verdict_of_herd(case, "herd7") == litmus.verdict(case), case.name


def shape(threads: list[list[str]], never: str) -> object:
    """Make a test of the words x and y, which are in X10 and X11 of every processor."""
    rows = [
        " | ".join(thread[at] if at < len(thread) else "" for thread in threads)
        for at in range(max(map(len, threads)))
    ]
    words = " ".join(f"{number}:X10=x; {number}:X11=y;" for number in range(len(threads)))
    heads = " | ".join(f"P{number}" for number in range(len(threads)))
    lines = "".join(f" {row} ;\n" for row in [heads, *rows])
    return litmus.parse(f"AArch64 shape\n{{ x=0; y=0; {words} }}\n{lines}exists {never}\n")


SET = "MOV W9,#1"
X, Y = "[X10]", "[X11]"


@pytest.mark.parametrize(
    ("threads", "never", "expected"),
    [
        # Message passing.
        ([[SET, f"STR W9,{X}", f"STR W9,{Y}"], [f"LDAR W0,{Y}", f"LDR W1,{X}"]],
         "(1:X0=1 /\\ 1:X1=0)", "Sometimes"),
        ([[SET, f"STR W9,{X}", f"STLR W9,{Y}"], [f"LDAR W0,{Y}", f"LDR W1,{X}"]],
         "(1:X0=1 /\\ 1:X1=0)", "Never"),
        # Store buffering: only a full barrier, or STLR before LDAR, prevents it.
        ([[SET, f"STR W9,{X}", "DMB ISHLD", f"LDR W0,{Y}"],
          [SET, f"STR W9,{Y}", "DMB ISHLD", f"LDR W0,{X}"]], "(0:X0=0 /\\ 1:X0=0)", "Sometimes"),
        ([[SET, f"STR W9,{X}", "DMB ISH", f"LDR W0,{Y}"],
          [SET, f"STR W9,{Y}", "DMB ISH", f"LDR W0,{X}"]], "(0:X0=0 /\\ 1:X0=0)", "Never"),
        ([[SET, f"STLR W9,{X}", f"LDAR W0,{Y}"], [SET, f"STLR W9,{Y}", f"LDAR W0,{X}"]],
         "(0:X0=0 /\\ 1:X0=0)", "Never"),
        ([[SET, f"STLR W9,{X}", f"LDR W0,{Y}"], [SET, f"STLR W9,{Y}", f"LDR W0,{X}"]],
         "(0:X0=0 /\\ 1:X0=0)", "Sometimes"),
        # Load buffering: a branch keeps a store after the load that it depends on.
        ([[SET, f"LDR W0,{X}", f"STR W9,{Y}"], [SET, f"LDR W0,{Y}", f"STR W9,{X}"]],
         "(0:X0=1 /\\ 1:X0=1)", "Sometimes"),
        ([[SET, f"LDR W0,{X}", "CBZ W0,END0", f"STR W9,{Y}", "END0:"],
          [SET, f"LDR W0,{Y}", "CBZ W0,END1", f"STR W9,{X}", "END1:"]],
         "(0:X0=1 /\\ 1:X0=1)", "Never"),
        # Coherence: two loads of one word are never of a later and then of an earlier store.
        ([[SET, f"STR W9,{X}"], [f"LDR W0,{X}", f"LDR W1,{X}"]],
         "(1:X0=1 /\\ 1:X1=0)", "Never"),
        # Independent reads of independent writes: all processors see one order of stores.
        ([[SET, f"STR W9,{X}"], [SET, f"STR W9,{Y}"],
          [f"LDR W0,{X}", "DMB ISHLD", f"LDR W1,{Y}"],
          [f"LDR W0,{Y}", "DMB ISHLD", f"LDR W1,{X}"]],
         "(2:X0=1 /\\ 2:X1=0 /\\ 3:X0=1 /\\ 3:X1=0)", "Never"),
        ([[SET, f"STR W9,{X}"], [SET, f"STR W9,{Y}"],
          [f"LDR W0,{X}", f"LDR W1,{Y}"], [f"LDR W0,{Y}", f"LDR W1,{X}"]],
         "(2:X0=1 /\\ 2:X1=0 /\\ 3:X0=1 /\\ 3:X1=0)", "Sometimes"),
    ],
)  # fmt: skip
def test_the_checker_knows_the_classical_shapes(
    threads: list[list[str]], never: str, expected: str
) -> None:
    """Arm publishes these results; herd7 has the same."""
    test = shape(threads, never)

    assert litmus.verdict(test) == expected
    if shutil.which("herd7"):
        assert litmus.verdict_of_herd(test, "herd7") == expected


def test_without_herd7_it_reports_what_is_missing(tmp_path: Path) -> None:
    """Nothing passes silently."""
    done = subprocess.run(
        [sys.executable, SPEC / "litmus.py", "--herd"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path)},
    )

    assert done.returncode == 2
    assert "missing: herd7" in done.stderr
