"""An earlier build: the last release or, until there is one, the commit in `previous_build.txt`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs
import pytest

ROOT = Path(__file__).parents[2]
COMMIT = (Path(__file__).parent / "previous_build.txt").read_text().strip()
CLIENT = Path(__file__).parent / "build_client.py"


def make_previous_build(folder: Path, commit: str = COMMIT) -> str:
    """Return a Python that has an earlier build installed; skip the test where git has no history.

    By default it is the build before. It is an environment of its own: the sources of that commit,
    compiled there, and next to them the libraries that this environment has.
    """
    known = _git("cat-file", "-e", f"{commit}^{{commit}}")
    if known.returncode:
        pytest.skip(f"this checkout has no commit {commit[:12]}, of which the build before is made")
    sources = folder / "sources"
    sources.mkdir(parents=True)
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit],
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(sources)], check=True, input=packed.stdout)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, check=True, cwd=sources, capture_output=True)
    environment = folder / "environment"
    make = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(make, check=True, capture_output=True)
    python = environment / "bin" / "python"
    site = next(environment.glob("lib/python*/site-packages"))
    libraries = sysconfig.get_paths()["purelib"]
    # In front of PYTHONPATH, which may name the sources of this build.
    first = f"import sys; sys.path.insert(0, {str(sources / 'src')!r})"
    (site / "previous.pth").write_text(f"{first}\n{libraries}\n")
    said = subprocess.run(
        [str(python), "-c", "import peercache; print(peercache.__file__)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout.startswith(str(sources)), f"the environment has {said.stdout}"
    return str(python)


@attrs.define(eq=False)
class BuildClient:
    """A client in a process of its own, of whichever build its Python has."""

    process: subprocess.Popen[str]
    log: IO[str]

    def ask(self, **question: Any) -> Any:
        """Return the answer to one question: see `build_client.py`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the client ended: {self.said()}"
        return json.loads(line)

    def said(self) -> str:
        """Return its log."""
        self.log.seek(0)
        return self.log.read()


@contextlib.contextmanager
def build_client(python: str, cluster: str, home: str, log: Path) -> Iterator[BuildClient]:
    """Run a client of a build, attached to a node, until the block ends."""
    with log.open("w+") as file:
        process = subprocess.Popen(
            [python, str(CLIENT), cluster, home],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
        try:
            yield BuildClient(process, file)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=False, capture_output=True)
