//! Products of 16-bit numbers over longer rows, in two parts.
//!
//! Every row of the left factor begins at a multiple of 16 bytes, but the last few columns do not fill 16 bytes, and not
//! every library has fast algorithms for such sizes. All the other columns are a product by themselves. What is left is a
//! small one: other rows of the result, or terms that are added to its sums.

use hypatia_core::ty::DType;

use crate::driver::{Device, Stream};
use crate::gemm::{Epilogue, Gemm, Operands, Problem};
use crate::setting::{Setting, tuned};
use crate::{Error, Result};

/// Numbers of 16 bits in 16 bytes.
const UNIT: usize = 8;

/// Products below this many multiplications are not worth two launches.
const WORTH: usize = 1 << 27;

/// Two parts, the small one first, and where they start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parts {
    rest: Problem,
    most: Problem,
    /// Elements from the start of each operand to what the small part has of it.
    left: usize,
    right: usize,
    out: usize,
}

impl Parts {
    /// None if it is not such a product.
    fn of(whole: &Problem) -> Option<Parts> {
        let aligned = |n: usize| n.is_multiple_of(UNIT);
        let columns = if whole.left.transposed { whole.m } else { whole.k };
        let plain = matches!(whole.input, DType::BF16 | DType::F16)
            && whole.output == whole.input
            && whole.epilogue == Epilogue::None
            && whole.residual.is_none()
            && (whole.batch, whole.alignment) == (1, 16);
        let rows = [whole.left.ld, whole.right.ld, whole.out.ld].into_iter().all(aligned);
        let large = whole.m.saturating_mul(whole.n).saturating_mul(whole.k) >= WORTH;
        if !plain || !rows || !large || aligned(columns) || columns < UNIT {
            return None;
        }
        let many = columns / UNIT * UNIT;
        let (mut rest, mut most) = (*whole, *whole);
        if whole.left.transposed {
            (rest.m, most.m) = (columns - many, many);
            let out = many * whole.out.ld;
            return Some(Parts {
                rest,
                most,
                left: many,
                right: 0,
                out,
            });
        }
        (rest.k, most.k) = (columns - many, many);
        let right = if whole.right.transposed {
            many
        } else {
            many * whole.right.ld
        };
        Some(Parts {
            rest,
            // The sums of the small part are where the result will be.
            most: most.with_residual(),
            left: many,
            right,
            out: 0,
        })
    }
}

/// A product in two parts.
#[derive(Debug)]
pub(super) struct Cut {
    parts: Parts,
    rest: Gemm,
    most: Gemm,
    microseconds: f64,
}

impl Cut {
    /// A product by the best algorithms for its parts; none if there is no reason to take it apart.
    ///
    /// # Safety
    /// The setting's memory is the device's.
    pub(super) unsafe fn new(
        device: &'static Device,
        whole: &Problem,
        setting: &mut Setting<'_>,
    ) -> Result<Option<Cut>> {
        let Some(parts) = Parts::of(whole) else {
            return Ok(None);
        };
        // SAFETY: promised by the caller.
        let ((rest, first), (most, second)) =
            unsafe { (tuned(device, parts.rest, setting)?, tuned(device, parts.most, setting)?) };
        Ok(Some(Cut {
            parts,
            rest,
            most,
            // Of a launch more.
            microseconds: first + second + 1.0,
        }))
    }

    /// About what a run takes.
    pub(super) fn microseconds(&self) -> f64 {
        self.microseconds
    }

    /// Bytes that it works with.
    pub(super) fn workspace(&self) -> usize {
        self.rest.workspace().max(self.most.workspace())
    }

    /// # Safety
    /// As of [`Gemm::launch`].
    pub(super) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        if [o.left, o.right, o.out].contains(&0) {
            return Err(Error::malformed(format!("{o:x?} lacks something")));
        }
        let further = |address: u64, elements: usize| address + 2 * elements as u64;
        let rest = Operands {
            left: further(o.left, self.parts.left),
            right: further(o.right, self.parts.right),
            out: further(o.out, self.parts.out),
            ..*o
        };
        let most = Operands { residual: o.out, ..*o };
        // SAFETY: promised by the caller; these are parts of its operands. The second launch follows the first.
        unsafe {
            self.rest.launch(stream, &rest)?;
            self.most.launch(stream, &most)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(sizes: [usize; 3], transposed: bool) -> Problem {
        let mut problem = Problem::new(DType::BF16, sizes, [transposed, false]);
        problem.left.ld = problem.left.ld.next_multiple_of(UNIT);
        problem
    }

    #[test]
    fn terms_are_cut() {
        let whole = problem([4096, 768, 50257], false);
        let parts = Parts::of(&whole).unwrap();
        assert_eq!((parts.rest.k, parts.most.k), (1, 50256));
        assert_eq!((parts.left, parts.right, parts.out), (50256, 50256 * 768, 0));
        // They are added to what the small part left.
        assert_eq!(parts.most.residual, Some(whole.out));
        assert!(parts.rest.residual.is_none());
        for part in [parts.rest, parts.most] {
            assert_eq!((part.m, part.n, part.left.ld, part.right.ld), (4096, 768, 50264, 768));
        }
    }

    #[test]
    fn rows_are_cut() {
        let parts = Parts::of(&problem([30522, 768, 4096], true)).unwrap();
        assert_eq!((parts.rest.m, parts.most.m), (2, 30520));
        assert_eq!((parts.left, parts.right, parts.out), (30520, 0, 30520 * 768));
        assert!(parts.most.residual.is_none());
        assert_eq!((parts.most.k, parts.most.left.ld), (4096, 30528));
    }

    #[test]
    fn other_products_stay_whole() {
        assert_eq!(Parts::of(&problem([4096, 768, 50256], false)), None);
        // Rows that begin anywhere.
        assert_eq!(
            Parts::of(&Problem::new(DType::BF16, [4096, 768, 50257], [false, false])),
            None
        );
        let whole = problem([4096, 768, 50257], false);
        assert_eq!(Parts::of(&whole.with_epilogue(Epilogue::Bias)), None);
        assert_eq!(Parts::of(&whole.with_residual()), None);
        assert_eq!(Parts::of(&problem([16, 768, 1001], false)), None);
        assert_eq!(Parts::of(&Problem { alignment: 8, ..whole }), None);
    }
}
