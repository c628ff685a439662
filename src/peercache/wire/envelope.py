"""Every message of the control plane.

A command is an imperative (`Reserve`), its answer a participle or noun (`Granted`), a notice a past
participle (`Touched`). Batches travel packed: `keys` is n × 16 bytes, `records` n × 56
(`model.records.RECORD`), `drops` n × 24 (`model.records.DROP`), lengths and offsets n × 8
little-endian. A class states its tag on the wire, its senders and its receiver
(`messages.declared`). A tag never changes; a new message gets the next one.

No promise depends on a message arriving, or arriving only once: every request carries a number
that its answer repeats, and summaries repair messages that must not be lost.

A build speaks WIRE_VERSION and, from the second release on, the version of the release before it. A
version is a set of messages: a later one only appends, so messages that both ends know have the
same bytes. Hello and Welcome carry the versions that the ends speak, and a node never sends a
message that the peer's version does not have. A changed message gets a new name and a new tag.

Version 4 is the first that is released: builds before it had 1 to 3, and are refused.
"""

from __future__ import annotations

from types import ModuleType

import attrs

from peercache.wire.messages import directory, membership, pool, session
from peercache.wire.messages.declared import Declared, Message

WIRE_VERSION = 4
WIRE_VERSION_OLDEST = 4
"""The versions that this build speaks: its own, and that of the last release, once there is one."""

ENVELOPE_VERSION = 2
"""The first number of an envelope: the version of its structure, which both ends must share to read
a Hello at all."""

UNKNOWN_CLUSTER = ""
"""In an envelope of an operator that does not know the node's cluster: the answer names it."""


def _in_order(*modules: ModuleType) -> tuple[type[Message], ...]:
    """Return the messages of these modules in the order of their tags, which have no gap."""
    found = {kind for module in modules for kind in vars(module).values() if _is_message(kind)}
    in_order = sorted(found, key=lambda kind: kind.declared.tag)
    tags = [kind.declared.tag for kind in in_order]
    assert tags == list(range(len(in_order))), f"a tag is missing, or two messages have it: {tags}"
    return tuple(in_order)


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and isinstance(getattr(kind, "declared", None), Declared)


MESSAGES = _in_order(directory, membership, pool, session)
"""Every message of the wire; the index of each is its tag."""


def versions_spoken() -> str:
    """Return the wire versions of this build, as a text."""
    if WIRE_VERSION_OLDEST == WIRE_VERSION:
        return str(WIRE_VERSION)
    return f"{WIRE_VERSION_OLDEST} to {WIRE_VERSION}"


@attrs.frozen
class Envelope:
    """A message with its sender, and the incarnation that it is for (0: any)."""

    sender: int
    target: int
    message: Message
