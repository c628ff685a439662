"""Queue pairs and completion queues: the objects of pyverbs behind a connection.

Keeps   no code asks pyverbs for the state of a pair: its cached field still says "ready to send"
        after an error. A failed completion shows the error, and then the pair is destroyed. No
        property of a destroyed object is read again: its reference is dropped first. Every
        completion event is acknowledged at once. Otherwise destroying the queue would wait for it,
        while holding the GIL. A completion queue is as large as its send queue: some devices report
        no overrun, and after an error every request completes, signaled or not.
"""

from __future__ import annotations

import errno
import os
from typing import Any, final

import attrs

from peercache.config.settings import Config
from peercache.rdma.verbs import Verbs, completion_channel, outlives_fork

RETRIES_MAX = 6
"""7 means "forever" in verbs: no completion arrived in 60 s with a link down (rdma_rxe)."""

RNR_RETRY = 7
"""7 is harmless here: no peer sends a message that needs a receive."""

RNR_TIMER = 12

HOP_LIMIT = 64
"""Routers that a packet may pass."""

PSN_MAX = 2**24 - 1


@attrs.frozen
class Sizes:
    """The room of a queue pair. work: send requests; pieces: scatter entries of each."""

    work: int
    pieces: int


@attrs.frozen
class QpPath:
    """The route from a local port to the other end.

    gid_index, port:  of the local port.
    mtu:              the largest that both ends support, a number of verbs, 1 to 5.
    reads_at_once:    outstanding READs, as initiator and as responder.
    config:           the other limits; docs/reference/configuration.md explains them.
    """

    port: int
    gid_index: int
    is_global: bool
    mtu: int
    reads_at_once: int
    config: Config


@attrs.frozen
class QpEnd:
    """One end of a connection, as the other end must know it. lid: 0 on Ethernet; gid: 16 bytes."""

    qp_num: int
    psn: int
    lid: int
    gid: bytes


@final
class QueuePair:
    """One reliable connection; used by one thread at a time."""

    def __init__(
        self, verbs: Verbs, *, context: Any, pd: Any, cq: Any, port: int, sizes: Sizes
    ) -> None:
        """Create the queue pair in INIT. Raises verbs.Error."""
        enums = verbs.enums
        capacities = verbs.QPCap(
            max_send_wr=sizes.work, max_recv_wr=1, max_send_sge=sizes.pieces, max_recv_sge=1
        )
        wanted = verbs.QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=cq,
            rcq=cq,
            cap=capacities,
            pd=pd,
            # Only the last of a chain is signaled.
            sq_sig_all=0,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_READ,
        )
        first = verbs.QPAttr(port_num=port)
        first.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ
        first.pkey_index = 0
        # With attributes, pyverbs brings a reliable connection to INIT.
        self._pair: Any = outlives_fork(verbs.QPEx(context, wanted, first))
        self._verbs = verbs
        self._is_connected = False
        self.number = int(self._pair.qp_num)

    @property
    def posting(self) -> Any:
        """Return the object that takes work requests; valid until `destroy`."""
        return self._pair

    def connect(self, path: QpPath, other: QpEnd, *, psn: int) -> None:
        """Make the pair ready to receive, then to send; once. Raises verbs.Error."""
        # A pair that failed is never reset: the other end of its old connection could still send to
        # it.
        assert not self._is_connected, self.number
        self._is_connected = True
        verbs = self._verbs
        attributes = verbs.QPAttr(port_num=path.port, path_mtu=path.mtu)
        attributes.ah_attr = _address(verbs, path, other)
        attributes.dest_qp_num = other.qp_num
        attributes.rq_psn, attributes.sq_psn = other.psn, psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = path.reads_at_once
        attributes.min_rnr_timer = RNR_TIMER
        attributes.timeout = path.config.rdma_timeout
        attributes.retry_cnt = min(path.config.rdma_retry_count, RETRIES_MAX)
        attributes.rnr_retry = RNR_RETRY
        self._pair.to_rtr(attributes)
        self._pair.to_rts(attributes)

    def destroy(self) -> None:
        """Destroy the pair; after the return no request of it writes to memory."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()


def _address(verbs: Verbs, path: QpPath, other: QpEnd) -> Any:
    common = {"dlid": other.lid, "sl": path.config.rdma_service_level, "port_num": path.port}
    if not path.is_global:
        return verbs.AHAttr(is_global=0, **common)
    route = verbs.GlobalRoute(
        dgid=verbs.GID(other.gid.hex(":", 2)),
        sgid_index=path.gid_index,
        hop_limit=HOP_LIMIT,
        traffic_class=path.config.rdma_traffic_class,
    )
    return verbs.AHAttr(gr=route, is_global=1, **common)


SUCCESS = 0
REMOTE_ACCESS_ERROR = 10
"""Numbers of enum ibv_wc_status: newer pyverbs has an enum, older plain integers."""

BURST = 16
"""Completions taken at a time; usually there is one."""


@attrs.frozen
class Completion:
    """One finished work request. number: its wr_id; status: see above."""

    number: int
    status: int


@final
class Completions:
    """One completion queue; used by one thread at a time.

    pyverbs holds the GIL in every call, so a blocking `get_cq_event` would block the whole engine.
    Instead a thread takes completions, arms the queue, and sleeps in `poll(2)` on `descriptor`
    without the GIL.
    """

    def __init__(self, verbs: Verbs, context: Any, entries: int) -> None:
        """Create a queue with room for `entries`. Raises verbs.Error."""
        self._error = verbs.Error
        self._channel, self.descriptor = completion_channel(verbs, context)
        # Otherwise `get_cq_event` would wait for an event.
        os.set_blocking(self.descriptor, False)
        try:
            self._queue: Any = outlives_fork(verbs.CQ(context, entries, None, self._channel, 0))
        except BaseException:
            self._channel.close()
            raise

    @property
    def queue(self) -> Any:
        """Return the queue that a queue pair completes into; valid until `close`."""
        return self._queue

    def take(self) -> list[Completion]:
        """Return the requests that have completed since the last call; never blocks."""
        _, found = self._queue.poll(BURST)
        return [Completion(int(each.wr_id), int(each.status)) for each in found]

    def arm(self) -> None:
        """Make the descriptor readable on the next completion.

        Call `take` again afterwards: an earlier completion creates no event.
        """
        self._queue.req_notify()

    def acknowledge(self) -> None:
        """Take and acknowledge every event, after the descriptor became readable."""
        while True:
            try:
                self._channel.get_cq_event(self._queue)
            except self._error as error:
                if abs(getattr(error, "error_code", 0)) == errno.EAGAIN:
                    return
                raise
            self._queue.ack_events(1)

    def close(self) -> None:
        """Destroy the queue and its event channel, after every queue pair of it."""
        queue, self._queue = self._queue, None
        channel, self._channel = self._channel, None
        if queue is not None:
            queue.close()
        if channel is not None:
            channel.close()
