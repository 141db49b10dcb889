//! Products of 16-bit numbers whose result has rows that are no multiple of 16 bytes, as of most vocabularies.
//!
//! cuBLASLt has fast algorithms only for results in which every row starts at a multiple of 16 bytes. Here only every
//! second, fourth or eighth row does. But rows that lie so far apart all start alike, and so the rows `i`, `i + period`,
//! ... are one product, with rows of the result that are `period` times as long, from the first column on that is aligned
//! in them. Nothing is padded or copied; the few columns at both ends of each row are computed by a kernel.

use hypatia_core::ty::DType;

use crate::driver::{Device, Function, Stream};
use crate::gemm::{Epilogue, Gemm, Operands, Problem};
use crate::setting::{Setting, tuned};
use crate::{Error, Result, kernel};

const SOURCE: &str = include_str!("interleaved.cu");

/// The kernels of ours: the name and source of their module.
pub(crate) const MODULE: (&str, &str) = ("interleaved", SOURCE);

/// Products below this many multiplications are not worth several launches.
const WORTH: usize = 1 << 27;

/// Numbers of 16 bits in 16 bytes.
pub(crate) const UNIT: usize = 8;

/// Where the workspace of the library and every copy of a bias start.
pub(crate) const ALIGNMENT: usize = 256;

/// How the rows of a product are taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// From one row to the next that starts alike.
    pub(crate) period: usize,
    /// Columns from the first that is aligned on, as many in each row: the library has them.
    pub(crate) written: usize,
}

impl Rows {
    /// None if all rows start alike, or there are too few columns.
    fn of(n: usize) -> Option<Rows> {
        Rows::within(n, n)
    }

    /// The same where the library has only the first of `n` columns.
    pub(crate) fn within(n: usize, columns: usize) -> Option<Rows> {
        let period = UNIT >> n.trailing_zeros().min(UNIT.trailing_zeros());
        let most = (0..period).map(|row| first(row, n)).max()?;
        let written = columns.checked_sub(most)? / UNIT * UNIT;
        (period > 1 && written > 0).then_some(Rows { period, written })
    }

    /// The product of the rows from this one on that start alike.
    fn problem(&self, whole: &Problem, row: usize) -> Problem {
        let mut problem = *whole;
        problem.m = (whole.m - row).div_ceil(self.period);
        problem.n = self.written;
        problem.left.ld *= self.period;
        problem.out.ld *= self.period;
        problem
    }
}

/// The first column of a row that is aligned.
fn first(row: usize, n: usize) -> usize {
    (UNIT - row * n % UNIT) % UNIT
}

/// A product by interleaved rows.
#[derive(Debug)]
pub(crate) struct Interleaved {
    whole: Problem,
    rows: Rows,
    /// One for each row up to the period.
    products: Vec<Gemm>,
    edges: Function,
    shifted: Function,
    workspace: usize,
    microseconds: f64,
}

impl Interleaved {
    /// True if it is worth trying.
    pub(crate) fn serves(problem: &Problem) -> bool {
        let aligned = |ld: usize| ld.is_multiple_of(UNIT);
        matches!(problem.input, DType::BF16 | DType::F16)
            && problem.output == problem.input
            && matches!(problem.epilogue, Epilogue::None | Epilogue::Bias)
            && problem.residual.is_none()
            && (problem.batch, problem.alignment) == (1, 16)
            && !problem.left.transposed
            && problem.right.transposed
            && [problem.k, problem.left.ld, problem.right.ld].into_iter().all(aligned)
            && problem.out.ld == problem.n
            && problem.m.saturating_mul(problem.n).saturating_mul(problem.k) >= WORTH
    }

    /// A product by the best algorithms for its parts; none if it is not worth trying.
    ///
    /// # Safety
    /// The setting's memory is the device's.
    pub(crate) unsafe fn new(
        device: &'static Device,
        whole: &Problem,
        setting: &mut Setting<'_>,
    ) -> Result<Option<Interleaved>> {
        let Some(rows) = Rows::of(whole.n).filter(|r| Interleaved::serves(whole) && whole.m >= UNIT * r.period) else {
            return Ok(None);
        };
        let module = kernel::module(device, MODULE.0, MODULE.1)?;
        // The kernels of ours: launches of a graph, and reading the left factor at a quarter of what memory gives.
        let mut microseconds = 6.0 + (2 * whole.m * whole.k) as f64 / 1e6;
        let mut products = vec![];
        for row in 0..rows.period {
            // SAFETY: promised by the caller.
            let (product, took) = unsafe { tuned(device, rows.problem(whole, row), setting)? };
            products.push(product);
            microseconds += took;
        }
        let workspace = products.iter().map(Gemm::workspace).max().unwrap_or(0);
        Ok(Some(Interleaved {
            whole: *whole,
            rows,
            products,
            edges: module.function("edges")?,
            shifted: module.function("shifted")?,
            workspace: workspace.next_multiple_of(ALIGNMENT),
            microseconds,
        }))
    }

    /// About what a run takes.
    pub(crate) fn microseconds(&self) -> f64 {
        self.microseconds
    }

