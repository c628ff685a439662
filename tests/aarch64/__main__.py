"""Run unit tests with the C parts compiled for aarch64, in qemu's user mode.

    python -m tests.aarch64                      all, in parts (tests/aarch64/parts.py)
    python -m tests.aarch64 PYTEST ARGUMENTS     others, in one emulator, with nothing left out

A small Debian for arm64 and the packages of pyproject.toml are made once, in the user's cache
folder (1 GB). Nothing is installed on the host: the tests run in namespaces of their own, in which
the kernel starts programs for aarch64 with qemu. Where that is not possible it prints NOT RUN and
why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.aarch64 import parts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
QEMU = "qemu-aarch64-static"
PROGRAMS = {QEMU: "qemu-user-static", "mmdebstrap": "mmdebstrap", "sh": "dash"}
SUITE, PYTHON = "bookworm", "python3.11"
PACKAGES = (
    "python3.11,python3.11-dev,python3.11-venv,gcc,libc6-dev,libssl-dev,libatomic1,libstdc++6,libc-bin,"
    "bash,coreutils,dash,diffutils,findutils,git,grep,gzip,hostname,iproute2,make,mawk,mount,openssl,"
    "procps,sed,tar,util-linux"
)
ONLY_ON_THE_HOST = ("mypy", "playwright", "pre-commit", "ruff")
"""Requirements that no unit test needs."""
COPIED = ("src", "sims", "tests", "docs", "benchmarks", "examples", "deploy", "integrations")
FILES = ("setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
PTH = "/checkout/src\n"
FROM_HOST = ("group", "hosts", "passwd")
"""Files of /etc: packages that are only extracted make no users."""
PACE = "4"
"""Factor of all times in tests: emulated code is slower than any machine (tests/pace.py)."""
QEMU_MIN = 8
"""Earlier ones keep memory for each page of address space ever reserved: 11 GB and more."""
AT_ONCE = 2
"""Emulators: each takes a core, and up to 1.3 GB."""

NEW_USER, NEW_MOUNTS, NEW_PROCESSES, NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x08000000
PARENT_DEATH_SIGNAL = 1

# Magic and mask of an executable for aarch64, as in qemu-binfmt-conf.sh. F: the emulator is opened
# now, so that it is found below another root.
ENTER = r"""
set -eu
root=$1 checkout=$2 qemu=$3
shift 3
mount --make-rprivate /
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":peercache:M::$magic:$mask:$qemu:FP" > /proc/sys/fs/binfmt_misc/register
[ "$root" != / ] || exit 0
mount --bind "$root" "$root"
mount --bind "$checkout" "$root/checkout"
mount -t proc none "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs none "$root/dev/shm"
mount --rbind /sys "$root/sys"
mount -t tmpfs none "$root/tmp"
cd "$root"
exec chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root \
    LANG=C.UTF-8 "$@"
"""


def begun(root: Path, checkout: Path, command: Sequence[str], output: Path | None = None) -> int:
    """Start a command below a root for aarch64, in namespaces of its own; return the process.

    output: takes what it writes, in place of this process's own output.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    ready, go = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        if libc.unshare(NEW_USER | NEW_MOUNTS | NEW_PROCESSES | NEW_IPC):
            os._exit(125)
        if output is not None:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os.setgid(0)
        os.setuid(0)
        # What runs ends with this process, also after a SIGKILL.
        libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        child = os.fork()
        if child == 0:
            libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
            where = (str(root), str(checkout), shutil.which(QEMU) or QEMU)
            os.execvp("sh", ["sh", "-c", ENTER, "sh", *where, *command])
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.close(ready[1])
    if os.read(ready[0], 1):
        # All users of the host, where root may map them; else this one as root.
        whole = os.geteuid() == 0
        if not whole:
            Path(f"/proc/{parent}/setgroups").write_text("deny")
        for kind, number in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            text = "0 0 4294967295" if whole else f"0 {number} 1"
            Path(f"/proc/{parent}/{kind}").write_text(text)
    os.write(go[1], b"1")
    for end in (ready[0], *go):
        os.close(end)
    return parent


