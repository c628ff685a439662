"""Verdicts from recorded facts, each with the line that fixes it, and the facts of any host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache.cli.doctor.checks import ADVICE, GOOD, PROBLEM, Finding, as_text, judge, written
from peercache.cli.doctor.facts import Facts, Libraries, Memory, PortFact, Speed
from peercache.cli.doctor.host import private_numbers, release_of
from peercache.memory.kernel import filesystem_of

GIB = 2**30

PORT = PortFact(
    name="mlx5_0",
    state="ACTIVE",
    link_layer="Ethernet",
    rate_gbps=100.0,
    mtu=9000,
    gids=(
        (1, "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "RoCE v2"),
        (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    ),
    uverbs="/dev/infiniband/uverbs0",
)

HOST = Facts(
    peercache="0.1.0",
    python="3.11.2 x86_64",
    kernel="6.1.0-18-amd64",
    fabric="auto",
    pool_size=64 * GIB,
    granule=16384,
    shm_dir="/dev/shm",
    hugepages_wanted="off",
    libraries=Libraries(
        libibverbs="/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0",
        libibverbs_release="44.0",
        offers=(34,),
        pyverbs="/usr/lib/python3/dist-packages/pyverbs",
        wants=34,
    ),
    ports=(PORT,),
    chosen=(("mlx5_0", 3),),
    choice_problems=(),
    memory=Memory(
        memlock=-1,
        memlock_hard=-1,
        may_lock_anything=False,
        shm_type="tmpfs",
        shm_free=100 * GIB,
        available=200 * GIB,
        hugepages=((2 * 2**20, 0, 0), (GIB, 0, 0)),
        huge_mounts=(("/dev/hugepages", 2 * 2**20),),
    ),
    nofile=1024,
    nofile_hard=1_048_576,
    speed=Speed(tcp_gb_s=4.5, copy_gb_s=12.0, read_over="mlx5_0", read_gb_s=11.4, read_us=6.0),
)
BARE = attrs.evolve(
    HOST,
    ports=(),
    chosen=(),
    choice_problems=("this host has no RDMA device",),
    libraries=Libraries(problem="pyverbs cannot be imported: No module named 'pyverbs'"),
    speed=Speed(tcp_gb_s=4.5, copy_gb_s=12.0),
)


def with_memory(**changes: Any) -> Facts:
    """The good host with other memory."""
    return attrs.evolve(HOST, memory=attrs.evolve(HOST.memory, **changes))


def with_libraries(**changes: Any) -> Facts:
    """The good host with other libraries."""
    return attrs.evolve(HOST, libraries=attrs.evolve(HOST.libraries, **changes))


def worst(facts: Facts) -> list[Finding]:
    """What is not good."""
    return [finding for finding in judge(facts) if finding.level != GOOD]


def test_good_host_has_no_problem_and_shows_what_it_would_use() -> None:
    """Every topic gets its line, and none a fix."""
    findings = judge(HOST)

    assert {finding.level for finding in findings} == {GOOD}
    assert not any(finding.fix for finding in findings)
    reported = " ".join(finding.text for finding in findings)
    assert "mlx5_0 would be used" in reported
    assert "0000:ffff:0a00:0001" in reported
    assert "11.40 GB/s" in reported


def test_host_without_rdma_is_well_unless_rdma_is_asked_for() -> None:
    """A host without RDMA is good over tcp, and a problem where fabric is rdma."""
    asked = worst(attrs.evolve(BARE, fabric="rdma"))

    assert worst(BARE) == []
    assert [finding.topic for finding in asked] == ["rdma", "pyverbs"]
    assert all(finding.level == PROBLEM and finding.fix for finding in asked)


@pytest.mark.parametrize(
    ("facts", "level", "text", "fix"),
    [
        (
            with_memory(shm_free=10 * GIB),
            PROBLEM,
            "64.0 GiB does not fit",
            "mount -o remount,size=64G /dev/shm",
        ),
        (with_memory(shm_type="", shm_free=0), PROBLEM, "does not exist", "mkdir -p /dev/shm"),
        (with_memory(may_write_shm=False), PROBLEM, "cannot create files", "chmod 1777 /dev/shm"),
        (with_memory(shm_type="ext4"), ADVICE, "is ext4", "--shm-dir /dev/shm"),
        (
            with_memory(cgroup_limit=32 * GIB, cgroup_used=2 * GIB),
            PROBLEM,
            "may use 32.0 GiB",
            "docker: --memory=67g",
        ),
        (attrs.evolve(HOST, nofile_hard=1024), ADVICE, "at most 1024", "LimitNOFILE=65536"),
        (
            with_memory(memlock=8 * 2**20),
            PROBLEM,
            "8.0 MiB may be locked",
            "ulimit -l unlimited  (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
        ),
        (
            attrs.evolve(HOST, ports=(attrs.evolve(PORT, is_usable=False),)),
            PROBLEM,
            "/dev/infiniband/uverbs0",
            "--device /dev/infiniband",
        ),
        (
            attrs.evolve(HOST, ports=(attrs.evolve(PORT, mtu=1500),)),
            ADVICE,
            "packets of 1024 bytes",
            "ip link set dev INTERFACE mtu 9000",
        ),
        (
            with_libraries(problem="ImportError", wants=59, pyverbs_release="59.0"),
            PROBLEM,
            "pyverbs 59.0 was built for IBVERBS_PRIVATE_59, rdma-core 44.0 here has 34",
            "build pyverbs for 34",
        ),
        (
            with_libraries(problem="No module", pyverbs="", wants=0),
            PROBLEM,
            "pyverbs is not installed",
            "apt-get install python3-pyverbs",
        ),
        (
            with_libraries(problem="pyverbs is incomplete: IBV_MTU_4096"),
            PROBLEM,
            "incomplete",
            "docs/how-to/enable-rdma.md",
        ),
        (
            attrs.evolve(HOST, speed=Speed(read_over="mlx5_0", read_problem="no completion")),
            PROBLEM,
            "no completion",
            "enable-rdma.md",
        ),
    ],
)
def test_what_is_wrong_is_said_once_with_the_line_that_fixes_it(
    facts: Facts, level: str, text: str, fix: str
) -> None:
    """One cause, one finding."""
    (finding,) = worst(facts)

    assert finding.level == level
    assert text in finding.text
    assert fix in finding.fix


def test_root_may_lock_what_it_likes() -> None:
    """The limit is not asked of a process with CAP_IPC_LOCK."""
    assert worst(with_memory(memlock=8 * 2**20, may_lock_anything=True)) == []


def test_a_port_that_cannot_be_used_names_the_way_to_make_it_usable() -> None:
    """A device that is there and idle is a problem even where tcp would do."""
    down = attrs.evolve(
        HOST, chosen=(), choice_problems=("the link of mlx5_0 is DOWN",), speed=Speed()
    )

    (finding,) = worst(down)

    assert (finding.level, finding.text) == (PROBLEM, "the link of mlx5_0 is DOWN")
    assert "ip link set" in finding.fix


def test_huge_pages_are_counted_with_the_one_for_the_words() -> None:
    """The fix names the whole number that the kernel must be given, in use or not."""
    facts = attrs.evolve(
        with_memory(hugepages=((2 * 2**20, 100, 40),)), hugepages_wanted="2M", pool_size=GIB
    )

    (finding,) = worst(facts)

    assert finding.text == "the pool needs 515 huge pages of 2M, 40 are free"
    assert finding.fix == "sysctl vm.nr_hugepages=575"


def test_report_shows_fixes_ports_and_the_number_of_problems() -> None:
    """A person finds the fix below its problem, and an arrow at the GID that would be used."""
    facts = with_memory(memlock=8 * 2**20)
    text = as_text(facts, judge(facts))

    lines = text.splitlines()
    failed = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    assert "fix: ulimit -l unlimited" in lines[failed + 1]
    assert "    -> GID 3  0000:0000:0000:0000:0000:ffff:0a00:0001  RoCE v2" in lines
    assert "  mlx5_0  ACTIVE  Ethernet  100 Gb/s  interface MTU 9000, packets of 4096" in lines
    assert lines[-1] == "1 problem"
    assert as_text(HOST, judge(HOST)).endswith("no problems\n")


def test_report_as_json_has_everything() -> None:
    """A collector of reports of many hosts needs facts, not sentences."""
    report = json.loads(written(HOST, judge(HOST)))

    assert report["problems"] == 0
    assert report["facts"]["ports"][0]["name"] == "mlx5_0"
    assert {finding["topic"] for finding in report["findings"]} >= {"pool", "rdma", "READ"}


MOUNTS = """\
sysfs /sys sysfs rw 0 0
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw,size=24G 0 0
hugetlbfs /dev/hugepages hugetlbfs rw,relatime,pagesize=2M 0 0
none /mnt/huge hugetlbfs rw,pagesize=1024M 0 0
none /mnt/default hugetlbfs rw 0 0
"""


def test_file_system_of_a_folder_is_that_of_the_nearest_mount() -> None:
    """A folder below a mount is on it, and one that is not there on none."""
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
