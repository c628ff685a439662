"""Fuzz readers of bytes, guided by coverage: `python -m tests.fuzz codec --minutes 10`.

Without names: every target. An input that fails is kept in tests/fuzz/corpus, and its name printed.
It takes atheris (`pip install atheris`), and gcc for the coverage of the C parts: these are built
in a copy, with the sanitizers of addresses and undefined behaviour.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.targets import CORPUS, TARGETS, corpus, kept

ROOT = Path(__file__).parents[2]
KEPT_BYTES = 2048
"""Of the inputs that a run found, these are kept with --keep: the last ones, of each target."""
INPUT_BYTES_MAX = 256
DIGEST_DIGITS = 40
"""Of the names that libFuzzer gives to inputs."""

GUIDED = """
import sys, atheris
with atheris.instrument_imports(include=["peercache"]):
    from tests.fuzz.targets import TARGETS
atheris.Setup(sys.argv, TARGETS[{name!r}].run)
atheris.Fuzz()
"""
CHECKED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
COUNTED = "-fsanitize-coverage=trace-pc,trace-cmp"


def instrumented(folder: Path) -> dict[str, str]:
    """Build the C parts with coverage; return what the environment of a target needs for them."""
    found = find_spec("atheris")
    runtime = Path(found.origin or "").parents[1] / "asan_with_fuzzer.so" if found else Path()
    if not runtime.is_file():
        return _without("this atheris has no sanitizers")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    flags = f"{CHECKED} {COUNTED} -g -O1"
    environment = {**os.environ, "CC": "gcc", "CFLAGS": flags, "LDFLAGS": f"{folder}/counters.o"}
    commands = (
        ["gcc", "-O2", "-fPIC", "-c", str(Path(__file__).with_name("counters.c"))],
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
    )
    try:
        for command in commands:
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return _without(f"{error} {getattr(error, 'stderr', b'')[-500:]!r}")
    return {
        "LD_PRELOAD": str(runtime),
        # Python keeps what it has until its end; what grows meets the limit of memory.
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=64",
        "PYTHONPATH": f"{folder}/src",
    }


def _without(why: str) -> dict[str, str]:
    print(f"NOT RUN: coverage and sanitizers of the C parts: {why}", flush=True)
    return {}


def fuzz(name: str, seconds: int, environment: dict[str, str], *, keep: bool) -> int:
    """Fuzz a target; return its exit status."""
    failing = CORPUS / name
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        for number, data in enumerate(corpus(name)):
            Path(place, str(number)).write_bytes(data)
        failing.mkdir(parents=True, exist_ok=True)
        flags = [f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=65536",
                 f"-artifact_prefix={failing}/", "-rss_limit_mb=2048"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", GUIDED.format(name=name), place, *flags],
            check=False, capture_output=True, text=True, errors="replace", cwd=ROOT,
            env={**os.environ, **environment},
        )  # fmt: skip
        if not any(failing.iterdir()):
            failing.rmdir()
        if keep:
            _keep(name, Path(place))
    runs, places = (
        (re.findall(what, done.stderr) or ["no"])[-1]
        for what in (r"executed_units: (\d+)", r"cov: (\d+)")
    )
    print(f"{name}: {runs} inputs, {places} places, exit status {done.returncode}", flush=True)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-60:]))
    return done.returncode


def _keep(name: str, place: Path) -> None:
    """Keep short inputs that reached something new, the last ones first, then the older ones."""
    new = [path for path in place.iterdir() if len(path.name) == DIGEST_DIGITS]
    new.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    old = kept(name).read_text().split() if kept(name).is_file() else []
    left, chosen = KEPT_BYTES, set[str]()
    for data in dict.fromkeys([*(path.read_bytes().hex() for path in new), *old]):
        if 0 < len(data) // 2 <= min(left, INPUT_BYTES_MAX):
            chosen.add(data)
            left -= len(data) // 2
    kept(name).write_text("".join(f"{data}\n" for data in sorted(chosen)))


def main() -> int:
    """Fuzz each target for a time, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--keep", action="store_true", help="keep inputs for the tests")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        environment = instrumented(Path(folder))
        seconds = max(1, round(60 * asked.minutes))
        failed = [
            fuzz(name, seconds, environment, keep=asked.keep) for name in asked.names or TARGETS
        ]
    return int(any(failed))


if __name__ == "__main__":
    raise SystemExit(main())
