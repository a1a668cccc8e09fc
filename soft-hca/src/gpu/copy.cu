// The copy kernel of soft-hca's GPU memory: a batch of ranges, any of them in GPU or in pinned host memory.
//
// Stores are what the readers of NCCL's LL and LL128 protocols rely on: aligned 8-byte units are never torn, and aligned
// 128-byte lines are written by one store instruction of one warp, as those protocols write them inside a host.
//
// copy.ptx beside this file is made from it, with nothing but Debian's clang:
//   clang-14 -x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_70 \
//     -O3 -S copy.cu -o copy.ptx
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define ITEMS 64
#define UNROLL 4
// Bytes that one block copies at a time: a whole number of lines.
#define TILE (THREADS * 16ULL * UNROLL)

struct Item {
    u64 dst;
    u64 src;
    u64 len;
};

// Mirrored by `Batch` in mod.rs.
struct Batch {
    Item items[ITEMS];
    u64 ticket;
    // Host memory: the ticket of the last batch that is done.
    u64 done;
    // Device memory: blocks of this batch that are done.
    u64 blocks_done;
    u32 count;
};

#define DEVICE static __attribute__((device)) inline __attribute__((always_inline))

DEVICE void load16(u64 at, u64 *a, u64 *b) {
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(at) : "memory");
}
DEVICE void store16(u64 at, u64 a, u64 b) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(a), "l"(b) : "memory");
}
DEVICE void copy8(u64 to, u64 from) {
    u64 value;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
DEVICE void copy1(u64 to, u64 from) {
    u32 value;
    asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    asm volatile("st.volatile.global.u8 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// The unit of the body: 16, 8 or 1 bytes, by how the two addresses are aligned to each other.
DEVICE u64 unit_of(u64 dst, u64 src) {
    u64 apart = (dst ^ src) & 15;
    return apart == 0 ? 16 : (apart & 7) == 0 ? 8 : 1;
}

// A stretch shorter than 16 bytes at an end: in whole 8-byte units where it is made of them.
DEVICE void copy_end(u64 to, u64 from, u64 len, u32 thread) {
    if (((to | from) & 7) == 0 && len >= 8) {
        if (thread == 0) copy8(to, from);
        to += 8, from += 8, len -= 8;
    } else if (((to + len) & 7) == 0 && ((from + len) & 7) == 0 && len >= 8) {
        if (thread == 0) copy8(to + len - 8, from + len - 8);
        len -= 8;
    }
    if (thread < len) copy1(to + thread, from + thread);
}

extern "C" __attribute__((global)) void soft_hca_copy(const Batch batch) {
    const u32 thread = __nvvm_read_ptx_sreg_tid_x();
    const u32 block = __nvvm_read_ptx_sreg_ctaid_x();
    const u32 blocks = __nvvm_read_ptx_sreg_nctaid_x();
    u32 turn = block;
    for (u32 i = 0; i < batch.count; i++) {
        const u64 dst = batch.items[i].dst, end = dst + batch.items[i].len;
        const u64 shift = batch.items[i].src - dst;
        const u64 unit = unit_of(dst, dst + shift);
        // Whole units lie in body..body_end; tiles start on lines of the target.
        const u64 body = (dst + unit - 1) & ~(unit - 1), body_end = end & ~(unit - 1);
        const u64 first = dst & ~511ULL;
        const u64 tiles = (end - first + TILE - 1) / TILE;
        u64 tile = turn;
        for (; tile < tiles; tile += blocks) {
            const u64 from = first + tile * TILE;
            if (tile == 0) {
                const u64 stop = body < end ? body : end;
                copy_end(dst, dst + shift, stop - dst, thread);
                if (body <= body_end) copy_end(body_end, body_end + shift, end - body_end, thread);
            }
            if (unit == 16) {
                u64 a[UNROLL], b[UNROLL];
#pragma unroll
                for (int k = 0; k < UNROLL; k++) {
                    const u64 at = from + (k * THREADS + thread) * 16ULL;
                    if (at >= body && at < body_end) load16(at + shift, &a[k], &b[k]);
                }
#pragma unroll
                for (int k = 0; k < UNROLL; k++) {
                    const u64 at = from + (k * THREADS + thread) * 16ULL;
                    if (at >= body && at < body_end) store16(at, a[k], b[k]);
                }
            } else {
                for (u64 at = from + thread * unit; at < from + TILE; at += THREADS * unit) {
                    if (at < body || at >= body_end) continue;
                    if (unit == 8)
                        copy8(at, at + shift);
                    else
                        copy1(at, at + shift);
                }
            }
        }
        // The next range goes on with the block whose turn it is.
        turn = (u32)(tile - tiles);
    }
    __syncthreads();
    if (thread == 0) {
        __nvvm_membar_sys();
        u32 before;
        asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(batch.blocks_done) : "memory");
        if (before == blocks - 1) {
            asm volatile("st.volatile.global.u32 [%0], 0;" ::"l"(batch.blocks_done) : "memory");
            __nvvm_membar_sys();
            asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(batch.done), "l"(batch.ticket) : "memory");
        }
    }
}