    /// Bytes from one copy of the bias to the next.
    fn copy_bytes(&self) -> usize {
        match self.whole.epilogue {
            Epilogue::Bias => (2 * self.rows.written).next_multiple_of(ALIGNMENT),
            _ => 0,
        }
    }

    /// Bytes that it works with.
    pub(crate) fn workspace(&self) -> usize {
        self.workspace + self.rows.period * self.copy_bytes()
    }

    /// # Safety
    /// As of [`Gemm::launch`].
    pub(crate) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let (whole, Rows { period, written }) = (&self.whole, self.rows);
        let (copies, copy) = (o.workspace + self.workspace as u64, self.copy_bytes());
        let bias = if copy > 0 { o.bias } else { 0 };
        let lacks = [o.left, o.right, o.out].contains(&0) || copy > 0 && (o.bias == 0 || o.workspace == 0);
        if lacks || ![o.left, o.right, o.out].iter().all(|a| a.is_multiple_of(16)) {
            return Err(Error::malformed(format!(
                "{whole}: {o:x?} lacks something or is not aligned"
            )));
        }
        if copy > 0 {
            let blocks = [written.div_ceil(256) as u32, period as u32, 1];
            let numbers = [whole.n, written, copy / 2, period].map(|n| n as u64);
            let arguments = [&[o.bias, copies], &numbers[..]].concat();
            // SAFETY: promised by the caller; there is room for the copies.
            unsafe { self.shifted.launch(stream, blocks, 256, &arguments)? };
        }
        for (row, product) in self.products.iter().enumerate() {
            let first = first(row, whole.n);
            let operands = Operands {
                left: o.left + 2 * (row * whole.left.ld) as u64,
                right: o.right + 2 * (first * whole.right.ld) as u64,
                bias: if copy > 0 { copies + (row * copy) as u64 } else { 0 },
                out: o.out + 2 * (row * whole.n + first) as u64,
                ..*o
            };
            // SAFETY: promised by the caller; these are parts of its operands.
            unsafe { product.launch(stream, &operands)? };
        }
        let (m, half) = (whole.m, usize::from(whole.input == DType::F16));
        let numbers = [
            m,
            whole.n,
            whole.k,
            whole.left.ld,
            whole.right.ld,
            written,
            period,
            half,
        ];
        let arguments = [&[o.left, o.right, bias, o.out], &numbers.map(|n| n as u64)[..]].concat();
        // SAFETY: as above.
        unsafe { (self.edges).launch(stream, [m.div_ceil(4) as u32, 1, 1], 128, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc::{self, Arch};

    #[test]
    fn every_element_is_written_once_and_products_are_aligned() {
        for n in (9..90).chain([30522, 50257, 50265]) {
            let Some(rows) = Rows::of(n) else {
                assert!(n.is_multiple_of(UNIT) || n < 2 * UNIT);
                continue;
            };
            assert!(n - rows.written <= 14 && rows.written.is_multiple_of(UNIT));
            let m = 2 * rows.period + 1;
            let mut whole = Problem::linear(DType::BF16, m, n, 64);
            whole.left.ld = 72;
            let mut count = vec![0; m * n];
            for row in 0..rows.period {
                let part = rows.problem(&whole, row);
                let start = row * n + first(row, n);
                assert!(start.is_multiple_of(UNIT) && part.out.ld.is_multiple_of(UNIT));
                assert_eq!(part.left.ld, 72 * rows.period);
                for (r, c) in (0..part.m).flat_map(|r| (0..part.n).map(move |c| (r, c))) {
                    count[start + r * part.out.ld + c] += 1;
                }
            }
            // As the kernel has it.
            for (row, j) in (0..m).flat_map(|row| (0..n - rows.written).map(move |j| (row, j))) {
                let first = first(row % rows.period, n);
                count[row * n + if j < first { j } else { j + rows.written }] += 1;
            }
            assert!(count.iter().all(|c| *c == 1), "{n}");
        }
    }

    #[test]
    fn it_is_for_large_products_of_16_bits() {
        let large = Problem::linear(DType::BF16, 4096, 50257, 768);
        assert!(Interleaved::serves(&large));
        assert!(Interleaved::serves(&large.with_epilogue(Epilogue::Bias)));
        assert!(!Interleaved::serves(&large.with_epilogue(Epilogue::GeluBias)));
        assert!(!Interleaved::serves(&large.with_residual()));
        assert!(!Interleaved::serves(&Problem::linear(DType::BF16, 1, 50257, 768)));
        assert!(!Interleaved::serves(&Problem::linear(DType::BF16, 4096, 50257, 767)));
        assert!(!Interleaved::serves(&Problem::linear(DType::F32, 4096, 50257, 768)));
        assert_eq!(Rows::of(50264), None);
        assert_eq!(Rows::of(50257).map(|r| r.period), Some(8));
        assert_eq!(Rows::of(30522).map(|r| r.period), Some(4));
    }

    #[test]
    fn it_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for arch in [Arch::new(8, 0), Arch::new(9, 0), Arch::new(10, 0)] {
            nvrtc::compile("interleaved", SOURCE, arch).unwrap();
        }
    }
}
