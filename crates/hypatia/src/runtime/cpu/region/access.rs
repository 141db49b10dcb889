//! How a tile finds its elements in memory: strided tensors read into registers and written from them.
//!
//! Positions count the elements of a region in row-major order. Every tensor collapses its dimensions on its own, so
//! that a dense one is a plain array whatever its neighbours look like.

use std::ops::Range;

use smallvec::SmallVec;

use crate::runtime::cpu::lanes::{self, Ahead, Kernel, dispatch};
use crate::ty::DType;

/// What tiles of a dtype are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    F32,
    F64,
    I64,
    Bool,
}

impl Class {
    pub(crate) fn of(dtype: DType) -> Class {
        match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Class::F32,
            DType::F64 => Class::F64,
            DType::Bool => Class::Bool,
            _ => Class::I64,
        }
    }

    /// Bytes of an element in a register.
    pub(crate) fn size(self) -> usize {
        match self {
            Class::F32 => 4,
            Class::F64 | Class::I64 => 8,
            Class::Bool => 1,
        }
    }
}

/// One tensor of a run.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) data: *mut u8,
    dtype: DType,
    /// Sizes and strides, outermost first, none of size 1, none that could be merged.
    dims: SmallVec<[(usize, isize); 4]>,
    /// Whether all rows are the same one.
    repeats: bool,
}

// SAFETY: only a description; whoever reads or writes through it answers for the memory.
unsafe impl Send for Access {}
// SAFETY: as above.
unsafe impl Sync for Access {}

impl Access {
    pub(crate) fn new(data: *mut u8, dtype: DType, shape: &[usize], strides: &[isize]) -> Access {
        let mut dims: SmallVec<[(usize, isize); 4]> = SmallVec::new();
        for (&size, &stride) in shape.iter().zip(strides) {
            match dims.last_mut() {
                _ if size == 1 => {}
                Some(outer) if outer.1 == stride * size as isize => *outer = (outer.0 * size, stride),
                _ => dims.push((size, stride)),
            }
        }
        let repeats = dims.iter().rev().skip(1).all(|d| d.1 == 0);
        Access {
            data,
            dtype,
            dims,
            repeats,
        }
    }

    /// A dense array whose element at position `start` is at `data`.
    pub(crate) fn dense(data: *mut u8, dtype: DType, start: usize, len: usize) -> Access {
        Access {
            data: data.wrapping_sub(start * dtype.size()),
            dtype,
            dims: SmallVec::from_slice(&[(len, 1)]),
            repeats: true,
        }
    }

    /// Where `len` elements from position `start` on lie, if they can be used without a copy.
    pub(crate) fn direct(&self, start: usize, len: usize) -> Option<*mut u8> {
        let same = matches!(self.dtype, DType::F32 | DType::F64 | DType::I64 | DType::Bool);
        if same { self.place(start, len) } else { None }
    }

    /// Where `len` elements from position `start` on lie, if they do so without gaps.
    fn place(&self, start: usize, len: usize) -> Option<*mut u8> {
        let (&(inner, stride), outer) = self.dims.split_last()?;
        if len == 0 || stride != 1 || (!outer.is_empty() && start % inner + len > inner) {
            return None;
        }
        let mut offset = start as isize;
        if !outer.is_empty() {
            offset = (start % inner) as isize;
            if !self.repeats {
                offset += self.row(start / inner);
            }
        }
        Some(self.data.wrapping_offset(offset * self.dtype.size() as isize))
    }

    /// The offset of a row, which is a run along the last dimension.
    fn row(&self, mut row: usize) -> isize {
        let mut offset = 0;
        for &(size, stride) in self.dims.iter().rev().skip(1) {
            offset += (row % size) as isize * stride;
            row /= size;
        }
        offset
    }

    /// Has these positions asked for, if they lie without gaps; `computed` bytes of a computation are one element.
    pub(crate) fn ask(&self, positions: Range<usize>, computed: usize, ahead: &mut Ahead) {
        if let Some(data) = self.place(positions.start, positions.len()) {
            ahead.push(data, self.dtype.size(), computed);
        }
    }

