"""Reasons: why a page was a miss, a read left rdma, or TLS failed (the label `reason`)."""

from __future__ import annotations

FABRICS = ("shm", "tcp", "rdma")
"""The values of the label `fabric`."""

# Why a page was a miss: the values of the label `reason`.
ABSENT = "absent"  # no node holds it, or no asked node knew a holder
EVICTED = "evicted"  # the holder evicted it before or during the read
PEER_UNREACHABLE = "peer_unreachable"  # no connection, no answer, or its breaker is open
DEADLINE = "deadline"  # the deadline passed
VERIFY_FAILED = "verify_failed"  # the checksum did not match: never expected
REFUSED = "refused"  # the peer refused to serve it
WRONG_SIZE = "wrong_size"  # the page has another length than the destination
NO_HOME = "no_home"  # no home node, or it restarted
NO_ANSWER = "no_answer"  # the home node, or the node that was to take a page, was silent too long
POOL_FULL = "pool_full"  # no room, or more uncommitted than allowed
TOO_LARGE = "too_large"  # the page is larger than the pool
WEIGHTS_CHANGED = "weights_changed"  # the engine has new weights; their client is being opened
UNSUPPORTED = "unsupported"  # a host pool that is not served, or was never named
INTERNAL = "internal"  # a bug in PeerCache, logged as an error
CLOSED = "closed"  # the client is closed, or this is a forked child
WRONG_PAGE = "wrong_page"  # the memory at the record's place holds another page
NO_CHECKSUM = "no_checksum"  # with verify=full, the record names no checksum
DRAINING = "draining"  # an operator drains the home node: it stores no more
NOT_PROMOTED = "not_promoted"  # on its holder's disk, and not loaded in time

MISS_REASONS = (
    ABSENT, EVICTED, PEER_UNREACHABLE, DEADLINE, VERIFY_FAILED, REFUSED, WRONG_SIZE, NO_HOME,
    NO_ANSWER, POOL_FULL, TOO_LARGE, WEIGHTS_CHANGED, UNSUPPORTED, INTERNAL, CLOSED, NOT_PROMOTED,
    WRONG_PAGE, NO_CHECKSUM, DRAINING,
)  # fmt: skip

# Why exists did not report pages that it found, with decline = cost: the label `reason`.
SLOW_FABRIC = "slow_fabric"  # to read them from memory takes longer than to compute them
SLOW_DISK = "slow_disk"  # the same, from a disk
UNMEASURED = "unmeasured"  # a first page did not arrive in time to know

DECLINE_REASONS = (SLOW_FABRIC, SLOW_DISK, UNMEASURED)

# What became of the pages of a hint: the label `outcome` of its metric, by the label `hint`.
RETAIN, DEMOTE, PREFETCH, SHARE = "retain", "demote", "prefetch", "share"
DONE = "done"
ALREADY = "already"  # nothing was to be done
FORBIDDEN = "refused"  # over the quota, retained, no room here, or not this client's to change
MISSING = "missing"  # no member has it, or none has it in memory where that is what counts
UNANSWERED = "unanswered"  # not known in time, or a member did not answer

HINT_OUTCOMES = {
    RETAIN: (DONE, FORBIDDEN, MISSING, UNANSWERED),
    DEMOTE: (DONE, FORBIDDEN, MISSING, UNANSWERED),
    PREFETCH: (DONE, ALREADY, FORBIDDEN, MISSING, UNANSWERED),
    SHARE: (ALREADY, MISSING, UNANSWERED),
}

# Why a hint of an engine was not obeyed at all.
UNKNOWN = "unknown"  # an action, or a version of it, that this version does not know
TOO_MANY = "too_many"  # more actions or pages than one request may have
NO_TARGET = "no_target"  # it names a session, or pages that this process has not seen
LATE = "late"  # it waited too long for its turn

# Why a page that was offered to another node was not taken: the label `reason` of these metrics.
NO_ROOM = "no_room"  # no node that was asked had free memory or much colder pages
NO_NODE = "no_node"  # there was no node to ask
MALFORMED = "malformed"  # the offer, or its answer, made no sense
FULL = "full"  # the node that it was offered to had no room, or no colder pages
OTHER_BYTES = "other_bytes"  # that node holds other bytes under the key, or has no checksum
NOT_READ = "not_read"  # it was not read in time, changed or was removed, or owners did not answer
NOT_A_MEMBER = "not_a_member"  # a node offered it that is not in the view
NOT_DRAINING = "not_draining"  # a node handed it over that does not drain
NAMESPACE = "namespace"  # the certificate of this node does not allow its namespace

HINT_REFUSALS = (UNKNOWN, MALFORMED, TOO_MANY, NO_TARGET, LATE)
OFFER_FAILURES = (
    NO_ROOM, NO_NODE, NO_ANSWER, MALFORMED, FULL, DRAINING, OTHER_BYTES, TOO_LARGE, NOT_READ,
)  # fmt: skip
TAKE_FAILURES = (
    FULL, DRAINING, OTHER_BYTES, TOO_LARGE, NOT_READ, MALFORMED, NOT_A_MEMBER, NOT_DRAINING,
    NAMESPACE,
)  # fmt: skip

# Why rdma did not finish a read: the values of the label `reason` of its metrics.
LINK_DOWN = "link_down"  # the link of the own port is down, or one rail alone stalls
UNREGISTERED = "unregistered"  # the peer has not registered that memory yet
NO_MEMORY = "no_memory"  # no block of the client is registered in time

RDMA_FAILURES = (
    PEER_UNREACHABLE, REFUSED, DEADLINE, INTERNAL, LINK_DOWN, UNREGISTERED, NO_MEMORY,
)  # fmt: skip

# Why a directory table of this host was not used.
TABLE_FAILURES = (
    "torn", "not_opened", "closed", "cut_short", "foreign", "other_version", "malformed",
)  # fmt: skip

# Why TLS failed: the values of the label `reason` of refusals, on the data port all of them.
HANDSHAKE_LOST = "handshake_lost"  # the peer hung up
NO_CERTIFICATE = "no_certificate"
UNKNOWN_CA = "unknown_ca"  # of an authority that tls_ca does not name
EXPIRED = "expired"
NOT_YET_VALID = "not_yet_valid"
BAD_CERTIFICATE = "bad_certificate"  # another fault; on the control port any of the last three
NO_TLS = "no_tls"  # clear text, or noise
OLD_TLS = "old_tls"  # TLS 1.2, or no cipher in common
REFUSED_BY_PEER = "refused_by_peer"  # the peer does not accept our certificate
BROKEN_TLS = "broken_tls"
SILENT = "silent"  # not a byte for too long
HANDSHAKE = "handshake"  # control: nng does not report which
