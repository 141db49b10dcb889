//! Rows that fit a few registers, for AVX-512: read once, kept there, written once. The time of a short row is that of
//! one instruction after the other, so sums are joined by as few of them as there are.

use super::rows::Finish;
use crate::kernels::rowwise::RowOp;

/// Elements of the longest such row.
const WIDEST: usize = 64;

/// Rows, one after the other, and what is done with them. A result may replace its row.
pub(super) struct Short {
    pub(super) x: *const f32,
    /// What is added to the rows, or null.
    pub(super) plus: *const f32,
    pub(super) y: *mut f32,
    pub(super) count: usize,
    pub(super) width: usize,
    /// Factors and summands of the columns of a norm, or null.
    pub(super) scale: *const f32,
    pub(super) shift: *const f32,
    pub(super) eps: f64,
}

impl Short {
    /// Rows of numbers that are f32.
    pub(super) fn new<T>(
        op: RowOp,
        (x, plus): (*const T, *const T),
        target: &mut [T],
        (count, width): (usize, usize),
        finish: Finish<T>,
    ) -> Short {
        let (scale, shift) = match finish {
            Finish::Nothing => (std::ptr::null(), std::ptr::null()),
            Finish::Scale(scale) => (scale.as_ptr(), std::ptr::null()),
            Finish::ScaleShift(scale, shift) => (scale.as_ptr(), shift.as_ptr()),
        };
        Short {
            x: x.cast(),
            plus: plus.cast(),
            y: target.as_mut_ptr().cast(),
            count,
            width,
            scale: scale.cast(),
            shift: shift.cast(),
            eps: op.eps(),
        }
    }
}

/// # Safety
/// The pointers reach what they are said to be; the width is the one that the kernel was asked for.
pub(super) type Kernel = unsafe fn(&Short);

