#!/usr/bin/env bash
# Runs the tests of the C sources with the sanitizers of addresses and undefined behaviour, in a copy
# of the checkout that is removed afterwards. Arguments go to pytest, in place of the usual tests.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
folder=$(mktemp -d)
# pytest keeps what a process writes before it is aborted: the reports go to files.
trap 'cat "$folder"/report.* 2>/dev/null || true; rm -rf "$folder"' EXIT
flags="-fsanitize=address,undefined"

cp -r "$root"/{src,sims,tests,setup.py,pyproject.toml,README.md} "$folder"
cd "$folder"
CFLAGS="$flags -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1" LDFLAGS="$flags" \
    "$python" setup.py -q build_ext --inplace

[ $# -gt 0 ] || set -- tests/unit/fabric tests/unit/memory tests/contracts/test_fabrics.py \
    tests/unit/net/test_handshakes.py tests/unit/actors/test_directory_table.py \
    tests/unit/actors/test_directory_table_machine.py tests/unit/actors/test_pool.py \
    tests/unit/actors/test_pool_pages.py tests/unit/actors/test_publisher.py \
    tests/unit/actors/test_publisher_losses.py tests/unit/actors/test_publisher_ring.py \
    tests/unit/model/test_records.py tests/unit/model/test_reuse.py \
    tests/unit/storage/test_slab_files.py tests/unit/storage/test_ring.py tests/fuzz
# Python itself is not instrumented: the runtimes come first, and leaks are not looked for.
LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:log_path="$folder/report" \
    UBSAN_OPTIONS=print_stacktrace=1:log_path="$folder/report" \
    PYTHONMALLOC=malloc PYTHONPATH="$folder/src:$folder" \
    "$python" -m pytest -q -p no:cacheprovider --hypothesis-profile=fast -m "not slow" "$@"
