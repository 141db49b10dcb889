//! Large fp32 products by cuBLASLt's bf16 products of pieces.
//!
//! With `x = x0 + x1 + x2` and `w = w0 + w1 + w2`, the greatest piece first, `[x0 x1 x2]·[w2 w1 w0]` is the sum of the
//! smallest products that count, `[x0 x1]·[w1 w0]` that of the next and `x0·w0` that of the greatest: three products over
//! parts of the same two matrices, each added to the one before. The last decides about the error, and tensor cores round
//! towards zero, which a long sum of the library shows; so it is done by [tiles](super::tiles), which add in chunks.

use hypatia_core::ty::DType;

use super::tiles::{Shape, Tiles};
use super::{Linear, Operands};
use crate::driver::{Device, Function, Stream};
use crate::gemm::{Gemm, Problem};
use crate::{Error, Result, kernel};

/// What the module is called.
pub(super) const NAME: &str = "pieces";
pub(super) const SOURCE: &str = include_str!("pieces.cu");

/// Products below this many multiplications are not worth several launches.
const WORTH: usize = 1 << 27;

/// Bytes at a multiple of which buffers start.
const ALIGNMENT: usize = 256;

/// One product of pieces: where its factors start, in elements, and what it computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    left: usize,
    right: usize,
    pub(super) problem: Problem,
}

/// The library's products for a linear layer, in order.
pub(super) fn parts(whole: &Problem) -> [Part; 2] {
    let k = whole.k;
    let part = |left: usize, right: usize, k: usize, residual| {
        let mut problem = Problem::linear(DType::BF16, whole.m, whole.n, k);
        problem.output = DType::F32;
        problem.left.ld = 3 * whole.k;
        problem.right.ld = 3 * whole.k;
        problem.residual = residual;
        Part { left, right, problem }
    };
    [part(0, 0, 3 * k, whole.residual), part(0, k, 2 * k, Some(whole.out))]
}

/// The kernels around the products.
#[derive(Debug)]
struct Kernels {
    split: Function,
    mend: Function,
    survey: Function,
}

/// A linear layer by pieces of both factors.
#[derive(Debug)]
pub(super) struct Pieces {
    linear: Linear,
    parts: Vec<(Part, Gemm)>,
    top: Tiles,
    kernels: Kernels,
    workspace: usize,
    /// Where the pieces of the weight are.
    weight: u64,
    /// Bits of the greatest magnitude of an activation with which no sum of pieces overflows.
    limit: u32,
}

impl Pieces {
    /// True if it is worth trying.
    pub(super) fn serve(linear: &Linear) -> bool {
        let size = linear.m.saturating_mul(linear.n).saturating_mul(linear.k);
        Tiles::serve(linear)
            && linear.k.is_multiple_of(8)
            && size >= WORTH
            && 3 * linear.k.max(linear.m) < i32::MAX as usize
    }

    /// Bytes of the pieces of a weight.
    pub(super) fn weight_bytes(linear: &Linear) -> usize {
        6 * linear.n * linear.k
    }

    /// Of products that are ready; it has no weight yet.
    pub(super) fn new(device: &'static Device, linear: Linear, parts: Vec<(Part, Gemm)>, top: Shape) -> Result<Pieces> {
        // What the library's products have added up is the residual.
        let last = Linear {
            residual: true,
            residual_row: linear.n,
            ..linear
        };
        let module = kernel::module(device, NAME, SOURCE)?;
        let workspace = parts.iter().map(|(_, gemm)| gemm.workspace()).max().unwrap_or(0);
        Ok(Pieces {
            linear,
            workspace: workspace.next_multiple_of(ALIGNMENT),
            parts,
            top: Tiles::new(device, last, top)?,
            kernels: Kernels {
                split: module.function("split")?,
                mend: module.function("mend")?,
                survey: module.function("survey")?,
            },
            weight: 0,
            limit: 0,
        })
    }

    /// Looks at the weight; the result says whether it is finite and not too small for pieces.
    ///
    /// # Safety
    /// The weight is there, and `scratch` has eight bytes.
    pub(super) unsafe fn survey(&mut self, stream: Stream, weight: u64, scratch: u64) -> Result<bool> {
        let Linear { n, k, .. } = self.linear;
        let blocks = [(n * k).div_ceil(1024).clamp(1, 1024) as u32, 1, 1];
        // SAFETY: promised by the caller.
        let (most, tiny) = unsafe {
            stream.fill(scratch, 0, 8)?;
            let arguments = [weight, scratch, (n * k) as u64];
            self.kernels.survey.launch(stream, blocks, 256, &arguments)?;
            (stream.read_u32(scratch)?, stream.read_u32(scratch + 4)?)
        };
        let Some(limit) = limit(f32::from_bits(most), k).filter(|_| tiny == 0) else {
            return Ok(false);
        };
        self.limit = limit.to_bits();
        Ok(true)
    }

