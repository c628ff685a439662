"""The rig on the command line: `python -m tests.rdma.rig`, from the repository's root.

    prepare                        make what is not there yet: kernel, packages, pyverbs; boot once
    run [OPTIONS] -- COMMAND...    run a command in a guest; its exit status is the answer
    test [PYTEST ARGUMENTS]        the rig's own tests; those marked rdma, with the recent pyverbs;
                                   those of BOTH_GENERATIONS with the distribution's; and, where
                                   SGLang's Python is, two of its engines' stores. With arguments:
                                   only these, in one guest

`run` answers 124 at the time limit, and 125 where the guest cannot be had or died; its console's
last lines are on stderr then. `prepare` and `test` answer 125 only where this machine cannot have a
guest, for the reason that they print: a guest that dies under a test is a failure.
Any Python 3.10 will do; its own modules are what a guest sees.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.rdma.rig import bindings, guest
from tests.rdma.rig.cache import RigError, folder, say
from tests.rdma.rig.kernel import kernel
from tests.rdma.rig.packages import guest_files

ROOT = Path(__file__).parents[3]
PYTHON = Path(sys.executable)
SGLANG_PYTHON = (
    Path(os.environ.get("PEERCACHE_SGLANG_VENV") or folder().parent / "sglang-0.5.23")
    / "bin"
    / "python"
)
# Every page of a process in the guest may be a mapping of the host's, and SGLang is large.
SGLANG_MAPPINGS = 262_144
# Its host pools need ten gigabytes more to be free. The guest's memory is a sparse file.
SGLANG_MEMORY_MIB = 14_000
# What it really touches of that, with some to spare.
SGLANG_TOUCHED_MIB = 6_000
# One boot, to see whether this machine lets a guest run at all.
BOOT_LIMIT_S = 300.0
STATUS_FAILED = 1
# All tests of one pass; a guest that hangs is ended then, and its console shown.
PASS_LIMIT_S = 2400.0
# What depends on how pyverbs spells things: enough to run again with its older generation.
BOTH_GENERATIONS = ("test_verbs.py", "test_registering.py", "test_fabric.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.rig", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare")
    running = verbs.add_parser("run")
    running.add_argument("--limit-s", type=float, default=guest.LIMIT_S)
    running.add_argument("--memory-mib", type=int, default=guest.MEMORY_MIB)
    running.add_argument("--writable", type=Path, action="append", default=[], metavar="FOLDER")
    running.add_argument("--pyverbs", choices=("built", "packaged", "none"), default="built")
    running.add_argument("--bare", action="store_true", help="a guest without RDMA devices")
    running.add_argument("command", nargs="+")
    verbs.add_parser("test").add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    # As if interrupted: the guest is ended on the way out.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if options.verb == "prepare":
            try:
                _prepare()
            except OSError as error:
                raise RigError(f"this machine has no room for it: {error}") from error
            return 0
        if options.verb == "test":
            return _test(options.arguments)
        # What is missing is reported before anything long is begun.
        kernel()
        return guest.run(
            options.command,
            limit_s=options.limit_s,
            memory_mib=options.memory_mib,
            writable=options.writable,
            environment=_environment(options.pyverbs),
            devices=not options.bare,
        )
    except RigError as error:
        say(str(error))
        return guest.STATUS_GUEST_DIED


def _prepare() -> None:
    for path in (kernel(), guest_files(), bindings.built(PYTHON), bindings.packaged()):
        print(path)
    # With what the tests need: on some machines a guest is built, and then may not run.
    status = guest.run(["true"], limit_s=BOOT_LIMIT_S)
    if status:
        raise RigError(f"a guest does not run on this machine (exit status {status})")


def _environment(pyverbs: str, python: Path = PYTHON) -> dict[str, str]:
    """The interpreter's own modules, this checkout's sources, and one generation of pyverbs."""
    folders = [ROOT / "src", ROOT]
    if pyverbs != "none":
        folders.append(bindings.built(python) if pyverbs == "built" else bindings.packaged())
    return {"PYTHONPATH": ":".join(map(str, folders)), "PEERCACHE_RDMA_GUEST": pyverbs}


def _test(arguments: list[str]) -> int:
    if arguments:
        return _pass("built", arguments)
    statuses: list[int] = []
    try:
        _all_passes(statuses)
    except RigError as error:
        say(str(error))
        statuses.append(guest.STATUS_GUEST_DIED)
    return verdict(statuses)


def verdict(statuses: Sequence[int]) -> int:
    """Return one exit status for all passes: what a machine lacks hides no failure."""
    failed = [status for status in statuses if status]
    lacks, died = guest.STATUS_GUEST_DIED in failed, guest.STATUS_GUEST_DIED
    return next((status for status in failed if status != died), died if lacks else 0)


def _all_passes(statuses: list[int]) -> None:
    here = Path(__file__).parents[1]
    # What is quick to fail comes first; all are run, so that one failure hides no other.
    statuses.append(_own_tests(here))
    statuses.append(_pass("built", [str(here)]))
    if bindings.packaged_fits(PYTHON, guest_files()):
        files = [str(here / name) for name in BOTH_GENERATIONS]
        statuses.append(_pass("packaged", files))
    else:
        say("skipped: the tests with the distribution's pyverbs, made for another Python than this")
    if lacking := _lacking_for_sglang():
        say(f"skipped: two of SGLang's engines over a cable: {lacking}")
    else:
        files = [str(here / "test_sglang_store.py")]
        statuses.append(_pass("built", files, SGLANG_PYTHON, SGLANG_MEMORY_MIB))


def _own_tests(here: Path) -> int:
    """The rig's tests boot guests themselves: they run on the host."""
    _prepare()
    environment = {**os.environ, "PEERCACHE_TEST_RIG": "1"}
    pytest = [str(PYTHON), "-m", "pytest", str(here / "test_rig.py")]
    return subprocess.run(pytest, env=environment, check=False).returncode


def _lacking_for_sglang() -> str:
    """Return what is missing for SGLang in a guest, with what brings it; "" if nothing is."""
    # The stamp is what its installation does last.
    if not SGLANG_PYTHON.exists() or not (SGLANG_PYTHON.parents[1] / ".peercache-stamp").exists():
        return f"{SGLANG_PYTHON} is not there; PEERCACHE_TEST_SGLANG=1 make sglang makes it"
    if reason := guest.lacking_for_memory(SGLANG_MEMORY_MIB, SGLANG_TOUCHED_MIB):
        return reason
    mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    if mappings < SGLANG_MAPPINGS:
        return f"sysctl -w vm.max_map_count={SGLANG_MAPPINGS} is needed, it is {mappings}"
    return ""


def _pass(
    pyverbs: str,
    arguments: list[str],
    python: Path = PYTHON,
    memory_mib: int = guest.MEMORY_MIB,
) -> int:
    say(f"the tests in the guest, pyverbs {pyverbs}")
    started_s = time.monotonic()
    pytest = [str(python), "-m", "pytest", "-m", "rdma", "-p", "no:cacheprovider", "--durations=5"]
    environment = _environment(pyverbs, python)
    status = guest.run(
        pytest + arguments,
        limit_s=PASS_LIMIT_S,
        memory_mib=memory_mib,
        environment=environment,
    )
    say(f"exit status {status} after {time.monotonic() - started_s:.0f} s")
    # It has booted before: what it died of now is a failure.
    return STATUS_FAILED if status == guest.STATUS_GUEST_DIED else status


def _terminated(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
