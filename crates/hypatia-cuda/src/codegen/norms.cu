// Norms of training steps: about the mean with weight and bias (CENTERED), or about zero with a weight.
//
// LANES threads work on a row of WIDTH elements, PACK of them at a time, and keep their share in registers. Parameters
// have two gradients or one (SUMS), which blocks sum over their rows; the last kernel sums over the blocks.
#define COUNT ((WIDTH + LANES * PACK - 1) / (LANES * PACK))
#define ROWS (256 / LANES)
#define SUMS (CENTERED ? 2 : 1)
typedef float Share[COUNT][PACK];

// Visits a thread's elements: which they are in its share, and which in the row.
template <typename F> __device__ __forceinline__ void visit(F f) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int p = 0; p < COUNT; p++) {
        const int c = (p * LANES + lane) * PACK;
        if (c < WIDTH) f(p, c);
    }
}
__device__ __forceinline__ void load(const ELEMENT* row, Share& share) {
    visit([&](int p, int c) {
        const auto pack = read<PACK>(row + c);
#pragma unroll
        for (int j = 0; j < PACK; j++) share[p][j] = value(pack.at[j]);
    });
}
template <typename F> __device__ __forceinline__ void store(ELEMENT* row, F f) {
    visit([&](int p, int c) {
        Pack<ELEMENT, PACK> pack;
#pragma unroll
        for (int j = 0; j < PACK; j++) pack.at[j] = As<ELEMENT>::of(f(p, j));
        write<PACK>(row + c, pack);
    });
}
template <typename F> __device__ __forceinline__ float mean_of(F f) {
    float sum = 0;
    visit([&](int p, int) {
#pragma unroll
        for (int j = 0; j < PACK; j++) sum += f(p, j);
    });
    return total<LANES>(sum) / WIDTH;
}

#if CENTERED
extern "C" __global__ void __launch_bounds__(256) norm_forward(const ELEMENT* x, const ELEMENT* w, const ELEMENT* b, ELEMENT* y, float* means, float* factors, i64 rows) {
#else
extern "C" __global__ void __launch_bounds__(256) norm_forward(const ELEMENT* x, const ELEMENT* w, ELEMENT* y, float* factors, i64 rows) {
#endif
    const i64 row = blockIdx.x * (i64)ROWS + threadIdx.x / LANES;
    if (row >= rows) return;
    Share v, scale, shift;
    load(x + row * WIDTH, v);
    load(w, scale);
    float mean = 0;
#if CENTERED
    load(b, shift);
    mean = mean_of([&](int p, int j) { return v[p][j]; });
#endif
    const float spread = mean_of([&](int p, int j) { return (v[p][j] - mean) * (v[p][j] - mean); });
    const float factor = rsqrtf(spread + EPS);
    store(y + row * WIDTH, [&](int p, int j) {
        const float normal = (v[p][j] - mean) * factor * scale[p][j];
        return CENTERED ? normal + shift[p][j] : normal;
    });
    if (threadIdx.x % LANES == 0) {
#if CENTERED
        means[row] = mean;
#endif
        factors[row] = factor;
    }
}

#if CENTERED
extern "C" __global__ void __launch_bounds__(256) norm_backward(const ELEMENT* g, const ELEMENT* x, const float* means, const float* factors, const ELEMENT* w, ELEMENT* dx, float* partial, i64 rows) {
#else
extern "C" __global__ void __launch_bounds__(256) norm_backward(const ELEMENT* g, const ELEMENT* x, const float* factors, const ELEMENT* w, ELEMENT* dx, float* partial, i64 rows) {
#endif
    const int part = threadIdx.x / LANES;
    Share scale, of_w = {}, of_b = {};
    load(w, scale);
    for (i64 row = blockIdx.x * (i64)ROWS + part; row < rows; row += gridDim.x * (i64)ROWS) {
        Share given, normal;
        load(g + row * WIDTH, given);
        load(x + row * WIDTH, normal);
        const float factor = factors[row];
#if CENTERED
        const float mean = means[row];
#else
        const float mean = 0;
#endif
        visit([&](int p, int) {
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                normal[p][j] = (normal[p][j] - mean) * factor;
                of_w[p][j] += given[p][j] * normal[p][j];
                if (CENTERED) of_b[p][j] += given[p][j];
                given[p][j] *= scale[p][j];
            }
        });
        float level = 0;
#if CENTERED
        level = mean_of([&](int p, int j) { return given[p][j]; });
#endif
        const float slope = mean_of([&](int p, int j) { return given[p][j] * normal[p][j]; });
        store(dx + row * WIDTH, [&](int p, int j) { return factor * (given[p][j] - level - normal[p][j] * slope); });
    }
    // The rows of a block one after the other, so that sums are the same at every call. Neighbours lie side by side.
    __shared__ float sums[ROWS > 1 ? SUMS : 1][ROWS > 1 ? COUNT * PACK : 1][LANES];
    float* const mine = partial + blockIdx.x * (i64)(SUMS * WIDTH);
    const int lane = threadIdx.x % LANES;
    for (int r = 0; r < ROWS; r++) {
        if (part == r) visit([&](int p, int c) {
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                float w_sum = of_w[p][j], b_sum = of_b[p][j];
                if (ROWS > 1 && r > 0) {
                    w_sum += sums[0][p * PACK + j][lane];
                    if (CENTERED) b_sum += sums[SUMS - 1][p * PACK + j][lane];
                }
                if (r + 1 < ROWS) {
                    sums[0][p * PACK + j][lane] = w_sum;
                    if (CENTERED) sums[SUMS - 1][p * PACK + j][lane] = b_sum;
                } else {
                    mine[c + j] = w_sum;
                    if (CENTERED) mine[WIDTH * (SUMS - 1) + c + j] = b_sum;
                }
            }
        });
        __syncthreads();
    }
}

// A block for 32 columns.
#if CENTERED
extern "C" __global__ void __launch_bounds__(1024) norm_sums(const float* partial, ELEMENT* dw, ELEMENT* db, i64 blocks) {
#else
extern "C" __global__ void __launch_bounds__(1024) norm_sums(const float* partial, ELEMENT* dw, i64 blocks) {
#endif
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < SUMS * WIDTH)
        for (i64 row = part; row < blocks; row += 32) sum += partial[row * (SUMS * WIDTH) + c];
    __shared__ float parts[32][33];
    parts[part][lane] = sum;
    __syncthreads();
    if (part > 0 || c >= SUMS * WIDTH) return;
    for (int r = 1; r < 32; r++) sum += parts[r][lane];
#if CENTERED
    if (c >= WIDTH) {
        db[c - WIDTH] = As<ELEMENT>::of(sum);
        return;
    }
#endif
    dw[c] = As<ELEMENT>::of(sum);
}
