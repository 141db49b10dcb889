//! How a tile finds its elements in memory: strided tensors read into registers and written from them.
//!
//! Positions count the elements of a region in row-major order. Every tensor collapses its dimensions on its own, so
//! that a dense one is a plain array whatever its neighbours look like.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use crate::cpu::lanes::{self, Ahead, Kernel, dispatch};

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

/// How a dtype lies in memory and in registers.
trait Stored {
    type Memory: Copy;
    type Register: Copy;
    fn widen(x: Self::Memory) -> Self::Register;
    fn narrow(x: Self::Register) -> Self::Memory;
}

macro_rules! stored {
    ($($dtype:ident: $memory:ty, $register:ty, $widen:expr, $narrow:expr;)*) => {
        $(
            struct $dtype;

            impl Stored for $dtype {
                type Memory = $memory;
                type Register = $register;
                #[inline(always)]
                fn widen(x: $memory) -> $register {
                    $widen(x)
                }
                #[inline(always)]
                fn narrow(x: $register) -> $memory {
                    $narrow(x)
                }
            }
        )*

        /// An expression with the type of a dtype.
        macro_rules! with_type {
            ($value:expr, $name:ident => $body:expr) => {
                match $value {
                    $(
                        DType::$dtype => {
                            type $name = $dtype;
                            $body
                        }
                    )*
                    // No region is made of those.
                    DType::C64 | DType::C128 => {}
                }
            };
        }
    };
}

/// The integer modulo two to its bits.
macro_rules! wrap {
    ($t:ty) => {
        |x: i64| x as $t
    };
}

stored! {
    Bool: u8, u8, |x| x, |x| x;
    U8: u8, i64, i64::from, wrap!(u8);
    I8: i8, i64, i64::from, wrap!(i8);
    I16: i16, i64, i64::from, wrap!(i16);
    I32: i32, i64, i64::from, wrap!(i32);
    I64: i64, i64, |x| x, |x| x;
    F16: u16, f32, lanes::f16_to_f32, lanes::f32_to_f16;
    BF16: u16, f32, lanes::bf16_to_f32, lanes::f32_to_bf16;
    F32: f32, f32, |x| x, |x| x;
    F64: f64, f64, |x| x, |x| x;
}

/// How a tensor lies in memory, wherever it starts. Depends on sizes only, so that it is made once for many runs.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    dtype: DType,
    /// Sizes and strides, outermost first, none of size 1, none that could be merged.
    dims: SmallVec<[(usize, isize); 4]>,
    /// Whether all rows are the same one.
    repeats: bool,
    /// The first and the last byte that are reached, from the first element on.
    span: (isize, isize),
}

impl Layout {
    pub(crate) fn new(dtype: DType, shape: &[usize], strides: &[isize]) -> Layout {
        let mut dims: SmallVec<[(usize, isize); 4]> = SmallVec::new();
        for (&size, &stride) in shape.iter().zip(strides) {
            match dims.last_mut() {
                _ if size == 1 => {}
                Some(outer) if outer.1 == stride * size as isize => *outer = (outer.0 * size, stride),
                _ => dims.push((size, stride)),
            }
        }
        let repeats = dims.iter().rev().skip(1).all(|d| d.1 == 0);
        let reach = |sign: isize| -> isize {
            let reaching = dims.iter().filter(|d| d.1.signum() == sign);
            reaching.map(|d| (d.0 as isize - 1) * d.1).sum()
        };
        let size = dtype.size() as isize;
        let span = (reach(-1) * size, (reach(1) + 1) * size - 1);
        Layout {
            dtype,
            dims,
            repeats,
            span,
        }
    }

    /// Of an array without gaps, however long.
    fn array(dtype: DType) -> &'static Layout {
        static ARRAYS: OnceLock<[Layout; 2]> = OnceLock::new();
        let [single, double] = ARRAYS.get_or_init(|| [DType::F32, DType::F64].map(|d| Layout::new(d, &[0], &[1])));
        if dtype == DType::F64 { double } else { single }
    }

    /// Whether the elements of a tensor of so many lie one after the other, in the form they are computed in.
    pub(crate) fn is_array(&self, count: usize) -> bool {
        let plain = matches!(self.dtype, DType::F32 | DType::F64 | DType::I64 | DType::Bool);
        plain && (count <= 1 || self.dims[..] == [(count, 1)])
    }

    /// Whether all rows are one row of this dtype and width, without gaps.
    pub(crate) fn is_row_of(&self, dtype: DType, width: usize) -> bool {
        self.dtype == dtype && self.is_one_row(width)
    }

    fn is_one_row(&self, width: usize) -> bool {
        self.repeats && self.dims.last() == Some(&(width, 1))
    }
}

/// One tensor of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access<'a> {
    pub(crate) data: *mut u8,
    layout: &'a Layout,
}

// SAFETY: only a description; whoever reads or writes through it answers for the memory.
unsafe impl Send for Access<'_> {}
// SAFETY: as above.
unsafe impl Sync for Access<'_> {}

impl<'a> Access<'a> {
    pub(crate) fn new(data: *mut u8, layout: &'a Layout) -> Access<'a> {
        Access { data, layout }
    }

    /// A dense array of floats whose element at position `start` is at `data`.
    pub(crate) fn dense(data: *mut u8, dtype: DType, start: usize) -> Access<'static> {
        Access {
            data: data.wrapping_sub(start * dtype.size()),
            layout: Layout::array(dtype),
        }
    }

    /// Where `len` elements from position `start` on lie, if they can be used without a copy.
    pub(crate) fn direct(&self, start: usize, len: usize) -> Option<*mut u8> {
        let same = matches!(self.layout.dtype, DType::F32 | DType::F64 | DType::I64 | DType::Bool);
        if same { self.place(start, len) } else { None }
    }

