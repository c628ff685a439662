"""Pages and namespaces that are removed from the disk, and none that comes back."""

from __future__ import annotations

from peercache.actors.ports import Load
from peercache.model.keys import COPIES, tag_of
from peercache.wire.messages.pool import Removed
from tests.unit.actors.disk_world import CLIENT, POOL, DiskWorld, filled, key, keys


def test_removed_page_goes_from_disk_too() -> None:
    """It counts once, wherever it was; the answer comes when a restart cannot bring it back."""
    world = filled()
    world.remove(2, 3, 101, 999)
    waiting = not [a for a in world.answers if isinstance(a, Removed)]

    world.finish()

    assert waiting
    assert world.answers[-1] == Removed(7, 3)
    assert world.places(2, 3, 101) == ["", "", ""]
    assert key(3) not in world.image.rows.values()
    world.check_records()


def test_pages_removed_before_the_disk_is_open_do_not_come_back() -> None:
    """They are answered for at once, and go from disk as soon as it is known what lies there."""
    before = filled()
    before.finish()
    world = DiskWorld(image=before.image, is_open=False)
    world.remove(2, 3)
    world.clear(9)
    answered = len(world.answers)
    world.set(3)

    world.open()
    world.wait(1.0)
    world.finish()

    assert answered == 2
    assert world.places(1, 2, 3) == ["disk", "", "memory"]
    assert key(2) not in world.image.rows.values()
    world.check_records()


def test_removal_is_answered_in_time_by_a_slow_disk() -> None:
    """The count is right; that it lasts over a restart is not waited for without end."""
    world = filled()
    world.remove(2)

    world.wait(0.2)

    assert world.answers[-1] == Removed(7, 1)


def test_clear_empties_one_namespace_on_disk() -> None:
    """Others' pages stay."""
    world = DiskWorld()
    world.set(1, 2)
    world.set(3, namespace=9)
    world.finish()

    world.clear(1)
    world.finish()

    assert world.answers[-1] == Removed(8, 2)
    assert world.tier.figures()["disk_pages"] == 1


def test_clear_of_a_name_empties_all_its_geometries_on_disk() -> None:
    """By its space tag, as in memory."""
    world = DiskWorld()
    for page, namespace in enumerate((tag_of(5, 7), tag_of(5, 8), tag_of(6, 7)), 1):
        world.set(page, namespace=namespace)
    world.finish()

    world.clear(5)
    world.finish()

    assert world.answers[-1] == Removed(8, 2)
    assert world.tier.figures()["disk_pages"] == 1


def test_a_page_of_unknown_geometry_is_removed_and_cleared_with_any_of_its_name() -> None:
    """It was handed over: its key is all that says of which geometry it is."""
    for is_open in (True, False):
        before = DiskWorld()
        before.set(1, 2, 3, namespace=5)
        before.set(4, namespace=tag_of(5, 8))
        before.finish()
        world = before if is_open else DiskWorld(image=before.image, is_open=False)

        world.remove(1, namespace=tag_of(5, 7))
        if is_open:
            world.finish()
            assert world.places(1, 2) == ["", "memory"]
        world.clear(tag_of(5, 7))
        if not is_open:
            world.open()
        world.finish()

        assert list(world.image.rows.values()) == [key(4)]


def test_pages_from_other_nodes_are_dropped_from_disk() -> None:
    """Before it is open, too: what was copied before a restart is dropped after it."""
    for is_open in (True, False):
        before = DiskWorld()
        before.set(1, 2, namespace=5)
        before.set(3, namespace=tag_of(5, 8))
        before.finish()
        world = before if is_open else DiskWorld(image=before.image, is_open=False)

        world.clear(COPIES)
        if not is_open:
            world.open()
        world.finish()

        assert list(world.image.rows.values()) == [key(3)]


def test_page_removed_while_it_is_written_does_not_come_back() -> None:
    """The write may end well, and is not published."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    for _ in range(3):
        world.step(job)

    world.remove(1)
    world.finish()

    assert world.where(1) == ""
    assert world.tier.figures()["disk_pages"] == 0
    assert not world.image.rows


def test_late_end_of_a_removed_write_leaves_the_page_that_was_set_since_known() -> None:
    """The first write of a key ends after the second: what it tells is not of the second page."""
    world = DiskWorld()
    world.set(1)
    (slow,) = world.working
    for _ in range(3):
        world.step(slow)
    world.remove(1)
    world.set(1)
    (quick,) = (job for job in world.working if job != slow)
    while quick in world.working:
        world.step(quick)
    world.set(*range(100, 100 + POOL))
    known = world.where(1)

    world.finish()

    assert known == "disk"
    assert world.where(1) == "disk"
    world.check_records()


def test_row_of_a_page_removed_while_it_is_loaded_goes_before_the_answer() -> None:
    """A graceful restart must not find the page, however long the load takes."""
    world = filled()
    world.finish()
    world.ask(3)

    world.remove(3)
    world.image.sync()

    assert key(3) not in world.image.rows.values()


def test_page_removed_while_it_is_loaded_does_not_come_back() -> None:
    """The load ends without a page."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    world.step(job)

    world.remove(3)
    world.finish()

    assert world.where(3) == ""
    assert world.pool.figures()["pool_bytes_reserved"] == 0


def test_page_removed_before_its_commit_was_heard_does_not_come_back() -> None:
    """The tier takes back what the pool committed after a client had removed it."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    while job in world.working and any(world.working[job].pages[1:]):
        world.step(job)
    # The removal reaches the pool just before the commit does.
    from peercache.wire.messages.pool import Remove

    world.post("pool", Remove(7, 1, keys(3)), CLIENT)
    for _ in range(3):
        if job in world.working:
            world.step(job)
    world.finish()

    assert world.where(3) == ""
