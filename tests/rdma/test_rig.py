"""The rig keeps its word: outputs, statuses, limits, and nothing left behind.

They boot guests, so they run only as a part of `make test-rdma`, on the host.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pace import FACTOR, assert_within
from tests.rdma.rig import guest
from tests.rdma.rig.kernel import kernel

pytestmark = pytest.mark.skipif(
    "PEERCACHE_TEST_RIG" not in os.environ, reason="boots guests: make test-rdma runs it"
)


def run(command: list[str], **options: object) -> tuple[int, bytes, bytes]:
    output, errors = io.BytesIO(), io.BytesIO()
    defaults: dict[str, object] = {"limit_s": 300, "memory_mib": 512, "devices": False}
    chosen = defaults | options
    status = guest.run(command, output=output, errors=errors, **chosen)  # type: ignore[arg-type]
    return status, output.getvalue(), errors.getvalue()


def guest_processes(memory_mib: int) -> list[str]:
    """The process ids of guests of that size: each process of a guest is one of the host's."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # No process, or gone since.
            continue
        if arguments[:2] == [os.fsencode(kernel()), b"mem=%dM" % memory_mib]:
            found.append(entry.name)
    return found


def test_output_arrives_byte_by_byte_and_the_status_is_the_commands() -> None:
    """Every byte value, both ways out apart, megabytes of them."""
    program = (
        "import sys; every = bytes(range(256));"
        "sys.stdout.buffer.write(every * 8192); sys.stderr.buffer.write(every); sys.exit(7)"
    )

    status, output, errors = run([sys.executable, "-c", program])

    assert status == 7
    assert output == bytes(range(256)) * 8192
    assert errors == bytes(range(256))


def test_a_command_has_the_hosts_world(tmp_path: Path) -> None:
    """Its working directory, its environment with what was added, its files."""
    (tmp_path / "file").write_text("as on the host")
    script = 'pwd; echo "$ADDED"; echo "$HOME"; cat "$1"; id -u'

    _, output, _ = run(
        ["bash", "-c", script, "-", str(tmp_path / "file")], environment={"ADDED": 'it\'s "so"'}
    )

    expected = f'{Path.cwd()}\nit\'s "so"\n{os.environ["HOME"]}\nas on the host0\n'
    assert output.decode() == expected


def test_only_folders_named_writable_are_written(tmp_path: Path) -> None:
    """What the guest writes elsewhere is gone with it; the host's files are as they were."""
    for name in ("kept", "scratch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("old")
    script = f"for d in kept scratch; do echo new >{tmp_path}/$d/file; cat {tmp_path}/$d/file; done"

    _, output, _ = run(["bash", "-c", script], writable=[tmp_path / "kept"])

    assert output == b"new\nnew\n"
    assert (tmp_path / "kept" / "file").read_text() == "new\n"
    assert (tmp_path / "scratch" / "file").read_text() == "old"


def test_the_time_limit_ends_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """124, what was said until then, and no process left: not even those of the command."""
    started_s = time.monotonic()

    status, output, _ = run(
        ["bash", "-c", "echo begun; sleep 987 & sleep 986"], limit_s=30, memory_mib=499
    )

    assert status == 124
    assert output == b"begun\n"
    assert guest_processes(499) == []
    assert_within(time.monotonic() - started_s, 120 * FACTOR)
    assert "time limit of 30 s (its command was running)" in capsys.readouterr().err


def test_a_panic_is_reported_with_the_consoles_end(capsys: pytest.CaptureFixture[str]) -> None:
    """125, at once, and the kernel's own words."""
    crash = "echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger; sleep 60"

    status, _, _ = run(["bash", "-c", crash])

    reported = capsys.readouterr().err
    assert status == 125
    assert "the guest died (its command was running)" in reported
    assert "Kernel panic" in reported


def test_a_command_that_was_killed_is_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """128 and the signal's number, as a shell has it, and the console: it may say why."""
    status, _, _ = run(["bash", "-c", "kill -9 $$"])

    assert status == 128 + 9
    assert "the command was killed (exit status 137)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_the_guest(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ended politely or not, within seconds; politely, no file is left either."""
    memory_mib = 500 + number  # A size that no other guest uses identifies this one.
    command = ["-m", "tests.rdma.rig", "run", "--bare", "--pyverbs", "none"]
    command += ["--memory-mib", str(memory_mib), "--", "bash", "-c", "echo up; sleep 985"]
    started = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert started.stdout is not None
    with started.stdout:
        assert started.stdout.readline() == b"up\n"
        before = guest_processes(memory_mib)

        started.send_signal(number)
        started.wait()
        ends_s = time.monotonic() + 120
        while (left := guest_processes(memory_mib)) and time.monotonic() < ends_s:
            time.sleep(0.05)

    assert before
    assert not left
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())
