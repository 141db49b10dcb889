//! Activations by tables, for AVX-512: a polynomial for each of 32 pieces, every coefficient picked out of two registers
//! by one permutation. They take half the time of the formulas in [`single`](super::single) and are as accurate.
//!
//! The coefficients are computed when a table is first used, from the function in f64.

use std::arch::x86_64::*;
use std::sync::LazyLock;

use super::Function;
use crate::cpu::lanes::Ahead;

/// Pieces: as many numbers as a permutation of two registers chooses from.
const PIECES: usize = 32;
/// Coefficients after the constant.
const DEGREE: usize = 7;
/// Lanes of a vector.
const LANES: usize = 16;
/// Adding it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// What becomes of the polynomial's value q.
#[derive(Clone, Copy)]
enum Form {
    /// q with the sign of x.
    Odd,
    /// max(x, 0) - |x| q: a function x (1 - q(x)) with q(-x) = 1 - q(x).
    Gate,
    /// 1 - q right of zero, q left of it.
    Step,
}

/// A function in pieces of |x|.
#[repr(C, align(64))]
pub(crate) struct Pieces {
    centres: [f32; PIECES],
    /// By power, then by piece.
    coefficients: [[f32; PIECES]; DEGREE + 1],
    /// Pieces for each 1 of |x|.
    density: f32,
    /// Where the last piece ends. Right of it the value there will do; left of its opposite only for odd functions.
    limit: f32,
    form: Form,
}

macro_rules! tables {
    ($($name:ident $form:ident to $limit:literal, |$a:ident| $q:expr;)*) => {
        $(
            #[doc = concat!("The pieces of ", stringify!($name), ".")]
            pub(super) fn $name() -> &'static Pieces {
                static TABLE: LazyLock<Box<Pieces>> = LazyLock::new(|| Pieces::new(Form::$form, $limit, |$a| $q));
                &TABLE
            }
        )*
    };
}

tables! {
    erf Odd to 4.0, |a| libm::erf(a);
    tanh Odd to 9.25, |a| a.tanh();
    sigmoid Step to 18.0, |a| 1.0 / (1.0 + a.exp());
    silu Gate to 18.0, |a| 1.0 / (1.0 + a.exp());
    gelu Gate to 6.0, |a| 0.5 * libm::erfc(a * std::f64::consts::FRAC_1_SQRT_2);
    gelu_tanh Gate to 5.5, |a| 1.0 / (1.0 + ((8.0 / std::f64::consts::PI).sqrt() * (a + 0.044715 * a * a * a)).exp());
}

impl Pieces {
    fn new(form: Form, limit: f32, f: impl Fn(f64) -> f64) -> Box<Pieces> {
        // The limit itself is to be of the last piece.
        let width = f64::from(limit) / (PIECES as f64 - 0.51);
        let mut table = Box::new(Pieces {
            centres: [0.0; PIECES],
            coefficients: [[0.0; PIECES]; DEGREE + 1],
            density: (1.0 / width) as f32,
            limit,
            form,
        });
        for piece in 0..PIECES {
            let centre = centre_near(piece as f64 * width, &f);
            table.centres[piece] = centre as f32;
            for (power, c) in fit(&f, centre, 0.505 * width).into_iter().enumerate() {
                // Of odd functions t itself is added apart: near zero the rounding of its coefficient would show.
                let apart = matches!(form, Form::Odd) && power == 1;
                table.coefficients[power][piece] = (c - f64::from(u8::from(apart))) as f32;
            }
        }
        table
    }

    /// Writes the function of `len` numbers, a multiple of 16; `f` is the same function, for where the pieces end.
    ///
    /// # Safety
    /// The machine must have AVX-512. The numbers must be readable and the results writable, in the same memory or in
    /// memory apart.
    pub(super) unsafe fn map<F: Function>(&self, f: F, x: *const f32, y: *mut f32, len: usize, ahead: Ahead) {
        // SAFETY: as promised by the caller.
        unsafe {
            match self.form {
                Form::Odd => self.run::<F, 0>(f, x, y, len, ahead),
                Form::Gate => self.run::<F, 1>(f, x, y, len, ahead),
                Form::Step => self.run::<F, 2>(f, x, y, len, ahead),
            }
        }
    }

