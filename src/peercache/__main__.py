"""`python -m peercache`: the same as the `peercache` command."""

from __future__ import annotations

import sys

from peercache.cli.main import main

sys.exit(main())
