//! Elementary functions over slices, vectorised for the machine at hand and within two units in the last place.
//!
//! ```
//! let mut x = [-1.0f32, 0.0, 2.0];
//! hypatia::runtime::cpu::math::relu(&mut x);
//! assert_eq!(x, [0.0, 0.0, 2.0]);
//! ```

use super::lanes::{Kernel, dispatch};

pub mod real;
pub mod single;

/// Lanes of the widest vector: rests of slices are padded to it, since vector code is faster than a scalar rest.
const LANES: usize = 16;

struct Map<'a, F>(&'a mut [f32], F);

/// A function of one number that is compiled for each instruction set.
trait Function: Copy {
    fn call<const FMA: bool>(self, x: f32) -> f32;
}

impl<F: Function> Kernel for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Map(values, f) = self;
        let (whole, rest) = values.split_at_mut(values.len() / LANES * LANES);
        for x in whole {
            *x = f.call::<FMA>(*x);
        }
        if !rest.is_empty() {
            let mut padded = [0.0; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            for x in &mut padded {
                *x = f.call::<FMA>(*x);
            }
            rest.copy_from_slice(&padded[..rest.len()]);
        }
    }
}

macro_rules! functions {
    ($($name:ident $kernel:ident $doc:literal |$x:ident| $body:expr;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $kernel;

            impl Function for $kernel {
                #[inline(always)]
                fn call<const FMA: bool>(self, $x: f32) -> f32 {
                    $body
                }
            }

            #[doc = $doc]
            pub fn $name(x: &mut [f32]) {
                dispatch(Map(x, $kernel));
            }
        )*

        /// Runs the function of that name at a level.
        #[cfg(test)]
        fn at_level(name: &str, level: super::lanes::Level, x: &mut [f32]) {
            match name {
                $(stringify!($name) => super::lanes::dispatch_at(level, Map(x, $kernel)),)*
                _ => unreachable!("no function {name}"),
            }
        }
    };
}

functions! {
    exp Exp "eˣ, in place." |x| single::exp::<FMA>(x);
    expm1 Expm1 "eˣ - 1, in place." |x| single::expm1::<FMA>(x);
    log Log "The natural logarithm, in place." |x| single::log::<FMA>(x);
    log1p Log1p "log(1 + x), in place." |x| single::log1p::<FMA>(x);
    tanh Tanh "The hyperbolic tangent, in place." |x| single::tanh::<FMA>(x);
    erf Erf "The error function, in place." |x| single::erf::<FMA>(x);
    sigmoid Sigmoid "1 / (1 + e⁻ˣ), in place." |x| single::sigmoid::<FMA>(x);
    silu Silu "x / (1 + e⁻ˣ), in place." |x| single::silu::<FMA>(x);
    gelu Gelu "x (1 + erf(x/√2)) / 2, in place." |x| single::gelu::<FMA>(x);
    gelu_tanh GeluTanh "The tanh form of GELU, in place." |x| single::gelu_tanh::<FMA>(x);
    relu Relu "x where it is not negative and zero elsewhere, in place; NaN stays." |x| single::relu(x);
    sqrt Sqrt "The square root, in place." |x| x.sqrt();
    rsqrt Rsqrt "One over the square root, in place." |x| 1.0 / x.sqrt();
}

#[derive(Clone, Copy)]
struct Sine;

impl Function for Sine {
    #[inline(always)]
    fn call<const FMA: bool>(self, x: f32) -> f32 {
        single::sin::<FMA>(x)
    }
}

#[derive(Clone, Copy)]
struct Cosine;

impl Function for Cosine {
    #[inline(always)]
    fn call<const FMA: bool>(self, x: f32) -> f32 {
        single::cos::<FMA>(x)
    }
}

/// The sine, in place.
pub fn sin(x: &mut [f32]) {
    dispatch(Map(x, Sine));
    finish_trig(x, f64::sin);
}

/// The cosine, in place.
pub fn cos(x: &mut [f32]) {
    dispatch(Map(x, Cosine));
    finish_trig(x, f64::cos);
}

/// Sines of huge numbers, which the vector code leaves as they were.
pub(crate) fn finish_trig(values: &mut [f32], f: fn(f64) -> f64) {
    if values
        .iter()
        .fold(false, |any, x| any | single::needs_long_reduction(*x))
    {
        for x in values.iter_mut().filter(|x| single::needs_long_reduction(**x)) {
            *x = f(f64::from(*x)) as f32;
        }
    }
}

#[cfg(test)]
mod tests;
