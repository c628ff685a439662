"""What the rig answers for all of its passes together."""

from __future__ import annotations

import pytest

from tests.rdma.rig import guest
from tests.rdma.rig.__main__ import verdict
from tests.rdma.rig.cache import RigError


@pytest.mark.parametrize(
    ("statuses", "answer"),
    [
        ([], 0),
        ([0, 0, 0], 0),
        ([0, 1, 0], 1),
        ([0, 124], 124),
        ([0, 125], 125),
        ([125, 0, 1], 1),
        ([1, 125], 1),
    ],
)
def test_what_a_machine_lacks_hides_no_failure(statuses: list[int], answer: int) -> None:
    """125 is for a machine that cannot have a guest, and only where nothing has failed."""
    assert verdict(statuses) == answer


def test_a_guest_that_has_no_room_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder for its memory, or too little memory for what it touches."""

    def no_place(memory_mib: int) -> None:
        raise RigError(f"no {memory_mib}")

    enough = guest.lacking_for_memory(1, 1)
    too_little = guest.lacking_for_memory(1, 2**40)
    monkeypatch.setattr(guest, "_place_of_memory", no_place)
    nowhere = guest.lacking_for_memory(7, 1)

    assert enough == ""
    assert "MiB of memory are needed" in too_little
    assert nowhere == "no 7"


@pytest.mark.parametrize("trace_lines", [5, 200])
def test_the_end_of_a_console_has_the_word_for_a_panic(trace_lines: int) -> None:
    """However long the trace after it is; without a panic it is the last lines."""
    before = [f"boot {number}" for number in range(100)]
    trace = [f"stack {number}" for number in range(trace_lines)]

    reported = guest.end_of([*before, "Kernel panic - not syncing: sysrq", *trace])

    assert "Kernel panic - not syncing: sysrq" in reported
    assert reported[-1] == trace[-1]
    assert len(reported) == max(trace_lines + 1, guest.CONSOLE_TAIL_LINES)
    assert guest.end_of(before) == before[-guest.CONSOLE_TAIL_LINES :]
