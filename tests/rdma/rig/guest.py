"""One guest: boots, runs one command, is gone.

The command runs with the host's files, environment and working directory. What it writes is
scratch, except below the folders named as writable. Its output arrives byte by byte.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tests.rdma.rig.cache import RigError
from tests.rdma.rig.kernel import kernel
from tests.rdma.rig.packages import guest_files

INIT = Path(__file__).with_name("guest_init.sh")
CPUINFO = Path("/proc/cpuinfo")
MEMORY_MIB = 3072
LIMIT_S = 1800.0
# What `timeout` answers, and a status for a guest that died before its command ended.
STATUS_TIME_LIMIT = 124
STATUS_GUEST_DIED = 125
# Above it, the shell's way to say by which signal.
STATUS_SIGNAL = 128
CONSOLE_TAIL_LINES = 30
# Ends a guest, its kernel's own helpers included, when its starter is gone: its stdin ends.
WATCH = 'read line; kill -9 -"$1"'
# Variables that describe this process, not the command's world.
ENVIRONMENT_LEFT_OUT = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "TMPDIR"})


def run(
    command: Sequence[str],
    *,
    limit_s: float = LIMIT_S,
    memory_mib: int = MEMORY_MIB,
    writable: Sequence[Path] = (),
    environment: dict[str, str] | None = None,
    devices: bool = True,
    output: BinaryIO | None = None,
    errors: BinaryIO | None = None,
) -> int:
    """Run `command` in a guest and answer its exit status.

    `environment` is added to that of this process. `devices`: the guest has rxe0 to rxe4.
    The limit counts from the start of the boot.
    """
    executable, files = kernel(), guest_files()
    with tempfile.TemporaryDirectory(prefix="rdma-guest-") as name:
        control = Path(name)
        _write_control(control, command, files, writable, environment or {}, devices=devices)
        with _booted(executable, control, memory_mib, output, errors) as process:
            timed_out = not _ended(process, control, limit_s)
        return _status(control, timed_out=timed_out, limit_s=limit_s)


def _write_control(
    control: Path,
    command: Sequence[str],
    files: Path,
    writable: Sequence[Path],
    environment: dict[str, str],
    *,
    devices: bool,
) -> None:
    variables = {
        name: value
        for name, value in (os.environ | environment).items()
        # Functions that a shell exported have names that no assignment can have.
        if name not in ENVIRONMENT_LEFT_OUT and name.isidentifier()
    }
    # The tools of an administrator are only on root's path.
    variables["PATH"] = f"{variables.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
    script = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    script += [f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}"]
    (control / "command").write_text("\n".join(script) + "\n")
    (control / "packages").write_text(f"{files}\n")
    (control / "writable").write_text("".join(f"{path.resolve()}\n" for path in writable))
    (control / "devices").write_text("yes\n" if devices else "no\n")
    (control / "cpuinfo").write_text(_first_processor(CPUINFO.read_text()))
    shutil.copy(INIT, control / "init")
    (control / "init").chmod(0o755)


def _first_processor(cpuinfo: str) -> str:
    """What the host reports of its first processor, which is the guest's only one.

    The guest's kernel reports no frequency of it, and perftest, which counts cycles, gives no
    figure without.
    """
    return cpuinfo.partition("\n\n")[0] + "\n\n"


@contextlib.contextmanager
def _booted(
    executable: Path,
    control: Path,
    memory_mib: int,
    output: BinaryIO | None,
    errors: BinaryIO | None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The running guest; afterwards none of its processes is left, and its output is complete."""
    out_reader, out_writer = os.pipe()
    err_reader, err_writer = os.pipe()
    arguments = [
        str(executable),
        f"mem={memory_mib}M",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        f"init={control}/init",
        f"RIG_CONTROL={control}",
        f"uml_dir={control}/",
        "loglevel=4",
        "con=null",
        "con0=null,fd:1",
        f"con1=null,fd:{out_writer}",
        f"con2=null,fd:{err_writer}",
    ]
    # The kernel keeps the guest's memory in a file there, and has not looked how much fits.
    places = {**os.environ, "TMPDIR": str(_place_of_memory(memory_mib))}
    with (control / "console").open("wb") as console:
        process = subprocess.Popen(
            arguments,
            cwd="/",
            env=places,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            pass_fds=(out_writer, err_writer),
            start_new_session=True,
        )
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCH, "watch", str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    # A panic aborts: its console shows why, a core file shows nothing more.
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
    os.close(out_writer)
    os.close(err_writer)
    pumps = [
        threading.Thread(target=_pump, args=(out_reader, output or sys.stdout.buffer)),
        threading.Thread(target=_pump, args=(err_reader, errors or sys.stderr.buffer)),
    ]
    for pump in pumps:
        pump.start()
    try:
        yield process
    finally:
        watcher.kill()
        watcher.communicate()
        # Each process of the guest is one of the host's, in the session that was begun for it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pump in pumps:
            pump.join()


def lacking_for_memory(memory_mib: int, touched_mib: int) -> str:
    """Why this machine has no room for a guest that touches so much of its memory; "" if it has."""
    try:
        _place_of_memory(memory_mib)
    except RigError as error:
        return str(error)
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_mib = int(facts["MemAvailable"].split()[0]) >> 10
    if available_mib < touched_mib:
        return f"{touched_mib} MiB of memory are needed, {available_mib} are available"
    return ""


def _place_of_memory(memory_mib: int) -> Path:
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/var/tmp")):
        if not place.is_dir():
            continue
        facts = os.statvfs(place)
        room_mib = facts.f_bavail * facts.f_frsize >> 20
        if room_mib > memory_mib and not facts.f_flag & os.ST_NOEXEC:
            return place
    raise RigError(f"no folder for temporary files has {memory_mib} MiB to spare")


def _pump(reader: int, target: BinaryIO) -> None:
    with os.fdopen(reader, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            target.write(data)
            target.flush()


def _ended(process: subprocess.Popen[bytes], control: Path, limit_s: float) -> bool:
    """Wait for the end of the command; False when the limit came first."""
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return (control / "status").exists()
    return True


def end_of(console: Sequence[str]) -> Sequence[str]:
    """Return the last lines of a console; where the kernel panicked, from its word for it on.

    The registers and the stack that follow are as long as the kernel likes.
    """
    panicked = (at for at, line in enumerate(console) if "Kernel panic" in line)
    tail = max(0, len(console) - CONSOLE_TAIL_LINES)
    return console[min(next(panicked, tail), tail) :]


def _status(control: Path, *, timed_out: bool, limit_s: float) -> int:
    status = control / "status"
    if status.exists() and int(status.read_text()) <= STATUS_SIGNAL:
        return int(status.read_text())
    tail = end_of((control / "console").read_bytes().decode(errors="replace").splitlines())
    reason = f"time limit of {limit_s:g} s" if timed_out else "the guest died"
    started = "its command was running" if (control / "booted").exists() else "it had not booted"
    if status.exists():
        # The kernel may have done it, for lack of memory, and then logs it.
        reason, started = "the command was killed", f"exit status {status.read_text().strip()}"
    print(f"rdma rig: {reason} ({started}); the console's end:", file=sys.stderr)
    print("\n".join(f"    {line}" for line in tail), file=sys.stderr)
    if status.exists():
        return int(status.read_text())
    return STATUS_TIME_LIMIT if timed_out else STATUS_GUEST_DIED
