// What all generated kernels share. No header is included, so that none has to be found.
typedef long long i64;
typedef unsigned long long u64;
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
#define INFINITE __int_as_float(0x7f800000)

// A kernel may begin before the one in front of it is done. This waits for it, and lets the next one begin.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Several elements that lie side by side, read and written by at most 16 bytes at a time.
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T at[N]; };
template <int N, typename T> __device__ __forceinline__ Pack<T, N> read(const T* from) { return *(const Pack<T, N>*)from; }
template <int N, typename T> __device__ __forceinline__ void write(T* to, const Pack<T, N>& pack) { *(Pack<T, N>*)to = pack; }

// From what lies in memory to what is computed with, and back.
__device__ __forceinline__ float value(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float value(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ __forceinline__ float value(float x) { return x; }
__device__ __forceinline__ double value(double x) { return x; }
__device__ __forceinline__ bool value(bool x) { return x; }
__device__ __forceinline__ i64 value(unsigned char x) { return x; }
__device__ __forceinline__ i64 value(signed char x) { return x; }
__device__ __forceinline__ i64 value(short x) { return x; }
__device__ __forceinline__ i64 value(int x) { return x; }
__device__ __forceinline__ i64 value(i64 x) { return x; }
template <typename T> struct As { template <typename V> static __device__ __forceinline__ T of(V x) { return (T)x; } };
template <> struct As<bf16> {
    static __device__ __forceinline__ bf16 of(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
};
template <> struct As<f16> {
    static __device__ __forceinline__ f16 of(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
};
template <typename T> __device__ __forceinline__ float rounded(float x) { return value(As<T>::of(x)); }

// The first bits of a number: towards zero, so that the greatest numbers stay finite, and to the nearest tf32.
__device__ __forceinline__ float shortened(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }
__device__ __forceinline__ float tf32(float x) { unsigned y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return __uint_as_float(y & 0xffffe000u); }

// Sums and products that are never contracted: eager torch rounds after each.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ i64 add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
__device__ __forceinline__ i64 sub(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
__device__ __forceinline__ i64 mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }

// torch's meaning, NaN included, for float, double and whole numbers. Of two zeros the positive one is greater.
template <typename T> __device__ __forceinline__ T div(T a, T b) { return a / b; }
template <typename T> __device__ __forceinline__ T maximum(T a, T b) { return a != a ? a : b != b ? b : max(a, b); }
template <typename T> __device__ __forceinline__ T minimum(T a, T b) { return a != a ? a : b != b ? b : min(a, b); }
template <typename T> __device__ __forceinline__ T clamp(T x, T least, T most) { return minimum(maximum(x, least), most); }
template <typename T> __device__ __forceinline__ T relu(T x) { return maximum(x, (T)0); }
template <typename T> __device__ __forceinline__ T neg(T x) { return -x; }
template <> __device__ __forceinline__ i64 neg(i64 x) { return sub(0ll, x); }
__device__ __forceinline__ float abs_(float x) { return fabsf(x); }
__device__ __forceinline__ double abs_(double x) { return fabs(x); }
__device__ __forceinline__ i64 abs_(i64 x) { return x < 0 ? neg(x) : x; }
template <typename T> __device__ __forceinline__ T sign(T x) { return (T)((T(0) < x) - (x < T(0))); }
template <typename T> __device__ __forceinline__ T square(T x) { return mul(x, x); }
template <typename T> __device__ __forceinline__ T cube(T x) { return mul(mul(x, x), x); }
template <typename T> __device__ __forceinline__ T reciprocal(T x) { return T(1) / x; }
template <typename T> __device__ __forceinline__ T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }
template <typename T> __device__ __forceinline__ T silu(T x) { return x / (T(1) + exp(-x)); }
template <typename T> __device__ __forceinline__ T gelu(T x) { return x * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440))); }
template <typename T> __device__ __forceinline__ T gelu_tanh(T x) {
    const T inner = T(0.79788456080286535588) * (x + T(0.044715) * (x * x * x));
    return T(0.5) * x * (T(1) + tanh(inner));
}

// One number of T threads side by side, the same in all of them.
template <int T, typename N, typename F> __device__ __forceinline__ N reduce(N x, F join) {
    for (int apart = (T < 32 ? T : 32) / 2; apart > 0; apart /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, apart));
    if constexpr (T > 32) {
        __shared__ N parts[T / 32];
        __syncthreads();
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
        __syncthreads();
        x = parts[0];
        for (int i = 1; i < T / 32; i++) x = join(x, parts[i]);
    }
    return x;
}
template <int T, typename N> __device__ __forceinline__ N total(N x) { return reduce<T>(x, [](N a, N b) { return a + b; }); }
template <int T, typename N> __device__ __forceinline__ N greatest(N x) { return reduce<T>(x, [](N a, N b) { return b > a ? b : a; }); }
template <int T, typename N> __device__ __forceinline__ N greatest_or_nan(N x) { return reduce<T>(x, [](N a, N b) { return maximum(a, b); }); }

// Puts the mean and the sum of squared distances of another group to those of one of `n`; it is this share of both.
template <typename T>
__device__ __forceinline__ void merge(T& mean, T& spread, T mean_too, T spread_too, T share, T n) {
    if (share == 0) return;
    const T far = mean_too - mean;
    mean += far * share;
    spread += spread_too + far * far * (n * share);
}
