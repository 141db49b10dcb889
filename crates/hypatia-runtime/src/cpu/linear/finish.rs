//! What follows a product, and the store.

use super::{Activation, Element, Epilogue, RowsMut};
use crate::cpu::lanes::{self, Kernel, Level};
use crate::cpu::math::activate;
use std::marker::PhantomData;

/// Where a result goes. Parts on several threads write it at once, each its own elements.
pub struct Sink<'a, T> {
    y: *mut T,
    stride: usize,
    pub epilogue: &'a Epilogue<'a, T>,
    lifetime: PhantomData<&'a mut T>,
}

// SAFETY: `T` is plain data, and the unsafe methods oblige their callers to keep to disjoint elements.
unsafe impl<T: Element> Sync for Sink<'_, T> {}

/// Sums of a part that are complete.
pub struct Block {
    /// Where the sums are in the result.
    pub row: usize,
    pub rows: usize,
    pub column: usize,
    pub columns: usize,
    /// From row to row of the sums.
    pub stride: usize,
}

impl<'a, T: Element> Sink<'a, T> {
    /// The result's rows must have been checked for the sizes that blocks will have.
    pub fn new(y: RowsMut<'a, T>, epilogue: &'a Epilogue<'a, T>) -> Sink<'a, T> {
        Sink {
            y: y.data.as_mut_ptr(),
            stride: y.stride,
            epilogue,
            lifetime: PhantomData,
        }
    }

    /// The address of an element.
    pub fn at(&self, row: usize, column: usize) -> *mut T {
        self.y.wrapping_add(row * self.stride + column)
    }

    pub fn stride(&self) -> usize {
        self.stride
    }

    /// # Safety
    /// The elements lie in the result, and no other thread uses them now.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "callers keep to disjoint elements")]
    unsafe fn row(&self, row: usize, column: usize, columns: usize) -> &mut [T] {
        // SAFETY: the caller's obligation.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, column), columns) }
    }

    /// True if a store is quick even for narrow blocks: nothing but bias and ReLU follows the sums.
    pub fn is_direct(&self) -> bool {
        matches!(self.epilogue.activation, Activation::None | Activation::Relu) && self.epilogue.residual.is_none()
    }

    /// Turns sums into results and stores them.
    ///
    /// # Safety
    /// The block lies in the result, and no other thread uses its elements now.
    pub unsafe fn store(&self, level: Level, sums: &mut [f32], block: &Block) {
        if self.is_direct() {
            #[cfg(target_arch = "x86_64")]
            if level == Level::Avx512 {
                assert!(sums.len() >= block.rows.saturating_sub(1) * block.stride + block.columns);
                let (sums, least) = (sums.as_ptr(), least(self.epilogue.activation));
                // SAFETY: the caller's obligation, for the result; the epilogue was checked.
                if unsafe {
                    T::store(
                        sums,
                        block,
                        self.at(block.row, block.column),
                        self.stride,
                        self.epilogue.bias,
                        least,
                    )
                } {
                    return;
                }
            }
            return lanes::dispatch_at(
                level,
                Direct {
                    sink: self,
                    sums,
                    block,
                },
            );
        }
        lanes::dispatch_at(
            level,
            Before {
                sink: self,
                sums,
                block,
            },
        );
        let activation = self.epilogue.activation;
        if !matches!(activation, Activation::None | Activation::Relu) {
            if block.stride == block.columns {
                activate(activation, &mut sums[..block.rows * block.columns]);
            } else {
                sums.chunks_mut(block.stride)
                    .take(block.rows)
                    .for_each(|row| activate(activation, &mut row[..block.columns]));
            }
        }
        lanes::dispatch_at(
            level,
            After {
                sink: self,
                sums,
                block,
            },
        );
    }
}

impl Sink<'_, f32> {
    /// What a kernel that adds the bias and applies ReLU itself leaves to do in place.
    ///
    /// # Safety
    /// As for [`Sink::store`].
    pub unsafe fn finish(&self, level: Level, row: usize, rows: usize, column: usize, columns: usize) {
        let activation = self.epilogue.activation;
        for r in row..row + rows {
            // SAFETY: the caller's obligation.
            let y = unsafe { self.row(r, column, columns) };
            if activation != Activation::Relu {
                activate(activation, y);
            }
            if let Some(residual) = self.epilogue.residual {
                let other = &residual.data[r * residual.stride + column..][..columns];
                lanes::dispatch_at(level, Add(y, other));
            }
        }
    }
}

