"""A device that registers when a test lets it, and counts what it has."""

from __future__ import annotations

import threading

import attrs

from peercache.rdma.registrar import Registered, RegistrationFailed
from tests.pace import TIMEOUT_S

CHUNK = 64 * 2**10


@attrs.define
class Device:
    """Registers up to `room_bytes`; each call waits until `gate` is open."""

    chunk_bytes: int = CHUNK
    room_bytes: int = 2**60
    problem: str = "no room"
    gate: threading.Event = attrs.field(factory=threading.Event)
    began: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    live: dict[int, tuple[int, int, int]] = attrs.field(factory=dict)
    calls: int = 0
    at_once: int = 0
    at_once_max: int = 0

    def register(self, address: int, length: int, access: int) -> Registered:
        """Take memory, if there is room."""
        with self.lock:
            self.calls += 1
            key = self.calls
            self.at_once += 1
            self.at_once_max = max(self.at_once, self.at_once_max)
        self.began.release()
        assert self.gate.wait(TIMEOUT_S)
        with self.lock:
            self.at_once -= 1
            if length > self.room_bytes:
                raise RegistrationFailed(self.problem)
            self.room_bytes -= length
            self.live[key] = (address, length, access)
        return Registered(lkey=key, rkey=key + 1000, handle=key)

    def deregister(self, piece: Registered) -> str:
        """Give memory back; once, or the test fails."""
        with self.lock:
            self.room_bytes += self.live.pop(piece.handle)[1]
        return ""
