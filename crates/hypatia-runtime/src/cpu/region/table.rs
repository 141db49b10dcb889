//! Which loop serves which op, on which class.

use hypatia_core::ty::{DType, truncated_32, truncated_64};

use super::access::Class;
use super::loops::{
    Binary, Kind, Loop, Tile, Unary, binary_loop, fill_loop, function_loop, mul_add_loop, select_loop, tile_mut,
    unary_loop,
};
use crate::cpu::math::real::{self, Real};
use crate::cpu::math::{self, trig::finish_trig};
use crate::kernels::region::Op;

fn pick<T: Copy, F: Binary<T>>(kind: Kind) -> Loop {
    match kind {
        Kind::TileTile => binary_loop::<T, F, 0>,
        Kind::TileConstant => binary_loop::<T, F, 1>,
        Kind::ConstantTile => binary_loop::<T, F, 2>,
    }
}

macro_rules! unary_ops {
    ($($op:ident$([$g:ident: $bound:ident])?: $t:ty => $out:ty, |$x:ident| $body:expr;)*) => {
        $(
            impl$(<$g: $bound>)? Unary<$t> for $op {
                type Out = $out;
                #[inline(always)]
                fn call<const FMA: bool>($x: $t) -> $out {
                    $body
                }
            }
        )*
    };
}

macro_rules! binary_ops {
    ($($op:ident$([$g:ident: $bound:ident])?: $t:ty => $out:ty, |$a:ident, $b:ident| $body:expr;)*) => {
        $(
            impl$(<$g: $bound>)? Binary<$t> for $op {
                type Out = $out;
                #[inline(always)]
                fn call<const FMA: bool>($a: $t, $b: $t) -> $out {
                    $body
                }
            }
        )*
    };
}

trait Ordered: PartialOrd + Copy {}
impl<T: PartialOrd + Copy> Ordered for T {}

macro_rules! structs {
    ($($name:ident)*) => { $(struct $name;)* };
}

structs!(Neg Abs Sign Exp Expm1 Log Log1p Sqrt Rsqrt Reciprocal Square Sin Cos Erf Tanh Sigmoid Relu Gelu GeluTanh);
structs!(Silu Floor Ceil Not Add Sub Mul Div Pow Maximum Minimum AtLeast AtMost Eq Ne Lt Le Gt Ge And Or);
structs!(Cube InverseSquare Identity Truth Widen Narrow IntToF32 IntToF64 ToInt ToI32 BoolToF32 BoolToF64 BoolToInt);

