//! Where ways to compute a linear layer are compared: random operands, errors against float64, times.

use super::{Linear, Operands, Product, pieces};
use crate::driver::{Event, Function, Graph, Stream};
use crate::{Result, kernel};

/// Elements whose error is measured.
const SAMPLES: u64 = 8192;
/// Launches that one measurement holds, recorded as a graph, so that the host does not slow them down.
const REPEATS: usize = 16;

/// Root of the mean square and greatest error, for sums of terms of both signs and for sums of positive ones.
pub(super) type Errors = [[f64; 2]; 2];

/// True if no error is more than twice what it is for the fp32 product.
pub(super) fn counts(errors: &Errors, fp32: &Errors) -> bool {
    let pairs = errors.iter().flatten().zip(fp32.iter().flatten());
    pairs.into_iter().all(|(ours, theirs)| *ours <= 2.0 * theirs)
}

/// Operands in the memory given for tuning.
pub(super) struct Trials {
    linear: Linear,
    stream: Stream,
    operands: Operands,
    stats: u64,
    judge: Function,
}

/// Sizes of x, w, residual, bias and y, in elements.
fn sizes(l: &Linear) -> [usize; 5] {
    let slab = |row: usize| (l.m - 1) * row;
    let residual = if l.residual { slab(l.residual_row) + l.n } else { 0 };
    let bias = if l.bias { l.n } else { 0 };
    [slab(l.x_row) + l.k, l.n * l.k, residual, bias, l.m * l.n]
}

fn aligned(elements: usize) -> usize {
    (4 * elements).next_multiple_of(256)
}

/// Bytes of memory that comparing needs, with what the ways themselves work with.
pub(super) fn bytes(linear: &Linear, workspace: usize) -> usize {
    sizes(linear).into_iter().map(aligned).sum::<usize>() + workspace + 1024
}

impl Trials {
    /// Draws the operands.
    ///
    /// # Safety
    /// There are [`bytes`] of memory of the device, which nobody else uses.
    pub(super) unsafe fn new(stream: Stream, linear: Linear, memory: u64) -> Result<Trials> {
        let module = kernel::module(stream.device(), pieces::NAME, pieces::SOURCE)?;
        let (draw, judge) = (module.function("draw")?, module.function("judge")?);
        let mut next = memory.next_multiple_of(256);
        let all = sizes(&linear);
        let mut at = [0; 5];
        let rows = [linear.x_row, linear.k, linear.residual_row, linear.n, linear.n];
        for (i, elements) in all.into_iter().enumerate().filter(|(_, elements)| *elements > 0) {
            at[i] = next;
            next += aligned(elements) as u64;
            let arguments = [at[i], elements as u64, rows[i] as u64, i as u64 + 1];
            let blocks = elements.div_ceil(256).clamp(1, 4096) as u32;
            // SAFETY: promised by the caller.
            unsafe { draw.launch(stream, [blocks, 1, 1], 256, &arguments)? };
        }
        let [left, right, residual, bias, out] = at;
        Ok(Trials {
            linear,
            stream,
            operands: Operands {
                left,
                right,
                residual,
                bias,
                out,
                aux: 0,
                workspace: next + 256,
            },
            stats: next,
            judge,
        })
    }

    /// Where the weight is.
    pub(super) fn weight(&self) -> u64 {
        self.operands.right
    }

    /// Eight bytes that are free.
    pub(super) fn spare(&self) -> u64 {
        self.stats
    }

    /// How exact a way is.
    ///
    /// # Safety
    /// It is for this product, and works with no more memory than was allowed for.
    pub(super) unsafe fn errors(&self, product: &Product) -> Result<Errors> {
        let (l, o, stats) = (&self.linear, &self.operands, self.stats);
        let mut arguments = vec![o.left, o.right, o.bias, o.residual, o.out, stats, stats + 16];
        arguments.extend([l.m, l.n, l.k, l.x_row, l.residual_row].map(|n| n as u64));
        arguments.extend([u64::from(l.relu), SAMPLES]);
        let mut words = [0u32; 6];
        // SAFETY: promised by the caller.
        unsafe {
            // What is left out is NaN.
            self.stream.fill(o.out, 0xff, 4 * l.m * l.n)?;
            self.stream.fill(stats, 0, 24)?;
            product.launch(self.stream, o)?;
            self.judge.launch(self.stream, [256, 1, 1], 256, &arguments)?;
            for (i, word) in words.iter_mut().enumerate() {
                *word = self.stream.read_u32(stats + 4 * i as u64)?;
            }
        }
        let square = |i: usize| f64::from_bits(u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32);
        let worst = |i: usize| f64::from(f32::from_bits(words[4 + i]));
        Ok([0, 1].map(|i| [(square(i) / SAMPLES as f64).sqrt(), worst(i)]))
    }

    /// Microseconds that a way takes.
    ///
    /// # Safety
    /// As of [`Trials::errors`].
    pub(super) unsafe fn time(&self, product: &Product) -> Result<f64> {
        let device = self.stream.device();
        // SAFETY: promised by the caller.
        let once = |stream| unsafe { product.launch(stream, &self.operands) };
        let graph = Graph::record(device, |stream| (0..REPEATS).try_for_each(|_| once(stream)))?;
        let mut graph = graph.instantiate()?;
        graph.upload(self.stream)?;
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        let mut least = f64::INFINITY;
        for _ in 0..4 {
            start.record(self.stream)?;
            // SAFETY: what was recorded uses this memory alone.
            unsafe { graph.launch(self.stream)? };
            end.record(self.stream)?;
            least = least.min(end.since(&start)? / REPEATS as f64);
        }
        Ok(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_counts_if_no_error_is_twice_that_of_fp32() {
        let fp32 = [[1e-7, 1e-6], [2e-6, 3e-6]];
        assert!(counts(&fp32, &fp32));
        assert!(counts(&[[2e-7, 1e-6], [1e-6, 6e-6]], &fp32));
        assert!(!counts(&[[1e-7, 1e-6], [4.1e-6, 3e-6]], &fp32));
        assert!(!counts(&[[1e-7, f64::NAN], [1e-6, 3e-6]], &fp32));
    }
}
