//! The kernels for AVX-512: one for each number of rows and of vectors.

use super::{Block, FETCH, LANES, ROWS, STREAMS, VECTORS};
use std::arch::x86_64::*;

type Kernel = unsafe fn(&Block);

/// How far ahead weights are fetched, in terms.
const AHEAD: usize = 16;
/// Rows up to which they are.
const FEW: usize = 3;

macro_rules! by_vectors {
    ($rows:literal, $chains:literal) => {
        [
            kernel::<$rows, 1, $chains> as Kernel,
            kernel::<$rows, 2, $chains> as Kernel,
            kernel::<$rows, 3, $chains> as Kernel,
            kernel::<$rows, 4, $chains> as Kernel,
        ]
    };
}

/// With few rows the latency of additions shows, unless terms are summed in several chains.
static KERNELS: [[Kernel; VECTORS]; ROWS] = [
    by_vectors!(1, 4),
    by_vectors!(2, 2),
    by_vectors!(3, 1),
    by_vectors!(4, 1),
    by_vectors!(5, 1),
    by_vectors!(6, 1),
];

/// # Safety
/// The machine has AVX-512 F; the pointers reach the rows, columns and terms that the block names; nothing else uses the
/// result's elements.
pub unsafe fn multiply(block: &Block) {
    let vectors = block.columns.div_ceil(LANES);
    // SAFETY: handed on.
    unsafe { KERNELS[block.rows - 1][vectors - 1](block) }
}

/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f")]
unsafe fn kernel<const R: usize, const V: usize, const CHAINS: usize>(block: &Block) {
    let zero = _mm512_setzero_ps();
    let mut sums = [[[zero; V]; R]; CHAINS];
    let (mut x, mut w, mut soon) = (block.x, block.w, block.soon);
    // The result is far away when it is written for the first time, or again after all other columns.
    for r in 0..R {
        for v in 0..V {
            _mm_prefetch::<_MM_HINT_T0>(block.y.wrapping_add(r * block.y_stride + v * LANES).cast());
        }
    }
    // SAFETY: the block's pointers reach its rows and terms. Fetching ahead faults nowhere.
    unsafe {
        for _ in 0..block.terms / FETCH {
            for _ in 0..block.lines {
                _mm_prefetch::<_MM_HINT_T1>(soon.cast());
                soon = soon.wrapping_add(LANES);
            }
            for _ in 0..FETCH / CHAINS {
                for (chain, sums) in sums.iter_mut().enumerate() {
                    step::<R, V>(sums, x.add(chain), block.x_stride, w.add(chain * V * LANES));
                }
                x = x.add(CHAINS);
                w = w.add(CHAINS * V * LANES);
            }
        }
        for _ in 0..block.terms % FETCH {
            step::<R, V>(&mut sums[0], x, block.x_stride, w);
            x = x.add(1);
            w = w.add(V * LANES);
        }
    }
    let mut total = sums[0];
    for others in &sums[1..] {
        for r in 0..R {
            for v in 0..V {
                total[r][v] = _mm512_add_ps(total[r][v], others[r][v]);
            }
        }
    }
    // SAFETY: handed on.
    unsafe { store(block, &total) }
}

/// One row times several panels at once, the first of them the block's and the others so many elements after each other:
/// memory is read faster in several places than in one.
///
/// # Safety
/// As for [`multiply`], with the columns of all panels.
#[target_feature(enable = "avx512f")]
pub unsafe fn streams(block: &Block, apart: usize) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; STREAMS];
    // SAFETY: the panels have as many terms as the row. Fetching ahead faults nowhere.
    unsafe {
        for term in 0..block.terms {
            let value = _mm512_set1_ps(*block.x.add(term));
            for (panel, sums) in sums.iter_mut().enumerate() {
                let w = block.w.add(panel * apart + term * VECTORS * LANES);
                for (v, sum) in sums.iter_mut().enumerate() {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((AHEAD * VECTORS + v) * LANES).cast());
                    *sum = _mm512_fmadd_ps(value, _mm512_load_ps(w.add(v * LANES)), *sum);
                }
            }
        }
        for (panel, sums) in sums.iter().enumerate() {
            let column = panel * VECTORS * LANES;
            let part = Block {
                y: block.y.add(column),
                bias: match block.bias.is_null() {
                    true => block.bias,
                    false => block.bias.add(column),
                },
                columns: VECTORS * LANES,
                ..*block
            };
            store(&part, &[*sums]);
        }
    }
}

/// Adds what is to be added to sums and writes them.
///
/// # Safety
/// As for [`multiply`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const R: usize, const V: usize>(block: &Block, total: &[[__m512; V]; R]) {
    let zero = _mm512_setzero_ps();
    let last: __mmask16 = u16::MAX >> (V * LANES - block.columns);
    for v in 0..V {
        let mask = if v + 1 == V { last } else { u16::MAX };
        // SAFETY: masked lanes are not touched; the others are columns of the block.
        unsafe {
            let bias = match block.bias.is_null() {
                true => zero,
                false => _mm512_maskz_loadu_ps(mask, block.bias.add(v * LANES)),
            };
            for (r, total) in total.iter().enumerate() {
                let y = block.y.add(r * block.y_stride + v * LANES);
                let mut sum = total[v];
                if block.adds {
                    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, y));
                }
                if !block.bias.is_null() {
                    sum = _mm512_add_ps(sum, bias);
                }
                if block.relu {
                    // The second operand is the result where either is NaN.
                    sum = _mm512_max_ps(zero, sum);
                }
                _mm512_mask_storeu_ps(y, mask, sum);
            }
        }
    }
}

/// One term for all rows and columns.
///
/// # Safety
/// `x` reaches `R` rows, `w` a term of the panel.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step<const R: usize, const V: usize>(
    sums: &mut [[__m512; V]; R],
    x: *const f32,
    x_stride: usize,
    w: *const f32,
) {
    // SAFETY: the caller's obligation; a prefetch faults nowhere.
    unsafe {
        let mut weights = [_mm512_setzero_ps(); V];
        for (v, weight) in weights.iter_mut().enumerate() {
            // With more rows there is time enough for what the processor fetches by itself.
            if R <= FEW {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((AHEAD * V + v) * LANES).cast());
            }
            *weight = _mm512_load_ps(w.add(v * LANES));
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let value = _mm512_set1_ps(*x.add(r * x_stride));
            for (sum, weight) in sums.iter_mut().zip(&weights) {
                *sum = _mm512_fmadd_ps(value, *weight, *sum);
            }
        }
    }
}
