//! How numbers become bf16 tiles: as they are, or as a sum of bf16 pieces whose products are added.
//!
//! A step is 32 terms. A tile of weights holds a step for 16 columns in rows of pairs of terms, a tile of activations
//! a step for 16 rows.

use super::super::lanes::{self, Kernel};
use super::super::linear::Element;
use half::bf16;

/// Terms in a step.
pub const STEP: usize = 32;
/// Columns of a panel, and rows of a tile.
pub const SIDE: usize = 16;
/// Elements in a tile.
pub const TILE: usize = STEP * SIDE;

/// Zero, and magnitudes from `least` on, as bits of fp32; `count` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Magnitudes {
    least: u32,
    count: u32,
}

impl Magnitudes {
    /// All numbers, Inf and NaN too.
    const ALL: Magnitudes = Magnitudes {
        least: 0,
        count: u32::MAX,
    };

    /// Those for which split sums are as good as sums in fp32.
    ///
    /// Tiles take subnormal pieces and subnormal sums for zero. From 2^-102 on all pieces are normal. A product of at
    /// least 2^-96 loses at most six times 2^-126, an eighth of a rounding. Below the other end no sum of `k` products
    /// overflows, and no piece is rounded up to infinity.
    fn beside(weights: &[&[f32]]) -> Option<Magnitudes> {
        let k = weights.first().map_or(0, |row| row.len());
        let (least, most) = lanes::dispatch(Extremes(weights));
        let (least, most) = match most {
            0 => (f64::INFINITY, 0.0),
            _ => (f64::from(f32::from_bits(least)), f64::from(f32::from_bits(most))),
        };
        let power = |exponent: i32| f64::from(exponent).exp2();
        let exact = power(-102);
        let from = (power(-96) / least).max(exact);
        let to = (power(125) / (most * k.max(1) as f64)).min(power(125));
        // Weights that leave less than this to activations are better served in fp32.
        let usual = most.is_finite() && least >= exact && from <= power(-40) && to >= power(40);
        usual.then(|| {
            let least = (from as f32).to_bits();
            Magnitudes {
                least,
                count: (to as f32).to_bits() - least,
            }
        })
    }
}

/// The bits of the smallest magnitude that is not zero, and of the largest. NaN is larger than infinity.
struct Extremes<'a>(&'a [&'a [f32]]);

impl Kernel for Extremes<'_> {
    type Output = (u32, u32);

    #[inline(always)]
    fn run<const FMA: bool>(self) -> (u32, u32) {
        let (mut least, mut most) = (u32::MAX, 0);
        for row in self.0 {
            for w in *row {
                let bits = w.to_bits() & (u32::MAX >> 1);
                // Zero becomes the largest.
                least = least.min(bits.wrapping_sub(1));
                most = most.max(bits);
            }
        }
        (least.wrapping_add(1), most)
    }
}

/// In which order the sums of a part are made.
#[derive(Debug, Clone, Copy)]
pub struct Blocking {
    /// Steps after which sums rest in memory.
    pub depth: usize,
    /// Activations stream by two panels, which stay in the first-level cache.
    pub stream: bool,
    /// Columns that are finished together: many, where activations of one pass fill the near caches.
    pub group: usize,
    /// Rows of a part, at least, if there are as many.
    pub rows: usize,
}

