"""The C sources of the compiled library, and the digest that ties a library to its sources.

`setup.py` runs this file by its path, so it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = (
    "installation/_identity.c",
    "memory/_scatter.c",
    "fabric/tcp/_receiving.c",
    "fabric/tcp/_serving.c",
)
"""Every C source, relative to the package's folder."""


def digest_of(package: Path) -> str:
    """Return the digest of the sources below a package's folder; raises OSError if one is gone."""
    digest = hashlib.sha256()
    for name in SOURCES:
        source = (package / name).read_bytes()
        digest.update(b"%s %d\n" % (name.encode(), len(source)))
        digest.update(source)
    return digest.hexdigest()
