"""The report of a call: what the calls of this thread did, and of no other."""

from __future__ import annotations

import threading
from collections import Counter

from peercache.client.report import current, reporting, tell_missed, tell_moved


def test_a_report_collects_until_its_block_ends() -> None:
    with reporting() as report:
        tell_moved(3, 300)
        tell_moved(1, 100)
        tell_missed({"absent": 2, "": 7, "evicted": 0})
        tell_missed({"absent": 1, "deadline": 4})
    tell_moved(9, 900)
    tell_missed({"absent": 9})

    assert (report.pages, report.bytes) == (4, 400)
    assert report.misses == Counter({"absent": 3, "deadline": 4})


def test_no_report_is_open_where_nothing_asked_for_one() -> None:
    assert current.report is None


def test_an_inner_block_has_a_report_of_its_own() -> None:
    with reporting() as outer:
        with reporting(is_detailed=True) as inner:
            tell_moved(1, 10)
        tell_moved(2, 20)

    assert (inner.pages, outer.pages) == (1, 2)
    assert (inner.is_detailed, outer.is_detailed) == (True, False)


def test_an_error_ends_the_report_too() -> None:
    try:
        with reporting():
            raise ValueError
    except ValueError:
        pass

    assert current.report is None


def test_threads_do_not_write_into_the_reports_of_others() -> None:
    """SGLang's exists, get and set run at once."""
    both = threading.Barrier(2)
    seen: dict[str, Counter[str]] = {}

    def call(reason: str) -> None:
        with reporting() as report:
            both.wait(60)
            for _ in range(1000):
                tell_missed({reason: 1})
            both.wait(60)
        seen[reason] = report.misses

    threads = [threading.Thread(target=call, args=(reason,)) for reason in ("absent", "evicted")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert seen == {"absent": Counter(absent=1000), "evicted": Counter(evicted=1000)}
