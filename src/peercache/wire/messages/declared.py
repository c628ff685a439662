"""What each message states of itself, beside its fields: its tag, its receiver, who may send it.

The codec, the rights, the routing of a node and the page on the wire follow from it. A class
without it is no `Message` for mypy.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Protocol

import attrs


class Role(Enum):
    """What a connection was admitted as."""

    NODE = "node"
    READER = "reader"
    WRITER = "writer"
    OPERATOR = "operator"


class Receiver(Enum):
    """Who takes a message: an actor of a node, by the name of its mailbox, or one of the others."""

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
    """The answer to a question, or a refusal: a node sends it, and takes none."""


class Rule(Enum):
    """What of a message must be its sender's own; `trust.rights` checks it."""

    OWN_RECORDS = "own_records"
    """The sender is the holder of all `records`."""
    OWN_ENTRY = "own_entry"
    """`member` is the sender."""
    OWN_NAMESPACE = "own_namespace"
    """The sender may change pages of `namespace`, a tag."""
    ALL_NAMESPACES = "all_namespaces"
    """The sender may read pages of every namespace."""


NO_ROLE: frozenset[Role] = frozenset()
"""No admitted connection: what is said before, and what answers a question of the receiver's."""
NODES = frozenset({Role.NODE})
WRITERS = frozenset({Role.WRITER})
CLIENTS = frozenset({Role.READER, Role.WRITER})
OPERATORS = frozenset({Role.OPERATOR})
OPERATORS_AND_NODES = frozenset({Role.NODE, Role.OPERATOR})
CLIENTS_AND_OPERATORS = CLIENTS | OPERATORS
REMOVERS = frozenset({Role.NODE, Role.WRITER, Role.OPERATOR})
"""A node sends its own clients' and operators' removals, which it forwards as itself."""
EVERYONE = frozenset(Role)


@attrs.frozen
class Declared:
    """What a message states.

    tag:     its number on the wire: each has its own, and keeps it forever.
    since:   the wire version that it came with; 4 is the first.
    to:      who receives it.
    of_node: who receives it from another node; None: the same.
    senders: the roles that may send it.
    rules:   what of it must be the sender's own.
    """

    tag: int
    to: Receiver
    senders: frozenset[Role]
    rules: tuple[Rule, ...] = ()
    since: int = 4
    of_node: Receiver | None = None


class Message(Protocol):
    """A message of the control plane: a frozen class of attrs with what it states of itself."""

    declared: ClassVar[Declared]
    __attrs_attrs__: ClassVar[Any]
