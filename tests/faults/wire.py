"""The network between the hosts of a run: a switch in user space, whose links can be made bad.

    ip netns exec SWITCH python -m tests.faults.wire SEED HOSTS

Each host has a tap device, which its maker moves into the host; every frame passes this process,
so one mechanism makes all faults of links on any kernel that has tun (few have netem).

In: one JSON object a line, {"from": 0, "to": 1, "loss": 0.1, …}: the fields of `Link`, replacing
what held for that direction. Out: {"ready": true}, then {} a line.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from typing import Any

import attrs

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_MAX = 65_536
FRAMES_AT_ONCE = 64
QUEUE_S = 0.3
"""How far behind a slow link may be before it drops: routers have no endless queues, either."""


@attrs.frozen(kw_only=True)
class Link:
    """One direction between two hosts. What has no value does nothing.

    is_cut:    nothing passes.
    loss, duplicated, reordered: the fraction of frames to which that happens; a reordered frame
               is late by `late_s`.
    delay_s, jitter_s: every frame is late by so much, plus or minus.
    rate:      bytes a second. frame_max: larger frames vanish, and nothing reports it.
    flaps_s:   the link is cut every other time of so many seconds.
    """

    is_cut: bool = False
    loss: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0
    late_s: float = 0.02
    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate: float = 0.0
    frame_max: int = 0
    flaps_s: float = 0.0


GOOD = Link()


def mac_of(number: int) -> str:
    """Return the hardware address of a host, from which the switch knows the tap."""
    return f"02:70:63:00:00:{number:02x}"


class Wire:
    """The taps, the links between them, and the frames that are under way."""

    def __init__(self, seed: int, hosts: int) -> None:
        """Make the taps of so many hosts, in the network namespace of this process."""
        self._rng = random.Random(seed)
        self._links: dict[tuple[int, int], Link] = {}
        self._free_at: dict[tuple[int, int], float] = {}
        self._taps = [_tap(f"tap{number}") for number in range(hosts)]
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def set_link(self, source: int, target: int, link: Link) -> None:
        """Replace what happens to frames in this direction."""
        self._links[source, target] = link

    def serve(self) -> None:
        """Pass frames until standard input ends."""
        poll = select.epoll()
        places = {tap: number for number, tap in enumerate(self._taps)}
        for tap in self._taps:
            poll.register(tap, select.EPOLLIN)
        poll.register(0, select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1
            for file, _ in poll.poll(wait_s):
                if file in places:
                    self._take(file, places[file])
                elif not self._obey():
                    return
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, target, frame = heapq.heappop(self._late)
                self._give(target, frame)

    def _obey(self) -> bool:
        line = os.read(0, 65_536)
        for each in line.decode().splitlines():
            asked: dict[str, Any] = json.loads(each)
            self.set_link(asked.pop("from"), asked.pop("to"), Link(**asked))
            print("{}", flush=True)
        return bool(line)

    def _take(self, tap: int, source: int) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(tap, FRAME_MAX)
            except OSError:  # None is left, or the device is down.
                return
            if frame[0] & 1:  # To all: they look for each other's hardware addresses.
                for target in range(len(self._taps)):
                    if target != source:
                        self.passed(source, target, frame)
            elif frame[5] < len(self._taps):
                self.passed(source, frame[5], frame)

    def passed(self, source: int, target: int, frame: bytes) -> None:
        """Do to a frame what its link does: pass it now or later, once or twice, or drop it."""
        link = self._links.get((source, target), GOOD)
        if link is GOOD:
            self._give(target, frame)
            return
        now = time.monotonic()
        if (
            link.is_cut
            or (link.flaps_s and int(now / link.flaps_s) % 2)
            or (link.frame_max and len(frame) > link.frame_max)
            or self._rng.random() < link.loss
        ):
            return
        due = now + link.delay_s + self._rng.uniform(-link.jitter_s, link.jitter_s)
        if link.rate:
            free_at = max(now, self._free_at.get((source, target), 0.0))
            if free_at > now + QUEUE_S:
                return
            self._free_at[source, target] = free_at + len(frame) / link.rate
            due += free_at - now + len(frame) / link.rate
        if self._rng.random() < link.reordered:
            due += link.late_s
        for _ in range(1 + (self._rng.random() < link.duplicated)):
            heapq.heappush(self._late, (due, next(self._numbers), target, frame))

    def _give(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._taps[target], frame)
        except OSError:  # The host's queue is full, or it is gone: as with any switch.
            return


def _tap(name: str) -> int:
    """Make a tap device; return its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def main() -> None:
    """Serve until standard input ends."""
    wire = Wire(*map(int, sys.argv[1:]))
    print('{"ready": true}', flush=True)
    wire.serve()


if __name__ == "__main__":
    main()
