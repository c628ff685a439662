#!/usr/bin/env bash
# Build the OpenSSL that release wheels carry, as static archives for an old C library.
#
#   openssl.sh ARCHITECTURE FOLDER     x86_64 or aarch64; FOLDER has the compilers of make.sh
#
# It prints the folder that has include/ and lib/. Sources and fixes are those of Debian stable; apt
# checks their signatures. What was built is kept in the user's cache folder by its version: some
# minutes of one core the first time. It requires dpkg-dev, perl and make.
set -euo pipefail
architecture=$1 compilers=$2
cache="${XDG_CACHE_HOME:-$HOME/.cache}/peercache/openssl"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# apt's own lists and sources stay as they are.
mkdir -p "$work"/apt/{lists/partial,archives/partial,sources}
cat >"$work/apt/sources/source.sources" <<SOURCES
Types: deb-src
URIs: ${DEBIAN_MIRROR:-http://deb.debian.org/debian}
Suites: stable stable-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: ${DEBIAN_SECURITY_MIRROR:-http://deb.debian.org/debian-security}
Suites: stable-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/apt/sources"
    -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update >&2
versions=$(apt-cache "${options[@]}" showsrc --only-source openssl | sed -n 's/^Version: //p' |
    sort -V -r | uniq)
[ -n "$versions" ] || { echo "apt names no source package of OpenSSL" >&2; exit 1; }
cd "$work"
# A mirror may name a version that it does not have yet.
for version in $versions; do
    apt-get "${options[@]}" source "openssl=$version" >"$work/log" 2>&1 && break
    version=
done
[ -n "$version" ] || { cat "$work/log" >&2; exit 1; }

# A wheel brings neither OpenSSL's modules nor its configuration, and must not load a host's.
# Hidden symbols cannot conflict with those of another OpenSSL in an engine's process.
features=(no-shared no-module no-dso no-engine no-legacy no-apps no-tests no-docs no-autoload-config
    enable-ktls "CFLAGS=-O3 -fPIC -fvisibility=hidden")
# The build inputs are part of its name.
digest=$(cat "$compilers/version" - <<<"${features[*]}" | sha256sum | cut -c1-8)
made="$cache/$version-$architecture-$digest"
if ! [ -e "$made/lib/libssl.a" ]; then
    cd "$work"/openssl-*/
    ./Configure "linux-$architecture" --prefix="$made.part" --libdir=lib --openssldir=/etc/ssl \
        CC="$compilers/$architecture-cc" AR="$compilers/ar" RANLIB="$compilers/ranlib" \
        "${features[@]}" >"$work/log" 2>&1 &&
        make -j "${JOBS:-$(nproc)}" build_libs >>"$work/log" 2>&1 &&
        make install_dev >>"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; exit 1; }
    rm -rf "$made"
    mkdir -p "$cache"
    mv "$made.part" "$made"
fi
echo "$made"
