// The convolution of PACK channels at STRIP places side by side, each channel by itself.
//
// The window has KH x KW elements, its places are SW apart along a row, and its elements DH and DW. `image` and `weight`
// begin at the channels; `top` and `left` say where the window begins at the first place. The image has HEIGHT rows of
// WIDTH pixels, ROW and PIXEL elements apart, the weight CHANNELS for each element of the window.
__device__ __forceinline__ void convolve(const ELEMENT* image, const ELEMENT* weight, int top, int left, float (&sums)[STRIP][PACK]) {
    constexpr int last = (STRIP - 1) * SW + (KW - 1) * DW;
#pragma unroll
    for (int t = 0; t < STRIP; t++)
#pragma unroll
        for (int c = 0; c < PACK; c++) sums[t][c] = 0;
#pragma unroll UNROLL
    for (int y = 0; y < KH; y++) {
        const int row = top + y * DH;
        // What is outside is zero, and not left out: a weight that is infinite makes NaN of it.
        const bool inside = row >= 0 && row < HEIGHT;
        const ELEMENT* from = image + row * (i64)ROW + left * (i64)PIXEL;
        float taps[KW][PACK];
#pragma unroll
        for (int x = 0; x < KW; x++) {
            const auto tap = read<PACK>(weight + (y * KW + x) * CHANNELS);
#pragma unroll
            for (int c = 0; c < PACK; c++) taps[x][c] = value(tap.at[c]);
        }
        // STEP divides the distances between all pixels that are read.
#pragma unroll
        for (int j = 0; j <= last; j += STEP) {
            bool used = false;
#pragma unroll
            for (int t = 0; t < STRIP; t++) used |= j >= t * SW && (j - t * SW) % DW == 0 && (j - t * SW) / DW < KW;
            if (!used) continue;
            float pixel[PACK] = {};
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
                for (int c = 0; c < PACK; c++) sums[t][c] = fmaf(pixel[c], taps[away / DW][c], sums[t][c]);
            }
        }
    }
}