    /// Where `len` elements from position `start` on lie, if they do so without gaps.
    fn place(&self, start: usize, len: usize) -> Option<*mut u8> {
        let (&(inner, stride), outer) = self.layout.dims.split_last()?;
        if len == 0 || stride != 1 || (!outer.is_empty() && start % inner + len > inner) {
            return None;
        }
        let mut offset = start as isize;
        if !outer.is_empty() {
            offset = (start % inner) as isize;
            if !self.layout.repeats {
                offset += self.row(start / inner);
            }
        }
        Some(self.data.wrapping_offset(offset * self.layout.dtype.size() as isize))
    }

    /// Whether all rows are one row of this width, without gaps.
    pub(crate) fn is_one_row(&self, width: usize) -> bool {
        self.layout.is_one_row(width)
    }

    /// The offset of a row, which is a run along the last dimension.
    fn row(&self, mut row: usize) -> isize {
        let mut offset = 0;
        for &(size, stride) in self.layout.dims.iter().rev().skip(1) {
            offset += (row % size) as isize * stride;
            row /= size;
        }
        offset
    }

    /// Has these positions asked for, if they lie without gaps; `computed` bytes of a computation are one element.
    pub(crate) fn ask(&self, positions: Range<usize>, computed: usize, ahead: &mut Ahead) {
        if let Some(data) = self.place(positions.start, positions.len()) {
            ahead.push(data, self.layout.dtype.size(), computed);
        }
    }

    /// The first and the last byte that are reached, as addresses.
    pub(crate) fn span(&self) -> (usize, usize) {
        let (first, last) = self.layout.span;
        (
            self.data.wrapping_offset(first) as usize,
            self.data.wrapping_offset(last) as usize,
        )
    }

    /// Calls `f(offset in elements, stride, position in the tile, count)` for every run along the last dimension.
    #[inline]
    fn runs(&self, start: usize, len: usize, mut f: impl FnMut(isize, isize, usize, usize)) {
        if len == 0 {
            return;
        }
        let Some((&(inner, stride), outer)) = self.layout.dims.split_last() else {
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
        // SAFETY: as promised by the caller.
        with_type!(self.layout.dtype, D => unsafe { self.read::<D>(start, len, register.cast()) });
    }

    /// Writes `len` elements from position `start` on.
    ///
    /// # Safety
    /// The positions must be those of the tensor, writable, and `register` must hold as many elements.
    pub(crate) unsafe fn store(&self, start: usize, len: usize, register: *const u8) {
        // SAFETY: as promised by the caller.
        with_type!(self.layout.dtype, D => unsafe { self.write::<D>(start, len, register.cast()) });
    }

    /// # Safety
    /// As of [`Access::load`], for the type of the dtype.
    unsafe fn read<D: Stored>(&self, start: usize, len: usize, register: *mut D::Register) {
        let data: *const D::Memory = self.data.cast();
        self.runs(start, len, |offset, stride, at, count| {
            let (from, to) = (data.wrapping_offset(offset), register.wrapping_add(at));
            // SAFETY: both lie within what the caller promised.
            unsafe { transfer::<_, _, Widen<D>>(from, stride, to, 1, count) };
        });
    }

    /// # Safety
    /// As of [`Access::store`], for the type of the dtype.
    unsafe fn write<D: Stored>(&self, start: usize, len: usize, register: *const D::Register) {
        let data: *mut D::Memory = self.data.cast();
        self.runs(start, len, |offset, stride, at, count| {
            let (from, to) = (register.wrapping_add(at), data.wrapping_offset(offset));
            // SAFETY: both lie within what the caller promised.
            unsafe { transfer::<_, _, Narrow<D>>(from, 1, to, stride, count) };
        });
    }
}

/// Tensors of these layouts at these addresses.
pub(crate) fn accesses<'a, A: smallvec::Array<Item = Access<'a>>>(
    layouts: &'a [Layout],
    addresses: &[*mut u8],
) -> SmallVec<A> {
    debug_assert_eq!(layouts.len(), addresses.len());
    let both = layouts.iter().zip(addresses);
    both.map(|(layout, data)| Access::new(*data, layout)).collect()
}

/// A change of representation.
trait Convert<A, B> {
    fn convert(a: A) -> B;
}

struct Widen<D>(PhantomData<D>);
struct Narrow<D>(PhantomData<D>);

impl<D: Stored> Convert<D::Memory, D::Register> for Widen<D> {
    #[inline(always)]
    fn convert(x: D::Memory) -> D::Register {
        D::widen(x)
    }
}

impl<D: Stored> Convert<D::Register, D::Memory> for Narrow<D> {
    #[inline(always)]
    fn convert(x: D::Register) -> D::Memory {
        D::narrow(x)
    }
}

struct Dense<'a, A, B, C>(&'a [A], &'a mut [B], PhantomData<C>);

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
/// `count` elements must be readable and writable, as far apart as the strides say, and in memory apart.
unsafe fn transfer<A: Copy, B: Copy, C: Convert<A, B>>(
    from: *const A,
    from_stride: isize,
    to: *mut B,
    to_stride: isize,
    count: usize,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        match (from_stride, to_stride) {
            (1, 1) => dispatch(Dense::<A, B, C>(
                std::slice::from_raw_parts(from, count),
                std::slice::from_raw_parts_mut(to, count),
                PhantomData,
            )),
            (0, 1) => std::slice::from_raw_parts_mut(to, count).fill(C::convert(*from)),
            _ => {
                (0..count as isize).for_each(|i| *to.offset(i * to_stride) = C::convert(*from.offset(i * from_stride)))
            }
        }
    }
}
