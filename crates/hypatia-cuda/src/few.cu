// A linear layer of few rows: the weight is read once, 16 bytes at a time and ahead of the tensor cores. The warps of a
// block share K.
//
// Before this text: ROWS of the weight that a block has at a time (8, 16 or 32); WARPS of a block; DEPTH, steps of 32 of K
// that a warp reads at once; PER, blocks of a multiprocessor; TILES, eights of rows of x; HALF, 1 for f16 and 0 for bf16.
typedef long long i64;
typedef unsigned short u16;

// Numbers at the same places of both factors may change places with others: a thread's eight numbers lie side by side.
struct __align__(16) Eight {
    unsigned pair[4];
};

__device__ __forceinline__ float wide(u16 bits) {
#if HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float((unsigned)bits << 16);
#endif
}
__device__ __forceinline__ u16 narrow(float value) {
    u16 bits;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

#if HALF
#define TYPES "f32.f16.f16.f32"
#else
#define TYPES "f32.bf16.bf16.f32"
#endif

// sums[16 x 8] += a[16 x 16] b[16 x 8]; `low` and `high` are rows that are eight apart.
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned* low, const unsigned* high, const unsigned* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(b[0]), "r"(b[1]));
}

// Of the weight nothing is read again: it is not to push other things out of the caches.
__device__ __forceinline__ Eight streamed(const u16* from) {
    Eight e;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(e.pair[0]), "=r"(e.pair[1]), "=r"(e.pair[2]), "=r"(e.pair[3]) : "l"(from));
    return e;
}

// A kernel may begin before the one in front of it is done: this lets the next one, and this waits for it.
__device__ __forceinline__ void let_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define OCTETS (ROWS / 8)
#define GROUPS ((OCTETS + 1) / 2)
#define COLUMNS (8 * TILES)
#define CHUNK (32 * DEPTH)

struct Weights {
    Eight at[OCTETS][DEPTH];
};
struct Rows {
    Eight at[TILES][DEPTH];
};

__device__ __forceinline__ void load(Weights& a, const u16* w, i64 w_row, i64 n, i64 k, i64 tile, i64 start) {
    const int octet = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const Eight none = {};
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
        // Rows past the last are read as the last one, and not written.
        const i64 row = tile * ROWS + 8 * o + octet;
        const u16* from = w + (row < n ? row : n - 1) * w_row + start + 8 * quarter;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) a.at[o][d] = start + 32 * d + 8 * quarter < k ? streamed(from + 32 * d) : none;
    }
}
__device__ __forceinline__ void load(Rows& b, const u16* x, i64 x_row, i64 m, i64 k, i64 start) {
    const int octet = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const Eight none = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const u16* from = x + (8 * i + octet) * x_row + start + 8 * quarter;
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            b.at[i][d] = start + 32 * d + 8 * quarter < k && 8 * i + octet < m ? *(const Eight*)(from + 32 * d) : none;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PER) few(
    const u16* x, const u16* w, const u16* bias, const u16* residual, u16* y,
    i64 m, i64 n, i64 k, i64 x_row, i64 w_row, i64 y_row, i64 residual_row, i64 activation,
    i64 multiplies, i64 early) {
    __shared__ float shared[2][WARPS][ROWS][COLUMNS + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, octet = lane / 4, quarter = lane % 4;
    const i64 tiles = (n + ROWS - 1) / ROWS, first = (i64)warp * CHUNK;
    const Eight none = {};
    i64 tile = blockIdx.x, start = first;
    int turn = 0;
    float sums[GROUPS][TILES][4] = {};
    Weights a;
    Rows b;
    let_next();
    // A weight that no kernel writes is on its way while the kernels before are still at work.
    if (early) load(a, w, w_row, n, k, tile, start);
    begin();
    if (!early) load(a, w, w_row, n, k, tile, start);
    load(b, x, x_row, m, k, start);
    while (tile < tiles) {
        i64 next = start + CHUNK * WARPS, next_tile = tile;
        if (next >= k) {
            next = first;
            next_tile += gridDim.x;
        }
        Weights later;
        Rows later_rows = b;
        // On their way while this chunk is multiplied and its sums are written.
        if (next_tile < tiles) {
            load(later, w, w_row, n, k, next_tile, next);
            if (next != start) load(later_rows, x, x_row, m, k, next);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int half = 0; half < 4; half += 2)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int g = 0; g < GROUPS; g++)
                        multiply(sums[g][i], a.at[2 * g][d].pair + half,
                                 (2 * g + 1 < OCTETS ? a.at[2 * g + 1 < OCTETS ? 2 * g + 1 : 0][d] : none).pair + half,
                                 b.at[i][d].pair + half);
        if (next_tile != tile) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (2 * g + e / 2 < OCTETS)
                            shared[turn][warp][16 * g + 8 * (e / 2) + octet][8 * i + 2 * quarter + e % 2] = sums[g][i][e];
                        sums[g][i][e] = 0.0f;
                    }
            __syncthreads();
            for (int at = threadIdx.x; at < ROWS * (int)m; at += 32 * WARPS) {
                const int row = at / ROWS;
                const i64 column = tile * ROWS + at % ROWS;
                if (column >= n) continue;
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; i++) sum += shared[turn][i][at % ROWS][row];
                if (residual && !multiplies) sum += wide(residual[row * residual_row + column]);
                if (bias) sum += wide(bias[column]);
                if (activation == 1) sum = sum != sum ? sum : fmaxf(sum, 0.0f);
                if (activation == 2) {
                    const float inner = 0.79788456080286535588f * (sum + 0.044715f * (sum * sum * sum));
                    sum = 0.5f * sum * (1.0f + tanhf(inner));
                }
                if (activation == 3) sum = sum * 0.5f * (1.0f + erff(sum * 0.70710678118654752440f));
                if (activation == 4) sum = sum / (1.0f + expf(-sum));
                if (activation == 5) sum = 1.0f / (1.0f + expf(-sum));
                if (activation == 6) sum = tanhf(sum);
                if (multiplies) sum *= wide(residual[row * residual_row + column]);
                y[row * y_row + column] = narrow(sum);
            }
            // The next tile's sums are elsewhere; those after it come when all have read these.
            turn ^= 1;
        }
        a = later;
        b = later_rows;
        tile = next_tile;
        start = next;
    }
}
