#!/usr/bin/env bash
# Build what a release uploads: the sdist, and one wheel each for x86-64 and aarch64.
#
#   make.sh FOLDER [ARCHITECTURE...]
#
# zig compiles for a C library of 2014 on any machine, so no old build host is needed. The wheels fit
# every Python from 3.10 on, because their libraries are called through ctypes, and carry OpenSSL.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
architectures=("${@:-x86_64}")
[ $# -gt 0 ] || architectures=(x86_64 aarch64)
glibc=2.17 # manylinux_2_17: accepted by pip on every Linux of the last ten years.

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/build"
python="$work/build/bin/python"
"$python" -m pip --disable-pip-version-check --quiet install \
    build wheel "ziglang>=0.13" "auditwheel>=6" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }

# The commands that setup.py and OpenSSL's build call: each is zig under another name.
mkdir "$work/compilers"
compiler() {
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$python" "$2" >"$work/compilers/$1"
    chmod +x "$work/compilers/$1"
}
for architecture in "${architectures[@]}"; do
    compiler "$architecture-cc" "cc -target $architecture-linux-gnu.$glibc"
done
compiler ar ar
compiler ranlib ranlib
"$python" -m ziglang version >"$work/compilers/version"

"$python" -m build --sdist --outdir "$out" . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
sdist=$(ls -t "$out"/*.tar.gz | head -n 1)
for architecture in "${architectures[@]}"; do
    openssl=$(deploy/wheels/openssl.sh "$architecture" "$work/compilers")
    # From the sdist, so that a missing file is noticed. _PYTHON_HOST_PLATFORM names the platform
    # that is built for; `-g0`, because zig would write this machine's folders.
    mkdir "$work/$architecture" && tar -xzf "$sdist" -C "$work/$architecture" --strip-components 1
    (
        cd "$work/$architecture"
        CC="$work/compilers/$architecture-cc" _PYTHON_HOST_PLATFORM="linux-$architecture" \
            CFLAGS="-g0 -I$openssl/include" LDFLAGS="-s -L$openssl/lib" PEERCACHE_STATIC_OPENSSL=1 \
            "$python" -m build --wheel --outdir dist .
    ) >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
    # auditwheel checks the required symbols of the C library, and refuses newer ones.
    "$python" -m auditwheel show "$work/$architecture"/dist/*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
    grep -q "\"manylinux_2_17_$architecture\"" "$work/log" || { cat "$work/log" >&2; exit 1; }
    "$python" -m wheel tags --remove --python-tag py3 --abi-tag none \
        --platform-tag "manylinux_2_17_$architecture.manylinux2014_$architecture" \
        "$work/$architecture"/dist/*.whl >/dev/null 2>&1
    mv "$work/$architecture"/dist/*.whl "$out"
done
ls -l "$out"
