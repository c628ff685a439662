"""Tells the service manager that started this process how far it is (sd_notify)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str, log: Any, environment: Mapping[str, str] | None = None) -> None:
    """Send a state to the socket that systemd's `Type=notify` names; do nothing without one.

    state: READY or STOPPING. It never blocks and never raises: a service manager that does not
    hear ends the wait by its own time-out.
    """
    address = (os.environ if environment is None else environment).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # "@" stands for the zero byte of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sender:
        try:
            sender.sendto(state.encode(), target)
        except OSError as error:
            log.warning("node.notify_failed", socket=address, problem=error.strerror)
