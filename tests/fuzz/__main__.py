"""Fuzz readers of bytes, guided by coverage: `python -m tests.fuzz codec --minutes 10`.

Without names: every target. An input that fails is kept in tests/fuzz/corpus, and its name printed.
It takes atheris (`pip install atheris`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import CORPUS, TARGETS, corpus

GUIDED = """
import sys, atheris
with atheris.instrument_imports(include=["peercache"]):
    from tests.fuzz.targets import TARGETS
atheris.Setup(sys.argv[1:], TARGETS[{name!r}].run)
atheris.Fuzz()
"""


def main() -> int:
    """Fuzz each target for a time, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args()
    failed = 0
    for name in asked.names or TARGETS:
        with tempfile.TemporaryDirectory(prefix="peercache-") as place:
            for number, data in enumerate(corpus(name)):
                Path(place, str(number)).write_bytes(data)
            kept = CORPUS / name
            kept.mkdir(parents=True, exist_ok=True)
            seconds = max(1, round(60 * asked.minutes))
            flags = [f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=65536",
                     f"-artifact_prefix={kept}/", "-rss_limit_mb=4096"]  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", GUIDED.format(name=name), place, *flags],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            if not any(kept.iterdir()):
                kept.rmdir()
        lines = done.stderr.splitlines()
        runs = next((line.split()[-1] for line in lines if "number_of_executed" in line), "no")
        print(f"{name}: {runs} inputs, exit status {done.returncode}", flush=True)
        if done.returncode:
            failed += 1
            print("\n".join(lines[-40:]))
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
