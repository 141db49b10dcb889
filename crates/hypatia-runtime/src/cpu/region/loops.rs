//! Loops over tiles, one for every shape of operands; what they compute comes as a type.

use std::marker::PhantomData;
use std::ops::{Add, Mul};

use crate::cpu::lanes::{Ahead, Kernel, dispatch, level};
use crate::cpu::math::{self, Function};

/// Operands and result of a loop: addresses of tiles, or of one element where the loop says so.
pub(crate) struct Tile {
    pub(crate) args: [*const u8; 3],
    pub(crate) out: *mut u8,
    pub(crate) len: usize,
    /// What a loop that takes long asks for meanwhile.
    pub(crate) ahead: Ahead,
}

/// # Safety
/// The operands must have `len` elements of the loop's classes (one where it takes a constant), and `out` room for as
/// many, apart from all operands.
pub(crate) type Loop = unsafe fn(&Tile);

/// How the two operands of a binary loop come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    TileTile,
    TileConstant,
    ConstantTile,
}

pub(super) trait Unary<T> {
    type Out: Copy;
    fn call<const FMA: bool>(x: T) -> Self::Out;
}

pub(super) trait Binary<T> {
    type Out: Copy;
    fn call<const FMA: bool>(a: T, b: T) -> Self::Out;
}

struct Map<'a, F, T, R>(&'a [T], &'a mut [R], PhantomData<F>);

impl<T: Copy, F: Unary<T>> Kernel for Map<'_, F, T, F::Out> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (r, x) in self.1.iter_mut().zip(self.0) {
            *r = F::call::<FMA>(*x);
        }
    }
}

enum Pair<'a, T> {
    Tiles(&'a [T], &'a [T]),
    Right(&'a [T], T),
    Left(T, &'a [T]),
}

struct Zip<'a, F, T, R>(Pair<'a, T>, &'a mut [R], PhantomData<F>);

impl<T: Copy, F: Binary<T>> Kernel for Zip<'_, F, T, F::Out> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        match self.0 {
            Pair::Tiles(a, b) => {
                for ((r, a), b) in self.1.iter_mut().zip(a).zip(b) {
                    *r = F::call::<FMA>(*a, *b);
                }
            }
            Pair::Right(a, b) => {
                for (r, a) in self.1.iter_mut().zip(a) {
                    *r = F::call::<FMA>(*a, b);
                }
            }
            Pair::Left(a, b) => {
                for (r, b) in self.1.iter_mut().zip(b) {
                    *r = F::call::<FMA>(a, *b);
                }
            }
        }
    }
}

/// # Safety
/// As of [`Loop`].
pub(super) unsafe fn unary_loop<T: Copy, F: Unary<T>>(t: &Tile) {
    // SAFETY: as promised by the caller.
    let (x, out) = unsafe { (tile::<T>(t.args[0], t.len), tile_mut::<F::Out>(t.out, t.len)) };
    dispatch(Map::<F, T, F::Out>(x, out, PhantomData));
}

/// # Safety
/// As of [`Loop`]; `len` is a multiple of 16.
pub(super) unsafe fn function_loop<F: Function + Default>(t: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { math::map(level(), F::default(), t.args[0].cast(), t.out.cast(), t.len, t.ahead) };
}

/// # Safety
/// As of [`Loop`], the kinds of operands being those of `KIND`.
pub(super) unsafe fn binary_loop<T: Copy, F: Binary<T>, const KIND: u8>(t: &Tile) {
    let (a, b) = (t.args[0], t.args[1]);
    // SAFETY: as promised by the caller.
    let (pair, out) = unsafe {
        let pair = match KIND {
            0 => Pair::Tiles(tile::<T>(a, t.len), tile::<T>(b, t.len)),
            1 => Pair::Right(tile::<T>(a, t.len), *b.cast()),
            _ => Pair::Left(*a.cast(), tile::<T>(b, t.len)),
        };
        (pair, tile_mut::<F::Out>(t.out, t.len))
    };
    dispatch(Zip::<F, T, F::Out>(pair, out, PhantomData));
}

