"""The sender of a message, as actors see it, and where to send the answer."""

from __future__ import annotations

import attrs


@attrs.frozen
class Origin:
    """The sender of a message, and where to send the answer.

    identity: incarnation of a node, or id of a client.
    pipe:     the connection that the answer goes back on; 0 for a member, which is answered over
              this node's own link to it.
    """

    identity: int
    pipe: int = 0
