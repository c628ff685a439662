#!/usr/bin/env bash
# Installs the packages of the distribution that tests need, where root may; the gate's first part.
# What cannot be had is a line NOT RUN, and no failure.
set -euo pipefail

missing=()
# FILE PACKAGE WHAT: a file of the package, and what is not tested without it.
wanted=(
    "/usr/bin/spin|spin|the model of docs/spec"
    "/usr/include/openssl/ssl.h|libssl-dev|TLS"
    "/usr/bin/etcd|etcd-server|discovery by etcd"
    "/usr/sbin/dnsmasq|dnsmasq-base|discovery by DNS"
    "/usr/bin/chromium|chromium|the dashboard in a browser"
    "/usr/bin/promtool|prometheus|rules and board on Prometheus"
    "/usr/bin/prometheus-alertmanager|prometheus-alertmanager|alerts on Alertmanager"
    "/usr/sbin/ip|iproute2|several hosts"
)
for line in "${wanted[@]}"; do
    IFS='|' read -r file package _ <<<"$line"
    [ -e "$file" ] || [ -e "${file/sbin/bin}" ] || missing+=("$package")
done
if [ "${#missing[@]}" != 0 ] && [ "$(id -u)" = 0 ]; then
    wait=(-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    for _ in 1 2 3; do
        if apt-get "${wait[@]}" update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get "${wait[@]}" install -y -qq "${missing[@]}"; then
            break
        fi
        sleep 10
    done
fi
for line in "${wanted[@]}"; do
    IFS='|' read -r file package what <<<"$line"
    [ -e "$file" ] || [ -e "${file/sbin/bin}" ] ||
        echo "NOT RUN: the tests of $what: $package is not installed, and cannot be"
done
