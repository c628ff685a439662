"""A rail: one opened port of one device, with its protection domain and registered memory.

Owns    a context, a protection domain, and the registrations of that domain.
Keeps   children are closed before their parents: first queue pairs and completion queues, by the
        objects that made them, then registrations, domain and context here.
"""

from __future__ import annotations

from typing import Any, final

import attrs

from peercache.config.settings import Config
from peercache.model.process import ForkGuard
from peercache.rdma import device, neighbours
from peercache.rdma.device import Chosen
from peercache.rdma.memory import Regions
from peercache.rdma.queue_pair import QpEnd, QpPath, QueuePair, Sizes
from peercache.rdma.verbs import Absent, Verbs, load, open_context, outlives_fork

READS_AT_ONCE = 16
"""READs that we have outstanding on a queue pair, at most: the limit of most devices."""

SLOWEST_PORTION_S = 2.0
"""16 MiB over a tenth of a gigabit per second: the longest time of a portion without loss."""


@attrs.frozen
class Abilities:
    """The limits of a device. pieces: scatter entries of one READ."""

    work: int
    pieces: int
    reads_started: int
    reads_served: int
    mtu: int


@final
class Rail:
    """One opened port. Thread-safe; close everything made from it before `close`."""

    def __init__(self, verbs: Verbs, chosen: Chosen, config: Config) -> None:
        """Open the port. Raises verbs.Error or OSError with the reason."""
        self.verbs = verbs
        self.chosen = chosen
        self.name = chosen.port.name
        self._config = config
        self._fork = ForkGuard()
        self.context: Any = open_context(verbs, chosen.port.device)
        self._pd: Any = None
        try:
            self._pd = outlives_fork(verbs.PD(self.context))
            self.abilities = _abilities(self.context, chosen.port.number)
            self.regions = Regions(self._pd, device=self.name)
        except BaseException:
            self._close_context()
            raise

    @property
    def link_layer(self) -> str:
        """Return device.ETHERNET or device.INFINIBAND."""
        return self.chosen.port.link_layer

    @property
    def gives_up_s(self) -> float:
        """Return the time after which a request without a completion counts as lost.

        A device may take four times its timeout for each attempt (InfiniBand, 9.7.6.1.3).
        """
        tries = self._config.rdma_retry_count + 1
        return SLOWEST_PORTION_S + 4 * 4.096e-6 * (1 << self._config.rdma_timeout) * tries

    def is_ours(self) -> bool:
        """Return whether this process opened the rail: a forked child must not close it."""
        return not self._fork.is_child

    def is_up(self) -> bool:
        """Return whether the link is up now."""
        return device.is_up(self.chosen.port.device, self.chosen.port.number)

    def finds(self, gid: bytes, until: float) -> bool:
        """Return whether the kernel can connect to a GID without a wait of its own.

        Waits for `neighbours.RESOLVE_S` at most, without the GIL.
        """
        if self.link_layer != device.ETHERNET:
            return True
        return neighbours.find(self.chosen.gid, gid, until)

    def queue_pair(self, cq: Any, sizes: Sizes) -> QueuePair:
        """Create a queue pair, not yet connected. Raises verbs.Error."""
        return QueuePair(
            self.verbs,
            context=self.context,
            pd=self._pd,
            cq=cq,
            port=self.chosen.port.number,
            sizes=sizes,
        )

    def end(self, pair: QueuePair, psn: int) -> QpEnd:
        """Return the end of a queue pair, for the other end."""
        # Read each time: an InfiniBand subnet manager may change the address.
        lid = int(self.context.query_port(self.chosen.port.number).lid)
        return QpEnd(pair.number, psn, lid, self.chosen.gid.raw)

    def path(self, *, mtu: int, reads_at_once: int) -> QpPath:
        """Return the route to another end with these limits."""
        return QpPath(
            port=self.chosen.port.number,
            gid_index=self.chosen.gid.index,
            is_global=self.link_layer == device.ETHERNET,
            mtu=min(mtu, self.abilities.mtu),
            reads_at_once=reads_at_once,
            config=self._config,
        )

    @property
    def reads_started(self) -> int:
        """Return how many READs a connection may have outstanding as initiator."""
        return min(READS_AT_ONCE, self.abilities.reads_started)

    def reads_served(self, wanted: int) -> int:
        """Return how many READs a connection answers at once, if the initiator wants `wanted`."""
        return max(1, min(wanted, self.abilities.reads_served))

    def close(self) -> None:
        """Close registrations, domain and context, after everything made from them."""
        if not self.is_ours():
            return
        self.regions.close()
        self._close_context()

    def _close_context(self) -> None:
        pd, self._pd = self._pd, None
        context, self.context = self.context, None
        if pd is not None:
            pd.close()
        if context is not None:
            context.close()


def open_rails(config: Config) -> tuple[tuple[Rail, ...], tuple[str, ...]]:
    """Open the rails of this host; return them and the problems, a sentence each."""
    verbs = load()
    if isinstance(verbs, Absent):
        return (), (verbs,)
    choice = device.choose(device.read_ports(), config.rdma_device_names, config.rdma_gid_index)
    rails: list[Rail] = []
    problems = list(choice.problems)
    for chosen in choice.ports:
        opened = _opened(verbs, chosen, config)
        if isinstance(opened, Rail):
            rails.append(opened)
        else:
            problems.append(opened)
    return tuple(rails), tuple(problems)


def _opened(verbs: Verbs, chosen: Chosen, config: Config) -> Rail | str:
    try:
        return Rail(verbs, chosen, config)
    except (verbs.Error, OSError) as error:
        return f"{chosen.port.name} cannot be opened: {error}"


def _abilities(context: Any, port: int) -> Abilities:
    found = context.query_device()
    scatter = [int(found.max_sge), int(found.max_sge_rd)]
    return Abilities(
        work=int(found.max_qp_wr),
        # Some devices allow fewer scatter entries for a READ, and some leave that field empty.
        pieces=min(each for each in scatter if each > 0),
        reads_started=int(found.max_qp_init_rd_atom) or int(found.max_qp_rd_atom),
        reads_served=int(found.max_qp_rd_atom),
        mtu=int(context.query_port(port).active_mtu),
    )
