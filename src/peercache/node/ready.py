"""Ready: where a node serves."""

from __future__ import annotations

import attrs

from peercache.model.ids import name_of


@attrs.frozen
class Ready:
    """Where a node serves. home: ipc:// or inproc://; http: HOST:PORT, or "" where it is off."""

    incarnation: int
    control: str
    data: str
    home: str
    http: str
    local_secret: bytes = attrs.field(repr=False)

    def line(self) -> dict[str, str | None]:
        """Return the ready line, as the node prints it."""
        return {
            "event": "node.ready",
            "node": name_of(self.incarnation),
            "control": self.control,
            "data": self.data,
            "home": self.home,
            "http": self.http or None,
        }

    def sockets(self) -> list[int | str]:
        """Return the local addresses of the node's sockets: tcp ports, and a path."""
        ports = [
            int(each.rpartition(":")[2]) for each in (self.control, self.data, self.http) if each
        ]
        return [*ports, self.home.removeprefix("ipc://")]
