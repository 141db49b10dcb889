//! Loops that make the values of a class those of a narrower dtype.

use hypatia_core::ty::DType;

use super::loops::tile_mut;
use crate::cpu::lanes::{Kernel, bf16_to_f32, dispatch, f16_to_f32, f32_to_bf16, f32_to_f16};

/// # Safety
/// There must be `len` elements of the loop's class that nobody else uses.
pub(crate) type InPlace = unsafe fn(*mut u8, usize);

struct Update<'a, T, F>(&'a mut [T], F);

/// A function from a type to itself that vectorises.
trait Step<T>: Copy {
    fn step(self, x: T) -> T;
}

impl<T: Copy, F: Step<T>> Kernel for Update<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for x in self.0 {
            *x = self.1.step(*x);
        }
    }
}

macro_rules! roundings {
    ($($name:ident $fn:ident $t:ty, |$x:ident| $body:expr;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $name;

            impl Step<$t> for $name {
                #[inline(always)]
                fn step(self, $x: $t) -> $t {
                    $body
                }
            }

            /// # Safety
            /// As of [`InPlace`].
            unsafe fn $fn(data: *mut u8, len: usize) {
                // SAFETY: as promised by the caller.
                dispatch(Update(unsafe { tile_mut::<$t>(data, len) }, $name));
            }
        )*
    };
}

roundings! {
    RoundBf16 round_bf16 f32, |x| bf16_to_f32(f32_to_bf16(x));
    RoundF16 round_f16 f32, |x| f16_to_f32(f32_to_f16(x));
    WrapU8 wrap_u8 i64, |x| i64::from(x as u8);
    WrapI8 wrap_i8 i64, |x| i64::from(x as i8);
    WrapI16 wrap_i16 i64, |x| i64::from(x as i16);
    WrapI32 wrap_i32 i64, |x| i64::from(x as i32);
}

/// The loop that makes the values of a class those of a dtype, if it has fewer.
pub(super) fn round(dtype: DType) -> Option<InPlace> {
    Some(match dtype {
        DType::BF16 => round_bf16,
        DType::F16 => round_f16,
        DType::U8 => wrap_u8,
        DType::I8 => wrap_i8,
        DType::I16 => wrap_i16,
        DType::I32 => wrap_i32,
        _ => return None,
    })
}
