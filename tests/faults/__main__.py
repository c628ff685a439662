"""Run a cluster with faults that follow from a seed, and check its histories.

    python -m tests.faults --seed 7 --minutes 1

Prints the seed and each fault, and last what was counted and what was violated: exit status 1. The
run has namespaces of its own for mounts and processes, so nothing of it can be left behind. With
`--check FOLDER` it only checks the history of an earlier run again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import attrs

from tests.faults.checkers import check, sure_removals
from tests.faults.cluster import Cluster, mounted, running
from tests.faults.history import History, read_json, write_edn, write_json
from tests.faults.injection import Injection
from tests.faults.recorder import GET, SET
from tests.faults.schedule import KINDS, Plan, key_after, plan
from tests.system.separate_hosts import skip_reason

INSIDE = "FAULTS_INSIDE"
PRIVATE = "/run/netns", "/dev/shm"
"""Where the files of hosts and namespaces are: in file systems that end with the run."""
START_S, HEALS_S = 180.0, 30.0


def why_not() -> str:
    """Return why this machine cannot make such a run, "" if it can."""
    if reason := skip_reason():
        return reason
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    if shutil.which("cc") is None:
        return "there is no C compiler"
    return ""


def main() -> int:
    """Run, check, and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", action="append", choices=KINDS, default=[])
    parser.add_argument("--upgrade", action="store_true",
                        help="start with the build before, and upgrade node by node")  # fmt: skip
    parser.add_argument("--keep", type=Path, help="a new folder for histories and logs")
    parser.add_argument("--plan", action="store_true", help="print the faults, and do nothing")
    parser.add_argument("--check", type=Path, help="the folder of an earlier run")
    asked = parser.parse_args()
    if asked.check:
        return report(read_json(asked.check / "history.jsonl"), [])
    made = plan(asked.seed, asked.minutes * 60, asked.only, upgrades=asked.upgrade)
    if asked.plan:
        print(*made.faults, sep="\n")
        return 0
    if reason := why_not():
        print(f"NOT RUN: faults: {reason}")
        return 0
    if INSIDE not in os.environ:
        flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation",
                 "private"]  # fmt: skip
        again = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
        if "--seed" not in sys.argv:
            again += ["--seed", str(asked.seed)]
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", *flags, *again])
    for folder in PRIVATE:
        mounted(Path(folder))
    words = "".join(f" --only {kind}" for kind in asked.only)
    words += " --upgrade" if asked.upgrade else ""
    print(
        f"reproduce: python -m tests.faults --seed {asked.seed} --minutes {asked.minutes:g}{words}"
    )
    return run(made, asked.keep)


def run(made: Plan, kept: Path | None) -> int:
    """Make one run; return the exit status."""
    print(f"settings: {dict(made.settings)} {dict(made.client_settings)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peercache-faults-") as folder:
        with running(made, Path(folder)) as cluster:
            injection = Injection(cluster)
            if not became(cluster.is_whole, START_S):
                print(*(host.said() for host in cluster.hosts.values()), sep="\n")
                print("VIOLATED start: not all processes are ready")
                return 1
            cluster.began = time.monotonic()
            injection.run()
            problems = heals(cluster)
            for name, host in cluster.hosts.items():
                for log in host.root.glob("*.log"):
                    shutil.copy(log, Path(folder) / f"{name}-{log.name}")
        spans = sorted(injection.spans, key=lambda span: span.began)
        history = attrs.evolve(cluster.history(), spans=spans)
        problems += cluster.problems()
        status = report(history, problems)
        if kept is not None or status:
            keep(Path(folder), history, kept or Path(tempfile.mkdtemp(prefix="peercache-failed-")))
    return status


def became(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait until something is so, or the time is over; return whether it is."""
    until = time.monotonic() + within_s
    while not (so := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return so


def heals(cluster: Cluster) -> list[str]:
    """Require that every client stores pages that all others find, soon after the last fault."""
    until = time.monotonic() + HEALS_S
    waiting = {
        (one, other): key_after(int(one)) for one in cluster.clients for other in cluster.clients
    }
    while waiting and time.monotonic() < until and not cluster.problems():
        for one, client in cluster.clients.items():
            if any(writer == one for writer, _ in waiting):
                client.ask(SET, [key_after(int(one))])
        for (writer, reader), key in list(waiting.items()):
            if cluster.clients[reader].ask(GET, [key]) == [True]:
                del waiting[writer, reader]
    return [f"heals: client {reader} does not find what client {writer} stores"
            for writer, reader in waiting]  # fmt: skip


def report(history: History, problems: list[str]) -> int:
    """Print what was counted and what was violated; return the exit status."""
    counts = Counter(call.kind for call in history.calls)
    hits = sum(sum(call.answers) for call in history.calls if call.kind == GET)
    gets = sum(len(call.keys) for call in history.calls if call.kind == GET)
    print(f"calls: {dict(counts)}, {hits} hits of {gets} pages, "
          f"{sum(1 for _ in sure_removals(history))} sure removals, "
          f"{len(history.spans)} faults, {len(history.lives)} lives of nodes")  # fmt: skip
    problems = [*problems, *check(history)]
    for problem in problems[:40]:
        print(f"VIOLATED {problem}")
    print(f"{len(problems)} violations")
    return int(bool(problems))


def keep(made: Path, history: History, folder: Path) -> None:
    """Copy the history and the logs of a run to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(history, folder / "history.jsonl")
    write_edn(history.calls, folder / "history.edn", sure_removals(history))
    for log in made.glob("*.log"):
        shutil.copy(log, folder / log.name)
    print(f"kept: {folder}")


if __name__ == "__main__":
    sys.exit(main())
