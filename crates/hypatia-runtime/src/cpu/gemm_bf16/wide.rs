//! Tiles multiplied in fp32, each weight widened as it is read.

use super::format::{Format, SIDE, STEP, TILE};
use super::{Element, GROUP};
use crate::cpu::lanes::{Kernel, bf16_to_f32};
use std::marker::PhantomData;

/// Rows that a kernel takes at once. With four the compiler runs out of registers.
pub const ROWS: usize = 3;
/// Rows of a part: widened activations stay in the second-level cache.
pub const PART_ROWS: usize = 63;
/// Pairs of terms in a step.
const PAIRS: usize = STEP / 2;

/// Copies a row as fp32; what is left of the destination becomes zero.
pub struct Widen<'a, T> {
    pub from: &'a [T],
    pub to: &'a mut [f32],
}

impl<T: Element> Kernel for Widen<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (to, rest) = self.to.split_at_mut(self.from.len());
        to.iter_mut().zip(self.from).for_each(|(t, f)| *t = f.widen());
        rest.fill(0.0);
    }
}

/// Sums of a few rows for a group of columns.
pub struct Multiply<'a, F> {
    pub format: PhantomData<F>,
    /// Rows of `steps` steps.
    pub x: &'a [f32],
    /// Panels of as many.
    pub w: &'a [u16],
    /// Rows of a group.
    pub sums: &'a mut [f32],
    pub rows: usize,
    pub panels: usize,
    pub steps: usize,
}

impl<F: Format> Kernel for Multiply<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        assert!(
            self.x.len() >= self.rows * self.steps * STEP
                && self.w.len() >= self.panels * self.steps * F::PIECES * TILE
        );
        match self.rows {
            1 => self.by_panels::<1, 2, FMA>(),
            2 => self.by_panels::<2, 2, FMA>(),
            _ => self.by_panels::<ROWS, 1, FMA>(),
        }
    }
}

impl<F: Format> Multiply<'_, F> {
    #[inline(always)]
    fn by_panels<const R: usize, const CHAINS: usize, const FMA: bool>(&mut self) {
        match self.panels {
            1 => self.block::<R, 1, CHAINS, FMA>(),
            2 => self.block::<R, 2, CHAINS, FMA>(),
            3 => self.block::<R, 3, CHAINS, FMA>(),
            _ => self.block::<R, 4, CHAINS, FMA>(),
        }
    }

    /// With few rows the latency of additions shows, unless even and odd terms are summed apart.
    #[inline(always)]
    fn block<const R: usize, const P: usize, const CHAINS: usize, const FMA: bool>(&mut self) {
        let terms = self.steps * STEP;
        let mut sums = [[[[0f32; SIDE]; CHAINS]; P]; R];
        for (step, pair) in (0..self.steps).flat_map(|step| (0..PAIRS).map(move |pair| (step, pair))) {
            for p in 0..P {
                // SAFETY: `run` has checked that there are as many rows, panels and steps.
                let (even, odd) = unsafe { pair_of::<F>(self.w, p * self.steps + step, pair) };
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: as above.
                    let (a, b) = unsafe {
                        let x = self.x.as_ptr().add(r * terms + step * STEP + pair * F::PAIR.0);
                        (*x, *x.add(F::PAIR.1))
                    };
                    add::<FMA>(&mut sums[p][0], a, &even);
                    add::<FMA>(&mut sums[p][CHAINS - 1], b, &odd);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, chains) in sums.iter().enumerate() {
                let to = &mut self.sums[r * GROUP + p * SIDE..][..SIDE];
                for (lane, to) in to.iter_mut().enumerate() {
                    *to = chains.iter().map(|c| c[lane]).sum();
                }
            }
        }
    }
}

#[inline(always)]
fn add<const FMA: bool>(sums: &mut [f32; SIDE], x: f32, weights: &[f32; SIDE]) {
    for (sum, w) in sums.iter_mut().zip(weights) {
        *sum = if FMA { x.mul_add(*w, *sum) } else { *sum + x * w };
    }
}

/// The weights of a pair of terms for 16 columns.
///
/// # Safety
/// There are as many steps, counted over all panels.
#[inline(always)]
unsafe fn pair_of<F: Format>(w: &[u16], step: usize, pair: usize) -> ([f32; SIDE], [f32; SIDE]) {
    let (mut even, mut odd) = ([0f32; SIDE], [0f32; SIDE]);
    // From the smallest piece on: their sum is exact.
    for piece in (0..F::PIECES).rev() {
        let at = (step * F::PIECES + piece) * TILE + pair * 2 * SIDE;
        // SAFETY: the caller's obligation.
        let weights = unsafe { &*w.as_ptr().add(at).cast::<[u32; SIDE]>() };
        for lane in 0..SIDE {
            let (low, high) = (
                bf16_to_f32(weights[lane] as u16),
                f32::from_bits(weights[lane] & !0xffff),
            );
            let first = piece + 1 == F::PIECES;
            even[lane] = if first { low } else { even[lane] + low };
            odd[lane] = if first { high } else { odd[lane] + high };
        }
    }
    (even, odd)
}

/// Writes the weights of some panels in fp32, term after term.
pub struct Unpack<'a, F> {
    pub format: PhantomData<F>,
    /// Panels of `steps` steps.
    pub w: &'a [u16],
    pub panels: usize,
    pub steps: usize,
    /// Terms of all panels.
    pub to: &'a mut [f32],
}

impl<F: Format> Kernel for Unpack<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        assert!(self.w.len() >= self.panels * self.steps * F::PIECES * TILE);
        let width = self.panels * SIDE;
        for (step, to) in self.to.chunks_mut(STEP * width).enumerate() {
            for (panel, pair) in (0..self.panels).flat_map(|panel| (0..PAIRS).map(move |pair| (panel, pair))) {
                // SAFETY: checked above.
                let (even, odd) = unsafe { pair_of::<F>(self.w, panel * self.steps + step, pair) };
                let term = pair * F::PAIR.0;
                for (term, weights) in [(term, even), (term + F::PAIR.1, odd)] {
                    // The last step may have fewer terms.
                    if let Some(to) = to
                        .get_mut(term * width + panel * SIDE..)
                        .and_then(|to| to.get_mut(..SIDE))
                    {
                        to.copy_from_slice(&weights);
                    }
                }
            }
        }
    }
}
