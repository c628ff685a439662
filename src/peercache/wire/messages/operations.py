"""Messages for the people who run a cluster: how a node is, and how all members are.

A status travels as one byte string (`model.status.encoded`): it gains fields with every version,
and nodes of two versions read from each other what both know.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class StatusAsked:
    """Ask a node how it is. detail: with its threads, environment and settings."""

    request: int
    detail: bool


@attrs.frozen
class StatusTold:
    """Answer a StatusAsked: a `model.status.Status`, encoded."""

    request: int
    status: bytes


@attrs.frozen
class ClusterAsked:
    """Ask a node how all members are, those behind the incarnation `after`; it asks each."""

    request: int
    detail: bool
    after: int


@attrs.frozen
class ClusterTold:
    """Answer a ClusterAsked: some `model.status.MemberStatus`, encoded; `more` follow behind."""

    request: int
    statuses: bytes
    more: bool
