//! The functions of kernels, for f32 and f64 alike.

use super::{single, trig};

macro_rules! real {
    ($($name:ident $doc:literal |$x:ident| $single:expr, $double:expr;)*) => {
        /// A floating type that kernels compute in. `FMA` is that of [`Kernel::run`](crate::cpu::lanes::Kernel::run).
        pub trait Real: Copy + PartialOrd + 'static {
            $(
                #[doc = $doc]
                fn $name<const FMA: bool>(self) -> Self;
            )*

            /// The nearest value to an f64.
            fn from_f64(x: f64) -> Self;

            /// Every value is one of f64.
            fn to_f64(self) -> f64;

            /// True for NaN.
            fn nan(self) -> bool;
        }

        impl Real for f32 {
            $(
                #[inline(always)]
                fn $name<const FMA: bool>(self) -> f32 {
                    let $x = self;
                    $single
                }
            )*

            #[inline(always)]
            fn from_f64(x: f64) -> f32 {
                x as f32
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn nan(self) -> bool {
                self.is_nan()
            }
        }

        impl Real for f64 {
            $(
                #[inline(always)]
                fn $name<const FMA: bool>(self) -> f64 {
                    let $x = self;
                    $double
                }
            )*

            #[inline(always)]
            fn from_f64(x: f64) -> f64 {
                x
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                self
            }

            #[inline(always)]
            fn nan(self) -> bool {
                self.is_nan()
            }
        }
    };
}

real! {
    neg "-x." |x| -x, -x;
    abs "|x|." |x| x.abs(), x.abs();
    sign "-1, 0 or 1; 0 for NaN." |x| f32::from(i8::from(x > 0.0) - i8::from(x < 0.0)), f64::from(i8::from(x > 0.0) - i8::from(x < 0.0));
    exp "eˣ." |x| single::exp::<FMA>(x), x.exp();
    exp_below "eˣ for x that is not above zero; zero instead of denormal f32." |x| single::exp_below::<FMA>(x), x.exp();
    exp_deep "eˣ for x that is not above zero." |x| single::exp_deep::<FMA>(x), x.exp();
    expm1 "eˣ - 1." |x| single::expm1::<FMA>(x), x.exp_m1();
    log "The natural logarithm." |x| single::log::<FMA>(x), x.ln();
    log1p "log(1 + x)." |x| single::log1p::<FMA>(x), x.ln_1p();
    sqrt "The square root." |x| x.sqrt(), x.sqrt();
    rsqrt "One over the square root." |x| 1.0 / x.sqrt(), 1.0 / x.sqrt();
    reciprocal "1/x." |x| 1.0 / x, 1.0 / x;
    square "x²." |x| x * x, x * x;
    sin "The sine; huge f32 stay as they are, for a second pass." |x| trig::sin1::<FMA>(x), x.sin();
    cos "The cosine; huge f32 stay as they are, for a second pass." |x| trig::cos1::<FMA>(x), x.cos();
    erf "The error function." |x| single::erf::<FMA>(x), libm::erf(x);
    tanh "The hyperbolic tangent." |x| single::tanh::<FMA>(x), x.tanh();
    sigmoid "1 / (1 + e⁻ˣ)." |x| single::sigmoid::<FMA>(x), 1.0 / (1.0 + (-x).exp());
    relu "x where it is not negative; NaN stays." |x| single::relu(x), if x < 0.0 { 0.0 } else { x };
    gelu "x Φ(x)." |x| single::gelu::<FMA>(x), 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    gelu_tanh "The tanh form of GELU." |x| single::gelu_tanh::<FMA>(x), gelu_tanh64(x);
    silu "x σ(x)." |x| single::silu::<FMA>(x), x / (1.0 + (-x).exp());
    floor "The greatest integer that is not above." |x| x.floor(), x.floor();
    ceil "The least integer that is not below." |x| x.ceil(), x.ceil();
}

#[inline(always)]
fn gelu_tanh64(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * inner).exp())
}

/// The greater of two numbers, NaN if either is.
#[inline(always)]
pub fn maximum<T: Real>(a: T, b: T) -> T {
    let greater = if a > b { a } else { b };
    if a.nan() { a } else { greater }
}

/// The lesser of two numbers, NaN if either is.
#[inline(always)]
pub fn minimum<T: Real>(a: T, b: T) -> T {
    let lesser = if a < b { a } else { b };
    if a.nan() { a } else { lesser }
}
