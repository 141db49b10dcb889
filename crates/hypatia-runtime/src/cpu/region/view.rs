//! Memory that a region reads and writes.

use std::marker::PhantomData;

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use super::access::Layout;
use crate::{Error, Result};

/// Rust types that are elements of tensors.
///
/// # Safety
/// Values have the size and layout of `DTYPE`.
pub unsafe trait Element: Copy + 'static {
    /// The dtype.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {
        $(
            // SAFETY: the same number of bits with the same meaning.
            unsafe impl Element for $t {
                const DTYPE: DType = DType::$d;
            }
        )*
    };
}

elements!(
    bool => Bool, u8 => U8, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64
);

/// A strided tensor to read. Strides count elements; 0 repeats one.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub(crate) data: *const u8,
    pub(crate) dtype: DType,
    pub(crate) strides: &'a [isize],
    /// Elements from `data` on.
    pub(crate) len: usize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of plain numbers.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

impl<'a> View<'a> {
    /// A view whose first element is that of `data`.
    pub fn new<T: Element>(data: &'a [T], strides: &'a [isize]) -> View<'a> {
        View {
            data: data.as_ptr().cast(),
            dtype: T::DTYPE,
            strides,
            len: data.len(),
            memory: PhantomData,
        }
    }

    /// A view of memory that Rust does not know of.
    ///
    /// # Safety
    /// For `'a`, every element that the strides reach within the shape the view is used with must be initialised,
    /// aligned, of this dtype, and written by nobody. An output of the same run may be the same memory if its
    /// strides and element size are the same, too.
    pub unsafe fn from_raw(data: *const u8, dtype: DType, strides: &'a [isize]) -> View<'a> {
        View {
            data,
            dtype,
            strides,
            len: usize::MAX,
            memory: PhantomData,
        }
    }
}

/// A strided tensor to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    pub(crate) data: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) strides: &'a [isize],
    pub(crate) len: usize,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a unique borrow of plain numbers.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// A view whose first element is that of `data`.
    pub fn new<T: Element>(data: &'a mut [T], strides: &'a [isize]) -> ViewMut<'a> {
        ViewMut {
            data: data.as_mut_ptr().cast(),
            dtype: T::DTYPE,
            strides,
            len: data.len(),
            memory: PhantomData,
        }
    }

    /// A view of memory that Rust does not know of.
    ///
    /// # Safety
    /// For `'a`, every element that the strides reach within the shape the view is used with must be writable,
    /// aligned, of this dtype, and used by nobody else, except as [`View::from_raw`] says.
    pub unsafe fn from_raw(data: *mut u8, dtype: DType, strides: &'a [isize]) -> ViewMut<'a> {
        ViewMut {
            data,
            dtype,
            strides,
            len: usize::MAX,
            memory: PhantomData,
        }
    }
}

/// Refuses strides that leave the memory.
pub(crate) fn check_bounds(what: &str, index: usize, shape: &[usize], strides: &[isize], len: usize) -> Result<()> {
    let fail = |message: String| {
        Err(Error::Type {
            op: "region".into(),
            message: format!("{what} {index}: {message}"),
        })
    };
    if shape.len() != strides.len() {
        return fail(format!("{} strides for shape {shape:?}", strides.len()));
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let reach = |sign: isize| {
        let reaching = shape.iter().zip(strides).filter(|(_, stride)| stride.signum() == sign);
        reaching.map(|(&n, &s)| (n as i128 - 1) * s as i128).sum::<i128>()
    };
    // Memory given by its address may be entered anywhere; a slice begins at its first element.
    let known = len != usize::MAX;
    if known && (reach(-1) < 0 || reach(1) >= len as i128) {
        return fail(format!(
            "shape {shape:?} with strides {strides:?} leaves its {len} elements"
        ));
    }
    Ok(())
}

/// How tensors of a shape lie in memory.
pub(crate) fn layouts(what: &str, shape: &[usize], given: &[(DType, &[isize])]) -> Result<Vec<Layout>> {
    let one = |(i, (dtype, strides)): (usize, &(DType, &[isize]))| {
        check_bounds(what, i, shape, strides, usize::MAX)?;
        Ok(Layout::new(*dtype, shape, strides))
    };
    given.iter().enumerate().map(one).collect()
}

/// As [`layouts`], of tensors to write.
pub(crate) fn distinct_layouts(what: &str, shape: &[usize], given: &[(DType, &[isize])]) -> Result<Vec<Layout>> {
    let made = layouts(what, shape, given)?;
    given.iter().try_for_each(|v| check_distinct(shape, v.1))?;
    Ok(made)
}

/// Refuses outputs that write an element twice.
fn check_distinct(shape: &[usize], strides: &[isize]) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut dims: SmallVec<[(usize, usize); 6]> = shape
        .iter()
        .zip(strides)
        .filter(|(n, _)| **n > 1)
        .map(|(n, s)| (s.unsigned_abs(), *n))
        .collect();
    dims.sort_unstable();
    let mut reach = 0;
    for (stride, n) in dims {
        if stride <= reach {
            return Err(Error::Type {
                op: "region".into(),
                message: format!("an output of shape {shape:?} with strides {strides:?} overlaps itself"),
            });
        }
        reach += stride * (n - 1);
    }
    Ok(())
}
