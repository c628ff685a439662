"""Messages for the people who run a cluster: how a node is, and how all members are.

A status travels as one byte string (`model.status.encoded`): it gains fields with every version,
and nodes of two versions read from each other what both know.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import (
    NO_ROLE,
    OPERATORS,
    OPERATORS_AND_NODES,
    Declared,
    Receiver,
)


@attrs.frozen
class StatusAsked:
    """Ask a node how it is. detail: with its threads, environment and settings."""

    # It names namespaces, processes and other hosts: not for clients. A node asks for an operator.
    declared: ClassVar = Declared(45, Receiver.NODE, OPERATORS_AND_NODES)

    request: int
    detail: bool


@attrs.frozen
class StatusTold:
    """Answer a StatusAsked: a `model.status.Status`, encoded."""

    declared: ClassVar = Declared(46, Receiver.ASKER, NO_ROLE)

    request: int
    status: bytes


@attrs.frozen
class ClusterAsked:
    """Ask a node how all members are, those behind the incarnation `after`; it asks each."""

    declared: ClassVar = Declared(47, Receiver.NODE, OPERATORS)

    request: int
    detail: bool
    after: int


@attrs.frozen
class ClusterTold:
    """Answer a ClusterAsked: some `model.status.MemberStatus`, encoded; `more` follow behind."""

    declared: ClassVar = Declared(48, Receiver.ASKER, NO_ROLE)

    request: int
    statuses: bytes
    more: bool
