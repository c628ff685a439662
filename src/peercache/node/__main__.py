"""`python -m peercache.node`: the same as `peercache node`."""

from __future__ import annotations

import sys

from peercache.cli.node import main

if __name__ == "__main__":
    sys.exit(main())
