// x * w^T of 16-bit numbers into rows that are no multiple of 16 bytes, by warp groups of an H100 or H200. Rows that are
// eight apart start alike, and so a warp group computes 64 such rows. It takes its columns from the first that is
// aligned in its rows: the tile of the weight has eight more than a warp group. So the engine that copies tensors
// writes all but a few numbers at both ends of each row, as if rows were aligned.
//
// Two warp groups of a block and two blocks of a cluster share a tile of the weight, of which each block fetches a part for
// both. One warp fetches, and two write what was computed while the next tile is: tensor cores take few instructions ahead,
// so whatever else a warp group does has to be short.
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int ROWS = 64, COLUMNS = WIDTH, DEPTH = 64, STAGES = 4, GROUPS = 2, UNIT = 8;
// Rows of the weight that the first block of a cluster fetches; the second has the others.
constexpr int FIRST = 128;
// What a warp group writes at a time: 64 columns, of which the last may have some of those before. So many steps lie
// between two of them, since what is fetched waits behind what is written.
constexpr int SIDE = 64, SIDES = 4, APART = 3;
// Bytes in shared memory: rows of DEPTH numbers, what a warp group writes at a time, and the bias of its columns.
constexpr int DEEP = 2 * DEPTH, X = ROWS * DEEP, W = (COLUMNS + UNIT) * DEEP, STAGE = GROUPS * X + W;
constexpr int OUT = ROWS * 2 * SIDE, BIAS = 4 * COLUMNS;
constexpr int OUTS = STAGES * STAGE, BIASES = OUTS + GROUPS * OUT, BARRIERS = BIASES + GROUPS * BIAS;
static_assert(STAGES >= SIDES && STAGE % 1024 == 0, "rooms of a last tile, and alignment");

// What the driver made of a tensor's address, sizes and strides.
struct __align__(64) Map {
    u64 words[16];
};
// Rows that start alike of the left factor and of the result, and the weight by what each block fetches.
struct Maps {
    Map x[UNIT], out[UNIT], w[2];
};

