"""A member of the cluster, as an entry of a view, and its states."""

from __future__ import annotations

import attrs

ALIVE, SUSPECT, DEAD, LEFT = 0, 1, 2, 3
"""States of a member, from better to worse; on equal counters the worse one wins."""


@attrs.frozen
class Member:
    """One entry of a view: a node, its addresses, and its state.

    counter:   raised only by the member itself, to refute.
    head_rank: its place in `discovery_addr` if it is a configured head, else 255.
    control:   HOST:PORT for others; data likewise, for the tcp fabric.
    segment:   path of the published shared-memory file; boot_id shows whether it is on our host.
    name:      the name in its certificate, "" without TLS.
    nonce:     random, new at each start; `ids.incarnation_of` computes the incarnation from both.
    """

    incarnation: int
    counter: int
    state: int
    head_rank: int
    host_name: str
    control: str
    data: str
    boot_id: str
    segment: str
    name: str = ""
    nonce: bytes = b""