    /// # Safety
    /// As of [`Pieces::map`]; `FORM` is the number of the form.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn run<F: Function, const FORM: u8>(&self, f: F, x: *const f32, y: *mut f32, len: usize, mut ahead: Ahead) {
        let mut at = 0;
        // SAFETY: as promised by the caller.
        unsafe {
            // Two vectors alternate, so that one computes while the other waits.
            while at + 2 * LANES <= len {
                ahead.fetch::<2>();
                self.vectors::<F, FORM, 2>(f, x.add(at), y.add(at));
                at += 2 * LANES;
            }
            if at < len {
                self.vectors::<F, FORM, 1>(f, x.add(at), y.add(at));
            }
        }
    }

    /// # Safety
    /// As of [`Pieces::run`], for `K` vectors.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn vectors<F: Function, const FORM: u8, const K: usize>(&self, f: F, x: *const f32, y: *mut f32) {
        let zero = _mm512_setzero_ps();
        let (mut v, mut a, mut t, mut q) = ([zero; K], [zero; K], [zero; K], [zero; K]);
        let mut piece = [_mm512_setzero_si512(); K];
        for k in 0..K {
            // SAFETY: readable, as promised by the caller.
            v[k] = unsafe { _mm512_loadu_ps(x.add(k * LANES)) };
            // In this order NaN stays.
            a[k] = _mm512_min_ps(_mm512_set1_ps(self.limit), _mm512_abs_ps(v[k]));
            let shifted = _mm512_fmadd_ps(a[k], _mm512_set1_ps(self.density), _mm512_set1_ps(ROUND));
            piece[k] = _mm512_castps_si512(shifted);
            t[k] = _mm512_sub_ps(a[k], pick(&self.centres, piece[k]));
            q[k] = pick(&self.coefficients[DEGREE], piece[k]);
        }
        for power in (0..DEGREE).rev() {
            for k in 0..K {
                let mut next = pick(&self.coefficients[power], piece[k]);
                if FORM == 0 && power == 0 {
                    next = _mm512_add_ps(next, t[k]);
                }
                q[k] = _mm512_fmadd_ps(q[k], t[k], next);
            }
        }
        for k in 0..K {
            let mut result = match FORM {
                0 => _mm512_or_ps(q[k], _mm512_and_ps(v[k], _mm512_set1_ps(-0.0))),
                // In this order NaN and the sign of zero stay.
                1 => _mm512_fnmadd_ps(a[k], q[k], _mm512_max_ps(zero, v[k])),
                _ => {
                    let right = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(v[k], zero);
                    _mm512_mask_sub_ps(q[k], right, _mm512_set1_ps(1.0), q[k])
                }
            };
            if FORM != 0 {
                let far = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(v[k], _mm512_set1_ps(-self.limit));
                if far != 0 {
                    let mut values = [0f32; LANES];
                    // SAFETY: an array of as many numbers.
                    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), v[k]) };
                    for value in &mut values {
                        *value = f.call::<true>(*value);
                    }
                    // SAFETY: as above.
                    result = unsafe { _mm512_mask_loadu_ps(result, far, values.as_ptr()) };
                }
            }
            // SAFETY: writable, as promised by the caller.
            unsafe { _mm512_storeu_ps(y.add(k * LANES), result) };
        }
    }
}

/// The entries of a table by the low five bits of an index.
#[inline]
#[target_feature(enable = "avx512f")]
fn pick(table: &[f32; PIECES], index: __m512i) -> __m512 {
    // SAFETY: two vectors are as long as the table.
    let (low, high) = unsafe {
        (
            _mm512_loadu_ps(table.as_ptr()),
            _mm512_loadu_ps(table.as_ptr().add(LANES)),
        )
    };
    _mm512_permutex2var_ps(low, index, high)
}

/// A number near `x`, and exact in f32, whose function is almost exact in f32, too: its rounding would be half the error.
fn centre_near(x: f64, f: impl Fn(f64) -> f64) -> f64 {
    let off = |c: &f64| {
        let value = f(*c);
        if value == 0.0 {
            0.0
        } else {
            (f64::from(value as f32) / value - 1.0).abs()
        }
    };
    let grid = 2f64.powi(-18);
    let first = (x / grid).round() * grid;
    (0..128)
        .map(|i| first + f64::from(i) * grid)
        .min_by(|a, b| off(a).total_cmp(&off(b)))
        .unwrap_or(first)
}

/// The coefficients of a polynomial in t = x - centre that is exact at the centre, for |t| <= reach.
fn fit(f: impl Fn(f64) -> f64, centre: f64, reach: f64) -> [f64; DEGREE + 1] {
    // The slope towards the centre as a series of Chebyshev's polynomials, cut off where it is small.
    const NODES: usize = 16;
    let angle = |node: usize| std::f64::consts::PI * (node as f64 + 0.5) / NODES as f64;
    let slopes: [f64; NODES] = std::array::from_fn(|node| {
        let t = reach * angle(node).cos();
        (f(centre + t) - f(centre)) / t
    });
    let mut powers = [0.0; DEGREE];
    let (mut before, mut now) = ([0.0; DEGREE], [0.0; DEGREE]);
    now[0] = 1.0;
    for order in 0..DEGREE {
        let weights = slopes
            .iter()
            .enumerate()
            .map(|(node, s)| s * (order as f64 * angle(node)).cos());
        let weight = weights.sum::<f64>() * if order == 0 { 1.0 } else { 2.0 } / NODES as f64;
        (0..DEGREE).for_each(|power| powers[power] += weight * now[power]);
        // T₁ = u, and Tₙ₊₁ = 2u Tₙ - Tₙ₋₁.
        let factor = if order == 0 { 1.0 } else { 2.0 };
        let next = std::array::from_fn(|p| if p == 0 { 0.0 } else { factor * now[p - 1] } - before[p]);
        (before, now) = (now, next);
    }
    let mut coefficients = [0.0; DEGREE + 1];
    coefficients[0] = f(centre);
    for (power, c) in powers.into_iter().enumerate() {
        coefficients[power + 1] = c / reach.powi(power as i32);
    }
    coefficients
}