    /// Takes room for the pieces of the weight, and splits it unless that was done before.
    ///
    /// # Safety
    /// The weight is there, and room for [`Pieces::weight_bytes`].
    pub(super) unsafe fn take(&mut self, stream: Stream, weight: u64, room: u64, done: bool) -> Result<()> {
        let Linear { n, k, .. } = self.linear;
        self.weight = room;
        if done {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        unsafe { self.split(stream, [weight, room, 0], n, k, true) }
    }

    /// # Safety
    /// The factor and the room for its pieces are there.
    unsafe fn split(&self, stream: Stream, at: [u64; 3], rows: usize, row: usize, right: bool) -> Result<()> {
        let [from, to, flags] = at;
        let limit = if right { u32::MAX } else { self.limit };
        let (k, row) = (self.linear.k as u64, row as u64);
        let arguments = [from, to, flags, k, row, u64::from(right), u64::from(limit)];
        // SAFETY: promised by the caller.
        unsafe { self.kernels.split.launch(stream, [rows as u32, 1, 1], 256, &arguments) }
    }

    /// Bytes that a run needs: cuBLASLt's, the pieces of the activation, a flag for each of its rows.
    pub(super) fn workspace(&self) -> usize {
        let Linear { m, k, .. } = self.linear;
        self.workspace + (6 * m * k).next_multiple_of(ALIGNMENT) + 4 * m
    }

    /// # Safety
    /// As of [`super::Product::launch`].
    pub(super) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        if o.workspace == 0 || o.left == 0 || o.out == 0 {
            return Err(Error::malformed("a product in pieces that lacks something"));
        }
        let l = &self.linear;
        let pieces = o.workspace + self.workspace as u64;
        let flags = pieces + (6 * l.m * l.k).next_multiple_of(ALIGNMENT) as u64;
        // SAFETY: promised by the caller.
        unsafe { self.split(stream, [o.left, pieces, flags], l.m, l.x_row, false)? };
        for (i, (part, gemm)) in self.parts.iter().enumerate() {
            let operands = Operands {
                left: pieces + 2 * part.left as u64,
                right: self.weight + 2 * part.right as u64,
                residual: if i == 0 { o.residual } else { o.out },
                ..*o
            };
            // SAFETY: as above.
            unsafe { gemm.launch(stream, &operands)? };
        }
        let last = Operands { residual: o.out, ..*o };
        // SAFETY: as above.
        unsafe { self.top.launch(stream, &last)? };
        let mut arguments = vec![o.left, o.right, o.bias, o.residual, o.out, flags];
        arguments.extend([l.n, l.k, l.x_row, l.residual_row].map(|n| n as u64));
        arguments.push(u64::from(l.relu));
        // SAFETY: as above.
        unsafe { (self.kernels.mend).launch(stream, [l.m as u32, 1, 1], 128, &arguments) }
    }
}

/// The greatest magnitude of an activation with which no sum over `k` overflows; none for a weight that has no pieces.
fn limit(most: f32, k: usize) -> Option<f32> {
    // The first piece of what is greater than this would be infinite.
    const GREATEST: f32 = 3.38e38;
    if most.is_nan() || most > GREATEST {
        return None;
    }
    // Sums are at most twice what their greatest terms add up to.
    let sums = f64::from(GREATEST) / (2.0 * k as f64 * f64::from(most).max(f64::MIN_POSITIVE));
    Some(sums.min(f64::from(GREATEST)) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Epilogue;
    use crate::loading::testing::has;
    use crate::nvrtc::{self, Arch};

    #[test]
    fn parts_cover_all_but_the_greatest_products_of_pieces() {
        let whole = Problem::linear(DType::F32, 64, 32, 72).with_epilogue(Epilogue::ReluBias);
        let (k, found) = (72, parts(&whole));
        let mut products = vec![];
        for part in &found {
            for i in 0..part.problem.k {
                let (left, right) = (part.left + i, part.right + i);
                // The same place in both rows.
                assert_eq!(left % k, right % k);
                products.push((left % k, left / k, 2 - right / k));
            }
        }
        products.sort_unstable();
        products.dedup();
        assert_eq!(products.len(), 5 * k);
        assert!(products.iter().all(|(_, a, b)| (1..=2).contains(&(a + b))));
        assert!(found.iter().all(|p| p.problem.epilogue == Epilogue::None));
        assert!(found[0].problem.residual.is_none() && found[1].problem.residual.is_some());
    }

    #[test]
    fn a_weight_says_what_activations_may_be() {
        assert_eq!(limit(f32::NAN, 8), None);
        assert_eq!(limit(f32::INFINITY, 8), None);
        assert_eq!(limit(0.0, 8), Some(3.38e38));
        assert!(limit(1.0, 1024).is_some_and(|l| l > 1e35 && l < 2e35));
    }

    #[test]
    fn it_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for arch in [Arch::new(8, 0), Arch::new(9, 0), Arch::new(10, 0)] {
            nvrtc::compile("pieces", SOURCE, arch).unwrap();
        }
    }
}