    /// The first and the last byte that are reached, as addresses.
    pub(crate) fn span(&self) -> (usize, usize) {
        let reach = |sign: isize| -> isize {
            let dims = self.dims.iter().filter(|d| d.1.signum() == sign);
            dims.map(|d| (d.0 as isize - 1) * d.1).sum()
        };
        let at = |elements: isize| self.data.wrapping_offset(elements * self.dtype.size() as isize) as usize;
        (at(reach(-1)), at(reach(1)) + self.dtype.size() - 1)
    }

    /// Calls `f(offset in elements, stride, position in the tile, count)` for every run along the last dimension.
    #[inline]
    fn runs(&self, start: usize, len: usize, mut f: impl FnMut(isize, isize, usize, usize)) {
        if len == 0 {
            return;
        }
        let Some((&(inner, stride), outer)) = self.dims.split_last() else {
            return f(0, 0, 0, len);
        };
        if outer.is_empty() {
            return f(start as isize * stride, stride, 0, len);
        }
        let mut index: SmallVec<[usize; 4]> = SmallVec::from_elem(0, outer.len());
        let mut rest = start / inner;
        let mut offset = 0;
        for (i, &(size, stride)) in outer.iter().enumerate().rev() {
            index[i] = rest % size;
            rest /= size;
            offset += index[i] as isize * stride;
        }
        let (mut column, mut done) = (start % inner, 0);
        while done < len {
            let count = (inner - column).min(len - done);
            f(offset + column as isize * stride, stride, done, count);
            done += count;
            column = 0;
            for (i, &(size, stride)) in outer.iter().enumerate().rev() {
                index[i] += 1;
                offset += stride;
                if index[i] < size {
                    break;
                }
                offset -= size as isize * stride;
                index[i] = 0;
            }
        }
    }

    /// Reads `len` elements from position `start` on into a register.
    ///
    /// # Safety
    /// The positions must be those of the tensor, readable, and `register` must have room in its class.
    pub(crate) unsafe fn load(&self, start: usize, len: usize, register: *mut u8) {
        let size = self.dtype.size() as isize;
        let class = Class::of(self.dtype).size();
        self.runs(start, len, |offset, stride, at, count| {
            let from = self.data.wrapping_offset(offset * size);
            let to = register.wrapping_add(at * class);
            // SAFETY: both lie within what the caller promised.
            unsafe {
                match self.dtype {
                    DType::F32 | DType::F64 | DType::I64 | DType::Bool if stride == 1 => {
                        std::ptr::copy_nonoverlapping(from, to, count * class);
                    }
                    DType::Bool => read::<u8, u8, Same>(from, stride, to, count),
                    DType::U8 => read::<u8, i64, Same>(from, stride, to, count),
                    DType::I8 => read::<i8, i64, Same>(from, stride, to, count),
                    DType::I16 => read::<i16, i64, Same>(from, stride, to, count),
                    DType::I32 => read::<i32, i64, Same>(from, stride, to, count),
                    DType::I64 => read::<i64, i64, Same>(from, stride, to, count),
                    DType::F16 => read::<u16, f32, F16>(from, stride, to, count),
                    DType::BF16 => read::<u16, f32, Bf16>(from, stride, to, count),
                    DType::F32 => read::<f32, f32, Same>(from, stride, to, count),
                    DType::F64 => read::<f64, f64, Same>(from, stride, to, count),
                }
            }
        });
    }

    /// Writes `len` elements from position `start` on.
    ///
    /// # Safety
    /// The positions must be those of the tensor, writable, and `register` must hold as many elements.
    pub(crate) unsafe fn store(&self, start: usize, len: usize, register: *const u8) {
        let size = self.dtype.size() as isize;
        let class = Class::of(self.dtype).size();
        self.runs(start, len, |offset, stride, at, count| {
            let to = self.data.wrapping_offset(offset * size);
            let from = register.wrapping_add(at * class);
            // SAFETY: both lie within what the caller promised.
            unsafe {
                match self.dtype {
                    DType::F32 | DType::F64 | DType::I64 | DType::Bool if stride == 1 => {
                        std::ptr::copy_nonoverlapping(from, to, count * class);
                    }
                    DType::Bool => write::<u8, u8, Same>(from, to, stride, count),
                    DType::U8 => write::<i64, u8, Wrap>(from, to, stride, count),
                    DType::I8 => write::<i64, i8, Wrap>(from, to, stride, count),
                    DType::I16 => write::<i64, i16, Wrap>(from, to, stride, count),
                    DType::I32 => write::<i64, i32, Wrap>(from, to, stride, count),
                    DType::I64 => write::<i64, i64, Wrap>(from, to, stride, count),
                    DType::F16 => write::<f32, u16, F16>(from, to, stride, count),
                    DType::BF16 => write::<f32, u16, Bf16>(from, to, stride, count),
                    DType::F32 => write::<f32, f32, Same>(from, to, stride, count),
                    DType::F64 => write::<f64, f64, Same>(from, to, stride, count),
                }
            }
        });
    }
}

