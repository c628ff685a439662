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

tests/release/try_wheel.sh "$folder"/dist/*.whl "${PYTHON:-python3}"