def entered(root: Path, checkout: Path, command: Sequence[str]) -> int:
    """Run a command as `begun` does; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(begun(root, checkout, command), 0)[1])


def why_not() -> str:
    """Return why this machine cannot run the tests, "" if it can."""
    if platform.machine() != "x86_64":
        return f"this machine is {platform.machine()}, and it was tried on x86-64 only"
    missing = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if missing:
        return f"needs {' '.join(missing)} (Debian, Ubuntu: apt-get install)"
    if entered(Path("/"), Path("/"), ()):
        return (
            "the kernel has no binfmt_misc for a user namespace: that takes Linux 6.7, and root"
            " where user namespaces are restricted"
        )
    return ""


def requirements() -> list[str]:
    """Return what the tests need of PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [each for each in wanted if not each.startswith(ONLY_ON_THE_HOST)]


def debian() -> Path:
    """Return the root for aarch64, made if there is none for these packages."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peercache" / "aarch64"
    )
    shim = HERE / "process_vm.c"
    made_of = [SUITE, PACKAGES, *requirements(), shim.read_text(), PTH, FROM_HOST]
    root = cache / f"root-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"
    if root.is_dir():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    print(f"making {root}: some minutes", flush=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as folder:
        made = Path(folder) / "root"
        options = ("--quiet", "--variant=extract", "--architectures=arm64", f"--include={PACKAGES}")
        subprocess.run(["mmdebstrap", *options, SUITE, str(made)], check=True)
        for name in ("checkout", "tmp", "proc", "dev", "sys", "root", "usr/local/lib"):
            (made / name).mkdir(parents=True, exist_ok=True)
        made.chmod(0o755)
        (made / "usr/bin/python3").unlink(missing_ok=True)
        (made / "usr/bin/python3").symlink_to(PYTHON)
        for name in FROM_HOST:
            shutil.copy(Path("/etc") / name, made / "etc" / name)
        packages = made / "usr/local/lib" / PYTHON / "dist-packages"
        platforms = [f"--platform=manylinux{each}_aarch64" for each in ("_2_28", "_2_17", "2014")]
        subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install",
             "--target", str(packages), *platforms, "--python-version=3.11", "--only-binary=:all:",
             *requirements()],
            check=True,
        )  # fmt: skip
        # As an editable installation: a test may set PYTHONPATH.
        (packages / "checkout.pth").write_text(PTH)
        shutil.copy(shim, made / "usr/local/lib")
        library = "/usr/local/lib/process_vm.so"
        compiled = ("gcc", "-O1", "-shared", "-fPIC", "-o", library, library.replace(".so", ".c"))
        if entered(made, Path(folder), compiled):
            raise SystemExit("the C compiler for aarch64 failed")
        (made / "etc" / "ld.so.preload").write_text(f"{library}\n")
        made.rename(root)
    return root


def copied_to(folder: Path) -> None:
    """Copy the checkout without what is compiled for this machine."""
    for name in COPIED:
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, folder)


def in_checkout(script: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command that runs a script in the copy of the checkout."""
    where = f"cd /checkout && {script}"
    # numpy's idle worker thread is busy all the time in the emulator.
    variables = (f"PEERCACHE_TEST_PACE={PACE}", "OPENBLAS_NUM_THREADS=1")
    return ("env", *variables, "bash", "-c", where, "bash", *arguments)


def why_not_all() -> str:
    """Return why the emulator cannot run the whole suite, "" if it can."""
    shown = subprocess.run([QEMU, "--version"], check=True, capture_output=True, text=True).stdout
    print(shown.partition("\n")[0], flush=True)
    found = re.search(r"version (\d+)", shown)
    if found is None or int(found[1]) < QEMU_MIN:
        return f"all unit tests take qemu {QEMU_MIN}: an earlier one needs 11 GB; name some tests"
    return ""


def main() -> int:
    """Build, run, and return the exit status of the tests."""
    if reason := why_not() or (not sys.argv[1:] and why_not_all()):
        print(f"NOT RUN: aarch64: {reason}")
        return 0
    root = debian()
    with tempfile.TemporaryDirectory(prefix="peercache-aarch64-") as folder:
        checkout = Path(folder)
        copied_to(checkout)
        build = f"CFLAGS='-Wall -Wextra -Werror' {PYTHON} setup.py -q egg_info build_ext --inplace"
        if status := entered(root, checkout, in_checkout(build)):
            return status
        test = f'exec {PYTHON} -m pytest -p no:cacheprovider "$@"'
        if sys.argv[1:]:
            return entered(root, checkout, in_checkout(test, sys.argv[1:]))

        def begin(arguments: Sequence[str], output: Path) -> int:
            return begun(root, checkout, in_checkout(test, arguments), output)

        return parts.run(begin, checkout, root.parent / "parts", AT_ONCE)


if __name__ == "__main__":
    sys.exit(main())
