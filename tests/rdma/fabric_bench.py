"""An owner and a reader of the rdma fabric in one process, over two devices of the guest.

Everything but the exchange of queue pairs is what a node and a client run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from peercache.config.settings import Config
from peercache.rdma import device
from peercache.rdma.rail import Rail
from peercache.rdma.verbs import Verbs, load
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import NO_PATH, ChannelOpened, OpenChannel, Refused
from tests.contracts.fabric_suite import GRANULE, INCARNATION
from tests.rdma.fake_bench import CLIENT, Bench

SETTINGS = Config()
"""The defaults. Shorter time-outs find a dead peer sooner, and let a guest with one busy processor
send everything again, in storms that last for seconds."""


def open_rail(name: str, settings: Config = SETTINGS) -> Rail:
    """Open one device of the guest."""
    verbs = load()
    assert isinstance(verbs, Verbs), verbs
    choice = device.choose(device.read_ports(), (name,), settings.rdma_gid_index)
    assert choice.ports, choice.problems
    return Rail(verbs, choice.ports[0], settings)


@attrs.define(kw_only=True)
class RdmaBench(Bench):
    """An owner and a reader over devices; tests may change what the owner answers with `forge`."""

    channels_max = 4

    owner_rails: Sequence[str] = ("rxe2",)
    reader_rails: Sequence[str] = ("rxe1",)
    settings: Config = SETTINGS
    forge: Callable[[Message], Message | None] = attrs.field(default=lambda answer: answer)
    is_away: bool = attrs.field(default=False, init=False)

    def rails_of_owner(self) -> list[Any]:
        """Open the node's devices."""
        return [open_rail(name, self.settings) for name in self.owner_rails]

    def rails_of_reader(self) -> list[Any]:
        """Open the client's devices."""
        return [open_rail(name, self.settings) for name in self.reader_rails]

    def restart_server(self) -> None:
        """End every channel and registration of the owner, and begin again."""
        self.server.close_all()
        self.server = self.new_server()

    def exchange(self, peer: int, message: Message, until: float) -> Message | None:
        """Carry a question to the owner's side, as the control plane does."""
        assert isinstance(message, OpenChannel)
        self.asked.append(message)
        if self.is_away or peer != INCARNATION:
            return None
        # As the actor of a node does, before it connects.
        rail = self.server.rail_for(message)
        if not rail.finds(message.gid, until):
            return Refused(message.request, NO_PATH, f"no answer at {rail.name}")
        return self.forge(self.server.open(CLIENT, message))

    def fill(self, page_bytes: int, seed: int = 3) -> None:
        """Fill the page memory with noise, and give slot i the word 2 (i + 1)."""
        rng = np.random.default_rng(seed)
        self.segment.pages[:] = rng.integers(0, 256, len(self.segment.pages), np.uint8)
        count = self.segment.layout.page_bytes // page_bytes
        starts = np.arange(count) * (page_bytes // GRANULE)
        self.segment.store_words(starts, 2 * (np.arange(count, dtype=np.uint64) + np.uint64(1)))


def forged(answer: Message | None, **changes: Any) -> Message | None:
    """Return a node's answer with some facts changed."""
    return attrs.evolve(answer, **changes) if isinstance(answer, ChannelOpened) else answer
