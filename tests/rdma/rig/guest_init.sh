#!/bin/bash
# Process 1 of the guest. The kernel starts it on the host's files, mounted read-only: it lays a
# scratch layer over them, makes the devices, runs the one command, and switches the power off.
#
# From the kernel's command line: RIG_CONTROL, a folder of the host that both sides write to, with
#   packages   the folder of files to lay over the host's
#   writable   folders the guest may really write to, one on a line
#   devices    yes, or no for a guest without RDMA devices
#   cpuinfo    what the guest shows as /proc/cpuinfo
#   command    what to run, a script for bash with its environment and working directory
# and for the way back: booted, status.
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

give_up() {
    echo "guest: $*" >/dev/console
    # The end of process 1 is a kernel panic, which ends the guest and is seen on the console.
    exit 1
}

lay_out_files() {
    local new=/run/new
    mount -t proc proc /proc || give_up "no /proc"
    mount -t tmpfs -o mode=755 run /run || give_up "no /run"
    mkdir -p /run/packages /run/scratch/upper /run/scratch/work "$new"
    # A mount of its own: layers of one file system may not lie within each other.
    mount -t hostfs -o "ro,$(<"$RIG_CONTROL/packages")" none /run/packages || give_up "no packages"
    mount -t overlay -o lowerdir=/run/packages:/,upperdir=/run/scratch/upper \
        -o workdir=/run/scratch/work,index=off,xino=off overlay "$new" || give_up "no overlay"
    mount -t proc proc "$new/proc"
    mount -t sysfs sys "$new/sys"
    mount -t devtmpfs dev "$new/dev"
    mkdir -p "$new/dev/pts" "$new/dev/shm"
    mount -t devpts devpts "$new/dev/pts"
    mount -t tmpfs -o mode=1777 shm "$new/dev/shm"
    mount -t tmpfs -o mode=755 run "$new/run"
    mkdir -p "$new/run/lock" "$new/run/rig"
    mount -t hostfs -o "$RIG_CONTROL" none "$new/run/rig" || give_up "no way back to the host"
    exec chroot "$new" /bin/bash /run/rig/init inside
}

open_writable_folders() {
    local folder
    while read -r folder; do
        mount -t hostfs -o "$folder" none "$folder" || give_up "cannot write to $folder"
    done </run/rig/writable
}

# rxe0 is alone and talks to itself. The others are the ends of two cables, rxe1 to rxe2 and rxe3
# to rxe4: what they say to each other truly crosses a veth pair, so a cable can be pulled.
# Soft-RoCE knows the first network namespace only: both ends live there, and rules keep the kernel
# from going by the loopback because it knows both addresses for its own. Addresses: 10.9.1.1 on rd0;
# 10.9.2.1 and fd09:2::1 on rd1, .2 and ::2 on rd2; net 3 the same on rd3 and rd4.
make_devices() {
    ip -batch - <<'LINES' || give_up "no interfaces"
link add rd0 mtu 9000 type dummy
link add rd1 mtu 9000 type veth peer name rd2 mtu 9000
link add rd3 mtu 9000 type veth peer name rd4 mtu 9000
address add 10.9.1.1/24 dev rd0
LINES
    accept_own_addresses all rd1 rd2 rd3 rd4
    for i in 0 1 2 3 4; do
        echo "link set rd$i up"
    done | ip -batch - || give_up "no links"
    plug_ends 10.9. . 32 | ip -4 -batch - || give_up "no IPv4 ways"
    plug_ends fd09: :: 128 | ip -6 -batch - || give_up "no IPv6 ways"
    for i in 0 1 2 3 4; do
        echo "link add rxe$i type rxe netdev rd$i"
    done | rdma --batch - || give_up "no rxe devices"
}

accept_own_addresses() {
    local end
    for end; do
        echo 0 >"/proc/sys/net/ipv4/conf/$end/rp_filter"
        echo 1 >"/proc/sys/net/ipv4/conf/$end/accept_local"
        # An address is usable at once, and a pulled cable does not take it away.
        echo 0 >"/proc/sys/net/ipv6/conf/$end/accept_dad"
        echo 1 >"/proc/sys/net/ipv6/conf/$end/keep_addr_on_down"
    done
}

# plug_ends PREFIX SEPARATOR BITS: the addresses of one family, and each end's way to its peer.
plug_ends() {
    local end net own peer table
    # The rule that finds local addresses moves behind those of the cables.
    echo "rule add pref 100 lookup local"
    echo "rule del pref 0"
    while read -r end net own peer; do
        table=$((100 + end))
        echo "address add $1$net$2$own/$3 dev rd$end"
        echo "route add $1$net$2$peer dev rd$end src $1$net$2$own table $table"
        echo "rule add pref 10 iif rd$end lookup local"
        echo "rule add pref 20 from $1$net$2$own to $1$net$2$peer lookup $table"
    done <<'ENDS'
1 2 1 2
2 2 2 1
3 3 1 2
4 3 2 1
ENDS
}

run_command() {
    local status
    # The two terminals are the command's stdout and stderr: raw, so that bytes stay bytes.
    stty -F /dev/tty1 raw -echo
    stty -F /dev/tty2 raw -echo
    cut -d' ' -f1 /proc/uptime >/run/rig/booted
    /bin/bash /run/rig/command </dev/null >/dev/tty1 2>/dev/tty2
    status=$?
    # What was written last is still on its way through the terminals.
    stty -F /dev/tty1 sane
    stty -F /dev/tty2 sane
    echo $status >/run/rig/status.new
    mv /run/rig/status.new /run/rig/status
    sync
}

if [ "${1:-}" != inside ]; then
    lay_out_files
fi
exec </dev/null
echo rdma-guest >/proc/sys/kernel/hostname
echo 1 >/proc/sys/kernel/panic_on_oops
# Memory is taken when it is touched, as on the host: a large allocation alone is no reason to fail.
echo 1 >/proc/sys/vm/overcommit_memory
ulimit -l unlimited
ip link set lo up
mount --bind /run/rig/cpuinfo /proc/cpuinfo || give_up "no /proc/cpuinfo"
open_writable_folders
if [ "$(</run/rig/devices)" = yes ]; then
    make_devices
fi
run_command
echo o >/proc/sysrq-trigger
sleep 30
