#!/bin/bash
# The contract driver, and `bench paths`, between two hosts over the kernel's Soft-RoCE, every byte checked. Runs on both
# machines of ci/vm, once for each row of the table at the end; needs dist/.
#   data.sh [REGEX]   only the rows whose name it matches
set -euo pipefail
plugin=$PWD/dist/lib/libnccl-net-rdma.so
nccl_rdma=$PWD/dist/bin/nccl-rdma
only=${1:-}
# Two cases wait for a listener that has gone.
export NCCL_NET_RDMA_CONNECT_TIMEOUT=5

fail() {
    echo "FAIL: $*"
    exit 1
}

packets() { # that each rail has sent
    local rail
    for ((rail = 0; rail < RAILS; rail++)); do cat "/sys/class/infiniband/rxe$rail/ports/1/hw_counters/sent_pkts"; done
}

# The first host plays, the second joins. What a row says about itself must be true at both ends: the MTU, how the GID begins
# that the plugin chose, and how many rails send packets.
rows=0
driver=(contract --procs 2)
row() { # name, beginning of the GID, MTU of the second host's interfaces, rails, settings of the plugin, arguments of the driver
    [[ $1 =~ $only ]] || return 0
    local name=$1 gid=$2 mtu=$3 rails=$4 settings start=$SECONDS before after rail said roce_mtu=4096
    read -ra settings <<<"$5"
    shift 5
    if [[ $RANK == 1 ]]; then
        for ((rail = 0; rail < RAILS; rail++)); do ip link set "eth$rail" mtu "$mtu"; done
        ((mtu > 4200)) || roce_mtu=1024
    fi
    said=$(env "${settings[@]}" NCCL_DEBUG=INFO "$nccl_rdma" devices --plugin "$plugin" | grep 'device 0:')
    grep -qE "MTU $roce_mtu, GID ${gid}[^;]* RoCE v2" <<<"$said" || fail "not with MTU $roce_mtu and a RoCE v2 GID $gid...: $said"
    vm barrier "row $name"
    mapfile -t before < <(packets)
    if [[ $RANK == 1 ]]; then
        env "${settings[@]}" "$nccl_rdma" join r0:7000
    else
        printf '\n==== %s: %s\n' "$name" "${settings[*]}"
        env "${settings[@]}" "$nccl_rdma" "${driver[@]}" --plugin "$plugin" --meet 0.0.0.0:7000 "$@"
    fi
    vm barrier "row $name played"
    mapfile -t after < <(packets)
    for ((rail = 0; rail < RAILS; rail++)); do
        (((after[rail] > before[rail]) == (rail < rails))) || fail "$name: rxe$rail of r$RANK has sent $((after[rail] - before[rail])) packets"
    done
    rows=$((rows + 1))
    [[ $RANK != 0 ]] || echo "$name: passed, $((SECONDS - start)) s; ${said#*; }"
}

cases() { printf -- '--only %s ' "$@"; }
quick="--quick --sizes 0,1,8,4096,64K,1M"
# With both devices the case of fused ones would use the second.
one=NCCL_IB_HCA==rxe0
both=NCCL_NET_RDMA_RAILS=rxe0+rxe1
ip6=NCCL_IB_ADDR_FAMILY=AF_INET6

# shellcheck disable=SC2046,SC2086
{
    #   name                       GID    MTU  rails settings driver
    row "IPv4, all cases"          10.77. 9000 1     $one     $quick
    row "8 MiB, groups of 1 and 8" 10.77. 9000 1     ""       $(cases large-groups)
    row "IPv6"                     fd77:  9000 1     $ip6     $quick $(cases sizes two-ways groups-8)
    row "MTU 1024 at one end"      10.77. 1500 1     ""       $quick $(cases sizes two-ways groups-8)
    # The cases that a second rail makes another thing of.
    row "two rails"                10.77. 9000 2     $both    $quick $(cases sizes large tags groups-8 two-ways iflush \
        many-connections random mr-while-sending connect-while-sending abort-sends abort-receives dies-sending)
    row "two devices, fused"       10.77. 9000 2     ""       --quick $(cases fused)
    row "two rails, IPv6, MTU 1024 at one end" fd77: 1500 2 "$both $ip6" $quick $(cases sizes two-ways groups-8)
    driver=(bench paths)
    row "paths measured"           10.77. 9000 1     $one     --paths host --max 64K --rounds 2 --out /run/vm/paths
}
[[ $RANK != 0 ]] || printf '\nSoft-RoCE, data: %s rows passed in %s s\n' "$rows" "$SECONDS"
