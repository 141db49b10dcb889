// Attention of one query for each head, as of a decoder that makes one token at a time.
//
// After the prelude and before this text: T, the type of the numbers; WIDTH of a head; HEADS, queries that share keys and
// values; MASK, the type of the mask (NO_MASK is defined if there is none); SPLIT, blocks of a cluster, which share keys;
// WARPS of a block; SCALE; strides, all of the dimensions batch, group of heads, head and key: Q0, Q1, Q2; K0, K1, K3; V0, V1, V3; M0 to M3.
#define SMALLEST __int_as_float(0xff800000)
// Of a query or a key a thread has eight numbers in each 32, of a value eight in each 64.
#define STEPS ((WIDTH + 31) / 32)
#define CHUNKS ((WIDTH + 63) / 64)
// Keys that a warp has at a time.
#define UNIT 16

struct __align__(16) Eight {
    unsigned pair[4];
};

// What a mask adds to a score, in powers of two.
__device__ __forceinline__ float allowed(bool seen) { return seen ? 0.0f : SMALLEST; }
template <typename M> __device__ __forceinline__ float allowed(M number) { return value(number) * 1.4426950408889634f; }

// sums[8 x 8] += a[8 x 16] b[16 x 8]; the other eight rows that the tensor core has are zeros.
template <typename N> __device__ __forceinline__ void multiply(float (&sums)[2], unsigned a0, unsigned a1, unsigned b0, unsigned b1);
template <> __device__ __forceinline__ void multiply<bf16>(float (&sums)[2], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    float x = 0.0f, y = 0.0f;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%8,%5,%8}, {%6,%7}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(x), "+f"(y) : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "r"(0));
}
template <> __device__ __forceinline__ void multiply<f16>(float (&sums)[2], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    float x = 0.0f, y = 0.0f;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%8,%5,%8}, {%6,%7}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(x), "+f"(y) : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "r"(0));
}

// Two numbers side by side, and one of each of two such pairs.
__device__ __forceinline__ unsigned both(float low, float high) {
    return (unsigned)As<T>::of(low).bits | (unsigned)As<T>::of(high).bits << 16;
}
__device__ __forceinline__ unsigned across(unsigned low, unsigned high, int second) {
    return __byte_perm(low, high, second ? 0x7632 : 0x5410);
}

// All blocks of a cluster, or all threads of a lone block.
__device__ __forceinline__ void meet() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// A number in the shared memory of a block of the cluster.
__device__ __forceinline__ float of_block(const float* own, unsigned block) {
#if SPLIT > 1
    unsigned address = (unsigned)__cvta_generic_to_shared(own);
    float found;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(address));
    return found;
#else
    return *own;
#endif
}

// By how much what was summed under a lower maximum is too large. Of nothing there is nothing.
__device__ __forceinline__ float shrink(float most, float now) { return most == SMALLEST ? 0.0f : exp2f(most - now); }

