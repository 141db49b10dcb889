//! Bias, ReLU and the store by AVX-512, for blocks that are too narrow for the loops of a compiler.

use super::StoreBlock;
use half::bf16;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// True if the processor has the instruction that rounds to bf16.
pub fn narrows() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
    })
}

/// bf16 in a vector of as many sums as two vectors have.
const WIDTH: usize = 32;

/// Stores `max(sums + bias, least)`; NaN stays.
///
/// # Safety
/// The machine has AVX-512 F; `sums` and `y` reach the block's rows and columns; nobody else uses them.
#[target_feature(enable = "avx512f")]
pub unsafe fn store_f32(
    sums: *const f32,
    block: &StoreBlock,
    y: *mut f32,
    y_stride: usize,
    bias: Option<&[f32]>,
    least: f32,
) {
    const LANES: usize = 16;
    let least = _mm512_set1_ps(least);
    for column in (0..block.columns).step_by(LANES) {
        let mask = u16::MAX >> LANES.saturating_sub(block.columns - column);
        let bias = bias.map_or(_mm512_set1_ps(-0.0), |bias| {
            // SAFETY: masked lanes are not read; the others are columns of the block.
            unsafe { _mm512_maskz_loadu_ps(mask, bias.as_ptr().add(block.column + column)) }
        });
        for row in 0..block.rows {
            // SAFETY: the block's own elements; masked lanes are not touched.
            unsafe {
                let sum = _mm512_maskz_loadu_ps(mask, sums.add(row * block.stride + column));
                // The second operand is the result where either is NaN.
                let value = _mm512_max_ps(least, _mm512_add_ps(sum, bias));
                _mm512_mask_storeu_ps(y.add(row * y_stride + column), mask, value);
            }
        }
    }
}

/// As [`store_f32`], rounded to bf16.
///
/// # Safety
/// As for [`store_f32`], and the machine [`narrows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub unsafe fn store_bf16(
    sums: *const f32,
    block: &StoreBlock,
    y: *mut bf16,
    y_stride: usize,
    bias: Option<&[bf16]>,
    least: f32,
) {
    let least = _mm512_set1_ps(least);
    for column in (0..block.columns).step_by(WIDTH) {
        let mask = u32::MAX >> WIDTH.saturating_sub(block.columns - column);
        let halves = [mask as u16, (mask >> 16) as u16];
        let bias = bias.map_or([_mm512_set1_ps(-0.0); 2], |bias| {
            // SAFETY: masked lanes are not read; the others are columns of the block.
            let both = unsafe { _mm512_maskz_loadu_epi16(mask, bias.as_ptr().add(block.column + column).cast()) };
            let wide = |half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
            [
                wide(_mm512_castsi512_si256(both)),
                wide(_mm512_extracti64x4_epi64::<1>(both)),
            ]
        });
        for row in 0..block.rows {
            // SAFETY: the block's own elements; masked lanes are not touched.
            unsafe {
                let sums = sums.add(row * block.stride + column);
                let y = y.add(row * y_stride + column);
                let mut values = [_mm512_setzero_ps(); 2];
                let mut odd = 0;
                for half in 0..2 {
                    let sum = _mm512_maskz_loadu_ps(halves[half], sums.wrapping_add(half * WIDTH / 2));
                    // The second operand is the result where either is NaN.
                    values[half] = _mm512_max_ps(least, _mm512_add_ps(sum, bias[half]));
                    odd |= _mm512_fpclass_ps_mask::<ODD>(values[half]);
                }
                let narrow = _mm512_cvtne2ps_pbh(values[1], values[0]);
                let narrow = std::mem::transmute::<__m512bh, __m512i>(narrow);
                _mm512_mask_storeu_epi16(y.cast(), mask, narrow);
                if odd != 0 {
                    one_by_one(&values, y, WIDTH.min(block.columns - column));
                }
            }
        }
    }
}

/// NaN, which has one form in torch, and subnormal numbers, which the instruction takes for zero.
const ODD: i32 = 0x01 | 0x20 | 0x80;

/// # Safety
/// So many elements can be written.
#[cold]
#[target_feature(enable = "avx512f")]
unsafe fn one_by_one(values: &[__m512; 2], y: *mut bf16, columns: usize) {
    let mut sums = [0f32; WIDTH];
    // SAFETY: the array holds both vectors; the caller vouches for the rest.
    unsafe {
        _mm512_storeu_ps(sums.as_mut_ptr(), values[0]);
        _mm512_storeu_ps(sums.as_mut_ptr().add(WIDTH / 2), values[1]);
        for (column, sum) in sums.iter().enumerate().take(columns) {
            *y.add(column) = super::Element::narrow(*sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Element;
    use super::*;

    #[test]
    fn narrows_as_elements_do() {
        if !narrows() {
            return;
        }
        let odd = [
            f32::NAN,
            -f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::INFINITY,
            f32::MAX,
            1e-45,
            -1e-39,
            1e-38,
            -0.0,
            1.0 + 1.0 / 256.0,
        ];
        for columns in [1, 10, 16, 17, 32, 33, 70] {
            let sums: Vec<f32> = (0..3 * 80)
                .map(|i| {
                    if i % 3 == 0 {
                        odd[i / 3 % odd.len()]
                    } else {
                        i as f32 - 100.3
                    }
                })
                .collect();
            let bias: Vec<bf16> = (0..80)
                .map(|i| bf16::narrow(if i % 2 == 0 { 0.0 } else { 1.7 }))
                .collect();
            for (bias, least) in [(None, f32::NEG_INFINITY), (Some(&bias[..]), 0.0)] {
                let mut y = vec![bf16::narrow(-7.0); 3 * 100];
                let block = StoreBlock {
                    row: 0,
                    rows: 3,
                    column: 5,
                    columns,
                    stride: 80,
                };
                // SAFETY: the slices are longer than the block.
                unsafe { store_bf16(sums.as_ptr(), &block, y.as_mut_ptr(), 100, bias, least) };
                for (row, column) in (0..3).flat_map(|r| (0..100).map(move |c| (r, c))) {
                    let sum = sums[row * 80 + column.min(79)] + bias.map_or(-0.0, |b| b[(5 + column).min(79)].widen());
                    let expected = match column < columns {
                        true => bf16::narrow(if sum < least { least } else { sum }),
                        false => bf16::narrow(-7.0),
                    };
                    assert_eq!(
                        y[row * 100 + column].to_bits(),
                        expected.to_bits(),
                        "{row} {column} {sum:e}"
                    );
                }
            }
        }
    }
}
