"""Removed pages are overwritten where they lie, and nothing else is."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.storage_port import DISK_CHANGED, DISK_UNTRIED, Forget, ForgetDone, SpillDone
from tests.unit.storage.rig import PATIENCE_S, Rig, key_of


def test_spill_lets_a_wipe_under_way_end_first(tmp_path: Path) -> None:
    """A wipe that has begun ends in the old header, never in that of the page written next."""
    with Rig(tmp_path) as rig:
        rig.spill([1])
        mover = rig.store._opened.mover
        begun, go_on, overwrite = threading.Event(), threading.Event(), mover._overwrite

        def overwrite_slowly(place: int) -> None:
            begun.set()
            assert go_on.wait(60)
            overwrite(place)

        mover._overwrite = overwrite_slowly
        gone = rig.index.remove(rig.index.find(key_of(1)))
        rig.perform(Forget(gone.places, wipe=True))
        assert begun.wait(60)
        job = rig.send_spill([2])
        # Time enough for a spill that would not wait; one that does is not disturbed by it.
        with pytest.raises(AssertionError, match="no SpillDone"):
            rig.await_fact(SpillDone, job, patience_s=0.5)
        go_on.set()

        assert rig.await_fact(SpillDone, job).outcomes == bytes(1)
        assert rig.load([2]) == ["right"]


@pytest.mark.parametrize("outcome", [DISK_UNTRIED, DISK_CHANGED])
def test_removed_page_is_wiped_though_nothing_is_written_to_its_place(
    tmp_path: Path, outcome: int
) -> None:
    """A spill to the place that comes to nothing leaves no header for a rebuilt index to find."""
    with Rig(tmp_path) as rig:
        rig.spill([1])
        index, go_on = rig.store._opened.index, threading.Event()
        write = index._write
        index._write = lambda *taken: go_on.wait(PATIENCE_S) and write(*taken)
        place = rig.place_of(1)
        gone = rig.index.remove(rig.index.find(key_of(1)))
        rig.perform(Forget(gone.places, wipe=True, job=99))

        if outcome == DISK_CHANGED:
            rig.store._opened.mover._unchanged = lambda records: np.zeros(len(records), np.bool_)
        said = rig.spill([2], until_s=-1.0 if outcome == DISK_UNTRIED else PATIENCE_S)
        go_on.set()
        rig.await_fact(ForgetDone, 99)

        assert rig.place_of(2) == place
        assert said == bytes([outcome])
    (tmp_path / "0" / "index.sqlite").unlink()
    with Rig(tmp_path) as again:
        assert len(again.opened.entries) == 0
