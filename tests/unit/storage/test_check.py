"""`peercache disk check` and `stats`: what they find, what they repair, what they leave alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peercache.cli.main import main
from tests.unit.storage.rig import Rig
from tests.unit.storage.test_damage import flip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict]]:
    """Run a command with --json; return its status and what it printed."""
    status = main(["disk", *arguments, "--json"])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store of 30 pages, closed."""
    with Rig(tmp_path) as rig:
        rig.write(list(range(20)))
        rig.write(list(range(20, 30)), 20_000)
    return tmp_path


def test_whole_store_is_found_whole(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every page is verified, nothing is changed, the status is 0."""
    status, (found,) = run(capsys, "check", str(filled))

    assert status == 0
    assert found["whole"]
    assert (found["pages"], found["page_bytes"]) == (30, 20 * 100_000 + 10 * 20_000)
    assert (found["damaged"], found["index"], found["pages_without_row"]) == ([], "ok", 0)


def test_damaged_pages_are_named_and_dropped(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and the file and offset; a second check finds a whole store without them."""
    with Rig(filled) as rig:
        file, at = rig.file_of(7)
    flip(file, at + 4096 + 500)

    status, (found,) = run(capsys, "check", str(filled / "0"))
    again, (then,) = run(capsys, "check", str(filled))

    assert (status, again) == (1, 0)
    assert found["damaged"] == [f"{file.name}:{at}"]
    assert (found["pages"], then["pages"]) == (29, 29)
    with Rig(filled) as rig:
        assert len(rig.opened.entries) == 29
        assert rig.load([6, 8]) == ["right"] * 2


@pytest.mark.parametrize("is_slab", [False, True])
def test_what_a_damaged_header_describes_is_dropped(
    filled: Path, capsys: pytest.CaptureFixture[str], *, is_slab: bool
) -> None:
    """Of a page: its row goes, and is counted. Of a slab: its pages go, and the file is named."""
    with Rig(filled) as rig:
        file, at = rig.file_of(7)
    flip(file, 0 if is_slab else at)

    status, (found,) = run(capsys, "check", str(filled))

    assert status == 1
    if is_slab:
        assert found["unreadable"] == [file.name]
    else:
        assert (found["rows_without_page"], found["pages"]) == (1, 29)


@pytest.mark.parametrize("size", [0, 2**20])
def test_a_slab_that_a_killed_node_was_creating_is_no_damage(
    filled: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """It has no header yet, and no page; one that had pages and lost its header is damaged."""
    (filled / "0" / "slab-000031.pcs").write_bytes(bytes(size))
    status, (found,) = run(capsys, "check", str(filled))
    assert (status, found["whole"], found["unreadable"]) == (0, True, [])

    with Rig(filled) as rig:
        file, _ = rig.file_of(7)
    file.write_bytes(bytes(file.stat().st_size))
    status, (found,) = run(capsys, "check", str(filled))
    assert (status, found["whole"]) == (1, False)
    assert found["rows_without_page"] > 0


def test_lost_index_is_made_again(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the slots, after every page was verified."""
    (filled / "0" / "index.sqlite").write_bytes(b"nothing")

    status, (found,) = run(capsys, "check", str(filled))

    assert status == 1
    assert found["pages"] == 30
    with Rig(filled) as rig:
        assert rig.load(list(range(30))) == ["right"] * 30
        assert "disk.index_rebuild_started" not in rig.log.events()


def test_evicted_page_stays_out_of_a_whole_index(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its slot still shows what it held, and that is no reason to bring it back."""
    with Rig(filled) as rig:
        rig.forget([3, 4])

    status, (found,) = run(capsys, "check", str(filled))

    assert status == 0
    assert (found["pages"], found["pages_without_row"]) == (28, 2)


def test_folder_of_a_running_node_is_not_checked_but_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check reports it and exits with 2; stats read while the node runs."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2, 3])
        rig.forget([3])  # reports when the rows are in the index

        refused = main(["disk", "check", str(tmp_path)])
        said = capsys.readouterr().err
        status, (found,) = run(capsys, "stats", str(tmp_path))

        assert refused == 2
        assert "running node" in said
        assert status == 0
        assert (found["in_use"], found["pages"], found["slabs"]) == (True, 2, 1)
        assert rig.load([1, 2]) == ["right"] * 2


def test_stats_of_a_closed_store_change_nothing(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of pages, files and ages."""
    before = sorted(file.name for file in (filled / "0").iterdir())

    status, (found,) = run(capsys, "stats", str(filled))

    assert status == 0
    assert (found["in_use"], found["pages"], found["namespaces"]) == (False, 30, 1)
    assert found["index"] == "ok"
    assert sorted(file.name for file in (filled / "0").iterdir()) == before


def test_people_are_notified_in_sentences(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json."""
    with Rig(filled) as rig:
        file, at = rig.file_of(7)
    flip(file, at + 5000)

    assert main(["disk", "check", str(filled)]) == 1
    assert main(["disk", "stats", str(filled)]) == 0

    said = capsys.readouterr().out
    assert f"damaged, dropped: {file.name}:{at}" in said
    assert "29 pages" in said
    assert "no node has it" in said


def test_folder_without_a_store_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path creates nothing."""
    assert main(["disk", "check", str(tmp_path)]) == 2
    assert main(["disk", "stats", str(tmp_path / "nowhere")]) == 2
    assert "there is no page store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
