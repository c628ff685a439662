"""The facts of any host: the command works everywhere, and needs no RDMA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peercache.cli.doctor.host import private_numbers, release_of
from peercache.memory.kernel import filesystem_of

MOUNTS = """\
sysfs /sys sysfs rw 0 0
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw,size=24G 0 0
hugetlbfs /dev/hugepages hugetlbfs rw,relatime,pagesize=2M 0 0
none /mnt/huge hugetlbfs rw,pagesize=1024M 0 0
none /mnt/default hugetlbfs rw 0 0
"""


def test_file_system_of_a_folder_is_that_of_the_nearest_mount() -> None:
    """A folder below a mount lies on it, and one that is not there on none."""
    assert filesystem_of("/dev/shm", MOUNTS) == "tmpfs"
    assert filesystem_of("/usr", MOUNTS) == "ext4"
    assert filesystem_of("/there/is/no/such/folder", MOUNTS) == ""


@pytest.mark.parametrize(
    ("name", "release"),
    [("libibverbs.so.1.14.44.0", "44.0"), ("libibverbs.so.1.14.59.1", "59.1"), ("other.so", "")],
)
def test_release_of_rdma_core_stands_in_the_name_of_its_file(name: str, release: str) -> None:
    """No package manager is asked: in a container there may be none."""
    assert release_of(name) == release


def test_private_interface_is_found_without_loading_a_library(tmp_path: Path) -> None:
    """A pyverbs that does not fit cannot be loaded, so what it wants is read from its file."""
    library = tmp_path / "device.so"
    library.write_bytes(b"\x7fELF..\0IBVERBS_PRIVATE_59\0..IBVERBS_1.1\0IBVERBS_PRIVATE_59\0")

    assert private_numbers(library) == (59,)
    assert private_numbers(tmp_path / "missing.so") == ()
    assert private_numbers(None) == ()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PEERCACHE_")}
    return subprocess.run(
        [sys.executable, "-m", "peercache", "doctor", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )


def test_command_works_here_and_measures() -> None:
    """A host without RDMA gets its pool, its copies and its tcp looked at."""
    done = run("--pool-size", "1MiB")

    assert done.returncode in (0, 1), done.stderr
    assert "/dev/shm" in done.stdout
    assert "tcp over the loopback" in done.stdout
    assert done.stderr == ""


def test_command_fails_for_a_pool_that_does_not_fit() -> None:
    """What a node would refuse at its start is known before."""
    done = run("--quick", "--json", "--pool-size", "1000TiB")

    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["problems"] >= 1
    assert any("does not fit" in finding["text"] for finding in report["findings"])


def test_command_takes_the_configuration_as_a_node_does() -> None:
    """A wrong name is the same error as at a node's start."""
    done = run("--quick", "--fabric", "pigeon")

    assert done.returncode == 2
    assert "pigeon" in done.stderr
