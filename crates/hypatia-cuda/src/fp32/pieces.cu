// Large fp32 products by a library's bf16 products: what happens before and after them, and how their error is measured.
//
// A row of k numbers becomes a row of 3k pieces, the greatest first on the left side and last on the right side.
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned u32;
typedef unsigned short u16;

__device__ __forceinline__ u16 rounded(float& x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    x -= __uint_as_float((u32)bits << 16);
    return bits;
}
// The last bits of what is below 2^-110 are lost in pieces; zero is not. What is above the limit may overflow on the way.
__device__ __forceinline__ bool is_odd(float x, u32 limit) {
    const u32 size = __float_as_uint(x) & 0x7fffffffu;
    return size > limit || size - 1 < (17u << 23) - 1;
}

// A block for each row. Flags say which rows have numbers that pieces cannot stand for.
extern "C" __global__ void __launch_bounds__(256) split(const float* x, u16* pieces, u32* flags, i64 k, i64 x_row, i64 right, i64 limit) {
    const float* from = x + blockIdx.x * x_row;
    u16* to = pieces + blockIdx.x * 3 * k;
    bool odd = false;
    for (i64 i = threadIdx.x * 4; i < k; i += 1024) {
        const float4 v = *(const float4*)(from + i);
        float at[4] = {v.x, v.y, v.z, v.w};
        ushort4 part[3];
#pragma unroll
        for (int j = 0; j < 4; j++) odd |= is_odd(at[j], (u32)limit);
#pragma unroll
        for (int p = 0; p < 3; p++) {
            part[p].x = rounded(at[0]);
            part[p].y = rounded(at[1]);
            part[p].z = rounded(at[2]);
            part[p].w = rounded(at[3]);
            *(ushort4*)(to + (right ? 2 - p : p) * k + i) = part[p];
        }
    }
    odd = __syncthreads_or(odd);
    if (flags && threadIdx.x == 0) flags[blockIdx.x] = odd;
}

// The greatest magnitude, and whether there are numbers that are too small for pieces.
extern "C" __global__ void __launch_bounds__(256) survey(const float* x, u32* found, i64 count) {
    u32 most = 0, tiny = 0;
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
        tiny |= is_odd(x[i], 0xffffffffu);
    }
    atomicMax(found, most);
    if (tiny) found[1] = 1;
}

// Rows with such numbers, computed again without pieces: a block for each row, a warp for each of its elements.
extern "C" __global__ void __launch_bounds__(128) mend(
    const float* x, const float* w, const float* bias, const float* residual, float* y, const u32* flags,
    i64 n, i64 k, i64 x_row, i64 residual_row, i64 relu) {
    const i64 row = blockIdx.x;
    if (!flags[row]) return;
    for (i64 column = threadIdx.x / 32; column < n; column += 4) {
        float sum = 0.0f;
        for (i64 i = threadIdx.x % 32; i < k; i += 32) sum = fmaf(x[row * x_row + i], w[column * k + i], sum);
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (residual) sum += residual[row * residual_row + column];
        if (bias) sum += bias[column];
        if (threadIdx.x % 32 == 0) y[row * n + column] = relu && sum < 0.0f ? 0.0f : sum;
    }
}

__device__ u32 scramble(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Numbers between -1 and 1; every second row has positive ones only, whose sums show roundings towards zero.
extern "C" __global__ void __launch_bounds__(256) draw(float* x, i64 count, i64 row, i64 seed) {
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        const float drawn = (float)scramble((u32)i ^ scramble((u32)seed)) * (2.0f / 4294967296.0f) - 1.0f;
        x[i] = i / row & 1 ? fabsf(drawn) : drawn;
    }
}

// Errors of some elements against sums in f64: for sums of both signs and for sums of positive terms, the sum of squares
// and the greatest. A warp for each element.
extern "C" __global__ void __launch_bounds__(256) judge(
    const float* x, const float* w, const float* bias, const float* residual, const float* y, double* squares, u32* worst,
    i64 m, i64 n, i64 k, i64 x_row, i64 residual_row, i64 relu, i64 samples) {
    const int lane = threadIdx.x % 32;
    for (i64 s = blockIdx.x * 8 + threadIdx.x / 32; s < samples; s += gridDim.x * 8) {
        const i64 row = scramble((u32)s * 2) % m, column = scramble((u32)s * 2 + 1) % n;
        double sum = 0.0;
        for (i64 i = lane; i < k; i += 32) sum += (double)x[row * x_row + i] * w[column * k + i];
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (lane) continue;
        if (residual) sum += residual[row * residual_row + column];
        if (bias) sum += bias[column];
        if (relu && sum < 0.0) sum = 0.0;
        const int which = row & column & 1;
        const double error = fabs(y[row * n + column] - sum);
        atomicAdd(squares + which, error * error);
        // Also where it is NaN.
        atomicMax(worst + which, error < 1e30 ? __float_as_uint((float)error) : 0x7f000000u);
    }
}
