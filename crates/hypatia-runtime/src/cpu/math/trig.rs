//! Sine and cosine.

use super::single::poly;
use super::{Function, apply};
use crate::cpu::lanes::{fma, level};

#[derive(Clone, Copy)]
struct Sine;

impl Function for Sine {
    #[inline(always)]
    fn call<const FMA: bool>(self, x: f32) -> f32 {
        sin1::<FMA>(x)
    }
}

#[derive(Clone, Copy)]
struct Cosine;

impl Function for Cosine {
    #[inline(always)]
    fn call<const FMA: bool>(self, x: f32) -> f32 {
        cos1::<FMA>(x)
    }
}

/// The sine, in place.
pub fn sin(x: &mut [f32]) {
    apply(level(), Sine, x);
    finish_trig(x, f64::sin);
}

/// The cosine, in place.
pub fn cos(x: &mut [f32]) {
    apply(level(), Cosine, x);
    finish_trig(x, f64::cos);
}

/// Sines of huge numbers, which the vector code leaves as they were.
pub(crate) fn finish_trig(values: &mut [f32], f: fn(f64) -> f64) {
    if values.iter().fold(false, |any, x| any | needs_long_reduction(*x)) {
        for x in values.iter_mut().filter(|x| needs_long_reduction(**x)) {
            *x = f(f64::from(*x)) as f32;
        }
    }
}

/// Half a turn's half with 25 bits, so that multiples below 2²⁸ are exact in f64, and the rest.
const QUARTER_HI: f64 = 1.570_796_310_901_641_8;
const QUARTER_LO: f64 = 1.589_325_477_352_819_7e-8;
/// Beyond it, sines need a longer reduction: see [`needs_long_reduction`].
const TRIG_LIMIT: f32 = 1e8;

/// True where [`sin1`] and [`cos1`] give up, infinities among them. No sine is as large, so they can be told apart.
#[inline(always)]
pub fn needs_long_reduction(x: f32) -> bool {
    x.abs() > TRIG_LIMIT
}

/// sin(x + quarter π/2).
#[inline(always)]
fn sine<const FMA: bool>(x: f32, quarter: u32) -> f32 {
    const ROUND64: f64 = 6_755_399_441_055_744.0;
    let y = f64::from(x);
    let shifted = y * std::f64::consts::FRAC_2_PI + ROUND64;
    let n = shifted - ROUND64;
    let r = ((y - n * QUARTER_HI) - n * QUARTER_LO) as f32;
    let turn = (shifted.to_bits() as u32).wrapping_add(quarter);
    let s = r * r;
    let sin = fma::<FMA>(r * s, poly::<FMA, 3>(s, SIN), r);
    let cos = fma::<FMA>(s * s, poly::<FMA, 3>(s, COS), fma::<FMA>(-0.5, s, 1.0));
    let value = if turn & 1 == 0 { sin } else { cos };
    f32::from_bits(value.to_bits() ^ (turn & 2) << 30)
}

/// (sin(r) - r) / r³ in r², for |r| <= π/4.
const SIN: [f32; 3] = [-0.166_666_55, 0.008_332_187, -1.951_790_9e-4];
/// (cos(r) - 1 + r²/2) / r⁴ in r², for |r| <= π/4.
const COS: [f32; 3] = [0.041_666_646, -0.001_388_731, 2.443_233_6e-5];

/// The sine; where it [`needs_long_reduction`], the argument itself.
#[inline(always)]
pub fn sin1<const FMA: bool>(x: f32) -> f32 {
    let result = sine::<FMA>(x, 0);
    // The reduction turns -0 into 0.
    if x == 0.0 || needs_long_reduction(x) { x } else { result }
}

/// The cosine; where it [`needs_long_reduction`], the argument itself.
#[inline(always)]
pub fn cos1<const FMA: bool>(x: f32) -> f32 {
    let result = sine::<FMA>(x, 1);
    if needs_long_reduction(x) { x } else { result }
}
