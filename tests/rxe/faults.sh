#!/bin/bash
# What becomes of a job between two hosts when something breaks, over the kernel's Soft-RoCE. Runs on both machines of ci/vm, once
# for each row of the table at the end; needs dist/. Only rails are cut: TCP goes by another network.
set -euo pipefail
plugin=$PWD/dist/lib/libnccl-net-rdma.so
nccl_rdma=$PWD/dist/bin/nccl-rdma
# Gives up 0.5 s after the last answer. rxe never does with a count of 7.
export NCCL_IB_TIMEOUT=14 NCCL_IB_RETRY_CNT=6 NCCL_DEBUG=INFO

fail() { # why, what the job has said
    printf '%s\nFAIL: %s: %s\n' "$2" "$name" "$1"
    exit 1
}

packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

# Breaks something once data flows.
later() {
    local start deadline=$((SECONDS + 60))
    start=$(packets)
    until (($(packets) > start + 1000)); do
        ((SECONDS < deadline)) || return 0
        sleep 0.1
    done
    echo "r$RANK: now $1"
    eval "$1"
}

# The job is an all-reduce, every element checked. It must end as told and in time, and the logs of both ends must say why.
rows=0
row() { # name, well or ill, words of the logs, settings, host that breaks it, how
    local name=$1 end=$2 words=$3 settings start=$SECONDS status=0 said breaker=
    read -ra settings <<<"$4"
    vm barrier "row $name"
    [[ $RANK != "$5" ]] || { later "$6" & breaker=$!; }
    if [[ $RANK == 1 ]]; then
        env "${settings[@]}" timeout 120 "$nccl_rdma" join r0:7000 || true
    else
        printf '\n==== %s: %s\n' "$name" "${settings[*]}"
        said=$(env "${settings[@]}" timeout 90 "$nccl_rdma" demo --plugin "$plugin" --meet 0.0.0.0:7000 --ranks 2 \
            --min 1M --max 1M --iters 40 --verbose 2>&1) || status=$?
        [[ $end == ill ]] || ((status == 0)) || fail "the job has failed" "$said"
        [[ $end == well ]] || ((status != 0)) || fail "the job has ended well" "$said"
        ((status != 124)) || fail "the job hangs" "$said"
        grep -m1 -E "$words" <<<"$said" || fail "no word of $words" "$said"
    fi
    [[ -z $breaker ]] || wait "$breaker"
    # As it was, for the next row.
    tc qdisc del dev eth0 root 2>/dev/null || true
    vm link "$RANK" 0 on
    [[ $name == *killed* ]] || vm barrier "row $name over"
    rows=$((rows + 1))
    [[ $RANK != 0 ]] || echo "$name: ended $end, $((SECONDS - start)) s"
}

patient="NCCL_IB_TIMEOUT=18"
both=NCCL_NET_RDMA_RAILS=rxe0+rxe1
right="every element of every rank is right"
lost=RETRY_EXC_ERR

#   name                           ends words           settings   who breaks what
row "nothing breaks"               well "$right"        ""         0 "true"
row "1 % of packets lost"          well "$right"        ""         1 "tc qdisc replace dev eth0 root netem loss 1%"
row "link flap of 1 s"             well "lost its link" "$patient" 1 "vm link 1 0 off; sleep 1; vm link 1 0 on"
row "cut at the second host"       ill  "$lost"         ""         1 "vm link 1 0 off"
row "cut at the first host"        ill  "$lost"         ""         0 "vm link 0 0 off"
row "one rail of two cut"          ill  "$lost"         "$both"    1 "vm link 1 0 off"
row "second machine stands still"  ill  "$lost"         ""         0 "vm after 15 cont 1; vm stop 1"
row "second machine killed"        ill  "$lost"         ""         0 "vm kill 1"
[[ $RANK != 0 ]] || printf '\nSoft-RoCE, faults: %s rows passed in %s s\n' "$rows" "$SECONDS"
