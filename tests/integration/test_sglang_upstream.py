"""What `integrations/sglang` adds to SGLang: `peercache` is a storage backend like its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.engine_process import PAGE_TOKENS
from tests.integration.engines import a_prompt, from_storage, installed, start_engine, wait_for
from tests.integration.patched import FILES, PACKAGE, apply, patched_files, patched_sglang
from tests.integration.processes import StandaloneNode, environment
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import wait_until

PROMPT_TOKENS = 600
STORED_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
UNIT_TEST = "test/registered/unit/mem_cache/test_hicache_peercache_storage.py"


@pytest.mark.slow
def test_the_unit_test_for_sglang_passes(tmp_path: Path) -> None:
    """Pages go through the backend that SGLang's factory makes by name."""
    # SGLang's test utilities import its benchmarks, and those a package that no page goes through.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    patched_sglang(tmp_path)

    done = subprocess.run(
        [sys.executable, str(FILES / "files" / UNIT_TEST), "-v"],
        env=environment(PYTHONPATH_FIRST=str(tmp_path), PEERCACHE_TEST_CPU_ENGINE="1"),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ran 2 tests" in done.stderr
    assert "skipped" not in done.stderr


@pytest.mark.slow
def test_an_engine_with_the_files_answers_from_what_it_stored(tmp_path: Path) -> None:
    """The entry point is installed, too, and leaves the name to the files."""
    model, patched = write_tiny_llama(tmp_path / "tiny-llama"), tmp_path / "patched"
    patched.mkdir()
    paths = os.pathsep.join([str(patched_sglang(patched)), str(installed(tmp_path / "installed"))])
    (tmp_path / "a").mkdir()
    ids = a_prompt(1, PROMPT_TOKENS)
    with (
        StandaloneNode(tmp_path / "a") as node,
        start_engine(model, node, {}, backend="peercache", PYTHONPATH_FIRST=paths) as engine,
    ):
        wait_for(engine)
        computed = engine.ask({"input_ids": ids})
        wait_until(
            lambda: from_storage(engine.ask({"input_ids": ids, "flush": True})) == STORED_TOKENS,
            "the pages come from storage",
        )
        answered = engine.ask({"input_ids": ids})

    assert answered["tokens"] == computed["tokens"]


def test_the_files_go_into_a_checkout(tmp_path: Path) -> None:
    """Each file of the patch is edited; a second time nothing is."""
    package = tmp_path / "python/sglang"
    for name in patched_files():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, package / name)

    done = apply(tmp_path)
    edited = {name: (package / name).read_text() for name in patched_files()}
    again = apply(tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / UNIT_TEST).exists()
    for name, text in edited.items():
        assert "peercache" in text, name
        assert (package / name).read_text() == text
    assert again.returncode == 1
    assert "already" in again.stderr


def test_another_sglang_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A patch that does not fit changes no file."""
    fits, *others = patched_files()
    package = tmp_path / "python/sglang"
    for name in (fits, *others):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("# another version\n")
    shutil.copy(PACKAGE / fits, package / fits)

    done = apply(tmp_path)

    assert done.returncode == 1
    assert "0.5.23" in done.stderr
    assert (package / fits).read_text() == (PACKAGE / fits).read_text()
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert found == {fits, *others}
