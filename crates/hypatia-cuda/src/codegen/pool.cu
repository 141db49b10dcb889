// What a pooling makes of PACK channels at STRIP places side by side.
//
// The window has KH x KW elements, its places are SW apart along a row, and its elements DH and DW. `image` begins at the
// channels; `top` and `left` say where the window begins at the first place. The image has HEIGHT rows of WIDTH pixels,
// ROW and PIXEL elements apart. A MEAN is of COUNT pixels, or of those that are there, if this is zero; PH and PW pixels
// behind the image are there, and as many before it, if padding counts. Elements are added in torch's order.
__device__ __forceinline__ int counted(int from, int size, int length, int padding) {
    return min(from + size, length + padding) - max(from, -padding);
}

__device__ __forceinline__ void pool(const ELEMENT* image, int top, int left, float (&made)[STRIP][PACK]) {
    constexpr int last = (STRIP - 1) * SW + (KW - 1) * DW;
    const float outside = MEAN ? 0 : -INFINITE;
#pragma unroll
    for (int t = 0; t < STRIP; t++)
#pragma unroll
        for (int c = 0; c < PACK; c++) made[t][c] = outside;
#pragma unroll UNROLL
    for (int y = 0; y < KH; y++) {
        const int row = top + y * DH;
        const bool inside = row >= 0 && row < HEIGHT;
        const ELEMENT* from = image + row * (i64)ROW + left * (i64)PIXEL;
        // STEP divides the distances between all pixels that are read.
#pragma unroll
        for (int j = 0; j <= last; j += STEP) {
            bool used = false;
#pragma unroll
            for (int t = 0; t < STRIP; t++) used |= j >= t * SW && (j - t * SW) % DW == 0 && (j - t * SW) / DW < KW;
            if (!used) continue;
            float pixel[PACK];
#pragma unroll
            for (int c = 0; c < PACK; c++) pixel[c] = outside;
            if (inside && left + j >= 0 && left + j < WIDTH) {
                const auto pack = read<PACK>(from + j * (i64)PIXEL);
#pragma unroll
                for (int c = 0; c < PACK; c++) pixel[c] = value(pack.at[c]);
            }
#pragma unroll
            for (int t = 0; t < STRIP; t++) {
                const int away = j - t * SW;
                if (away < 0 || away % DW != 0 || away / DW >= KW) continue;
#pragma unroll
                for (int c = 0; c < PACK; c++) {
                    const float x = pixel[c], so_far = made[t][c];
                    // Of equal numbers the first stays, and of NaN any.
                    made[t][c] = MEAN ? so_far + x : x > so_far || x != x ? x : so_far;
                }
            }
        }
    }
    if (!MEAN) return;
    const int rows = counted(top, KH, HEIGHT, PH);
#pragma unroll
    for (int t = 0; t < STRIP; t++) {
        const int count = COUNT ? COUNT : rows * counted(left + t * SW, KW, WIDTH, PW);
#pragma unroll
        for (int c = 0; c < PACK; c++) made[t][c] /= (float)count;
    }
}
