//! How numbers become bf16 tiles: as they are, or as a sum of bf16 pieces whose products are added.
//!
//! A step is 32 terms. A tile of weights holds a step for 16 columns in rows of pairs of terms, a tile of activations
//! a step for 16 rows.

use super::super::linear::Element;
use half::bf16;

/// Terms in a step.
pub const STEP: usize = 32;
/// Columns of a panel, and rows of a tile.
pub const SIDE: usize = 16;
/// Elements in a tile.
pub const TILE: usize = STEP * SIDE;

/// A number format over tiles.
pub trait Format: Send + Sync + 'static {
    /// What activations, weights and results are.
    type Value: Element;
    /// bf16 pieces of a number.
    const PIECES: usize;
    /// Pieces of the activation and of the weight whose products are added, in this order: small ones first, and
    /// equal weight pieces next to each other.
    const PAIRS: &'static [(usize, usize)];

    /// Steps after which sums rest in memory. With one piece, what a row block and two panels need stays in near caches.
    /// With several, short sums round less, as long as they are added to each other outside of tiles.
    const DEPTH: usize;

    /// Columns that are finished together: many, where activations of one pass fill the near caches.
    const GROUP: usize;
    /// Rows of a part, at least, if there are as many.
    const ROWS: usize;

    /// Where a term of a step stands in a row of a tile.
    fn place(term: usize) -> usize;

    /// The pieces, largest first; those past `PIECES` are not used.
    fn split(value: Self::Value) -> [u16; 3];

    /// Writes a step of a row: at most 32 terms, the rest zero, each piece `apart` elements from the last.
    /// Answers false if a term is not finite and the pieces cannot stand for it.
    ///
    /// # Safety
    /// The machine has AVX-512 F and BW; `from` has `terms` elements, and 32 fit at `to` and at every piece.
    #[cfg(target_arch = "x86_64")]
    unsafe fn write(from: *const Self::Value, terms: usize, to: *mut u16, apart: usize) -> bool;
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
    const DEPTH: usize = 64;
    const GROUP: usize = 128;
    const ROWS: usize = 128;

    fn place(term: usize) -> usize {
        term
    }

    fn split(value: bf16) -> [u16; 3] {
        [value.to_bits(), 0, 0]
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn write(from: *const bf16, terms: usize, to: *mut u16, _: usize) -> bool {
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
            const DEPTH: usize = 16;
            const GROUP: usize = 512;
            const ROWS: usize = 256;

            /// Terms 16 apart form a pair, so that two vectors are merged without a shuffle.
            fn place(term: usize) -> usize {
                term % SIDE * 2 + term / SIDE
            }

            fn split(value: f32) -> [u16; 3] {
                split(value)
            }

            #[cfg(target_arch = "x86_64")]
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn write(from: *const f32, terms: usize, to: *mut u16, apart: usize) -> bool {
                // SAFETY: handed on.
                unsafe { write_pieces::<$pieces>(from, terms, to, apart) }
            }
        }
    };
}
pieces!(Three, 2, [(1, 0), (0, 0), (0, 1)]);
pieces!(Six, 3, [(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)]);

const HIGH: u32 = 0xffff_0000;
const EXPONENT: u32 = 0x7f80_0000;

/// Each piece is what is left, rounded to bf16; near the largest numbers it is cut off instead, since rounding would
/// overflow.
fn split(value: f32) -> [u16; 3] {
    let mut rest = value;
    std::array::from_fn(|_| {
        let bits = rest.to_bits();
        let up = bits.wrapping_add(0x8000);
        let piece = if up & EXPONENT == EXPONENT { bits } else { up } & HIGH;
        rest -= f32::from_bits(piece);
        (piece >> 16) as u16
    })
}

/// [`split`] for a step.
///
/// # Safety
/// As for [`Format::write`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn write_pieces<const PIECES: usize>(from: *const f32, terms: usize, to: *mut u16, apart: usize) -> bool {
    use std::arch::x86_64::*;
    let half = _mm512_set1_epi32(0x8000);
    let high = _mm512_set1_epi32(HIGH as i32);
    let exponent = _mm512_set1_epi32(EXPONENT as i32);
    let mask = |terms: usize| -> __mmask16 { if terms >= SIDE { u16::MAX } else { (1 << terms) - 1 } };
    // SAFETY: the caller's obligation; masked lanes are not read.
    let mut rest = unsafe {
        [
            _mm512_maskz_loadu_ps(mask(terms), from),
            _mm512_maskz_loadu_ps(mask(terms.saturating_sub(SIDE)), from.wrapping_add(SIDE)),
        ]
    };
    let mut special = 0;
    for value in rest {
        special |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(value), exponent), exponent);
    }
    for piece in 0..PIECES {
        let mut kept = [half; 2];
        for (kept, value) in kept.iter_mut().zip(rest) {
            let bits = _mm512_castps_si512(value);
            let up = _mm512_add_epi32(bits, half);
            let over = _mm512_cmpeq_epi32_mask(_mm512_and_si512(up, exponent), exponent);
            *kept = _mm512_mask_mov_epi32(up, over, bits);
        }
        let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(kept[0]), kept[1]);
        // SAFETY: the caller's obligation.
        unsafe { _mm512_storeu_si512(to.add(piece * apart).cast(), both) };
        for (value, kept) in rest.iter_mut().zip(kept) {
            *value = _mm512_sub_ps(*value, _mm512_castsi512_ps(_mm512_and_si512(kept, high)));
        }
    }
    special == 0
}
