#!/usr/bin/env bash
# Build sdist and wheel as a release has them, install the wheel in a fresh environment outside the
# checkout, and store and read a page there. PYTHON: the interpreter of that environment.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip=(-m pip --disable-pip-version-check --quiet)

"${PYTHON:-python3}" -m venv "$folder/build"
"$folder/build/bin/python" "${pip[@]}" install build
# The wheel is built from the sdist, so that a file that the sdist lacks is noticed.
# OpenSSL is linked into the wheel: a host may have another one, or none.
PEERCACHE_STATIC_OPENSSL=1 "$folder/build/bin/python" -m build --outdir "$folder/dist" . >"$folder/build.log" 2>&1 || {
    cat "$folder/build.log" >&2
    exit 1
}
ls "$folder/dist"
case $(ls "$folder"/dist/*.whl) in
    *-any.whl) echo "The wheel carries no compiled part." >&2; exit 1 ;;
esac

"${PYTHON:-python3}" -m venv "$folder/user"
"$folder/user/bin/python" "${pip[@]}" install "$folder"/dist/*.whl
cd "$folder"
user/bin/peercache version
user/bin/python - <<'END'
from pathlib import Path

import peercache
from peercache import Client
from peercache.installation.library import load_tls

load_tls()
package = Path(peercache.__file__).parent
assert "site-packages" in package.parts, package
# Python itself loads the host's libssl, so the maps of this process tell nothing.
(library,) = package.rglob("libpeercache_tls*.so")
assert b"libssl.so" not in library.read_bytes(), f"{library} wants the host's OpenSSL"
page, buffer = bytes(range(256)) * 256, bytearray(65536)
with Client.open(pool_size="64MiB", listen="127.0.0.1:0") as cache:
    assert cache.batch_set(["a"], [page]) == [True]
    assert cache.batch_get(["a"], [buffer]) == [True]
assert buffer == page
print("a page was stored and read with the installed wheel")
END