unary_ops! {
    Neg[T: Real]: T => T, |x| x.neg::<FMA>();
    Abs[T: Real]: T => T, |x| x.abs::<FMA>();
    Sign[T: Real]: T => T, |x| x.sign::<FMA>();
    Exp[T: Real]: T => T, |x| x.exp::<FMA>();
    Expm1[T: Real]: T => T, |x| x.expm1::<FMA>();
    Log[T: Real]: T => T, |x| x.log::<FMA>();
    Log1p[T: Real]: T => T, |x| x.log1p::<FMA>();
    Sqrt[T: Real]: T => T, |x| x.sqrt::<FMA>();
    Rsqrt[T: Real]: T => T, |x| x.rsqrt::<FMA>();
    Reciprocal[T: Real]: T => T, |x| x.reciprocal::<FMA>();
    Square[T: Real]: T => T, |x| x.square::<FMA>();
    Sin[T: Real]: T => T, |x| x.sin::<FMA>();
    Cos[T: Real]: T => T, |x| x.cos::<FMA>();
    Erf[T: Real]: T => T, |x| x.erf::<FMA>();
    Tanh[T: Real]: T => T, |x| x.tanh::<FMA>();
    Sigmoid[T: Real]: T => T, |x| x.sigmoid::<FMA>();
    Relu[T: Real]: T => T, |x| x.relu::<FMA>();
    Gelu[T: Real]: T => T, |x| x.gelu::<FMA>();
    GeluTanh[T: Real]: T => T, |x| x.gelu_tanh::<FMA>();
    Silu[T: Real]: T => T, |x| x.silu::<FMA>();
    Floor[T: Real]: T => T, |x| x.floor::<FMA>();
    Ceil[T: Real]: T => T, |x| x.ceil::<FMA>();
    Cube: f32 => f32, |x| x * x * x;
    Cube: f64 => f64, |x| x * x * x;
    InverseSquare: f32 => f32, |x| 1.0 / (x * x);
    InverseSquare: f64 => f64, |x| 1.0 / (x * x);
    Identity: u8 => u8, |x| x;
    Identity: u32 => u32, |x| x;
    Identity: u64 => u64, |x| x;
    Neg: i64 => i64, |x| x.wrapping_neg();
    Abs: i64 => i64, |x| x.wrapping_abs();
    Sign: i64 => i64, |x| x.signum();
    Square: i64 => i64, |x| x.wrapping_mul(x);
    Relu: i64 => i64, |x| x.max(0);
    Not: u8 => u8, |x| u8::from(x == 0);
    Truth: f32 => u8, |x| u8::from(x != 0.0);
    Truth: f64 => u8, |x| u8::from(x != 0.0);
    Truth: i64 => u8, |x| u8::from(x != 0);
    Widen: f32 => f64, |x| f64::from(x);
    Narrow: f64 => f32, |x| x as f32;
    IntToF32: i64 => f32, |x| x as f32;
    IntToF64: i64 => f64, |x| x as f64;
    BoolToF32: u8 => f32, |x| f32::from(x);
    BoolToF64: u8 => f64, |x| f64::from(x);
    BoolToInt: u8 => i64, |x| i64::from(x);
    ToInt: f32 => i64, |x| truncated_64(f64::from(x));
    ToInt: f64 => i64, |x| truncated_64(x);
    ToI32: f32 => i64, |x| truncated_32(f64::from(x));
    ToI32: f64 => i64, |x| truncated_32(x);
}

binary_ops! {
    Add: f32 => f32, |a, b| a + b;
    Sub: f32 => f32, |a, b| a - b;
    Mul: f32 => f32, |a, b| a * b;
    Div: f32 => f32, |a, b| a / b;
    Pow: f32 => f32, |a, b| a.powf(b);
    Add: f64 => f64, |a, b| a + b;
    Sub: f64 => f64, |a, b| a - b;
    Mul: f64 => f64, |a, b| a * b;
    Div: f64 => f64, |a, b| a / b;
    Pow: f64 => f64, |a, b| a.powf(b);
    Maximum[T: Real]: T => T, |a, b| real::maximum(a, b);
    Minimum[T: Real]: T => T, |a, b| real::minimum(a, b);
    AtLeast[T: Ordered]: T => T, |a, b| if a < b { b } else { a };
    AtMost[T: Ordered]: T => T, |a, b| if a > b { b } else { a };
    Add: i64 => i64, |a, b| a.wrapping_add(b);
    Sub: i64 => i64, |a, b| a.wrapping_sub(b);
    Mul: i64 => i64, |a, b| a.wrapping_mul(b);
    Maximum: i64 => i64, |a, b| a.max(b);
    Minimum: i64 => i64, |a, b| a.min(b);
    Eq[T: PartialOrd]: T => u8, |a, b| u8::from(a == b);
    Ne[T: PartialOrd]: T => u8, |a, b| u8::from(a != b);
    Lt[T: PartialOrd]: T => u8, |a, b| u8::from(a < b);
    Le[T: PartialOrd]: T => u8, |a, b| u8::from(a <= b);
    Gt[T: PartialOrd]: T => u8, |a, b| u8::from(a > b);
    Ge[T: PartialOrd]: T => u8, |a, b| u8::from(a >= b);
    And: u8 => u8, |a, b| a & b;
    Or: u8 => u8, |a, b| a | b;
}

/// # Safety
/// As of [`Loop`].
unsafe fn sin_loop(t: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe {
        unary_loop::<f32, Sin>(t);
        finish_trig(tile_mut(t.out, t.len), f64::sin);
    }
}

