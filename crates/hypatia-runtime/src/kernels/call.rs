//! Calls: whatever computes tensors from tensors and is no kernel of ours.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use hypatia_core::ty::DType;

use crate::Result;

/// A tensor in memory, as a call sees it.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The first element.
    pub data: *mut u8,
    /// Its element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: &'a [usize],
    /// Elements from one index to the next.
    pub strides: &'a [isize],
    /// The GPU that has it, or none.
    pub gpu: Option<u32>,
}

/// Addresses of results that are handed over are multiples of this.
const ALIGNMENT: usize = 16;

impl Strided<'_> {
    /// Whether it is a result without a place: the call says where it lies.
    pub fn is_open(&self) -> bool {
        self.data.is_null() && !self.shape.contains(&0)
    }

    /// The addresses from its first byte to its last.
    pub fn extent(&self) -> Range<usize> {
        let start = self.data as usize;
        if self.shape.contains(&0) {
            return start..start;
        }
        let (mut first, mut last) = (0isize, 0isize);
        for (n, step) in self.shape.iter().zip(self.strides) {
            let far = (*n as isize - 1) * step;
            first += far.min(0);
            last += far.max(0);
        }
        let size = self.dtype.size() as isize;
        start.wrapping_add_signed(first * size)..start.wrapping_add_signed((last + 1) * size)
    }

    /// Whether this tensor, which a call made, can stand for an open result as it is: it lies as that one is to lie, and
    /// apart from the `others`. Some ops return an operand, or the same tensor twice.
    pub fn stands_for(&self, wanted: &Strided<'_>, others: &[Range<usize>]) -> bool {
        let (own, strides) = (self.extent(), self.strides.iter().zip(wanted.strides));
        let alike = |(n, (a, b)): (&usize, (&isize, &isize))| *n < 2 || a == b;
        // The memory of a lazy conjugate has other signs.
        (self.dtype, self.gpu, self.shape) == (wanted.dtype, wanted.gpu, wanted.shape)
            && !self.dtype.is_complex()
            && self.strides.len() == wanted.strides.len()
            && self.shape.iter().zip(strides).all(alike)
            && !self.data.is_null()
            && (self.data as usize).is_multiple_of(ALIGNMENT)
            && others.iter().all(|o| o.end <= own.start || own.end <= o.start)
    }
}

/// Memory with a result in it, which a call made and hands over; it is free again when this is dropped.
pub struct Kept {
    data: *mut u8,
    _owner: Box<dyn Send>,
}

// SAFETY: an address, and an owner that may go from thread to thread.
unsafe impl Send for Kept {}

impl Kept {
    /// Memory at an address, for as long as the owner lives.
    pub fn new(data: *mut u8, owner: impl Send + 'static) -> Kept {
        Kept {
            data,
            _owner: Box::new(owner),
        }
    }

    /// Where the result lies.
    pub fn data(&self) -> *mut u8 {
        self.data
    }
}

/// A constant in another form.
#[derive(Clone)]
pub struct Prepared {
    /// The address of the constant.
    pub from: usize,
    /// What made the form.
    pub how: String,
    /// The bytes of the constant, about those of the form.
    pub bytes: usize,
    /// For whoever prepared it.
    pub form: Arc<dyn Any + Send + Sync>,
}

/// Results that a call handed over, by their places among those that it writes.
pub type Handed = Vec<(usize, Kept)>;

/// Something that computes tensors from tensors.
pub trait Call: Send + Sync {
    /// Computes the results: into memory that is there already, and where it likes those that are open, all of which it
    /// hands over.
    ///
    /// # Safety
    /// The tensors are where they say, and the results overlap nothing else. Results are open only if this
    /// [makes](Call::makes) tensors.
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<Handed>;

    /// Brings constants that the call reads into the forms that it reads fastest, once, before the first call. Those
    /// that are `known` are used again; new ones take at most `room` bytes. Tensors that are no constants are none.
    /// Answers which forms are read.
    ///
    /// # Safety
    /// The constants are where they say, and as they will be at every call.
    unsafe fn prepare(
        &mut self,
        _constants: &[Option<Strided<'_>>],
        _known: &[Prepared],
        _room: usize,
    ) -> Result<Vec<Prepared>> {
        Ok(vec![])
    }

    /// Whether results are tensors of its own, which would be copied to a place that is there already.
    fn makes(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'a>(data: usize, shape: &'a [usize], strides: &'a [isize]) -> Strided<'a> {
        Strided {
            data: data as *mut u8,
            dtype: DType::F32,
            shape,
            strides,
            gpu: Some(0),
        }
    }

    #[test]
    fn extents_have_all_elements() {
        assert_eq!(at(64, &[2, 3], &[3, 1]).extent(), 64..88);
        assert_eq!(at(64, &[2, 3], &[-8, 1]).extent(), 32..76);
        assert_eq!(at(64, &[2, 0], &[3, 1]).extent(), 64..64);
        assert_eq!(at(64, &[], &[]).extent(), 64..68);
    }

    #[test]
    fn results_are_open_without_a_place() {
        assert!(at(0, &[2], &[1]).is_open());
        assert!(!at(16, &[2], &[1]).is_open());
        assert!(!at(0, &[0], &[1]).is_open());
    }

    #[test]
    fn what_lies_alike_and_apart_stands_for_a_result() {
        let wanted = at(0, &[2, 1, 4], &[4, 4, 1]);
        let made = at(64, &[2, 1, 4], &[4, 7, 1]);
        assert!(made.stands_for(&wanted, &[32..64, 96..128]));
        // It overlaps an operand, or a result that is taken.
        assert!(!made.stands_for(&wanted, &[0..16, 0..65]));
        assert!(!made.stands_for(&wanted, &[0..16, 95..200]));
        let others = [
            at(0, &[2, 1, 4], &[4, 4, 1]),
            at(72, &[2, 1, 4], &[4, 4, 1]),
            at(64, &[2, 1, 4], &[1, 4, 2]),
            at(64, &[2, 4], &[4, 1]),
            Strided {
                dtype: DType::I32,
                ..made
            },
            Strided { gpu: Some(1), ..made },
        ];
        for other in others {
            assert!(!other.stands_for(&wanted, &[]), "{other:?}");
        }
        let complex = |t: Strided<'static>| Strided { dtype: DType::C64, ..t };
        let (dense, open) = (at(64, &[2], &[1]), at(0, &[2], &[1]));
        assert!(dense.stands_for(&open, &[]));
        assert!(!complex(dense).stands_for(&complex(open), &[]));
    }
}
