"""The C sources of the compiled libraries, and the digest that ties a library to its sources.

`setup.py` runs this file by its path, so it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = (
    "installation/_identity.c",
    "actors/directory/_table.c",
    "actors/directory/_table_ahead.c",
    "actors/directory/_table_batches.c",
    "actors/directory/_table_finding.c",
    "actors/directory/_table_memory.c",
    "actors/pool/_records.c",
    "actors/publisher/_streams.c",
    "model/_keys.c",
    "model/_records.c",
    "model/_reuse.c",
    "memory/_scatter.c",
    "memory/_seals.c",
    "memory/_table_reading.c",
    "net/_handshakes.c",
    "paths/_locations.c",
    "fabric/tcp/_receiving.c",
    "fabric/tcp/_holding.c",
    "fabric/tcp/_responding.c",
    "fabric/tcp/_serving.c",
    "storage/_reads.c",
)
"""The sources of the library that every installation has, below the package's folder."""

TLS_SOURCES = (
    "installation/_identity.c",
    "fabric/tcp/_tls.c",
    "fabric/tcp/_tls_context.c",
)
"""The sources of the library with OpenSSL, which an installation may not have."""

HEADERS = (
    "actors/directory/_table.h",
    "memory/_table_layout.h",
    "fabric/tcp/_serving.h",
    "fabric/tcp/_tls.h",
)
"""Headers that sources of both libraries include."""


def digest_of(package: Path, sources: tuple[str, ...] = SOURCES) -> str:
    """Return the digest of a library's sources; raises OSError if one is missing.

    package: the folder that contains them.
    """
    digest = hashlib.sha256()
    for name in (*sources, *HEADERS):
        source = (package / name).read_bytes()
        digest.update(b"%s %d\n" % (name.encode(), len(source)))
        digest.update(source)
    return digest.hexdigest()