/// # Safety
/// As of [`Loop`].
unsafe fn cos_loop(t: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe {
        unary_loop::<f32, Cos>(t);
        finish_trig(tile_mut(t.out, t.len), f64::cos);
    }
}

/// The loop of a unary op.
pub(super) fn unary(op: Op, class: Class) -> Option<Loop> {
    macro_rules! floats {
        (functions $($function:ident)*; others $($name:ident)*) => {
            match (op, class) {
                (Op::Sin, Class::F32) => sin_loop,
                (Op::Cos, Class::F32) => cos_loop,
                (Op::Sin, Class::F64) => unary_loop::<f64, Sin>,
                (Op::Cos, Class::F64) => unary_loop::<f64, Cos>,
                $(
                    (Op::$function, Class::F32) => function_loop::<math::$function>,
                    (Op::$function, Class::F64) => unary_loop::<f64, $function>,
                )*
                $(
                    (Op::$name, Class::F32) => unary_loop::<f32, $name>,
                    (Op::$name, Class::F64) => unary_loop::<f64, $name>,
                )*
                (Op::Neg, Class::I64) => unary_loop::<i64, Neg>,
                (Op::Abs, Class::I64) => unary_loop::<i64, Abs>,
                (Op::Sign, Class::I64) => unary_loop::<i64, Sign>,
                (Op::Square, Class::I64) => unary_loop::<i64, Square>,
                (Op::Relu, Class::I64) => unary_loop::<i64, Relu>,
                (Op::Not, Class::Bool) => unary_loop::<u8, Not>,
                _ => return None,
            }
        };
    }
    Some(floats!(
        functions Exp Expm1 Log Log1p Sqrt Rsqrt Erf Tanh Sigmoid Gelu GeluTanh Silu;
        others Neg Abs Sign Reciprocal Square Relu Floor Ceil
    ))
}

/// The loop of a binary op.
pub(super) fn binary(op: Op, class: Class, kind: Kind) -> Option<Loop> {
    macro_rules! classes {
        (floats $($f:ident)*; numbers $($n:ident)*; all $($a:ident)*) => {
            match (op, class) {
                $(
                    (Op::$f, Class::F32) => pick::<f32, $f>(kind),
                    (Op::$f, Class::F64) => pick::<f64, $f>(kind),
                )*
                $(
                    (Op::$n, Class::F32) => pick::<f32, $n>(kind),
                    (Op::$n, Class::F64) => pick::<f64, $n>(kind),
                    (Op::$n, Class::I64) => pick::<i64, $n>(kind),
                )*
                $(
                    (Op::$a, Class::F32) => pick::<f32, $a>(kind),
                    (Op::$a, Class::F64) => pick::<f64, $a>(kind),
                    (Op::$a, Class::I64) => pick::<i64, $a>(kind),
                    (Op::$a, Class::Bool) => pick::<u8, $a>(kind),
                )*
                (Op::And, Class::Bool) => pick::<u8, And>(kind),
                (Op::Or, Class::Bool) => pick::<u8, Or>(kind),
                _ => return None,
            }
        };
    }
    Some(classes!(floats Div Pow; numbers Add Sub Mul Maximum Minimum; all Eq Ne Lt Le Gt Ge))
}

/// The loop that puts a bound below values, or above them. At a bound a value stays as it is, `-0` beside `0` too, and so
/// does NaN.
pub(super) fn bound(below: bool, class: Class, kind: Kind) -> Option<Loop> {
    Some(match (class, below) {
        (Class::F32, true) => pick::<f32, AtLeast>(kind),
        (Class::F32, false) => pick::<f32, AtMost>(kind),
        (Class::F64, true) => pick::<f64, AtLeast>(kind),
        (Class::F64, false) => pick::<f64, AtMost>(kind),
        (Class::I64, true) => pick::<i64, AtLeast>(kind),
        (Class::I64, false) => pick::<i64, AtMost>(kind),
        (Class::Bool, _) => return None,
    })
}

