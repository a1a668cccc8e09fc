// The copy kernel of soft-hca's GPU memory: batches of ranges, any of them in GPU or in pinned host memory.
//
// Stores are what the readers of NCCL's LL and LL128 protocols rely on: aligned 8-byte units are never torn, and aligned
// 128-byte lines are written by one store instruction of one warp, as those protocols write them inside a host.
//
// A launch takes several microseconds, so the last block stays a while and takes further small batches from a mailbox in
// host memory. It stays no longer than LIFE, so that nobody who waits for the GPU to be idle waits for ever.
//
// copy.ptx beside this file is made from it, with nothing but Debian's clang:
//   clang-14 -x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_70 -O3 -S copy.cu -o copy.ptx
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define ITEMS 64
#define UNROLL 4
// Bytes that one block copies at a time: a whole number of lines.
#define TILE (THREADS * 16ULL * UNROLL)
// Nanoseconds without a batch after which the kernel ends, and of its life.
#define LINGER 100000
#define LIFE 2000000
// Places of the mailbox, and the count that says: no batch, end.
#define PLACES 4
#define END 0xffffffffu

struct Item {
    u64 dst;
    u64 src;
    u64 len;
};

// Mirrored by `Batch` in cuda.rs.
struct Batch {
    Item items[ITEMS];
    u64 ticket;
    // Host memory: the ticket of the last batch that is done, and the last ticket of a kernel that has ended.
    u64 done;
    u64 left;
    // Host memory: not 0 if nothing may be copied any more.
    u64 abandoned;
    // Host memory: PLACES mails, the batch with ticket t in place t % PLACES.
    u64 mails;
    // Device memory: blocks of this batch that are done.
    u64 blocks_done;
    u32 count;
};

// An item in the mailbox: two units of 16 bytes, each of which is read at once and says whose it is.
struct Mail {
    u64 dst;
    u32 ticket;
    u32 count;
    u64 src;
    u32 len;
    u32 ticket_again;
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

DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
DEVICE void put8(u64 at, u64 value) {
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
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

static __attribute__((shared)) Item items[ITEMS];
static __attribute__((shared)) u32 count;
static __attribute__((shared)) u32 is_last;

// Copies what `items` holds, together with the other blocks.
static __attribute__((device)) __attribute__((noinline)) void copy_items(u32 thread, u32 block, u32 blocks) {
    u32 turn = block;
    for (u32 i = 0; i < count; i++) {
        const u64 dst = items[i].dst, end = dst + items[i].len;
        const u64 shift = items[i].src - dst;
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
}

// Half `half` of an item of the mail at `mail`: dst, or src and length. False if it is not of this ticket.
DEVICE bool open_half(u64 mail, u32 ticket, u32 half, u32 *mail_count) {
    u64 place, rest;
    load16(mail + half * 16ULL, &place, &rest);
    const u32 low = (u32)rest, high = (u32)(rest >> 32);
    if ((half & 1) == 0) {
        if (low != ticket) return false;
        items[half / 2].dst = place;
        *mail_count = high;
    } else {
        if (high != ticket) return false;
        items[half / 2].src = place;
        items[half / 2].len = low;
    }
    return true;
}

// Waits for the batch with this ticket and puts it into `items` and `count`; END if it is time to go.
DEVICE void next_batch(u32 thread, u64 mail, u32 ticket, u64 since, u64 born) {
    if (thread < 32) {
        // The first four items come with the poll itself.
        for (;;) {
            u32 mail_count = 0;
            const bool here = thread < 8 && open_half(mail, ticket, thread, &mail_count);
            u32 ready;
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                         : "=r"(ready)
                         : "r"((u32)here)
                         : "memory");
            asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(mail_count));
            if (ready & 1) {
                const u32 need = mail_count == END ? 1 : mail_count >= 4 ? 0xff : (1u << (2 * mail_count)) - 1;
                if ((ready & need) == need) {
                    if (thread == 0) count = mail_count;
                    break;
                }
                continue;
            }
            u32 late = 0;
            if (thread == 0) {
                const u64 now = nanoseconds();
                late = now - since > LINGER || now - born > LIFE;
            }
            asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(late));
            if (late) {
                if (thread == 0) count = END;
                break;
            }
        }
    }
    __syncthreads();
    if (count == END || count <= 4) return;
    u32 ignored;
    for (u32 half = 8 + thread; half < 2 * count; half += THREADS)
        while (!open_half(mail, ticket, half, &ignored)) {
        }
    __syncthreads();
}

extern "C" __attribute__((global)) void soft_hca_copy(const Batch batch) {
    const u32 thread = __nvvm_read_ptx_sreg_tid_x();
    const u32 block = __nvvm_read_ptx_sreg_ctaid_x();
    const u32 blocks = __nvvm_read_ptx_sreg_nctaid_x();
    const u64 born = nanoseconds();
    if (thread == 0) {
        u64 abandoned;
        asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(abandoned) : "l"(batch.abandoned) : "memory");
        count = abandoned ? END : batch.count;
    }
    if (thread < batch.count) {
        // Word by word: as a whole the parameter would be copied to the stack first.
        items[thread].dst = batch.items[thread].dst;
        items[thread].src = batch.items[thread].src;
        items[thread].len = batch.items[thread].len;
    }
    __syncthreads();
    if (count == END) return;
    copy_items(thread, block, blocks);
    __syncthreads();
    if (thread == 0) {
        __nvvm_membar_sys();
        u32 before;
        asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(batch.blocks_done) : "memory");
        is_last = before == blocks - 1;
        if (is_last) {
            asm volatile("st.volatile.global.u32 [%0], 0;" ::"l"(batch.blocks_done) : "memory");
            __nvvm_membar_sys();
            put8(batch.done, batch.ticket);
        }
    }
    __syncthreads();
    if (!is_last) return;
    u64 ticket = batch.ticket, since = nanoseconds();
    for (;;) {
        next_batch(thread, batch.mails + (ticket + 1) % PLACES * (ITEMS * sizeof(Mail)), (u32)(ticket + 1), since, born);
        if (count == END) break;
        copy_items(thread, 0, 1);
        __syncthreads();
        ticket++;
        since = nanoseconds();
        if (thread == 0) {
            __nvvm_membar_sys();
            put8(batch.done, ticket);
        }
    }
    if (thread == 0) put8(batch.left, ticket);
}