extern "C" __global__ void __launch_bounds__(32 * WARPS)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
attention(
    const T* q, const T* k, const T* v,
#ifndef NO_MASK
    const MASK* mask,
#endif
    T* y, i64 keys) {
    begin();
    __shared__ float most[WARPS][HEADS], sum[WARPS][HEADS], result[WARPS][HEADS][WIDTH];
    __shared__ float block_most[HEADS], block_sum[HEADS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, octet = lane / 4, quarter = lane % 4;
    const i64 batch = blockIdx.z, group = blockIdx.y;
    // Rows of the tensor core: heads in the queries and in the weights of keys. Its columns: keys, then numbers of a value.
    const bool is_head = octet < HEADS;
    const Eight none = {};
    Eight query[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        query[s] = is_head && 32 * s + 8 * quarter < WIDTH
            ? *(const Eight*)(q + batch * Q0 + group * Q1 + octet * Q2 + 32 * s + 8 * quarter) : none;
    float highest = SMALLEST, total_weight = 0.0f, sums[CHUNKS][8][2] = {};
    const i64 units = (keys + UNIT - 1) / UNIT, share = (units + SPLIT - 1) / SPLIT;
    const i64 last = (blockIdx.x + 1) * share < units ? (blockIdx.x + 1) * share : units;
    k += batch * K0 + group * K1;
    v += batch * V0 + group * V1;
#ifndef NO_MASK
    mask += batch * M0 + group * M1 + (is_head ? octet : 0) * M2;
#endif
    // Keys of a thread's scores: two neighbours in each half of the unit.
    auto place = [&](i64 unit, int e) { return unit * UNIT + 8 * (e / 2) + 2 * quarter + e % 2; };
    auto masked = [&](i64 unit, float (&added)[4]) {
        bool seen = false;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const i64 at = place(unit, e);
            added[e] = is_head && unit < last && at < keys ? 0.0f : SMALLEST;
#ifndef NO_MASK
            if (added[e] == 0.0f) added[e] = allowed(mask[at * M3]);
#endif
            seen |= added[e] != SMALLEST;
        }
        return seen;
    };
    i64 unit = blockIdx.x * share + warp;
    float added[4];
    masked(unit, added);
    // What the first keys are is not waited for; of later ones only those are read that are seen.
    bool seen = unit < last;
    while (unit < last) {
        const i64 next = unit + WARPS;
        Eight ks[2][STEPS], vs[4][CHUNKS];
        if (seen) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i64 at = unit * UNIT + 8 * h + octet;
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    ks[h][s] = at < keys && 32 * s + 8 * quarter < WIDTH
                        ? *(const Eight*)(k + at * K3 + 32 * s + 8 * quarter) : none;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const i64 at = place(unit, e);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    vs[e][c] = at < keys && 64 * c + 8 * octet < WIDTH
                        ? *(const Eight*)(v + at * V3 + 64 * c + 8 * octet) : none;
            }
        }
        float later[4];
        const bool seen_later = __any_sync(0xffffffffu, masked(next, later));
        if (seen) {
            float scores[2][2] = {}, weights[4];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < 4; half += 2)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        multiply<T>(scores[h], query[s].pair[half], query[s].pair[half + 1], ks[h][s].pair[half],
                                    ks[h][s].pair[half + 1]);
            float now = highest;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                weights[e] = added[e] == SMALLEST
                    ? SMALLEST : scores[e / 2][e % 2] * (float)(SCALE * 1.4426950408889634) + added[e];
                now = fmaxf(now, weights[e]);
            }
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
            const float old = shrink(highest, now);
            highest = now;
            total_weight *= old;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                weights[e] = weights[e] == SMALLEST ? 0.0f : exp2f(weights[e] - now);
                total_weight += weights[e];
            }
            const unsigned first = both(weights[0], weights[1]), second = both(weights[2], weights[3]);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sums[c][j][0] *= old;
                    sums[c][j][1] *= old;
                    multiply<T>(sums[c][j], first, second, across(vs[0][c].pair[j / 2], vs[1][c].pair[j / 2], j % 2),
                                across(vs[2][c].pair[j / 2], vs[3][c].pair[j / 2], j % 2));
                }
        }
#pragma unroll
        for (int e = 0; e < 4; e++) added[e] = later[e];
        seen = seen_later;
        unit = next;
    }
    total_weight += __shfl_xor_sync(0xffffffffu, total_weight, 1);
    total_weight += __shfl_xor_sync(0xffffffffu, total_weight, 2);
    // Of the warps of a block, then of the blocks of the cluster.
    if (is_head) {
        if (quarter == 0) {
            most[warp][octet] = highest;
            sum[warp][octet] = total_weight;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = 64 * c + 8 * (2 * quarter + e) + j;
                    if (at < WIDTH) result[warp][octet][at] = sums[c][j][e];
                }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < HEADS * WIDTH; at += 32 * WARPS) {
        const int h = at / WIDTH, e = at % WIDTH;
        float now = SMALLEST, all = 0.0f, total = 0.0f;
        for (int w = 0; w < WARPS; w++) now = fmaxf(now, most[w][h]);
        for (int w = 0; w < WARPS; w++) {
            const float by = shrink(most[w][h], now);
            total += sum[w][h] * by;
            all += result[w][h][e] * by;
        }
        // What the first warp left here is read by this thread alone.
        result[0][h][e] = all;
        if (e == 0) {
            block_sum[h] = total;
            block_most[h] = now;
        }
    }
    meet();
    for (int at = blockIdx.x * 32 * WARPS + threadIdx.x; at < HEADS * WIDTH; at += SPLIT * 32 * WARPS) {
        const int h = at / WIDTH, e = at % WIDTH;
        float now = SMALLEST, all = 0.0f, total = 0.0f;
        for (int b = 0; b < SPLIT; b++) now = fmaxf(now, of_block(&block_most[h], b));
        for (int b = 0; b < SPLIT; b++) {
            const float by = shrink(of_block(&block_most[h], b), now);
            total += of_block(&block_sum[h], b) * by;
            all += of_block(&result[0][h][e], b) * by;
        }
        // A query that sees nothing has zeros.
        y[((batch * gridDim.y + group) * HEADS + h) * WIDTH + e] = As<T>::of(total == 0.0f ? 0.0f : all / total);
    }
    meet();
}
