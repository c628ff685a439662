"""Run in a fresh environment: the installed wheel has TLS, and stores and reads a page."""

import importlib.metadata
import sys
from pathlib import Path

import peercache
from peercache import Client
from peercache.installation.library import load_tls

load_tls()
package = Path(peercache.__file__).parent
assert "site-packages" in package.parts, package
# Python itself loads the host's libssl, so the maps of this process show nothing.
(library,) = package.rglob("libpeercache_tls*.so")
assert b"libssl.so" not in library.read_bytes(), f"{library} wants the host's OpenSSL"
page, buffer = bytes(range(256)) * 256, bytearray(65536)
with Client.open(embedded=True, pool_size="64MiB", listen="127.0.0.1:0") as cache:
    assert cache.batch_set(["a"], [page]) == [True]
    assert cache.batch_get(["a"], [buffer]) == [True]
assert buffer == page
version = importlib.metadata.version("peercache-kv")
print(f"Python {sys.version.split()[0]}: a page was stored and read with {version}")