__device__ __forceinline__ void init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of another block of the cluster.
__device__ __forceinline__ void arrive_there(u32 barrier, u32 block) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
            barrier),
        "r"(block)
        : "memory");
}
__device__ __forceinline__ void fetch(u32 to, const Map* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
__device__ __forceinline__ void fetch_for_both(u32 to, const Map* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(barrier), "h"((u16)3), "r"(column), "r"(row)
        : "memory");
}
__device__ __forceinline__ void prepare(const Map* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void write(const Map* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until what was given to be written has been read.
__device__ __forceinline__ void written() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// Rows of 128 bytes, swizzled; eight of them are 1024 bytes apart from the next eight.
__device__ __forceinline__ u64 described(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// sums += (or =) 64 x 16 numbers times 16 x COLUMNS.
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], u64 x, u64 w, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, ADD, 0;\n"
        "wgmma.mma_async.sync.aligned.m64nWIDTHk16.f32.TYPE.TYPE {REGISTERS}, LEFT, RIGHT, p, 1, 1, 0, 0; }\n"
        : SUMS
        : "l"(x), "l"(w), "r"(add));
}
__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float wide(u16 bits) {
    float value;
    asm("cvt.f32.TYPE %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The columns of a row before the first that is aligned; eight if that is its first.
__device__ __forceinline__ int skipped(int kind, i64 n) {
    return UNIT - (int)(kind * n % UNIT);
}

__device__ __forceinline__ int first_of(int side) {
    return side < SIDES - 1 ? SIDE * side : COLUMNS - SIDE;
}
// Eight numbers of a row of what is written, swizzled.
__device__ __forceinline__ u32 place(int row, int eighth) {
    return row * (2 * SIDE) + (eighth ^ row % 8) * 16;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) unaligned(
    const __grid_constant__ Maps maps, const u16* bias, u16* out, i64 m, i64 n, i64 k) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 base = (u32)__cvta_generic_to_shared(dynamic);
    // Barriers: stages that are full and empty, and, of a warp group, what is to be written by sides, and its place.
    const u32 full = base + BARRIERS, empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const u32 taken = ready + 8 * GROUPS * SIDES;
    const int group = (int)threadIdx.x / 128, warp = (int)threadIdx.x % 128 / 32, lane = (int)threadIdx.x % 32;
    const int rank = blockIdx.x % 2;
    if (threadIdx.x < sizeof(Maps) / sizeof(Map)) prepare((const Map*)&maps + threadIdx.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init(full + 8 * s, 1);
            init(empty + 8 * s, 2 * GROUPS);
        }
        for (int i = 0; i < GROUPS * SIDES; i++) init(ready + 8 * i, 4);
        for (int i = 0; i < GROUPS; i++) init(taken + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    // Units of rows for four warp groups; the columns change last.
    const u32 high = 2 * (u32)((m + UNIT * ROWS - 1) / (UNIT * ROWS));
    const u32 tiles = high * (u32)((n + UNIT - 1 + COLUMNS - 1) / COLUMNS);
    const u32 start = blockIdx.x / 2, stride = gridDim.x / 2;
    const int steps = (int)((k + DEPTH - 1) / DEPTH);
    const auto unit_of = [&](u32 tile) { return (int)(tile % high) * 4 + rank * GROUPS; };
    const auto column_of = [&](u32 tile) { return (int)(tile / high) * COLUMNS - UNIT; };
    // Where a warp group leaves what is to be written. What it fetched of the left factor is read after its last
    // tile: there is room for all sides.
    const auto room = [&](int mine, int side, bool last) {
        return last ? base + side * STAGE + mine * X : base + OUTS + mine * OUT;
    };
    u32 stage = 0, phase = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 0 && lane == 0) {
            for (u32 tile = start; tile < tiles; tile += stride) {
                const int unit = unit_of(tile), kind = unit % UNIT, row = unit / UNIT * ROWS;
                const int column = column_of(tile) + rank * FIRST;
                for (int step = 0; step < steps; step++) {
                    const u32 to = base + stage * STAGE, there = full + 8 * stage;
                    wait(empty + 8 * stage, phase ^ 1);
                    expect(there, STAGE);
                    fetch(to, &maps.x[kind], there, step * DEPTH, row);
                    fetch(to + X, &maps.x[kind + 1], there, step * DEPTH, row);
                    fetch_for_both(to + GROUPS * X + rank * FIRST * DEEP, &maps.w[rank], there, step * DEPTH, column);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
        const int mine = warp - 1;
        for (u32 tile = start; mine >= 0 && mine < GROUPS && tile < tiles; tile += stride, phase ^= 1) {
            const int unit = unit_of(tile) + mine, kind = unit % UNIT, row = unit / UNIT * ROWS;
            const int skips = skipped(kind, n), width = (int)n - skips, end = width / UNIT * UNIT;
#pragma unroll 1
            for (int side = 0; side < SIDES; side++) {
                const u32 from = room(mine, side, tile + stride >= tiles);
                const int at = column_of(tile) + first_of(side);
                wait(ready + 8 * (mine * SIDES + side), phase);
                // The engine takes what lies between the first number that is aligned and the last eight.
                if (lane == 0 && at >= 0 && at < end) write(&maps.out[kind], from, at, row);
                const auto numbers = [&](int r, int c) {
                    return (const u16*)(dynamic + (from - base) + place(r, c / UNIT)) + c % UNIT;
                };
                const auto by_hand = [&](int r, int c) {
                    const i64 into = (i64)(row + r) * UNIT + kind;
                    const int column = at + c + skips;
                    if (into < m && column >= 0 && column < n) out[into * n + column] = *numbers(r, c);
                };
                // Of the first 64 columns some are before the first one, and the engine must not begin there.
#pragma unroll 1
                for (int i = lane; i < ROWS * SIDE / UNIT && at < 0; i += 32) {
                    const int r = i / (SIDE / UNIT), c = i % (SIDE / UNIT) * UNIT;
                    const i64 into = (i64)(row + r) * UNIT + kind;
                    if (c > 0 && into < m && at + c < end)
                        *(uint4*)(out + into * n + at + c + skips) = *(const uint4*)numbers(r, c);
                }
                const int ends = at < 0 ? 0 : end - at;
                if (ends >= 0 && ends < SIDE) {
#pragma unroll 2
                    for (int i = lane; i < ROWS * UNIT; i += 32) by_hand(i / UNIT, ends + i % UNIT);
                }
                if (lane == 0) written();
                __syncwarp();
                // Nobody waits for the places of the last tile.
                if (lane == 0 && tile + stride < tiles) arrive(taken + 8 * mine);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int mine = group - 1, thread = threadIdx.x % 128;
        float sums[COLUMNS / 2];
        // What was computed before: rounded, held until tensor cores are busy with the next tile.
        u32 pairs[COLUMNS / 4] = {};
        u32 before = 0, turn = 0;
        const auto begin = [&](int step, u32 shift) {
            wait(full + 8 * stage, phase);
            const u32 from = base + stage * STAGE;
            const u64 left = described(from + mine * X), right = described(from + GROUPS * X + shift);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < DEPTH / 16; i++) multiply(sums, left + 2 * i, right + 2 * i, step + i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        const auto finish = [&](int step) {
            if (step > 0) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (thread < 2) arrive_there(empty + 8 * before, thread);
            }
            before = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        };
        const auto leave = [&](int side, u32 to) {
            const int row = warp * 16 + lane % 16;
#pragma unroll
            for (int i = 0; i < SIDE / 16; i++) {
                const int j = first_of(side) / 8 + 2 * i;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                 to + place(row, 2 * i + lane / 16)),
                             "r"(pairs[j]), "r"(pairs[COLUMNS / 8 + j]), "r"(pairs[j + 1]),
                             "r"(pairs[COLUMNS / 8 + j + 1])
                             : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) arrive(ready + 8 * (mine * SIDES + side));
        };
        for (u32 tile = start; tile < tiles; tile += stride) {
            const int skips = skipped(unit_of(tile) + mine, n);
            const u32 shift = skips * DEEP;
#pragma unroll
            for (int part = 0; part < APART * SIDES; part++) {
                if (part < steps) {
                    begin(part, shift);
                    finish(part);
                }
                if (tile == start || part % APART) continue;
                wait(taken + 8 * mine, ++turn % 2);
                leave(part / APART, room(mine, part / APART, false));
            }
            for (int step = APART * SIDES; step < steps; step++) {
                begin(step, shift);
                finish(step);
            }
            float* const added = (float*)(dynamic + BIASES + mine * BIAS);
            if (bias) {
                group_sync(mine);
                for (int i = thread; i < COLUMNS; i += 128) {
                    const int at = column_of(tile) + skips + i;
                    added[i] = at >= 0 && at < n ? wide(bias[at]) : 0.0f;
                }
                group_sync(mine);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (thread < 2) arrive_there(empty + 8 * before, thread);
            if (bias) {
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++) {
                    const float2 b = ((const float2*)added)[4 * j + thread % 4];
                    sums[4 * j] += b.x, sums[4 * j + 1] += b.y, sums[4 * j + 2] += b.x, sums[4 * j + 3] += b.y;
                }
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; i++) {
                const int at = i % (COLUMNS / 8) * 4 + i / (COLUMNS / 8) * 2;
                pairs[i] = packed(sums[at], sums[at + 1]);
            }
        }
        if (start < tiles) {
            wait(taken + 8 * mine, ++turn % 2);
#pragma unroll
            for (int side = 0; side < SIDES; side++) leave(side, room(mine, side, true));
        }
    }
    cluster_sync();
}
