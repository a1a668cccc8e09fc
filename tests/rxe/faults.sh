#!/bin/bash
# What becomes of a job between two hosts when something breaks, over the kernel's Soft-RoCE. Runs on both machines of ci/vm, once
# for each row of the table at the end; needs dist/. TCP goes by a network of its own, which one row cuts, too.
#   faults.sh [REGEX]   only the rows whose name it matches
set -euo pipefail
plugin=$PWD/dist/lib/libnccl-net-rdma.so
nccl_rdma=$PWD/dist/bin/nccl-rdma
only=${1:-}
# rxe never gives up with a count of 7.
export NCCL_IB_RETRY_CNT=6 NCCL_DEBUG=INFO

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
    date +%s >/run/vm/broken
    eval "$1"
}

# Waits until the rails rest, as between two sizes.
rest() {
    local at=
    until [[ $at == $(packets) ]]; do
        at=$(packets)
        sleep 2
    done
}

# The rank of this machine dies at once; starting programs to find it would take longer than the job.
die() {
    local process first second
    for process in /proc/[0-9]*; do
        { read -r -d '' first && read -r -d '' second; } 2>/dev/null <"$process/cmdline" || continue
        [[ $first != *nccl-rdma || $second != rank ]] || kill -KILL "${process#/proc/}"
    done
}

# The job is an all-reduce, every element checked. It must end as told at both ends, and the log of each must say why; when it
# ends ill, soon after the cause: two seconds of retries, and the command gives the other process 3 s to hear of it.
soon=15
rows=0
address=10.77.0.$((RANK + 1))/24
row() { # name, well or ill or either, words of the first host's log, of the second's (-: it is cut off), settings, breaker, how
    [[ $1 =~ $only ]] || return 0
    local name=$1 end=$2 words=("$3" "$4") settings start=$SECONDS status=0 said breaker= took rank word
    read -ra settings <<<"$5"
    [[ $RANK != 0 ]] || rm -f /run/vm/broken
    vm barrier "row $name"
    [[ $RANK != "$6" ]] || { later "$7" & breaker=$!; }
    if [[ $RANK == 1 ]]; then
        env "${settings[@]}" timeout 200 "$nccl_rdma" join r0:7000 || status=$?
        ((status != 124)) || fail "the second host hangs" ""
    else
        printf '\n==== %s: %s\n' "$name" "${settings[*]}"
        said=$(env "${settings[@]}" timeout 180 "$nccl_rdma" demo --plugin "$plugin" --meet 0.0.0.0:7000 --ranks 2 \
            --min 1M --max "${most:-1M}" --iters 30 --anew 8 --verbose 2>&1) || status=$?
        [[ -e /run/vm/broken ]] || fail "the job has ended before it was broken" "$said"
        took=$(($(date +%s) - $(cat /run/vm/broken)))
        [[ $end != well ]] || ((status == 0)) || fail "the job has failed" "$said"
        [[ $end != ill ]] || ((status != 0)) || fail "the job has ended well" "$said"
        ((status != 124)) || fail "the job hangs" "$said"
        for rank in 0 1; do
            [[ ${words[rank]} != - ]] || continue
            while read -r word; do
                grep -m1 -E "^rank $rank: .*($word)" <<<"$said" || fail "no word of $word at r$rank" "$said"
            done < <(tr '&' '\n' <<<"${words[rank]}")
        done
        [[ $end != ill ]] || ((took <= soon)) || fail "it took $took s to end" "$said"
    fi
    [[ -z $breaker ]] || wait "$breaker"
    # As it was, for the next row.
    tc qdisc del dev eth0 root 2>/dev/null || true
    vm link "$RANK" 0 on
    ip addr del 10.77.0.12/24 dev eth0 2>/dev/null || true
    [[ $(ip addr show dev eth0) == *"$address"* ]] || ip addr add "$address" dev eth0
    [[ $name == *killed* ]] || vm barrier "row $name over"
    rows=$((rows + 1))
    [[ $RANK != 0 ]] || echo "$name: ended $end (status $status) $took s after it was broken; $((SECONDS - start)) s in all"
}

# How long a rail may give no answer: a busy computer lets machines wait, too.
patient=NCCL_IB_TIMEOUT=18 # 7.5 s
swift=NCCL_IB_TIMEOUT=16   # 1.9 s
both=NCCL_NET_RDMA_RAILS=rxe0+rxe1
defaults="NCCL_IB_TIMEOUT=20 NCCL_IB_RETRY_CNT=7"
alive=NCCL_NET_RDMA_KEEPALIVE_TIMEOUT=6000
watch=NCCL_NET_RDMA_STALL_TIMEOUT=6000
hole="tc qdisc replace dev mgmt root netem loss 100%"
mend="tc qdisc del dev mgmt root"
flap="vm link 1 0 off; sleep 1; vm link 1 0 on"
gone="ip addr del 10.77.0.2/24 dev eth0"
moved="rest; $gone; ip addr add 10.77.0.12/24 dev eth0"
well="ended well"
lost=RETRY_EXC_ERR
flapped="lost its link"
stalled="no progress to peer"
changed="GID table changed"
refused=LOC_QP_OP_ERR

#   name                           ends words: first, second   settings         who breaks what
row "0.5 % of packets lost"        well "$well"  "$well"       "$patient"       1 "tc qdisc replace dev eth0 root netem loss 0.5%"
row "flap of 1 s"                  well "$well"  "$flapped"    "$patient"       1 "$flap"
row "flap of one rail of two"      well "$well"  "$flapped"    "$patient $both" 1 "$flap"
row "cut at the second host"       ill  "$lost"  "$lost"       "$swift"         1 "vm link 1 0 off"
row "cut at the first host"        ill  "$lost"  "$lost"       "$swift"         0 "vm link 0 0 off"
row "one rail of two cut"          ill  "$lost"  "$lost"       "$swift $both"   1 "vm link 1 0 off"
# An address goes, and with it the GID, under connections that use it: the kernel ends them. Those made later take the new one.
row "address removed"              ill  "$refused" "$changed&$refused" "$patient" 1 "$gone"
most=2M row "another address"      well "$well&-> .*GID 10.77.0.12" "$well&$changed&GID 10.77.0.12 ->" "$patient" 1 "$moved"
# With NCCL's own defaults rxe retries for ever. Where TCP goes on, the watch over progress has to notice, and where that
# is cut, too, the keep-alive.
row "only the rails cut"           ill  "$stalled" "$stalled"  "$defaults $watch" 1 "vm link 1 0 off"
# The command itself hears of the second host's end only when TCP is back.
soon=25 row "all networks cut"     ill  "silent for" -         "$defaults $alive" 1 "$hole; vm link 1 0 off; sleep 14; $mend"
row "second process dies"          ill  "is gone"  -           "$defaults"      1 "die"
# What the first machine has on its way just then decides, but it must not wait for ever. When it fails, the command ends the second
# process, which cannot say a word.
row "second stands still for 8 s"  either "$well|$lost" "$well|$lost|stopped, since rank 0" "$swift" 0 "vm after 8 cont 1; vm stop 1"
row "second machine killed"        ill  "$lost|silent for" -   "$swift $alive"  0 "vm kill 1"
[[ $RANK != 0 ]] || printf '\nSoft-RoCE, faults: %s rows passed in %s s\n' "$rows" "$SECONDS"
