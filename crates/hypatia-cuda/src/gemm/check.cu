// The yardstick of matrix products: plain loops in f32, written to be right rather than fast.
//
// Types: 0 f32, 1 bf16, 2 f16. Epilogues: the library's numbers. All parameters have eight bytes.
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

__device__ float get(const void* data, i64 at, i64 type) {
    if (type == 0) return ((const float*)data)[at];
    u16 bits = ((const u16*)data)[at];
    if (type == 1) return __uint_as_float((u32)bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ void put(void* data, i64 at, i64 type, float value) {
    if (type == 0) {
        ((float*)data)[at] = value;
        return;
    }
    u16 bits;
    if (type == 1) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    ((u16*)data)[at] = bits;
}

__device__ u32 scramble(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Numbers spread evenly over -1 to 1; type 3: random bytes.
extern "C" __global__ void fill(void* data, i64 count, i64 type, i64 seed) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        u32 drawn = scramble((u32)i ^ scramble((u32)(i >> 32) + (u32)seed));
        if (type == 3) {
            ((unsigned char*)data)[i] = (unsigned char)drawn;
        } else {
            put(data, i, type, (float)drawn * (2.0f / 4294967296.0f) - 1.0f);
        }
    }
}

// Makes one element NaN.
extern "C" __global__ void spoil(void* data, i64 at, i64 type) {
    put(data, at, type, __uint_as_float(0x7fc00000u));
}

// sums[batch, m, n] = left · right + residual, tiles of 64 by 64, 16 by 16 threads of 4 by 4 sums each.
extern "C" __global__ void __launch_bounds__(256) product(
    const void* left, const void* right, const void* residual, float* sums, i64 type, i64 out_type, i64 m, i64 n,
    i64 k, i64 left_row, i64 left_step, i64 left_batch, i64 right_step, i64 right_column, i64 right_batch,
    i64 residual_row, i64 residual_batch, i64 has_residual) {
    __shared__ float a[16][65], b[16][65];
    const i64 row = blockIdx.y * 64ll, column = blockIdx.x * 64ll, batch = blockIdx.z;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float total[4][4] = {};
    for (i64 start = 0; start < k; start += 16) {
        for (int i = threadIdx.x; i < 64 * 16; i += 256) {
            // Neighbouring threads take neighbouring addresses, however the factor lies.
            const int i_left = left_step == 1 ? i / 16 : i % 64, s_left = left_step == 1 ? i % 16 : i / 64;
            const int i_right = right_step == 1 ? i / 16 : i % 64, s_right = right_step == 1 ? i % 16 : i / 64;
            const i64 r = row + i_left, c = column + i_right;
            a[s_left][i_left] = r < m && start + s_left < k
                ? get(left, batch * left_batch + r * left_row + (start + s_left) * left_step, type) : 0.0f;
            b[s_right][i_right] = c < n && start + s_right < k
                ? get(right, batch * right_batch + (start + s_right) * right_step + c * right_column, type) : 0.0f;
        }
        __syncthreads();
        // The sums of a tile are added as one, which keeps the error of long sums small.
        float part[4][4] = {};
        for (int s = 0; s < 16; s++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) part[i][j] += a[s][y * 4 + i] * b[s][x + 16 * j];
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) total[i][j] += part[i][j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const i64 r = row + y * 4 + i, c = column + x + 16 * j;
            if (r < m && c < n) {
                const i64 at = batch * residual_batch + r * residual_row + c;
                sums[(batch * m + r) * n + c] = total[i][j] + (has_residual ? get(residual, at, out_type) : 0.0f);
            }
        }
}

__device__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

__device__ float gelu_slope(float x) {
    const float t = tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
    const float inner = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
}

// The worst error is kept as the bits of a float, which are in the order of what they mean.
__device__ void report(u32* worst, float error, float allowed) {
    const float ratio = error / allowed;
    atomicMax(worst, __float_as_uint(ratio <= 1e30f ? ratio : 1e30f));
}

// What the epilogue makes of the sums, kept in `wants` if there is one, compared with what the library has written.
extern "C" __global__ void compare(
    const float* sums, float* wants, const void* out, const void* bias, const void* aux, u32* worst, i64 out_type, i64 epilogue, i64 m,
    i64 n, i64 out_row, i64 out_batch, i64 aux_ld, i64 total, i64 relative_bits, i64 absolute_bits) {
    const float relative = __uint_as_float((u32)relative_bits), absolute = __uint_as_float((u32)absolute_bits);
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
        const i64 c = i % n, r = i / n % m, batch = i / n / m;
        float before = sums[i];
        if (epilogue & 4) before += get(bias, c, out_type);
        float want = before;
        if (epilogue == 2 || epilogue == 6 || epilogue == 134) want = before < 0.0f ? 0.0f : before;
        if (epilogue == 32 || epilogue == 36 || epilogue == 164) want = gelu(before);
        if (epilogue == 134 || epilogue == 136 || epilogue == 152) {
            const i64 bit = r * aux_ld + c;
            const bool set = ((const unsigned char*)aux)[bit / 8] >> (bit % 8) & 1;
            if (epilogue != 134 && !set) want = 0.0f;
            if (epilogue == 134 && set != (before > 0.0f) && before == before) report(worst, fabsf(before), absolute);
        }
        if (epilogue == 164) {
            const float kept = get(aux, r * aux_ld + c, out_type);
            if (before == before) report(worst, fabsf(kept - before), absolute + relative * fabsf(before));
        }
        if (epilogue == 208) want = before * gelu_slope(get(aux, r * aux_ld + c, out_type));
        const float got = get(out, batch * out_batch + r * out_row + c, out_type);
        if (want != want) {
            // Some kernels make zero of it, by a maximum that takes the other number.
            report(worst, got != got ? 0.0f : 1.0f, 1e-30f);
            if (wants) wants[i] = want;
            continue;
        }
        // The library's gelu and its slope have an error of their own, which is a share of what they are applied to.
        const bool curve = epilogue & (32 | 64);
        const float size = curve ? fmaxf(fabsf(want), fabsf(before)) : fabsf(want);
        report(worst, fabsf(got - want), absolute + relative * size);
        if (wants) wants[i] = want;
    }
}

// Sums over `count` elements `step` apart, for each of `total`; f32 sums of 32 at a time. Roundings of the elements are
// allowed for as random ones are, which add up as their squares do.
extern "C" __global__ void compare_sums(
    const void* data, const void* sums, u32* worst, i64 type, i64 sum_type, i64 total, i64 count, i64 step, i64 next,
    i64 relative_bits, i64 absolute_bits) {
    const float relative = __uint_as_float((u32)relative_bits), absolute = __uint_as_float((u32)absolute_bits);
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
        float want = 0.0f, squares = 0.0f, size = 0.0f;
        for (i64 start = 0; start < count; start += 32) {
            float part = 0.0f;
            for (i64 j = start; j < count && j < start + 32; j++) {
                const float value = get(data, i * next + j * step, type);
                part += value;
                squares += value * value;
                size += fabsf(value);
            }
            want += part;
        }
        const float allowed = relative * fabsf(want) + 8.0f * relative * sqrtf(squares)
            + 8.0f * absolute * sqrtf((float)count) + 1e-6f * size;
        report(worst, fabsf(get(sums, i, sum_type) - want), allowed);
    }
}
