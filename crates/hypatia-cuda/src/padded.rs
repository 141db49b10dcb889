//! The same products as those of [interleaved rows](crate::interleaved), where there are few rows: several products would
//! read the weight several times. The library writes aligned rows into memory of their own, from where a kernel copies
//! them and computes what is left at both ends of each row.

use hypatia_core::ty::DType;
use hypatia_runtime::tuning::Entry;

use crate::driver::{Device, Function, Stream};
use crate::gemm::{Epilogue, Gemm, Launch, Operands, Problem};
use crate::interleaved::{ALIGNMENT, Interleaved, MODULE, Rows, UNIT};
use crate::setting::{Setting, key_of, times, tuned};
use crate::{Error, Result, kernel};

/// Of the kernels; measurements of others do not count.
const VERSION: u32 = 2;

/// Bytes of a copy that are worth a part of a plan's memory.
const MOST: usize = 128 << 20;

/// Blocks along y.
const MOST_ROWS: usize = 65535;

/// What it is called in the tuning database.
const NAME: &str = "padded";

/// A product into aligned rows, and what copies them.
#[derive(Debug)]
pub(crate) struct Padded {
    whole: Problem,
    rows: Rows,
    product: Gemm,
    spread: Function,
    microseconds: f64,
}

/// The columns that the library computes, and those of them that are copied.
fn parts(whole: &Problem) -> Option<(Problem, Rows)> {
    let mut product = *whole;
    product.n = whole.n / UNIT * UNIT;
    product.out.ld = product.n;
    let rows = Rows::within(whole.n, product.n)?;
    let bytes = 2 * whole.m * product.n;
    (Interleaved::serves(whole) && whole.m <= MOST_ROWS && bytes <= MOST).then_some((product, rows))
}

impl Padded {
    /// The product by the best algorithm; none if it is not worth trying.
    ///
    /// # Safety
    /// The setting's memory is the device's.
    pub(crate) unsafe fn new(
        device: &'static Device,
        whole: &Problem,
        setting: &mut Setting<'_>,
    ) -> Result<Option<Padded>> {
        let Some((part, rows)) = parts(whole) else {
            return Ok(None);
        };
        // SAFETY: promised by the caller.
        let (product, _) = unsafe { tuned(device, part, setting)? };
        let mut padded = Padded {
            whole: *whole,
            rows,
            product,
            spread: kernel::module(device, MODULE.0, MODULE.1)?.function("spread")?,
            microseconds: f64::INFINITY,
        };
        let key = key_of(device, whole, NAME, Some(VERSION))?;
        let known = setting.database.known_or(key, || {
            let ways: [(String, &dyn Launch); 1] = [(NAME.to_string(), &padded)];
            // SAFETY: promised by the caller.
            let times = unsafe { times(whole, &ways, padded.workspace(), setting)? };
            let (chosen, data) = (NAME.to_string(), vec![]);
            Ok::<_, Error>(Entry { chosen, times, data })
        })?;
        let Some(microseconds) = known.times.get(NAME) else {
            return Ok(None);
        };
        padded.microseconds = *microseconds;
        Ok(Some(padded))
    }

    /// What a run takes.
    pub(crate) fn microseconds(&self) -> f64 {
        self.microseconds
    }

    /// Where the copy is in the workspace: behind the library's part.
    fn copy(&self) -> usize {
        self.product.workspace().next_multiple_of(ALIGNMENT)
    }

    /// Bytes that it works with.
    pub(crate) fn workspace(&self) -> usize {
        self.copy() + 2 * self.whole.m * self.product.problem().n
    }

    /// # Safety
    /// As of [`Gemm::launch`].
    pub(crate) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let (whole, Rows { period, written }) = (&self.whole, self.rows);
        if o.workspace == 0 || !o.out.is_multiple_of(16) {
            return Err(Error::malformed(format!(
                "{whole}: {o:x?} lacks something or is not aligned"
            )));
        }
        let copy = o.workspace + self.copy() as u64;
        let half = usize::from(whole.input == DType::F16);
        let bias = if whole.epilogue == Epilogue::Bias { o.bias } else { 0 };
        let strides = [whole.left.ld, whole.right.ld, self.product.problem().n];
        let numbers = [&[whole.n, whole.k], &strides[..], &[written, period, half]].concat();
        let numbers: Vec<u64> = numbers.into_iter().map(|n| n as u64).collect();
        let arguments = [&[copy, o.left, o.right, bias, o.out], &numbers[..]].concat();
        let blocks = [1 + written.div_ceil(UNIT * 256) as u32, whole.m as u32, 1];
        // SAFETY: promised by the caller; there is room for the copy.
        unsafe {
            self.product.launch(stream, &Operands { out: copy, ..*o })?;
            self.spread.launch(stream, blocks, 256, &arguments)
        }
    }
}

impl Launch for Padded {
    unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { Padded::launch(self, stream, operands) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_columns_are_among_those_of_the_product() {
        for n in (40..90).chain([30522, 50257, 50263, 50265]) {
            let whole = Problem::linear(DType::BF16, 1 << 20, n, 768);
            let found = parts(&Problem { m: 512, ..whole });
            let Some((part, rows)) = found else {
                assert!(n.is_multiple_of(UNIT) || 512 * n * 768 < 1 << 27, "{n}");
                continue;
            };
            assert!(part.n.is_multiple_of(UNIT) && n - part.n < UNIT);
            for row in 0..rows.period {
                let first = (UNIT - row * n % UNIT) % UNIT;
                assert!((row * n + first).is_multiple_of(UNIT));
                // The last 16 bytes that are read begin with a column of the product.
                let last = if first > 0 { first + rows.written } else { rows.written };
                assert!(last <= part.n && rows.written.is_multiple_of(UNIT));
            }
            assert!(n - rows.written <= 16, "{n}");
        }
        assert!(parts(&Problem::linear(DType::BF16, 512, 50264, 768)).is_none());
        assert!(parts(&Problem::linear(DType::BF16, 4096, 50257, 768)).is_none());
    }
}
