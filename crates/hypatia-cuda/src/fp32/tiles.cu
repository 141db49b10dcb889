// y = act(x · wᵀ + residual + bias) in f32, by tensor cores: for products too small for a library's long pipelines.
//
// Each number is the sum of three bf16 pieces, made in registers: 8 bits each, 24 in all, so nothing is lost. Of the nine
// products of pieces the three smallest do not count. The greatest, which decide about the error, are added by tensor
// cores for one chunk at a time and by ordinary additions from chunk to chunk: tensor cores round towards zero, and that
// adds up. A cluster of SPLIT blocks shares the sums over K.
//
// Numbers that pieces cannot stand for are noticed: what is too great makes a sum that is not finite, what is too small
// is seen when it is fetched. Such sums are computed again, without pieces.
//
// With TERMS 1 only the products of the greatest pieces are computed, for who has the others and looks after such numbers.
typedef long long i64;
typedef unsigned u32;
constexpr int ACROSS = BN / 32, DOWN = BM / 32;
constexpr int THREADS = ACROSS * DOWN * GROUPS * 32;
constexpr int STAGE = (BM + BN) * CHUNK;
constexpr bool ALL = TERMS > 1;
// Rows of partial sums are this far apart.
constexpr int PITCH = BN + 8;
// What a thread fetches of every chunk: four numbers of some rows, all with the same place in their row.
constexpr int QUADS = CHUNK / 4, APART = THREADS / QUADS, LEFT = BM / APART, SLOTS = (BM + BN) / APART;
static_assert(CHUNK % (16 * GROUPS) == 0 && CHUNK >= 32, "each group of warps has its share of a chunk");
static_assert(BM % APART == 0 && BN % APART == 0 && APART % 2 == 0, "each row that a thread fetches is of one side");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Sixteen bytes into shared memory, zeros where there are none.
__device__ __forceinline__ void fetch(float* to, const float* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// The pieces of two numbers, the greatest first.
__device__ __forceinline__ void pieces_of(float a, float b, u32& first, u32& second, u32& third) {
    first = pair(a, b);
    if constexpr (!ALL) return;
    a -= __uint_as_float(first << 16);
    b -= __uint_as_float(first & 0xffff0000u);
    second = pair(a, b);
    a -= __uint_as_float(second << 16);
    b -= __uint_as_float(second & 0xffff0000u);
    third = pair(a, b);
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_row(float (&c)[4][4], const u32 (&a)[4], const u32 (&b)[4][2]) {
#pragma unroll
    for (int j = 0; j < 4; j++) mma(c[j], a, b[j]);
}
// Four numbers of a row of a chunk. Every second row has its halves of 16 swapped, so that reads do not meet in one bank.
__device__ __forceinline__ float* quad(float* tile, int row, int c) { return tile + row * CHUNK + ((c ^ ((row & 1) << 2)) << 2); }

struct Share {
    const float *x, *w;
    int x_row, k, at;
    u32 there;
    __device__ __forceinline__ void fetch_chunk(float* stage, int start) const {
        float* to = quad(stage, threadIdx.x / QUADS, threadIdx.x % QUADS);
        const bool inside = start + at < k;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const float* from = s < LEFT ? x + (i64)(s * APART) * x_row : w + (i64)((s - LEFT) * APART) * k;
            fetch(to + s * APART * CHUNK, from + start, inside && there >> s & 1);
        }
    }
    // True if the last bits of some number are below what a piece can hold: it is not zero and below 2^-110.
    __device__ __forceinline__ bool tiny(float* stage) const {
        const float* from = quad(stage, threadIdx.x / QUADS, threadIdx.x % QUADS);
        u32 least = 0xffffffffu;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const uint4 v = *(const uint4*)(from + s * APART * CHUNK);
            // Without the sign, and zero is the greatest of all.
            least = min(least, min(min(v.x * 2 - 1, v.y * 2 - 1), min(v.z * 2 - 1, v.w * 2 - 1)));
        }
        return least < (17u << 24);
    }
};