/// A number format over tiles.
pub trait Format: Send + Sync + 'static {
    /// What activations, weights and results are.
    type Value: Element;
    /// bf16 pieces of a number.
    const PIECES: usize;
    /// Pieces of the activation and of the weight whose products are added, in this order: small ones first, and
    /// equal weight pieces next to each other.
    const PAIRS: &'static [(usize, usize)];

    /// How sums of so many steps are made, of which a thread has so many rows.
    fn blocking(steps: usize, rows: usize) -> Blocking;

    /// Terms of a step that stand next to each other: the first of pair 0, and how far apart those of a pair are.
    const PAIR: (usize, usize);

    /// The pieces of some numbers, largest first; those past `PIECES` are not used.
    fn split(values: [Self::Value; SIDE]) -> [[u16; SIDE]; 3];

    /// Activations that tiles multiply with these weights as well as fp32 does; None if they do for hardly any.
    fn range(weights: &[&[Self::Value]]) -> Option<Magnitudes>;

    /// Writes a step of a row: at most 32 terms, the rest zero, each piece `apart` elements from the last.
    /// Answers false if a term is out of range.
    ///
    /// # Safety
    /// The machine has AVX-512 F and BW; `from` has `terms` elements, and 32 fit at `to` and at every piece.
    #[cfg(target_arch = "x86_64")]
    unsafe fn write(from: *const Self::Value, terms: usize, to: *mut u16, apart: usize, range: Magnitudes) -> bool;
}

/// Packs a panel: up to 16 rows of weights, which become columns of tiles.
pub struct PackPanel<'a, F: Format> {
    pub rows: &'a [&'a [F::Value]],
    /// Zeroed.
    pub to: &'a mut [u16],
}

impl<F: Format> Kernel for PackPanel<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let zero = F::Value::narrow(0.0);
        for (step, tiles) in self.to.chunks_mut(F::PIECES * TILE).enumerate() {
            for pair in 0..SIDE {
                let term = step * STEP + pair * F::PAIR.0;
                let (mut low, mut high) = ([zero; SIDE], [zero; SIDE]);
                for (column, row) in self.rows.iter().enumerate() {
                    low[column] = row.get(term).copied().unwrap_or(zero);
                    high[column] = row.get(term + F::PAIR.1).copied().unwrap_or(zero);
                }
                let (low, high) = (F::split(low), F::split(high));
                for piece in 0..F::PIECES {
                    let to = &mut tiles[piece * TILE + pair * 2 * SIDE..][..2 * SIDE];
                    for column in 0..SIDE {
                        to[2 * column] = low[piece][column];
                        to[2 * column + 1] = high[piece][column];
                    }
                }
            }
        }
    }
}

/// bf16 itself.
pub struct Whole;

/// fp32 in two pieces, without the product of the small ones.
pub struct Three;

/// fp32 in three pieces, without the products that are too small to matter.
pub struct Six;

impl Format for Whole {
    type Value = bf16;
    const PIECES: usize = 1;
    const PAIRS: &'static [(usize, usize)] = &[(0, 0)];
    const PAIR: (usize, usize) = (2, 1);

    /// What a row block and two panels need stays in near caches, up to 2048 terms or so. Beyond, sums wait in memory
    /// while activations go by short panels, which pays if there are many rows.
    fn blocking(steps: usize, rows: usize) -> Blocking {
        match steps >= 128 && rows >= 256 {
            true => Blocking {
                depth: 16,
                stream: true,
                group: 512,
                rows: 256,
            },
            false => Blocking {
                depth: 128,
                stream: steps <= 16,
                group: 128,
                rows: 128,
            },
        }
    }

    #[inline(always)]
    fn split(values: [bf16; SIDE]) -> [[u16; SIDE]; 3] {
        [values.map(bf16::to_bits), [0; SIDE], [0; SIDE]]
    }

