#!/usr/bin/env bash
# Install a wheel in a fresh environment of each Python, outside the checkout, and use it there.
#
#   try_wheel.sh WHEEL PYTHON...     it ends with 1 where one of them fails
set -euo pipefail
wheel=$(realpath "$1")
use=$(realpath "$(dirname "$0")/use.py")
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for python in "$@"; do
    rm -rf user
    "$python" -m venv user
    user/bin/python -m pip --disable-pip-version-check --quiet install "$wheel"
    user/bin/peercache version
    user/bin/python "$use"
done
