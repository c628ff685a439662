"""What each message class states in addition to its fields: its tag, its receiver, its senders.

The codec, the rights, the routing of a node and the wire reference page are derived from it. For
mypy a class without it is not a `Message`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Protocol

import attrs


class Role(Enum):
    """The role with which a connection was admitted."""

    NODE = "node"
    READER = "reader"
    WRITER = "writer"
    OPERATOR = "operator"


class Receiver(Enum):
    """The receiver of a message: an actor of a node, by the name of its mailbox, or another one."""

    MEMBERSHIP = "membership"
    PUBLISHER = "publisher"
    DIRECTORY = "directory"
    POOL = "pool"
    PROMOTE = "promote"
    RDMA = "rdma"
    REMOVAL = "removal"
    PLACEMENT = "placement"
    NODE = "node"
    """The switchboard answers it."""
    ASKER = "asker"
    """The answer to a request, or a refusal: a node sends it, and never receives it."""


class Rule(Enum):
    """What in a message must belong to its sender; `trust.rights` checks it."""

    OWN_RECORDS = "own_records"
    """The sender is the holder of all `records`."""
    OWN_ENTRY = "own_entry"
    """`member` is the sender."""
    OWN_NAMESPACE = "own_namespace"
    """The sender may change pages of `namespace`, a tag."""
    READABLE_NAMESPACE = "readable_namespace"
    """The sender may read pages of `namespace`, a tag."""
    ALL_NAMESPACES = "all_namespaces"
    """The sender may read pages of every namespace."""


NO_ROLE: frozenset[Role] = frozenset()
"""No admitted role: messages before admission, and answers to requests of the receiver."""
NODES = frozenset({Role.NODE})
WRITERS = frozenset({Role.WRITER})
CLIENTS = frozenset({Role.READER, Role.WRITER})
OPERATORS = frozenset({Role.OPERATOR})
OPERATORS_AND_NODES = frozenset({Role.NODE, Role.OPERATOR})
CLIENTS_AND_OPERATORS = CLIENTS | OPERATORS
REMOVERS = frozenset({Role.NODE, Role.WRITER, Role.OPERATOR})
"""Senders of removals. A node forwards those of its clients and operators as its own."""
EVERYONE = frozenset(Role)


@attrs.frozen
class Declared:
    """What a message class states.

    tag:     its unique number on the wire, which never changes.
    since:   the wire version that introduced it; 4 is the first.
    to:      its receiver.
    of_node: its receiver if another node sends it; None: the same.
    senders: the roles that may send it.
    rules:   what in it must belong to the sender.
    """

    tag: int
    to: Receiver
    senders: frozenset[Role]
    rules: tuple[Rule, ...] = ()
    since: int = 4
    of_node: Receiver | None = None


class Message(Protocol):
    """A message of the control plane: a frozen attrs class with its declaration."""

    declared: ClassVar[Declared]
    __attrs_attrs__: ClassVar[Any]
