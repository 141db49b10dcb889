//! Elementary functions over slices, vectorised for the machine at hand and within two units in the last place.
//!
//! ```
//! let mut x = [-1.0f32, 0.0, 2.0];
//! hypatia_runtime::cpu::math::relu(&mut x);
//! assert_eq!(x, [0.0, 0.0, 2.0]);
//! ```

use super::lanes::{Ahead, Kernel, Level, dispatch_at, level};
use crate::kernels::product::Activation;

#[cfg(target_arch = "x86_64")]
mod pieces;
pub mod real;
pub mod single;
pub mod trig;

pub use trig::{cos, sin};

/// Lanes of the widest vector: rests of slices are padded to it, since vector code is faster than a scalar rest.
const LANES: usize = 16;

/// A function of one number that is compiled for each instruction set.
pub(crate) trait Function: Copy {
    fn call<const FMA: bool>(self, x: f32) -> f32;

    /// Its table, if it has one.
    #[cfg(target_arch = "x86_64")]
    fn pieces() -> Option<&'static pieces::Pieces> {
        None
    }
}

/// Writes a function of numbers, vector by vector.
struct Map<F> {
    f: F,
    x: *const [f32; LANES],
    y: *mut [f32; LANES],
    vectors: usize,
    ahead: Ahead,
}

impl<F: Function> Kernel for Map<F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut ahead = self.ahead;
        for i in 0..self.vectors {
            ahead.fetch::<1>();
            // SAFETY: `map` obliges its caller to it; a vector is read before it is written.
            let mut values = unsafe { self.x.add(i).read() };
            for value in &mut values {
                *value = self.f.call::<FMA>(*value);
            }
            // SAFETY: as above.
            unsafe { self.y.add(i).write(values) };
        }
    }
}

/// Writes a function of `len` numbers, a multiple of 16, and asks for other memory meanwhile.
///
/// # Safety
/// The numbers must be readable and the results writable, in the same memory or in memory apart.
pub(crate) unsafe fn map<F: Function>(at: Level, f: F, x: *const f32, y: *mut f32, len: usize, ahead: Ahead) {
    #[cfg(target_arch = "x86_64")]
    if at.min(level()) == Level::Avx512
        && let Some(pieces) = F::pieces()
    {
        // SAFETY: as promised by the caller; the level was detected.
        return unsafe { pieces.map(f, x, y, len, ahead) };
    }
    let (x, y, vectors) = (x.cast(), y.cast(), len / LANES);
    dispatch_at(
        at,
        Map {
            f,
            x,
            y,
            vectors,
            ahead,
        },
    );
}

/// Applies a function in place.
fn apply<F: Function>(at: Level, f: F, values: &mut [f32]) {
    let (whole, rest) = values.split_at_mut(values.len() / LANES * LANES);
    let run = |x: &mut [f32]| {
        let data = x.as_mut_ptr();
        // SAFETY: one slice, read and written.
        unsafe { map(at, f, data, data, x.len(), Ahead::new()) };
    };
    run(whole);
    if !rest.is_empty() {
        let mut padded = [0.0; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        run(&mut padded);
        rest.copy_from_slice(&padded[..rest.len()]);
    }
}

macro_rules! functions {
    ($($name:ident $kernel:ident $doc:literal |$x:ident| $body:expr $(, $table:ident)?;)*) => {
        $(
            #[derive(Clone, Copy, Default)]
            pub(crate) struct $kernel;

            impl Function for $kernel {
                #[inline(always)]
                fn call<const FMA: bool>(self, $x: f32) -> f32 {
                    $body
                }

                $(
                    #[cfg(target_arch = "x86_64")]
                    fn pieces() -> Option<&'static pieces::Pieces> {
                        Some(pieces::$table())
                    }
                )?
            }

            #[doc = $doc]
            pub fn $name(x: &mut [f32]) {
                apply(level(), $kernel, x);
            }
        )*

        /// Runs the function of that name at a level.
        #[cfg(test)]
        fn at_level(name: &str, level: Level, x: &mut [f32]) {
            match name {
                $(stringify!($name) => apply(level, $kernel, x),)*
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
    tanh Tanh "The hyperbolic tangent, in place." |x| single::tanh::<FMA>(x), tanh;
    erf Erf "The error function, in place." |x| single::erf::<FMA>(x), erf;
    sigmoid Sigmoid "1 / (1 + e⁻ˣ), in place." |x| single::sigmoid::<FMA>(x), sigmoid;
    silu Silu "x / (1 + e⁻ˣ), in place." |x| single::silu::<FMA>(x), silu;
    gelu Gelu "x (1 + erf(x/√2)) / 2, in place." |x| single::gelu::<FMA>(x), gelu;
    gelu_tanh GeluTanh "The tanh form of GELU, in place." |x| single::gelu_tanh::<FMA>(x), gelu_tanh;
    relu Relu "x where it is not negative and zero elsewhere, in place; NaN stays." |x| single::relu(x);
    sqrt Sqrt "The square root, in place." |x| x.sqrt();
    rsqrt Rsqrt "One over the square root, in place." |x| 1.0 / x.sqrt();
}

/// Applies an activation in place.
pub(crate) fn activate(activation: Activation, x: &mut [f32]) {
    match activation {
        Activation::None => {}
        Activation::Relu => relu(x),
        Activation::Gelu => gelu(x),
        Activation::GeluTanh => gelu_tanh(x),
        Activation::Silu => silu(x),
        Activation::Sigmoid => sigmoid(x),
        Activation::Tanh => tanh(x),
    }
}

#[cfg(test)]
mod tests;