/// A change of representation between memory and registers.
trait Convert<A, B> {
    fn convert(a: A) -> B;
}

struct Same;
struct Wrap;
struct F16;
struct Bf16;

macro_rules! conversions {
    ($($how:ident: $a:ty => $b:ty, |$x:ident| $body:expr;)*) => {
        $(
            impl Convert<$a, $b> for $how {
                #[inline(always)]
                fn convert($x: $a) -> $b {
                    $body
                }
            }
        )*
    };
}

conversions! {
    Same: u8 => u8, |x| x;
    Same: u8 => i64, |x| i64::from(x);
    Same: i8 => i64, |x| i64::from(x);
    Same: i16 => i64, |x| i64::from(x);
    Same: i32 => i64, |x| i64::from(x);
    Same: i64 => i64, |x| x;
    Same: f32 => f32, |x| x;
    Same: f64 => f64, |x| x;
    Wrap: i64 => u8, |x| x as u8;
    Wrap: i64 => i8, |x| x as i8;
    Wrap: i64 => i16, |x| x as i16;
    Wrap: i64 => i32, |x| x as i32;
    Wrap: i64 => i64, |x| x;
    F16: u16 => f32, |x| lanes::f16_to_f32(x);
    F16: f32 => u16, |x| lanes::f32_to_f16(x);
    Bf16: u16 => f32, |x| lanes::bf16_to_f32(x);
    Bf16: f32 => u16, |x| lanes::f32_to_bf16(x);
}

struct Dense<'a, A, B, C>(&'a [A], &'a mut [B], std::marker::PhantomData<C>);

impl<A: Copy, B, C: Convert<A, B>> Kernel for Dense<'_, A, B, C> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (b, a) in self.1.iter_mut().zip(self.0) {
            *b = C::convert(*a);
        }
    }
}

/// # Safety
/// `count` elements must be readable from `from`, `stride` apart, and writable at `to`, one after the other.
unsafe fn read<A: Copy, B: Copy, C: Convert<A, B>>(from: *const u8, stride: isize, to: *mut u8, count: usize) {
    let (from, to): (*const A, *mut B) = (from.cast(), to.cast());
    // SAFETY: as promised; the register is not part of the tensor.
    unsafe {
        match stride {
            1 => dispatch(Dense::<A, B, C>(
                std::slice::from_raw_parts(from, count),
                std::slice::from_raw_parts_mut(to, count),
                std::marker::PhantomData,
            )),
            0 => std::slice::from_raw_parts_mut(to, count).fill(C::convert(*from)),
            _ => (0..count).for_each(|i| *to.add(i) = C::convert(*from.offset(i as isize * stride))),
        }
    }
}

/// # Safety
/// `count` elements must be readable from `from`, one after the other, and writable at `to`, `stride` apart.
unsafe fn write<A: Copy, B: Copy, C: Convert<A, B>>(from: *const u8, to: *mut u8, stride: isize, count: usize) {
    let (from, to): (*const A, *mut B) = (from.cast(), to.cast());
    // SAFETY: as promised; the register is not part of the tensor.
    unsafe {
        match stride {
            1 => dispatch(Dense::<A, B, C>(
                std::slice::from_raw_parts(from, count),
                std::slice::from_raw_parts_mut(to, count),
                std::marker::PhantomData,
            )),
            _ => (0..count).for_each(|i| *to.offset(i as isize * stride) = C::convert(*from.add(i))),
        }
    }
}