/// The kernel for rows of a width, if there is one on this machine.
pub(super) fn kernel(op: RowOp, width: usize) -> Option<Kernel> {
    if !(1..=WIDEST).contains(&width) {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::lanes::level() == crate::cpu::lanes::Level::Avx512 {
        return avx512::kernel(op, width);
    }
    None
}

impl RowOp {
    /// What is added to the spread of a norm.
    pub(super) fn eps(self) -> f64 {
        match self {
            RowOp::LayerNorm { eps } | RowOp::RmsNorm { eps } => eps,
            _ => 0.0,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{Kernel, Short};
    use crate::cpu::math::real::Real;
    use crate::kernels::rowwise::RowOp;

    const LANES: usize = 16;

    macro_rules! by_vectors {
        ($vectors:expr, $kernel:ident $(, $more:literal)*) => {
            [
                $kernel::<1 $(, $more)*> as Kernel,
                $kernel::<2 $(, $more)*>,
                $kernel::<3 $(, $more)*>,
                $kernel::<4 $(, $more)*>,
            ][$vectors - 1]
        };
    }

    pub(super) fn kernel(op: RowOp, width: usize) -> Option<Kernel> {
        let vectors = width.div_ceil(LANES);
        Some(match op {
            RowOp::Softmax { flushes: false } => by_vectors!(vectors, softmax, false, true),
            RowOp::Softmax { flushes: true } => by_vectors!(vectors, softmax, false, false),
            RowOp::LogSoftmax => by_vectors!(vectors, softmax, true, false),
            RowOp::LayerNorm { .. } => by_vectors!(vectors, layer_norm),
            RowOp::RmsNorm { .. } => by_vectors!(vectors, rms_norm),
            RowOp::Sum | RowOp::Mean | RowOp::Amax => return None,
        })
    }

    /// A row in `V` registers, of which the last one is not full.
    type Row<const V: usize> = [__m512; V];

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn mask<const V: usize>(v: usize, width: usize) -> __mmask16 {
        match v + 1 == V {
            true => u16::MAX >> (V * LANES - width),
            false => u16::MAX,
        }
    }

    /// Numbers from the start of a row, and `none` behind its end.
    ///
    /// # Safety
    /// There are as many as the row is wide.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load<const V: usize>(from: *const f32, width: usize, none: __m512) -> Row<V> {
        let mut row = [none; V];
        for (v, row) in row.iter_mut().enumerate() {
            // SAFETY: by the caller; what is masked is not read.
            *row = unsafe { _mm512_mask_loadu_ps(none, mask::<V>(v, width), from.add(v * LANES)) };
        }
        row
    }

    /// A row of the operand.
    ///
    /// # Safety
    /// As of [`Kernel`], for a row that there is.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn taken<const V: usize>(s: &Short, row: usize, none: __m512) -> Row<V> {
        // SAFETY: by the caller.
        unsafe {
            let mut x = load::<V>(s.x.add(row * s.width), s.width, none);
            if !s.plus.is_null() {
                let plus = load::<V>(s.plus.add(row * s.width), s.width, none);
                for (x, plus) in x.iter_mut().zip(plus) {
                    *x = _mm512_add_ps(*x, plus);
                }
            }
            x
        }
    }

    /// Writes a row of the result.
    ///
    /// # Safety
    /// As of [`Kernel`], for a row that there is.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn give<const V: usize>(s: &Short, row: usize, y: Row<V>) {
        for (v, y) in y.into_iter().enumerate() {
            // SAFETY: by the caller; what is masked is not written.
            unsafe { _mm512_mask_storeu_ps(s.y.add(row * s.width + v * LANES), mask::<V>(v, s.width), y) };
        }
    }

    /// As [`give`], with factors and summands.
    ///
    /// # Safety
    /// As there.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn give_norm<const V: usize>(s: &Short, row: usize, mut y: Row<V>) {
        let zero = _mm512_setzero_ps();
        // SAFETY: by the caller.
        unsafe {
            if !s.scale.is_null() {
                for (y, scale) in y.iter_mut().zip(load::<V>(s.scale, s.width, zero)) {
                    *y = _mm512_mul_ps(*y, scale);
                }
            }
            if !s.shift.is_null() {
                for (y, shift) in y.iter_mut().zip(load::<V>(s.shift, s.width, zero)) {
                    *y = _mm512_add_ps(*y, shift);
                }
            }
            give(s, row, y);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn sum<const V: usize>(row: Row<V>) -> f32 {
        let mut total = row[0];
        for part in &row[1..] {
            total = _mm512_add_ps(total, *part);
        }
        _mm512_reduce_add_ps(total)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn squares<const V: usize>(row: Row<V>) -> f32 {
        sum(row.map(|x| _mm512_mul_ps(x, x)))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn softmax<const V: usize, const LOG: bool, const DEEP: bool>(s: &Short) {
        // It changes no maximum, and its exponential no sum.
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        for row in 0..s.count {
            // SAFETY: by the caller.
            let x = unsafe { taken::<V>(s, row, none) };
            let mut most = x[0];
            for part in &x[1..] {
                most = _mm512_max_ps(most, *part);
            }
            // A NaN that the comparison passes over comes back in the exponentials.
            let most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
            let below = x.map(|x| _mm512_sub_ps(x, most));
            let exps = below.map(|x| exponential::<DEEP>(x));
            let total = sum(exps);
            let y = match LOG {
                true => {
                    let log = _mm512_set1_ps(f64::from(total).ln() as f32);
                    below.map(|x| _mm512_sub_ps(x, log))
                }
                false => {
                    let scale = _mm512_set1_ps(1.0 / total);
                    exps.map(|e| _mm512_mul_ps(e, scale))
                }
            };
            // SAFETY: by the caller.
            unsafe { give(s, row, y) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn exponential<const DEEP: bool>(x: __m512) -> __m512 {
        // SAFETY: both are sixteen floats.
        let mut lanes: [f32; LANES] = unsafe { std::mem::transmute(x) };
        for x in &mut lanes {
            *x = match DEEP {
                true => x.exp_deep::<true>(),
                false => x.exp_below::<true>(),
            };
        }
        // SAFETY: as above.
        unsafe { std::mem::transmute(lanes) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn layer_norm<const V: usize>(s: &Short) {
        let zero = _mm512_setzero_ps();
        // Products instead of divisions, which every row would wait for.
        let each = 1.0 / s.width as f64;
        for row in 0..s.count {
            // SAFETY: by the caller.
            let x = unsafe { taken::<V>(s, row, zero) };
            let mut rough = sum(x) * each as f32;
            // What is left of a mean is exact enough where it is within the spread: at once, but for rounding.
            let (mut apart, mut left, mut variance) = ([zero; V], 0.0, 0.0);
            for _ in 0..3 {
                let mean = _mm512_set1_ps(rough);
                for v in 0..V {
                    apart[v] = _mm512_maskz_sub_ps(mask::<V>(v, s.width), x[v], mean);
                }
                left = f64::from(sum(apart)) * each;
                variance = (f64::from(squares(apart)) * each - left * left).max(0.0);
                let better = (f64::from(rough) + left) as f32;
                // Never true of NaN.
                let too_far = left * left > variance;
                if !too_far || better == rough {
                    break;
                }
                rough = better;
            }
            if !(left + variance).is_finite() {
                // SAFETY: by the caller.
                unsafe { give_norm(s, row, wide_norm(x, s.width, s.eps)) };
                continue;
            }
            let left = _mm512_set1_ps(left as f32);
            let scale = _mm512_set1_ps((1.0 / (variance + s.eps).sqrt()) as f32);
            let y = apart.map(|x| _mm512_mul_ps(_mm512_sub_ps(x, left), scale));
            // SAFETY: by the caller.
            unsafe { give_norm(s, row, y) };
        }
    }

    /// A row whose moments overflow, in f64.
    #[cold]
    #[inline(never)]
    fn wide_norm<const V: usize>(x: Row<V>, width: usize, eps: f64) -> Row<V> {
        // SAFETY: both are so many times sixteen floats.
        let mut lanes: [[f32; LANES]; V] = unsafe { std::mem::transmute_copy(&x) };
        let row = &mut lanes.as_flattened_mut()[..width];
        let n = width as f64;
        let mean = row.iter().fold(0.0, |sum, x| sum + f64::from(*x)) / n;
        let apart = |x: f32| f64::from(x) - mean;
        let variance = row.iter().fold(0.0, |sum, x| sum + apart(*x) * apart(*x)) / n;
        let scale = 1.0 / (variance + eps).sqrt();
        row.iter_mut().for_each(|x| *x = (apart(*x) * scale) as f32);
        // SAFETY: as above.
        unsafe { std::mem::transmute_copy(&lanes) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn rms_norm<const V: usize>(s: &Short) {
        let each = 1.0 / s.width as f64;
        for row in 0..s.count {
            // SAFETY: by the caller.
            let x = unsafe { taken::<V>(s, row, _mm512_setzero_ps()) };
            let scale = _mm512_set1_ps((1.0 / (f64::from(squares(x)) * each + s.eps).sqrt()) as f32);
            let y = x.map(|x| _mm512_mul_ps(x, scale));
            // SAFETY: by the caller.
            unsafe { give_norm(s, row, y) };
        }
    }
}
