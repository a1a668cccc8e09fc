#!/bin/bash
# The plugin beside perftest between two hosts over the kernel's Soft-RoCE: runs on both machines of ci/vm, in turns in one boot.
# `ci/bench soft-roce` starts it. PEER is another plugin, driven as ours is; ROUNDS is the number of turns. Needs dist/.
set -euo pipefail
nccl_rdma=$PWD/dist/bin/nccl-rdma
plugins=(plugin="$PWD/dist/lib/libnccl-net-rdma.so" ${PEER:+peer="$PEER"})
sizes=(65536 1048576 8388608)
rounds=${ROUNDS:-5}
results=/run/vm/results
# Of both plugins; perftest is told the device and the index.
export NCCL_IB_HCA==rxe0:1 NCCL_IB_GID_INDEX=1

# A figure of perftest: the column in the line of the size.
perftest() { # what, size, column, program and arguments
    local what=$1 size=$2 column=$3 figure=
    shift 3
    vm barrier "turn $((++turns))"
    if [[ $RANK == 1 ]]; then
        "$@" -d rxe0 -x 1 -F -s "$size" >/dev/null
        return
    fi
    # The server may not listen yet.
    until [[ -n $figure ]]; do
        sleep 0.3
        figure=$("$@" -d rxe0 -x 1 -F -s "$size" r1 2>/dev/null | awk -v s="$size" -v c="$column" '$1 == s { print $c }') || true
    done
    echo "$what $size perftest $figure" | tee -a "$results"
}

driven() { # name of the plugin, its path
    vm barrier "turn $((++turns))"
    if [[ $RANK == 1 ]]; then
        "$nccl_rdma" join r0:7000
        return
    fi
    "$nccl_rdma" perf --plugin "$2" --meet 0.0.0.0:7000 --rounds 1 --volume 8M --sizes "8,$(IFS=,; echo "${sizes[*]}")" |
        awk -v name="$1" '$1 == 8 { print "latency", $1, name, $2 } $1 > 8 && $1 + 0 == $1 { print "bandwidth", $1, name, $4 * 8 }' |
        tee -a "$results"
}

turns=0
for ((round = 0; round < rounds; round++)); do
    for plugin in "${plugins[@]}"; do driven "${plugin%%=*}" "${plugin#*=}"; done
    # Means: half a round trip in us, Gb/s.
    perftest latency 8 6 ib_send_lat -n 200
    for size in "${sizes[@]}"; do
        # perftest wants at least 5.
        count=$((8388608 / size))
        perftest bandwidth "$size" 4 ib_write_bw --report_gbits -n $((count < 5 ? 5 : count))
    done
done
vm barrier over
[[ $RANK == 0 ]] || exit 0

# Medians with the least and the most, and how the plugins compare: above 1 is better than perftest.
awk -v cpus="$(nproc)" -v peer="${PEER:-}" '
function cell(key,   n, i, j, t, list) {
    n = split(seen[key], list, " ")
    for (i = 2; i <= n; i++)
        for (j = i; j > 1 && list[j - 1] + 0 > list[j] + 0; j--) { t = list[j]; list[j] = list[j - 1]; list[j - 1] = t }
    median = n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
    return digits(median) " (" digits(list[1]) "-" digits(list[n]) ")"
}
function digits(x) { return sprintf(x < 1000 ? "%.3g" : "%.0f", x) }
function against(what, size, name, base) {
    return " | " cell(what " " size " " name) " | " sprintf("%.2f", what == "latency" ? base / median : median / base)
}
function row(what, size, title,   line, base) {
    line = "| " cpus " | " title " | " size " | " cell(what " " size " perftest")
    base = median
    line = line against(what, size, "plugin", base)
    if (peer != "") line = line against(what, size, "peer", base)
    print line " |"
}
{ key = $1 " " $2 " " $3; seen[key] = seen[key] " " $4 }
END {
    print "\n| vCPUs | figure | size (B) | perftest | plugin | ratio |" (peer != "" ? " peer | ratio |" : "")
    print "|---|---|---|---|---|---|" (peer != "" ? "---|---|" : "")
    row("latency", 8, "latency, us (`ib_send_lat`)")
    for (size = 65536; size <= 8388608; size *= size == 65536 ? 16 : 8)
        row("bandwidth", size, "bandwidth, Gb/s (`ib_write_bw`)")
}' "$results"
