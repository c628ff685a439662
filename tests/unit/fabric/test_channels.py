"""The driver of the channel pool: waits end in time, and a channel that failed is closed first."""

from __future__ import annotations

import threading
import time

import attrs
import pytest

from peercache.actors.channels.actor import IDLE_S, ChannelLeased
from peercache.fabric.channels import ChannelDriver
from peercache.observability.reasons import CLOSED, DEADLINE
from tests.pace import TIMEOUT_S

PEER = 7


@attrs.define(eq=False)
class Wire:
    """A channel that notes its close."""

    fails: bool = False
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True
        if self.fails:
            raise OSError("the device refuses")


def driver_of(channels: int) -> ChannelDriver[Wire]:
    return ChannelDriver(max_channels_per_peer=channels, clock=time.monotonic)


def leased(driver: ChannelDriver[Wire], timeout_s: float = TIMEOUT_S) -> ChannelLeased:
    lease = driver.lease(PEER, time.monotonic() + timeout_s)
    assert isinstance(lease, ChannelLeased)
    return lease


def test_read_waits_for_a_channel_until_another_returns_it() -> None:
    """The same channel serves both, and is opened once."""
    driver, wire = driver_of(1), Wire()
    first = leased(driver)
    got: list[ChannelLeased] = []
    waiting = threading.Thread(target=lambda: got.append(leased(driver)))
    waiting.start()

    driver.end(first, wire, works=True)
    waiting.join(TIMEOUT_S)

    assert [lease.is_new for lease in (first, *got)] == [True, False]
    assert driver.channel_of(got[0]) is wire


def test_wait_for_a_channel_ends_at_the_deadline() -> None:
    """The reason is the read's own deadline, not the peer."""
    driver = driver_of(1)
    leased(driver)

    assert driver.lease(PEER, time.monotonic() + 0.01) == DEADLINE


def test_close_ends_the_wait_for_a_channel() -> None:
    """A read that waits learns at once that the client is closed."""
    driver = driver_of(1)
    held = leased(driver)
    got: list[ChannelLeased | str] = []
    waiting = threading.Thread(
        target=lambda: got.append(driver.lease(PEER, time.monotonic() + TIMEOUT_S))
    )
    waiting.start()
    closing = threading.Thread(target=driver.close)
    closing.start()

    waiting.join(TIMEOUT_S)
    driver.end(held, None, works=False)
    closing.join(TIMEOUT_S)

    assert got == [CLOSED]
    assert not closing.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_channel_that_failed_is_closed_and_its_place_is_free(fails: bool) -> None:
    """Even where its close raises, the next read opens another one."""
    driver, wire = driver_of(1), Wire(fails=fails)
    lease = leased(driver)

    if fails:
        with pytest.raises(OSError, match="refuses"):
            driver.end(lease, wire, works=False)
    else:
        driver.end(lease, wire, works=False)

    assert wire.is_closed
    assert leased(driver).is_new


def test_lease_closes_channels_that_were_idle_too_long() -> None:
    """The surplus of a burst does not stay for ever."""
    now = [0.0]
    driver: ChannelDriver[Wire] = ChannelDriver(max_channels_per_peer=2, clock=lambda: now[0])
    wire = Wire()
    lease = driver.lease(PEER, 1.0)
    assert isinstance(lease, ChannelLeased)
    driver.end(lease, wire, works=True)
    now[0] = IDLE_S

    after = driver.lease(PEER, IDLE_S + 1)

    assert isinstance(after, ChannelLeased)
    assert after.is_new
    assert wire.is_closed
    assert driver.channels == {}


def test_channel_that_failed_is_forgotten() -> None:
    """Its number is never used again: what was open under it must not stay for ever."""
    driver, wire = driver_of(1), Wire()
    driver.end(leased(driver), wire, works=True)

    driver.end(leased(driver), wire, works=False)

    assert driver.channels == {}
    assert wire.is_closed