/// The loop of a power with this exponent, where there is a better one than the general.
pub(super) fn power(exponent: f64, class: Class) -> Option<Loop> {
    let op = match exponent {
        0.5 => Op::Sqrt,
        -0.5 => Op::Rsqrt,
        -1.0 => Op::Reciprocal,
        2.0 => Op::Square,
        _ => {
            return match (exponent, class) {
                (1.0, _) => Some(copy(class)),
                (3.0, Class::F32) => Some(unary_loop::<f32, Cube>),
                (3.0, Class::F64) => Some(unary_loop::<f64, Cube>),
                (-2.0, Class::F32) => Some(unary_loop::<f32, InverseSquare>),
                (-2.0, Class::F64) => Some(unary_loop::<f64, InverseSquare>),
                _ => None,
            };
        }
    };
    unary(op, class)
}

/// The loop of `a * b + c`, where `b` and `c` may be constants.
pub(super) fn mul_add(class: Class, b: bool, c: bool) -> Option<Loop> {
    macro_rules! constants {
        ($t:ty) => {
            match (b, c) {
                (false, false) => mul_add_loop::<$t, false, false>,
                (false, true) => mul_add_loop::<$t, false, true>,
                (true, false) => mul_add_loop::<$t, true, false>,
                (true, true) => mul_add_loop::<$t, true, true>,
            }
        };
    }
    match class {
        Class::F32 => Some(constants!(f32)),
        Class::F64 => Some(constants!(f64)),
        _ => None,
    }
}

/// The loop of `Where`, the kinds being those of the two values.
pub(super) fn select(class: Class, kind: Kind) -> Loop {
    macro_rules! kinds {
        ($t:ty) => {
            match kind {
                Kind::TileTile => select_loop::<$t, 0>,
                Kind::TileConstant => select_loop::<$t, 1>,
                Kind::ConstantTile => select_loop::<$t, 2>,
            }
        };
    }
    match class.size() {
        1 => kinds!(u8),
        4 => kinds!(u32),
        _ => kinds!(u64),
    }
}

/// The loop that spreads a constant over a tile.
pub(super) fn fill(class: Class) -> Loop {
    match class.size() {
        1 => fill_loop::<u8>,
        4 => fill_loop::<u32>,
        _ => fill_loop::<u64>,
    }
}

/// The loop that copies a tile.
pub(super) fn copy(class: Class) -> Loop {
    match class.size() {
        1 => unary_loop::<u8, Identity>,
        4 => unary_loop::<u32, Identity>,
        _ => unary_loop::<u64, Identity>,
    }
}

/// The loop of a cast between classes; what the dtype lacks in bits is for [`super::rounding`].
pub(super) fn cast(from: Class, to: DType) -> Loop {
    use Class::*;
    match (from, Class::of(to)) {
        // torch converts to 32 bits, and to 64 for bytes without sign and the widest type.
        (F32, I64) if !matches!(to, DType::U8 | DType::I64) => unary_loop::<f32, ToI32>,
        (F64, I64) if !matches!(to, DType::U8 | DType::I64) => unary_loop::<f64, ToI32>,
        (F32, F64) => unary_loop::<f32, Widen>,
        (F64, F32) => unary_loop::<f64, Narrow>,
        (F32, I64) => unary_loop::<f32, ToInt>,
        (F64, I64) => unary_loop::<f64, ToInt>,
        (I64, F32) => unary_loop::<i64, IntToF32>,
        (I64, F64) => unary_loop::<i64, IntToF64>,
        (F32, Bool) => unary_loop::<f32, Truth>,
        (F64, Bool) => unary_loop::<f64, Truth>,
        (I64, Bool) => unary_loop::<i64, Truth>,
        (Bool, F32) => unary_loop::<u8, BoolToF32>,
        (Bool, F64) => unary_loop::<u8, BoolToF64>,
        (Bool, I64) => unary_loop::<u8, BoolToInt>,
        (F32, F32) | (F64, F64) | (I64, I64) | (Bool, Bool) => copy(from),
    }
}
