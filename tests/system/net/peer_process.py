"""A peer in a process of its own, to be killed or stopped; it answers Lookups on FOLDER's ipc."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.net.peers import Peer


def main() -> None:
    """Serve until the standard input ends."""
    kind, folder = sys.argv[1:]
    with Peer(kind, Path(folder)) as peer:
        print(peer.url, flush=True)
        sys.stdin.read()


main()
