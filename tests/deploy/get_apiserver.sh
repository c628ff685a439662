#!/usr/bin/env bash
# Build a Kubernetes API server into the user's cache folder, once: six minutes on two cores, 35 MB
# fetched. Debian has its sources (1.20.2, with all that they import) and the Go that compiles them,
# but no binary. The tests of tests/deploy/test_api_server.py run where it is there.
# It wants root for apt-get. Another exit status than 0: it cannot be had.
set -euo pipefail
cache="${XDG_CACHE_HOME:-$HOME/.cache}/peercache/deploy"
mkdir -p "$cache"
exec 9>"$cache/kube-apiserver.lock"
flock 9
[ -x "$cache/kube-apiserver" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

apt=(-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
apt-get "${apt[@]}" install -y -qq --no-install-recommends \
    golang-1.19-go make rsync bsdextrautils etcd-server >/dev/null
# Sources come by a list of our own: the system's may name binary packages only.
mkdir -p lists/partial archives/partial
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb-src [signed-by=$keys] http://deb.debian.org/debian bookworm main" >sources.list
apt+=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/none
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update -qq
apt-get "${apt[@]}" source -qq --download-only kubernetes
tar -xzf kubernetes_*.orig.tar.gz
mv kubernetes-*/ kubernetes

# The bundled reflect2 crashes with a Go as new as this one: Debian packages its successor.
apt-get -qq -o APT::Sandbox::User=root download golang-github-modern-go-reflect2-dev
dpkg -x golang-github-modern-go-reflect2-dev_*.deb newer
bundled=kubernetes/vendor/github.com/modern-go/reflect2
rm "$bundled"/*.go
cp newer/usr/share/gocode/src/github.com/modern-go/reflect2/*.go "$bundled"

cat >version <<'V'
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
V
export GOPATH="$work/kubernetes/.go" GOCACHE="$work/go" GO111MODULE=off CGO_ENABLED=0
export KUBE_GIT_VERSION_FILE="$work/version" PATH="/usr/lib/go-1.19/bin:$PATH"
make -C kubernetes WHAT=cmd/kube-apiserver GOFLAGS="-p=1 -tags=providerless" >make.log 2>&1 || {
    tail -30 make.log >&2
    exit 1
}
strip -o "$cache/kube-apiserver.new" kubernetes/_output/local/bin/linux/*/kube-apiserver
mv "$cache/kube-apiserver.new" "$cache/kube-apiserver"
