#!/usr/bin/env bash
# Use a wheel for aarch64 on another processor: store and read a page with Debian's Python for arm64,
# in qemu's user mode.
#
#   try_wheel_aarch64.sh WHEEL      wants mmdebstrap and qemu-user-static
set -euo pipefail
wheel=$(realpath "$1")
use=$(realpath "$(dirname "$0")/use.py")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

mmdebstrap --quiet --variant=extract --architectures=arm64 \
    --include=python3.11,libatomic1,libstdc++6 bookworm root
# qemu takes a path from below root where it is there: the node would make its segment in this host's
# /dev/shm, and the client look for it in the other one.
rm -rf root/{dev,proc,run,sys,tmp,var}
site=root/usr/local/lib/python3.11/site-packages
"${PYTHON:-python3}" -m pip --disable-pip-version-check --quiet install --target "$site" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all: "$wheel"
# Emulated calls take longer than a deadline allows.
PEERCACHE_OP_TIMEOUT_S=60 PEERCACHE_EXISTS_TIMEOUT_S=60 \
    PYTHONHOME="$folder/root/usr" PYTHONPATH="$folder/$site" \
    qemu-aarch64-static -L "$folder/root" root/usr/bin/python3.11 "$use"