// All blocks of a cluster, or all threads of a lone block.
__device__ __forceinline__ void meet() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
// An address in the shared memory of block z of the cluster.
__device__ __forceinline__ u32 of_block(u32 address, int z) {
#if SPLIT > 1
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(z));
#endif
    return address;
}
__device__ __forceinline__ float4 sums_at(u32 address) {
    float4 v;
#if SPLIT > 1
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
#else
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
#endif
    return v;
}
__device__ __noinline__ float plainly(const float* x, const float* w, int k) {
    float sum = 0.0f;
#pragma unroll 1
    for (int start = 0; start < k; start += 16) {
        // Sums of sums, which have smaller errors than one long sum.
        float part = 0.0f;
#pragma unroll 1
        for (int i = start; i < k && i < start + 16; i++) part = fmaf(x[i], w[i], part);
        sum += part;
    }
    return sum;
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(1, 1, SPLIT)
#endif
__launch_bounds__(THREADS) tiles(const float* x, const float* w, const float* bias, const float* residual, float* y,
                                 i64 m, i64 n, i64 k, i64 x_row, i64 residual_row, i64 relu) {
    extern __shared__ __align__(128) float memory[];
    __shared__ int odd;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int group = warp / (ACROSS * DOWN), wm = warp % (ACROSS * DOWN) / ACROSS, wn = warp % ACROSS;
    const i64 top = blockIdx.y * (i64)BM, edge = blockIdx.x * (i64)BN;
    const int line = threadIdx.x / QUADS, at = threadIdx.x % QUADS * 4;
    Share share = {x + (top + line) * x_row + at, w + (edge + line) * k + at, (int)x_row, (int)k, at, 0};
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
        share.there |= (u32)(s < LEFT ? top + line + s * APART < m : edge + line + (s - LEFT) * APART < n) << s;
    if (threadIdx.x == 0) odd = 0;
    const int chunks = ((int)k + CHUNK - 1) / CHUNK, per = (chunks + SPLIT - 1) / SPLIT;
    const int first = blockIdx.z * per, count = max(0, min(per, chunks - first));
    float total[2][4][4] = {}, little[2][4][4] = {};
    bool low = false;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) share.fetch_chunk(memory + i * STAGE, (first + i) * CHUNK);
        asm volatile("cp.async.commit_group;");
    }
    for (int i = 0; i < count; i++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2));
        float* stage = memory + i % STAGES * STAGE;
        if constexpr (ALL) low |= share.tiny(stage);
        __syncthreads();
        const int next = i + STAGES - 1;
        if (next < count) share.fetch_chunk(memory + next % STAGES * STAGE, (first + next) * CHUNK);
        asm volatile("cp.async.commit_group;");
        float most[2][4][4] = {};
#pragma unroll
        for (int step = 0; step < CHUNK / 16 / GROUPS; step++) {
            // The order of K inside a step is the same for both sides and otherwise of no importance.
            const int c = (step * GROUPS + group) * 4 + t;
            u32 b0[4][2], b1[4][2], b2[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 v = *(const float4*)quad(stage, BM + wn * 32 + j * 8 + g, c);
                pieces_of(v.x, v.y, b0[j][0], b1[j][0], b2[j][0]);
                pieces_of(v.z, v.w, b0[j][1], b1[j][1], b2[j][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 a0[4], a1[4], a2[4];
                const float4 u = *(const float4*)quad(stage, wm * 32 + i * 16 + g, c);
                const float4 v = *(const float4*)quad(stage, wm * 32 + i * 16 + 8 + g, c);
                pieces_of(u.x, u.y, a0[0], a1[0], a2[0]);
                pieces_of(v.x, v.y, a0[1], a1[1], a2[1]);
                pieces_of(u.z, u.w, a0[2], a1[2], a2[2]);
                pieces_of(v.z, v.w, a0[3], a1[3], a2[3]);
                mma_row(most[i], a0, b0);
                if constexpr (ALL) {
                    mma_row(little[i], a2, b0);
                    mma_row(little[i], a0, b2);
                    mma_row(little[i], a1, b1);
                    mma_row(little[i], a1, b0);
                    mma_row(little[i], a0, b1);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] += most[i][j][e];
    }
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    if (low) odd = 1;
    // Partial sums where the chunks were, one tile for each group of warps.
    float* mine = memory + group * BM * PITCH;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 sum = {total[i][j][2 * h] + little[i][j][2 * h], total[i][j][2 * h + 1] + little[i][j][2 * h + 1]};
                *(float2*)(mine + (wm * 32 + i * 16 + h * 8 + g) * PITCH + wn * 32 + j * 8 + 2 * t) = sum;
            }
    meet();
    bool strange = false;
#pragma unroll
    for (int z = 0; z < SPLIT; z++) {
        int flag;
#if SPLIT > 1
        asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(flag) : "r"(of_block(shared_address(&odd), z)));
#else
        flag = odd;
#endif
        strange |= flag != 0;
    }
    // The blocks of a cluster share the elements of their tile.
    constexpr int PACKS = BN / 4;
#pragma unroll 1
    for (int i = blockIdx.z * THREADS + threadIdx.x; i < BM * PACKS; i += THREADS * SPLIT) {
        const int r = i / PACKS, c = i % PACKS * 4;
        const i64 row = top + r, column = edge + c;
        if (row >= m || column >= n) continue;
        float sum[4] = {};
#pragma unroll
        for (int z = 0; z < SPLIT; z++)
#pragma unroll
            for (int q = 0; q < GROUPS; q++) {
                const float4 v = sums_at(of_block(shared_address(memory + q * BM * PITCH + r * PITCH + c), z));
                sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
            }
        const int wide = (int)min((i64)4, n - column);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (e >= wide) break;
            if (ALL && (strange || !(fabsf(sum[e]) < __int_as_float(0x7f800000))))
                sum[e] = plainly(x + row * x_row, w + (column + e) * k, (int)k);
            if (residual) sum[e] += residual[row * residual_row + column + e];
            if (bias) sum[e] += bias[column + e];
            if (relu) sum[e] = sum[e] < 0.0f ? 0.0f : sum[e];
        }
        float* to = y + row * n + column;
        if (wide == 4 && n % 4 == 0) {
            *(float4*)to = make_float4(sum[0], sum[1], sum[2], sum[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (e < wide) to[e] = sum[e];
        }
    }
#if SPLIT > 1
    // Nobody leaves while others read its memory.
    meet();
#endif
}
