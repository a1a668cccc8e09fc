// Watches 16-byte parts of memory while an adapter writes there, and counts those that are seen half-written. Loads are
// those of NCCL's device code: LL reads a line of two units with one volatile 16-byte load; for LL128 eight threads of
// a warp read a 128-byte line with 16 bytes each, and the last word of the line is the flag of all of it.
//
// Every 4-byte word of the memory carries the number of the round that wrote it. To make watch.ptx of this file (no CUDA
// SDK is needed):
//   clang-14 -x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_70 -O3 \
//     -S watch.cu -o watch.ptx

typedef unsigned int u32;
typedef unsigned long long u64;

#define GLOBAL __attribute__((global))
#define DEVICE __attribute__((device)) static inline

struct Part {
    u64 v0, v1;
};

DEVICE Part load(const char *from) {
    Part part;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(part.v0), "=l"(part.v1) : "l"(from) : "memory");
    return part;
}

DEVICE u64 load_host(const u64 *from) {
    u64 value;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

DEVICE u64 add(u64 *to, u64 value) {
    u64 before;
    asm volatile("atom.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(value) : "memory");
    return before;
}

DEVICE u32 from_lane(u32 value, u32 lane) {
    u32 got;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(got) : "r"(value), "r"(lane));
    return got;
}

DEVICE void together() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

DEVICE u32 low(u64 v) { return (u32)v; }
DEVICE u32 high(u64 v) { return (u32)(v >> 32); }
DEVICE bool older(u64 v, u32 round) { return low(v) < round || high(v) < round; }

// Of `out`: torn parts, lines seen with a new flag, parts without the last round at the end, whether time ran out,
// examples that follow as part, v0, v1, flag.
enum { TORN, FRESH, STALE, LATE, EXAMPLES, FIRST_EXAMPLE, MAX_EXAMPLES = 4 };

DEVICE void torn(u64 *out, u32 part, Part seen, u32 flag) {
    add(out + TORN, 1);
    u64 example = add(out + EXAMPLES, 1);
    if (example < MAX_EXAMPLES) {
        u64 *place = out + FIRST_EXAMPLE + 4 * example;
        place[0] = part;
        place[1] = seen.v0;
        place[2] = seen.v1;
        place[3] = flag;
    }
}

// Ends once *stop is not 0 (it is then the last round), or after `limit` nanoseconds.
extern "C" GLOBAL void watch(const char *data, u32 parts, u32 ll128, const u64 *stop, u64 limit, u64 *out) {
    const u32 part = __nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
    const u32 lane = part % 32;
    const bool active = part < parts;
    const u64 begin = nanoseconds();
    const char *mine = data + 16 * (u64)(active ? part : 0);
    u32 last_flag = 0, last_torn = 0;
    u64 fresh = 0;
    for (u32 turn = 0;; turn++) {
        u32 ended = 0;
        if (turn % 64 == 0) {
            // One question a warp: the answer comes over PCIe.
            if (lane == 0) {
                ended = (u32)load_host(stop);
                if (nanoseconds() - begin > limit) {
                    out[LATE] = 1;
                    ended = ended ? ended : ~0u;
                }
            }
            ended = from_lane(ended, 0);
        }
        // One load for the whole warp: threads that went different ways would see different moments of a line.
        together();
        const Part seen = load(mine);
        if (ll128) {
            const u32 flag = from_lane(low(seen.v1), lane | 7), flag_high = from_lane(high(seen.v1), lane | 7);
            // A flag of which only half has come is not taken for the new one.
            if (active && flag == flag_high) {
                const bool is_torn = older(seen.v0, flag) || (lane % 8 != 7 && older(seen.v1, flag));
                if (is_torn && last_torn != flag) {
                    last_torn = flag;
                    torn(out, part, seen, flag);
                }
                if (lane % 8 == 7 && flag != last_flag) {
                    fresh++;
                    last_flag = flag;
                }
            }
        } else if (active) {
            const u32 flag = high(seen.v0), second = high(seen.v1);
            const u32 newest = flag > second ? flag : second;
            if ((low(seen.v0) != flag || low(seen.v1) != second) && last_torn != newest) {
                last_torn = newest;
                torn(out, part, seen, newest);
            }
            if (flag != last_flag) {
                fresh++;
                last_flag = flag;
            }
        }
        if (ended) {
            if (active && (older(seen.v0, ended) || older(seen.v1, ended)))
                add(out + STALE, 1);
            break;
        }
    }
    if (fresh)
        add(out + FRESH, fresh);
}
