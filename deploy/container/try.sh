#!/usr/bin/env bash
# Build the image and run it: a node as uid 65532 that reports that it is healthy, and leaves at SIGTERM.
#
#   try.sh       as root, with mmdebstrap, buildah and podman; exit status 125 if they are missing
#
# It needs no container service and no registry: the base is built from Debian's packages and
# kept in the user's cache folder. Images and containers go to a folder that is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
not_here() { echo "cannot run here: $*" >&2; exit 125; }
[ "$(id -u)" = 0 ] || not_here "this is not root"
for tool in mmdebstrap buildah podman unshare; do
    command -v $tool >/dev/null || not_here "there is no $tool"
done
# podman needs its own mount namespace, in which it may hide cgroups that it cannot use.
if [ "${PEERCACHE_TRY_INSIDE:-}" != 1 ]; then
    PEERCACHE_TRY_INSIDE=1 exec unshare --mount --propagation private "$0" "$@"
fi
umount /sys/fs/cgroup/unified 2>/dev/null || true

work=$(mktemp -d)
name=peercache-try-$$
storage=(--storage-driver vfs --root "$work/storage" --runroot "$work/run")
podman=(podman "${storage[@]}")
finish() {
    "${podman[@]}" rm --force --time 0 $name >/dev/null 2>&1 || true
    umount -R "$work/storage" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

base="${XDG_CACHE_HOME:-$HOME/.cache}/peercache/container-base.tar"
if ! [ -e "$base" ]; then
    mkdir -p "$(dirname "$base")"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        stable "$base.part.tar" && mv "$base.part.tar" "$base" || not_here "no base can be made"
fi
export BUILDAH_ISOLATION=chroot
container=$(buildah "${storage[@]}" from scratch)
buildah "${storage[@]}" add --quiet "$container" "$base" / >/dev/null
buildah "${storage[@]}" commit --quiet "$container" localhost/base >/dev/null
buildah "${storage[@]}" rm "$container" >/dev/null

# This machine's access to PyPI: its certificates and pip's settings.
way=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
[ -e /etc/pip.conf ] && way+=(--volume /etc/pip.conf:/etc/pip.conf:ro)
for folder in ${PIP_FIND_LINKS:-}; do [ -d "$folder" ] && way+=(--volume "$folder:$folder:ro"); done
buildah "${storage[@]}" bud --quiet "${way[@]}" --ignorefile deploy/container/ignore \
    --build-arg BASE=localhost/base --format docker \
    --file deploy/container/Containerfile --tag localhost/peercache . >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
"${podman[@]}" images --format '{{.Repository}} {{.Size}}' localhost/peercache

# Limits that this shell may set: podman's defaults may exceed them.
files=$(ulimit -Hn)
[ "$files" != unlimited ] || files=65536
"${podman[@]}" run --detach --name $name --cgroups=disabled --network=host --shm-size 256m \
    --ulimit "nofile=$files:$files" --ulimit nproc=1000:1000 --no-healthcheck --read-only --read-only-tmpfs --cap-drop all --security-opt no-new-privileges \
    --security-opt seccomp=unconfined \
    --tmpfs /run/peercache:rw,mode=1777 \
    --env PEERCACHE_POOL_SIZE=64MiB --env PEERCACHE_LISTEN=127.0.0.1:0 \
    --env PEERCACHE_METRICS_PORT="${PORT:-31987}" \
    localhost/peercache >/dev/null
for _ in $(seq 60); do
    answer=$("${podman[@]}" exec $name peercache health 2>&1) && break
    sleep 0.5
done
echo "health: $answer"
[ "$answer" = ok ] || { "${podman[@]}" logs $name >&2; exit 1; }
uid=$("${podman[@]}" exec $name python3 -c 'import os; print(os.stat("/proc/1").st_uid)')
echo "uid: $uid"
[ "$uid" = 65532 ]
"${podman[@]}" exec $name python3 -c '
from peercache import Client
with Client.open() as cache:
    buffer = bytearray(65536)
    assert cache.batch_set(["a"], [b"p" * 65536]) == [True]
    assert cache.batch_get(["a"], [buffer]) == [True] and buffer == b"p" * 65536
print("a page was stored and read in the container")'
"${podman[@]}" stop --time 30 $name >/dev/null
status=$("${podman[@]}" inspect --format '{{.State.ExitCode}}' $name)
echo "exit status after SIGTERM: $status"
[ "$status" = 0 ]