struct Add<'a>(&'a mut [f32], &'a [f32]);

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.0.iter_mut().zip(self.1).for_each(|(y, r)| *y += r);
    }
}

/// ReLU or nothing as a lower bound.
fn least(activation: Activation) -> f32 {
    match activation {
        Activation::Relu => 0.0,
        _ => f32::NEG_INFINITY,
    }
}

/// The whole of a common epilogue. Rounding before ReLU changes nothing.
struct Direct<'a, 'b, T> {
    sink: &'a Sink<'b, T>,
    sums: &'a [f32],
    block: &'a Block,
}

impl<T: Element> Kernel for Direct<'_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (e, b) = (self.sink.epilogue, self.block);
        let least = least(e.activation);
        for r in 0..b.rows {
            let sums = &self.sums[r * b.stride..][..b.columns];
            // SAFETY: `Sink::store` obliges its caller to it.
            let y = unsafe { self.sink.row(b.row + r, b.column, b.columns) };
            if let Some(bias) = e.bias {
                for ((y, s), b) in y.iter_mut().zip(sums).zip(&bias[b.column..]) {
                    let sum = s + b.widen();
                    *y = T::narrow(if sum < least { least } else { sum });
                }
            } else {
                for (y, s) in y.iter_mut().zip(sums) {
                    *y = T::narrow(if *s < least { least } else { *s });
                }
            }
        }
    }
}

/// Bias, the first rounding, and ReLU.
struct Before<'a, 'b, T> {
    sink: &'a Sink<'b, T>,
    sums: &'a mut [f32],
    block: &'a Block,
}

impl<T: Element> Kernel for Before<'_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (e, b) = (self.sink.epilogue, self.block);
        let rounds = e.round_before_activation && (e.activation != Activation::None || e.residual.is_some());
        for r in 0..b.rows {
            let sums = &mut self.sums[r * b.stride..][..b.columns];
            if let Some(bias) = e.bias {
                sums.iter_mut()
                    .zip(&bias[b.column..])
                    .for_each(|(s, b)| *s += b.widen());
            }
            if rounds {
                sums.iter_mut().for_each(|s| *s = T::rounded(*s));
            }
            if e.activation == Activation::Relu {
                sums.iter_mut().for_each(|s| *s = if *s < 0.0 { 0.0 } else { *s });
            }
        }
    }
}

/// The second rounding, the residual, and the store.
struct After<'a, 'b, T> {
    sink: &'a Sink<'b, T>,
    sums: &'a mut [f32],
    block: &'a Block,
}

impl<T: Element> Kernel for After<'_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (e, b) = (self.sink.epilogue, self.block);
        let rounds = e.round_before_activation && e.activation != Activation::None;
        for r in 0..b.rows {
            let sums = &mut self.sums[r * b.stride..][..b.columns];
            if let Some(residual) = e.residual {
                let other = &residual.data[(b.row + r) * residual.stride + b.column..][..b.columns];
                if rounds {
                    sums.iter_mut().for_each(|s| *s = T::rounded(*s));
                }
                sums.iter_mut().zip(other).for_each(|(s, o)| *s += o.widen());
            }
            // SAFETY: `Sink::store` obliges its caller to it.
            let y = unsafe { self.sink.row(b.row + r, b.column, b.columns) };
            y.iter_mut().zip(sums).for_each(|(y, s)| *y = T::narrow(*s));
        }
    }
}
