#!/usr/bin/env bash
# Makes a virtual environment in which SGLang 0.5.23 runs without an accelerator, for the tests.
#
#   install_sglang.sh [VENV]
#
# VENV is by default $PEERCACHE_SGLANG_VENV, or a folder in the user's cache: it takes a minute and
# 2.6 GB, so it is made once and shared by all checkouts. A second run finds the stamp and ends.
# PyPI's torch brings several GB of CUDA along; the CPU build does as well:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu install_sglang.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-${PEERCACHE_SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/peercache/sglang-0.5.23}}
python=${PYTHON:-python3}
constraints=$here/constraints-sglang-0.5.23.txt

# What peercache itself needs, from its own list. The package is not installed: the environment is
# shared, and the tests put the src folder of their own checkout on the path.
ours=$("$python" - "$root/pyproject.toml" <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
for part in (r"^dependencies = \[(.*?)^\]", r"^dev = \[(.*?)\]"):
    for name in re.findall(r'"([^"]+)"', re.search(part, text, re.M | re.S)[1]):
        print(name)
PYTHON
)
stamp=$( (cat "$constraints" "${BASH_SOURCE[0]}"; echo "$ours") | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.peercache-stamp" 2>/dev/null)" = "$stamp" ]; then
    echo "$venv"
    exit 0
fi

# Two installations at once would mix their files: the second waits, and finds the stamp.
mkdir -p "$venv"
exec 9>"$venv/.peercache-lock"
flock 9
if [ "$(cat "$venv/.peercache-stamp" 2>/dev/null)" = "$stamp" ]; then
    echo "$venv"
    exit 0
fi

echo "installing SGLang 0.5.23 for tests into $venv (once, about a minute)" >&2
"$python" -m venv "$venv" >&2
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@" >&2; }

pip -c "$constraints" torch
# Without their dependencies: those are CUDA packages for the most part. What the storage path, the
# engine on a CPU and its HTTP server really import is listed below.
pip --no-deps sglang==0.5.23 torchvision==0.28.0
pip -c "$constraints" \
    numpy psutil orjson pyzmq pydantic msgspec requests pybase64 triton packaging pillow starlette \
    tqdm IPython aiohttp transformers apache-tvm-ffi dill sentencepiece compressed-tensors gguf \
    openai partial_json_parser ninja prometheus_client safetensors setuptools \
    setproctitle einops uvicorn fastapi uvloop xgrammar jsonschema soundfile python-multipart
# The requirement specifiers hold no spaces or globs, and each line is one argument.
mapfile -t requirements <<<"$ours"
pip "${requirements[@]}"
echo "$stamp" >"$venv/.peercache-stamp"
echo "$venv"
