#!/bin/sh
# Make `peercache` a built-in storage backend: of a checkout of SGLang, or of an installed one.
#
#     apply.sh CHECKOUT
#     apply.sh --installed FOLDER     the folder that holds the package `sglang`
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1:-}" = --installed ]; then
    target=${2:?name the folder that holds the package sglang}
    strip=2 new=$here/files/python
    package=$target/sglang
else
    target=${1:?name a checkout of SGLang}
    strip=1 new=$here/files
    package=$target/python/sglang
fi
if ! [ -e "$package/srt/mem_cache/storage/backend_factory.py" ]; then
    echo "$package is not an SGLang with storage backends" >&2
    exit 1
fi
if [ -e "$package/srt/mem_cache/storage/peercache" ]; then
    echo "$package already has the backend" >&2
    exit 1
fi
# All or nothing: a patch that does not apply leaves every file unchanged.
patch --dry-run -s -p$strip -d "$target" <"$here/sglang-0.5.23.patch" || {
    echo "the patch is for SGLang 0.5.23, and does not apply to $package" >&2
    exit 1
}
patch -s -p$strip -d "$target" <"$here/sglang-0.5.23.patch"
cp -R "$new/." "$target/"
