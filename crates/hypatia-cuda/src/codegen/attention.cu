// Attention of one query for each head, as of a decoder that makes one token at a time.
//
// After the prelude and before this text: T, the type of the numbers; WIDTH of a head; HEADS, queries that share keys and
// values; MASK, the type of the mask (NO_MASK is defined if there is none); SPLIT, blocks of a cluster, which share keys;
// SCALE; strides, all of the dimensions batch, group of heads, head and key: Q0, Q1, Q2; K0, K1, K3; V0, V1, V3; M0 to M3.
#define WARPS 8
#define DEPTH 4
// Threads that share a key: each has eight numbers of it.
#define LANES (WIDTH / 8)
#define STREAMS (32 / LANES)
#define SMALLEST __int_as_float(0xff800000)

// What a mask adds to a score, in powers of two.
__device__ __forceinline__ float allowed(bool seen) { return seen ? 0.0f : SMALLEST; }
template <typename M> __device__ __forceinline__ float allowed(M number) { return value(number) * 1.4426950408889634f; }

struct Parts {
    float most[HEADS], sum[HEADS], result[HEADS][8];
};

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
    __shared__ float most[WARPS][HEADS], sum[WARPS][HEADS], result[WARPS][HEADS][WIDTH];
    __shared__ float block_most[HEADS], block_sum[HEADS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane % LANES, stream = lane / LANES;
    const i64 batch = blockIdx.z, group = blockIdx.y;
    float query[HEADS][8];
    Parts parts;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const Pack<T, 8> pack = read<8>(q + batch * Q0 + group * Q1 + h * Q2 + place * 8);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            query[h][e] = value(pack.at[e]) * (float)(SCALE * 1.4426950408889634);
            parts.result[h][e] = 0.0f;
        }
        parts.most[h] = SMALLEST;
        parts.sum[h] = 0.0f;
    }
    const i64 share = (keys + SPLIT - 1) / SPLIT, first = blockIdx.x * share;
    const i64 last = first + share < keys ? first + share : keys;
    k += batch * K0 + group * K1 + place * 8;
    v += batch * V0 + group * V1 + place * 8;
    for (i64 start = first + warp * STREAMS; start < last; start += WARPS * STREAMS * DEPTH) {
        Pack<T, 8> ks[DEPTH], vs[DEPTH];
        float added[DEPTH][HEADS];
        bool seen[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const i64 at = start + stream + d * (i64)(WARPS * STREAMS);
            seen[d] = false;
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                added[d][h] = at < last ? 0.0f : SMALLEST;
#ifndef NO_MASK
                if (at < last) added[d][h] = allowed(mask[batch * M0 + group * M1 + h * M2 + at * M3]);
#endif
                seen[d] |= added[d][h] != SMALLEST;
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const i64 at = start + stream + d * (i64)(WARPS * STREAMS);
            ks[d] = vs[d] = Pack<T, 8>{};
            if (seen[d]) {
                ks[d] = read<8>(k + at * K3);
                vs[d] = read<8>(v + at * V3);
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float score = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; e++) score += query[h][e] * value(ks[d].at[e]);
#pragma unroll
                for (int apart = LANES / 2; apart > 0; apart /= 2) score += __shfl_xor_sync(0xffffffffu, score, apart);
                score += added[d][h];
                if (added[d][h] != SMALLEST && score != SMALLEST) {
                    const float now = fmaxf(parts.most[h], score);
                    const float old = shrink(parts.most[h], now), weight = exp2f(score - now);
                    parts.most[h] = now;
                    parts.sum[h] = parts.sum[h] * old + weight;
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        parts.result[h][e] = parts.result[h][e] * old + weight * value(vs[d].at[e]);
                }
            }
        }
    }
    // Of the streams of a warp, of its block, of the cluster.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int apart = LANES; apart < 32; apart *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, parts.most[h], apart), now = fmaxf(parts.most[h], other);
            const float ours = shrink(parts.most[h], now), theirs = shrink(other, now);
            parts.most[h] = now;
            parts.sum[h] = parts.sum[h] * ours + __shfl_xor_sync(0xffffffffu, parts.sum[h], apart) * theirs;
#pragma unroll
            for (int e = 0; e < 8; e++)
                parts.result[h][e] =
                    parts.result[h][e] * ours + __shfl_xor_sync(0xffffffffu, parts.result[h][e], apart) * theirs;
        }
        if (stream == 0) {
            most[warp][h] = parts.most[h];
            sum[warp][h] = parts.sum[h];
#pragma unroll
            for (int e = 0; e < 8; e++) result[warp][h][place * 8 + e] = parts.result[h][e];
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