/// # Safety
/// There must be `len` elements, unchanged while the slice lives.
pub(super) unsafe fn tile<'a, T>(data: *const u8, len: usize) -> &'a [T] {
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts(data.cast(), len) }
}

/// # Safety
/// There must be room for `len` elements that nobody else uses while the slice lives.
pub(super) unsafe fn tile_mut<'a, T>(data: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(data.cast(), len) }
}

/// # Safety
/// As of [`Loop`]; the operand is one element.
pub(super) unsafe fn fill_loop<T: Copy>(t: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { tile_mut::<T>(t.out, t.len).fill(*t.args[0].cast()) };
}

struct Select<'a, T>(&'a [u8], Pair<'a, T>, &'a mut [T]);

impl<T: Copy> Kernel for Select<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Select(condition, pair, out) = self;
        match pair {
            Pair::Tiles(a, b) => {
                for (((r, c), a), b) in out.iter_mut().zip(condition).zip(a).zip(b) {
                    *r = if *c != 0 { *a } else { *b };
                }
            }
            Pair::Right(a, b) => {
                for ((r, c), a) in out.iter_mut().zip(condition).zip(a) {
                    *r = if *c != 0 { *a } else { b };
                }
            }
            Pair::Left(a, b) => {
                for ((r, c), b) in out.iter_mut().zip(condition).zip(b) {
                    *r = if *c != 0 { a } else { *b };
                }
            }
        }
    }
}

/// # Safety
/// As of [`Loop`], the kinds of the second and third operand being those of `KIND`.
pub(super) unsafe fn select_loop<T: Copy, const KIND: u8>(t: &Tile) {
    let [c, a, b] = t.args;
    // SAFETY: as promised by the caller; only bits are copied, so any type of the size will do.
    unsafe {
        let pair = match KIND {
            0 => Pair::Tiles(tile::<T>(a, t.len), tile::<T>(b, t.len)),
            1 => Pair::Right(tile::<T>(a, t.len), *b.cast()),
            _ => Pair::Left(*a.cast(), tile::<T>(b, t.len)),
        };
        dispatch(Select(tile(c, t.len), pair, tile_mut(t.out, t.len)));
    }
}

/// `a * b + c`, rounded after the product as two loops would round it; `b` and `c` may be constants.
struct MulAdd<'a, T>(&'a [T], Factor<'a, T>, Factor<'a, T>, &'a mut [T]);

enum Factor<'a, T> {
    Tile(&'a [T]),
    Constant(T),
}

impl<T: Copy + Mul<Output = T> + Add<Output = T>> Kernel for MulAdd<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let MulAdd(a, b, c, out) = self;
        match (b, c) {
            (Factor::Tile(b), Factor::Tile(c)) => {
                for (((r, a), b), c) in out.iter_mut().zip(a).zip(b).zip(c) {
                    *r = *a * *b + *c;
                }
            }
            (Factor::Tile(b), Factor::Constant(c)) => {
                for ((r, a), b) in out.iter_mut().zip(a).zip(b) {
                    *r = *a * *b + c;
                }
            }
            (Factor::Constant(b), Factor::Tile(c)) => {
                for ((r, a), c) in out.iter_mut().zip(a).zip(c) {
                    *r = *a * b + *c;
                }
            }
            (Factor::Constant(b), Factor::Constant(c)) => {
                for (r, a) in out.iter_mut().zip(a) {
                    *r = *a * b + c;
                }
            }
        }
    }
}

/// # Safety
/// As of [`Loop`]; the second and third operand are constants where `B` and `C` say so.
pub(super) unsafe fn mul_add_loop<T: Copy + Mul<Output = T> + Add<Output = T>, const B: bool, const C: bool>(t: &Tile) {
    let [a, b, c] = t.args;
    // SAFETY: as promised by the caller.
    unsafe {
        let b = if B {
            Factor::Constant(*b.cast())
        } else {
            Factor::Tile(tile(b, t.len))
        };
        let c = if C {
            Factor::Constant(*c.cast())
        } else {
            Factor::Tile(tile(c, t.len))
        };
        dispatch(MulAdd::<T>(tile(a, t.len), b, c, tile_mut(t.out, t.len)));
    }
}
