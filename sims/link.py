"""A simulated `net.link.Link`: the same outbox and greeting over the simulated network.

The outbox is production code; this file checks its bounds again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from peercache.net.link import Outbox
from sims.network import TO_LISTENER, Network, Pipe
from sims.places import Place
from sims.swarm import Options
from sims.trace import Violation

RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 1.0
"""As nng's, in `net.sockets`."""

CONNECT_S = 1.0


class SimLink:
    """One directed link of a node to an address."""

    def __init__(
        self,
        url: str,
        *,
        hello: Callable[[], bytes],
        on_answer: Callable[[bytes], None],
        on_dropped: Callable[[int], None],
        options: Options,
        network: Network,
        place: Place,
        rng: random.Random,
    ) -> None:
        """Dial on `run`, in the name of `place`."""
        self._address = url.removeprefix("tcp://")
        self._hello = hello
        self._on_answer = on_answer
        self._on_dropped = on_dropped
        self._network = network
        self._place = place
        self._rng = rng
        self._options = options
        self._outbox = Outbox(messages_max=options.outbox_messages, bytes_max=options.outbox_bytes)
        self._pipe: Pipe | None = None
        self._broken = trio.Event()
        self._scope = trio.CancelScope()

    def send(self, raw: bytes) -> None:
        """Queue a message; never blocks, may drop the oldest."""
        if self._pipe is not None and not self._outbox:
            self._network.send(self._pipe, TO_LISTENER, raw)
            return
        dropped = self._outbox.put(raw)
        self._check_bounds()
        if dropped:
            self._on_dropped(dropped)
        self._flush()

    def greet_again(self) -> None:
        """Send Hello again: the peer does not know this node (any more)."""
        if self._pipe is not None:
            self._network.send(self._pipe, TO_LISTENER, self._hello())
            self._flush()

    def stop(self) -> None:
        """End `run`; what waits is not sent."""
        self._scope.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no message waits to be sent."""
        return not self._outbox

    async def run(self) -> None:
        """Dial, send Hello and messages until stopped."""
        with self._scope:
            try:
                backoff_s = RECONNECT_MIN_S
                while True:
                    self._broken = trio.Event()
                    self._pipe = await self._network.connect(
                        self._place, self._address, CONNECT_S, self._on_answer, self._broken.set
                    )
                    if self._pipe is not None:
                        backoff_s = RECONNECT_MIN_S
                        self._network.send(self._pipe, TO_LISTENER, self._hello())
                        self._flush()
                        await self._broken.wait()
                        self._pipe = None
                    await trio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                    backoff_s = min(2 * backoff_s, RECONNECT_MAX_S)
            finally:
                if self._pipe is not None:
                    self._network.hang_up(self._pipe)

    def _check_bounds(self) -> None:
        count, size = len(self._outbox.waiting), sum(map(len, self._outbox.waiting))
        if count > self._options.outbox_messages or size > self._options.outbox_bytes:
            detail = f"{count} messages of {size} bytes wait for {self._address}"
            raise Violation("outbox-bound", f"{self._place.name}: {detail}")

    def _flush(self) -> None:
        while self._pipe is not None and self._outbox:
            self._network.send(self._pipe, TO_LISTENER, self._outbox.take())