    /// What tiles do to the smallest numbers of bf16, they do in torch too.
    fn range(_: &[&[bf16]]) -> Option<Magnitudes> {
        Some(Magnitudes::ALL)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn write(from: *const bf16, terms: usize, to: *mut u16, _: usize, _: Magnitudes) -> bool {
        use std::arch::x86_64::*;
        // SAFETY: the caller's obligation; masked lanes are not read.
        unsafe {
            let row = match terms {
                STEP.. => _mm512_loadu_si512(from.cast()),
                _ => _mm512_maskz_loadu_epi16((1 << terms) - 1, from.cast()),
            };
            _mm512_storeu_si512(to.cast(), row);
        }
        true
    }
}

macro_rules! pieces {
    ($name:ident, $pieces:literal, $pairs:expr) => {
        impl Format for $name {
            type Value = f32;
            const PIECES: usize = $pieces;
            const PAIRS: &'static [(usize, usize)] = &$pairs;
            /// Two vectors are merged without a shuffle.
            const PAIR: (usize, usize) = (1, SIDE);

            /// Short sums round less, as long as they are added to each other outside of tiles.
            fn blocking(_: usize, _: usize) -> Blocking {
                Blocking {
                    depth: 16,
                    stream: false,
                    group: 512,
                    rows: 256,
                }
            }

            #[inline(always)]
            fn split(values: [f32; SIDE]) -> [[u16; SIDE]; 3] {
                split(values)
            }

            fn range(weights: &[&[f32]]) -> Option<Magnitudes> {
                Magnitudes::beside(weights)
            }

            #[cfg(target_arch = "x86_64")]
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn write(from: *const f32, terms: usize, to: *mut u16, apart: usize, range: Magnitudes) -> bool {
                // SAFETY: handed on.
                unsafe { write_pieces::<$pieces>(from, terms, to, apart, range) }
            }
        }
    };
}
pieces!(Three, 2, [(1, 0), (0, 0), (0, 1)]);
pieces!(Six, 3, [(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)]);

const HIGH: u32 = 0xffff_0000;

/// Each piece is what is left, rounded to bf16. The last rest is zero, for numbers whose pieces are normal.
#[inline(always)]
fn split(values: [f32; SIDE]) -> [[u16; SIDE]; 3] {
    let mut rest = values;
    std::array::from_fn(|_| {
        let mut pieces = [0; SIDE];
        for (piece, rest) in pieces.iter_mut().zip(&mut rest) {
            let bits = rest.to_bits().wrapping_add(0x8000) & HIGH;
            *rest -= f32::from_bits(bits);
            *piece = (bits >> 16) as u16;
        }
        pieces
    })
}

/// [`split`] for a step.
///
/// # Safety
/// As for [`Format::write`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn write_pieces<const PIECES: usize>(
    from: *const f32,
    terms: usize,
    to: *mut u16,
    apart: usize,
    range: Magnitudes,
) -> bool {
    use std::arch::x86_64::*;
    let half = _mm512_set1_epi32(0x8000);
    let high = _mm512_set1_epi32(HIGH as i32);
    let magnitude = _mm512_set1_epi32(i32::MAX);
    let (least, count) = (
        _mm512_set1_epi32(range.least as i32),
        _mm512_set1_epi32(range.count as i32),
    );
    let mask = |terms: usize| -> __mmask16 { if terms >= SIDE { u16::MAX } else { (1 << terms) - 1 } };
    // SAFETY: the caller's obligation; masked lanes are not read.
    let mut rest = unsafe {
        match terms {
            STEP.. => [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(SIDE))],
            _ => [
                _mm512_maskz_loadu_ps(mask(terms), from),
                _mm512_maskz_loadu_ps(mask(terms.saturating_sub(SIDE)), from.wrapping_add(SIDE)),
            ],
        }
    };
    let mut special = 0;
    for value in rest {
        let bits = _mm512_and_si512(_mm512_castps_si512(value), magnitude);
        let some = _mm512_test_epi32_mask(bits, bits);
        special |= _mm512_mask_cmpge_epu32_mask(some, _mm512_sub_epi32(bits, least), count);
    }
    for piece in 0..PIECES {
        let up = rest.map(|value| _mm512_add_epi32(_mm512_castps_si512(value), half));
        let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(up[0]), up[1]);
        // SAFETY: the caller's obligation.
        unsafe { _mm512_storeu_si512(to.add(piece * apart).cast(), both) };
        for (value, up) in rest.iter_mut().zip(up) {
            *value = _mm512_sub_ps(*value, _mm512_castsi512_ps(_mm512_and_si512(up, high)));
        }
    }
    special == 0
}
