// What the products of interleaved rows leave out: columns at both ends of every row, and biases that begin elsewhere.
typedef long long i64;
typedef unsigned short u16;

__device__ __forceinline__ float wide(u16 bits, bool half) {
    float value;
    if (half) {
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    return __uint_as_float((unsigned)bits << 16);
}
__device__ __forceinline__ u16 narrow(float value, bool half) {
    u16 bits;
    if (half)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Eight numbers of 16 bits.
struct __align__(16) Eight {
    u16 at[8];
};
// The first column of a row whose address is a multiple of 16 bytes.
__device__ __forceinline__ i64 first_column(i64 row, i64 period, i64 n) {
    return (8 - row % period * n % 8) % 8;
}

// A warp for each row: its columns before the first that a product writes, and behind the last. There are at most 14.
extern "C" __global__ void __launch_bounds__(128) edges(
    const u16* x, const u16* w, const u16* bias, u16* y,
    i64 m, i64 n, i64 k, i64 x_row, i64 w_row, i64 written, i64 period, i64 half) {
    const i64 row = blockIdx.x * 4ll + threadIdx.x / 32;
    if (row >= m) return;
    const int lane = threadIdx.x % 32, count = (int)(n - written);
    const i64 first = first_column(row, period, n);
    float sums[14] = {};
    for (i64 i = lane * 8; i < k; i += 256) {
        const Eight a = *(const Eight*)(x + row * x_row + i);
#pragma unroll
        for (int j = 0; j < 14; j++) {
            if (j >= count) continue;
            const i64 column = j < first ? j : j + written;
            const Eight b = *(const Eight*)(w + column * w_row + i);
#pragma unroll
            for (int e = 0; e < 8; e++) sums[j] += wide(a.at[e], half) * wide(b.at[e], half);
        }
    }
#pragma unroll
    for (int j = 0; j < 14; j++) {
        if (j >= count) continue;
        float sum = sums[j];
#pragma unroll
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        const i64 column = j < first ? j : j + written;
        if (lane == 0) y[row * n + column] = narrow(bias ? sum + wide(bias[column], half) : sum, half);
    }
}

// A copy of the bias for each kind of row, from its first column on, so that it begins at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(256) shifted(
    const u16* bias, u16* copies, i64 n, i64 written, i64 copy, i64 period) {
    const i64 i = blockIdx.x * 256ll + threadIdx.x, kind = blockIdx.y;
    if (i < written) copies[kind * copy + i] = bias[i + first_column(kind, period, n)];
}

// All columns of a row, for products into rows that lie in memory of their own and are all aligned: those between are
// copied, 16 bytes by a thread; the first block of each row computes the others, a warp each of them at a time.
extern "C" __global__ void __launch_bounds__(256) spread(
    const u16* from, const u16* x, const u16* w, const u16* bias, u16* y,
    i64 n, i64 k, i64 x_row, i64 w_row, i64 from_row, i64 written, i64 period, i64 half) {
    const i64 row = blockIdx.y, first = first_column(row, period, n);
    if (blockIdx.x == 0) {
        const int lane = threadIdx.x % 32;
        for (i64 j = threadIdx.x / 32; j < n - written; j += 8) {
            const i64 column = j < first ? j : j + written;
            float sum = 0.0f;
            for (i64 i = lane * 8; i < k; i += 256) {
                const Eight a = *(const Eight*)(x + row * x_row + i), b = *(const Eight*)(w + column * w_row + i);
#pragma unroll
                for (int e = 0; e < 8; e++) sum += wide(a.at[e], half) * wide(b.at[e], half);
            }
#pragma unroll
            for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
            if (lane == 0) y[row * n + column] = narrow(bias ? sum + wide(bias[column], half) : sum, half);
        }
        return;
    }
    const i64 unit = (blockIdx.x - 1) * 256ll + threadIdx.x;
    if (unit * 8 >= written) return;
    const uint4* units = (const uint4*)(from + row * from_row) + unit;
    uint4* to = (uint4*)(y + row * n + first) + unit;
    const uint4 low = units[0];
    if (first == 0) {
        *to = low;
        return;
    }
    const uint4 high = units[1];
    const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    unsigned out[4];
#pragma unroll
    for (int skipped = 0; skipped < 4; skipped++) {
        if (first / 2 != skipped) continue;
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = __funnelshift_r(words[i + skipped], words[i + skipped + 1 < 8 ? i + skipped + 1 : 7], first % 2 * 16);
    }
    *to = make_uint4(out[0], out[1], out[2], out[3]);
}
