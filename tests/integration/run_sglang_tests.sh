#!/usr/bin/env bash
# Runs the SGLang tests with the Python of their own environment; arguments go to pytest.
#
# Without that environment they are skipped, unless PEERCACHE_TEST_SGLANG=1: then it is made first.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${PEERCACHE_SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/peercache/sglang-0.5.23}

if [ "${PEERCACHE_TEST_SGLANG:-}" = 1 ]; then
    "$here/install_sglang.sh" "$venv" >/dev/null
    # Those that cannot be fetched are not tested, and their test reports it.
    "$venv/bin/python" "$here/older_sglang.py" >/dev/null || true
elif [ ! -x "$venv/bin/python" ] || [ ! -e "$venv/.peercache-stamp" ]; then
    echo "skipped: the SGLang tests ($venv is not there; PEERCACHE_TEST_SGLANG=1 makes it)"
    exit 0
fi
cd "$root"
# The tests import this checkout's sources: the compiled library lies among them. Where it fits them
# it is left alone, because other tests of this checkout may be using it.
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
"$venv/bin/python" -c "from peercache.installation.library import load, load_tls; load(); load_tls()" \
    2>/dev/null || "$venv/bin/python" setup.py -q build_ext --inplace
# Two engines starting on two busy cores take longer than any other fixture may.
all=(tests/integration)
for argument in "$@"; do
    # Tests that are named: only these.
    case $argument in tests/*) all=() ;; esac
done
exec "$venv/bin/python" -m pytest -m sglang "${all[@]}" "$@"
