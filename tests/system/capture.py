"""Writes every frame that passes a host to a file, until SIGTERM: `python -m … FILE`."""

from __future__ import annotations

import select
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

ETH_P_ALL = 3


def main() -> None:
    """Capture; one line on stdout reports that it has begun."""
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as packets,
        Path(sys.argv[1]).open("wb") as file,
    ):
        packets.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE: drop nothing
        print("capturing", flush=True)
        while not stopped or select.select([packets], [], [], 0)[0]:
            if select.select([packets], [], [], 0.1)[0]:
                file.write(packets.recv(1 << 17))


if __name__ == "__main__":
    main()
