"""The words for why a page was missed, or a read left rdma: values of the label `reason`."""

from __future__ import annotations

# Why a page was a miss: the values of the label `reason`.
ABSENT = "absent"  # nobody holds it, or nobody asked knew
EVICTED = "evicted"  # the holder reused the slot before or while we read
PEER_UNREACHABLE = "peer_unreachable"  # no connection, no answer, or its breaker is open
DEADLINE = "deadline"  # the caller's time was up
VERIFY_FAILED = "verify_failed"  # the checksum did not match: never expected
REFUSED = "refused"  # the peer would not serve us
WRONG_SIZE = "wrong_size"  # the page has another length than the destination
NO_HOME = "no_home"  # no home node to write to, or it restarted
POOL_FULL = "pool_full"  # no room, or more uncommitted than allowed
TOO_LARGE = "too_large"  # the page is larger than the pool
UNSUPPORTED = "unsupported"  # an interface we answer but do not serve (SGLang's v2 pools)
INTERNAL = "internal"  # an exception of ours: a bug, logged as an error
CLOSED = "closed"  # after close(), or in a forked child
NOT_PROMOTED = "not_promoted"  # on its holder's disk, and not loaded in time

MISS_REASONS = (
    ABSENT, EVICTED, PEER_UNREACHABLE, DEADLINE, VERIFY_FAILED, REFUSED, WRONG_SIZE, NO_HOME,
    POOL_FULL, TOO_LARGE, UNSUPPORTED, INTERNAL, CLOSED, NOT_PROMOTED,
)  # fmt: skip

# Why a read over rdma did not go on: the values of the label `reason` of its metrics.
LINK_DOWN = "link_down"  # the link of our port, or one rail alone does not get on
UNREGISTERED = "unregistered"  # the peer has not registered that memory yet
NO_MEMORY = "no_memory"  # no block of our own is registered soon enough

RDMA_FAILURES = (
    PEER_UNREACHABLE, REFUSED, DEADLINE, INTERNAL, LINK_DOWN, UNREGISTERED, NO_MEMORY,
)  # fmt: skip
