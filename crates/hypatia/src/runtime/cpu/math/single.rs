//! Functions of one f32, without branches: in a loop they become vector code.
//!
//! The polynomials are minimax fits in the variable and over the range named beside them. `FMA` says whether
//! `mul_add` is one instruction; without it [`fma`] goes through f64, so that results agree.

use crate::runtime::cpu::lanes::fma;

/// Adding it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
/// ln 2 with its low bits cut off, so that small multiples are exact, and the rest.
const LN2_HI: f32 = 0.693_145_75;
const LN2_LO: f32 = 1.428_606_8e-6;

/// (exp(r) - 1 - r) / r² for |r| <= ln(2)/2.
const EXP: [f32; 5] = [0.5, 0.166_665_33, 0.041_667_245, 0.008_367_62, 0.001_386_348_9];
/// (log(1 + f) - f + f²/2) / f³ for -1/3 <= f <= 1/3.
const LOG: [f32; 8] = [
    0.333_332_15,
    -0.249_998_02,
    0.200_104_52,
    -0.166_803_1,
    0.140_051_38,
    -0.121_865_82,
    0.139_880_08,
    -0.128_820_9,
];
/// (tanh(x)/x - 1)/x² in x², for |x| <= 0.6.
const TANH: [f32; 5] = [
    -0.333_332_96,
    0.133_318_51,
    -0.053_777_166,
    0.020_772_148,
    -0.005_865_995_3,
];
/// erf(x)/x - 1 in x², for |x| <= 0.95.
const ERF_NEAR: [f32; 7] = [
    0.128_379_17,
    -0.376_126_3,
    0.112_836_26,
    -0.026_855_74,
    0.005_192_460_5,
    -8.050_804e-4,
    8.002_775e-5,
];
/// log(erfc(x))/x for 0.93 <= x <= 4.
const ERF_FAR: [f32; 7] = [
    -1.128_654_2,
    -0.635_128,
    -0.106_275_305,
    0.023_795_081,
    -0.003_658_034_6,
    3.266_265e-4,
    -1.161_250_4e-5,
];

/// Slope of the variable t = 1/(1 + slope a) of [`gelu`].
const GELU_SLOPE: f32 = 0.4375;
/// exp(a²/2) Φ(-a)/t in t - GELU_CENTRE, for 0 <= a <= 14.6: the constant term and the others.
const GELU_CONSTANT: f32 = 0.256_051_2;
const GELU: [f32; 10] = [
    0.294_172_35,
    0.180_462_42,
    -0.028_725_34,
    -0.116_636_164,
    0.010_071_473,
    0.101_972_08,
    -0.038_013_43,
    -0.089_780_02,
    0.107_342_21,
    -0.038_201_76,
];
const GELU_CENTRE: f32 = 0.351_562_5;

/// Horner's scheme, the constant term first.
#[inline(always)]
fn poly<const FMA: bool, const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut sum = c[N - 1];
    for i in (0..N - 1).rev() {
        sum = fma::<FMA>(sum, x, c[i]);
    }
    sum
}

/// The lesser, or `x` if it is NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// The greater, or `x` if it is NaN.
#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

/// `(n, r, e)` with `x + low = n ln 2 + r + e`; `low` is what `x` lacks in precision, and `e` what `r` does.
#[inline(always)]
fn reduce<const FMA: bool>(x: f32, low: f32) -> (i32, f32, f32) {
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let (large, small) = (fma::<FMA>(n, -LN2_HI, x), fma::<FMA>(n, -LN2_LO, low));
    let r = large + small;
    (
        shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32,
        r,
        small - (r - large),
    )
}

/// exp(r) - 1 for a reduced argument.
#[inline(always)]
fn expm1_reduced<const FMA: bool>(r: f32) -> f32 {
    fma::<FMA>(r * r, poly::<FMA, 5>(r, EXP), r)
}

/// 2ⁿ for normal results.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Two factors of 2ⁿ, neither of which leaves the range of normal numbers.
#[inline(always)]
fn powers_of_two(n: i32) -> (f32, f32) {
    let half = n >> 1;
    (power_of_two(half), power_of_two(n.wrapping_sub(half)))
}

/// eˣ.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let (n, r, _) = reduce::<FMA>(at_most(at_least(x, -104.0), 89.0), 0.0);
    let (first, second) = powers_of_two(n);
    (1.0 + expm1_reduced::<FMA>(r)) * first * second
}

/// eˣ - 1.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    let (n, r, _) = reduce::<FMA>(at_most(at_least(x, -30.0), 89.0), 0.0);
    // Half of the power of two, which overflows before the result does.
    let half = power_of_two(n.wrapping_sub(1));
    let result = 2.0 * fma::<FMA>(half, expm1_reduced::<FMA>(r), half - 0.5);
    if x.abs() < 1e-9 { x } else { result }
}

/// log(1 + f) for -1/3 <= f <= 1/3, plus k ln 2.
#[inline(always)]
fn log_reduced<const FMA: bool>(f: f32, k: f32) -> f32 {
    let s = f * f;
    // Even and odd terms apart: half the latency.
    let even = poly::<FMA, 4>(s, [LOG[0], LOG[2], LOG[4], LOG[6]]);
    let odd = poly::<FMA, 4>(s, [LOG[1], LOG[3], LOG[5], LOG[7]]);
    let tail = fma::<FMA>(fma::<FMA>(odd, f, even), f, -0.5);
    fma::<FMA>(k, std::f32::consts::LN_2, fma::<FMA>(s, tail, f))
}

/// The bits of 2/3: exponents are counted from there, so that mantissas are near 1.
const TWO_THIRDS: u32 = 0x3f2a_aaab;

/// The natural logarithm.
#[inline(always)]
pub fn log<const FMA: bool>(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let y = if tiny { x * 8_388_608.0 } else { x };
    let exponent = y.to_bits().wrapping_sub(TWO_THIRDS) as i32 & !0x007f_ffff;
    let mantissa = f32::from_bits(y.to_bits().wrapping_sub(exponent as u32));
    let k = (exponent >> 23) as f32 - if tiny { 23.0 } else { 0.0 };
    let result = log_reduced::<FMA>(mantissa - 1.0, k);
    let result = if x < f32::INFINITY { result } else { x };
    let result = if x < 0.0 { f32::NAN } else { result };
    if x == 0.0 { f32::NEG_INFINITY } else { result }
}

/// log(1 + x).
#[inline(always)]
pub fn log1p<const FMA: bool>(x: f32) -> f32 {
    let exponent = (1.0 + x).to_bits().wrapping_sub(TWO_THIRDS) as i32 & !0x007f_ffff;
    // x/2ᵏ + (1/2ᵏ - 1): nothing of a small x is lost in 1 + x. Four times 1/2ᵏ is never denormal.
    let quarter = f32::from_bits(0x4080_0000u32.wrapping_sub(exponent as u32));
    let scaled = f32::from_bits(x.to_bits().wrapping_sub(exponent as u32));
    let result = log_reduced::<FMA>(scaled + fma::<FMA>(0.25, quarter, -1.0), (exponent >> 23) as f32);
    let result = if x < f32::INFINITY && x != 0.0 { result } else { x };
    let result = if x < -1.0 { f32::NAN } else { result };
    if x == -1.0 { f32::NEG_INFINITY } else { result }
}

/// The hyperbolic tangent.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let s = x * x;
    let near = fma::<FMA>(s * poly::<FMA, 5>(s, TANH), x, x);
    let (n, r, _) = reduce::<FMA>(at_least(-2.0 * x.abs(), -40.0), 0.0);
    let power = power_of_two(n);
    let e = fma::<FMA>(power, expm1_reduced::<FMA>(r), power);
    let far = 1.0 - 2.0 * e / (1.0 + e);
    if x.abs() > 0.6 { far } else { near }.copysign(x)
}

/// The error function.
#[inline(always)]
pub fn erf<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let near = fma::<FMA>(poly::<FMA, 7>(x * x, ERF_NEAR), x, x);
    let b = at_most(a, 4.0);
    let (n, r, _) = reduce::<FMA>(b * poly::<FMA, 7>(b, ERF_FAR), 0.0);
    let power = power_of_two(n);
    let far = (1.0 - power) - power * expm1_reduced::<FMA>(r);
    if a > 0.95 { far.copysign(x) } else { near }
}

/// `y` times 1 / (1 + eᶻ) if `upper`, and eᶻ / (1 + eᶻ) if not, for z = `z + low` <= 0. The power of two of eᶻ is
/// taken in two steps, the second one last, so that denormal results are rounded once.
#[inline(always)]
fn gate<const FMA: bool>(y: f32, z: f32, low: f32, upper: bool) -> f32 {
    let (n, r, _) = reduce::<FMA>(at_least(z, -120.0), low);
    let (first, second) = powers_of_two(n);
    let reduced = expm1_reduced::<FMA>(r);
    let whole = 1.0 + reduced;
    let e = whole * first * second;
    let bottom = 1.0 + e;
    let bottom_error = (1.0 - bottom) + e;
    let quotient = if upper { y } else { y * first } / bottom;
    let rest = fma::<FMA>(quotient, fma::<FMA>(-bottom_error, whole, reduced), quotient) * second;
    if upper { quotient } else { rest }
}

/// The result, or NaN at minus infinity, where a clamped argument has hidden an infinity times zero.
#[inline(always)]
fn zero_times_infinity(x: f32, result: f32) -> f32 {
    if x == f32::NEG_INFINITY { f32::NAN } else { result }
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    gate::<FMA>(1.0, -x.abs(), 0.0, x > 0.0)
}

/// x / (1 + e⁻ˣ).
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    zero_times_infinity(x, gate::<FMA>(at_least(x, -200.0), -x.abs(), 0.0, x > 0.0))
}

/// x, or zero where it is negative; NaN stays.
#[inline(always)]
pub fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// x Φ(x) = x (1 + erf(x/√2)) / 2.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
    let y = at_most(at_least(x, -30.0), 30.0);
    // With a = |x|, Φ(-a) = exp(-a²/2) t w(t). What rounding takes from the factors is carried along.
    let bottom = fma::<FMA>(GELU_SLOPE, y.abs(), 1.0);
    let bottom_error = fma::<FMA>(GELU_SLOPE, y.abs(), 1.0 - bottom);
    let t = 1.0 / bottom;
    let t_error = fma::<FMA>(-t, bottom_error, fma::<FMA>(-t, bottom, 1.0));
    let u = fma::<FMA>(t, t_error, t - GELU_CENTRE);
    let slope = poly::<FMA, 10>(u, GELU);
    let w = fma::<FMA>(slope, u, GELU_CONSTANT);
    let w_error = fma::<FMA>(slope, u, GELU_CONSTANT - w);
    let square = y * y;
    let (n, r, r_error) = reduce::<FMA>(at_least(-0.5 * square, -120.0), -0.5 * fma::<FMA>(y, y, -square));
    let product = y * t;
    let product_error = t * fma::<FMA>(-product, bottom_error, fma::<FMA>(-product, bottom, y));
    let curve = poly::<FMA, 5>(r, EXP);
    let reduced = fma::<FMA>(r * r, curve, r);
    let reduced_error = fma::<FMA>(r * r, curve, r - reduced);
    let rest = fma::<FMA>(
        product,
        reduced,
        fma::<FMA>(product, reduced_error + r_error, product_error),
    );
    let (first, second) = powers_of_two(n);
    let below = fma::<FMA>(product, w, fma::<FMA>(product + rest, w_error, w * rest)) * first * second;
    let result = if x > 0.0 { x - below } else { below };
    zero_times_infinity(x, result.copysign(x))
}

/// The tanh form of GELU, x σ(2√(2/π) (x + 0.044715 x³)).
#[inline(always)]
pub fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const LINEAR: f64 = 2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    // Far to the left the exponential magnifies the rounding of its argument: take that in f64.
    let a = f64::from(at_most(x.abs(), 30.0));
    let exact = a * (-LINEAR - LINEAR * 0.044715 * (a * a));
    let rounded = exact as f32;
    let low = (exact - f64::from(rounded)) as f32;
    zero_times_infinity(x, gate::<FMA>(at_least(x, -30.0), rounded, low, x > 0.0))
}

/// Half a turn's half with 25 bits, so that multiples below 2²⁸ are exact in f64, and the rest.
const QUARTER_HI: f64 = 1.570_796_310_901_641_8;
const QUARTER_LO: f64 = 1.589_325_477_352_819_7e-8;
/// Beyond it, sines need a longer reduction: see [`needs_long_reduction`].
const TRIG_LIMIT: f32 = 1e8;

/// True where [`sin`] and [`cos`] give up, infinities among them. No sine is as large, so they can be told apart.
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
pub fn sin<const FMA: bool>(x: f32) -> f32 {
    let result = sine::<FMA>(x, 0);
    // The reduction turns -0 into 0.
    if x == 0.0 || needs_long_reduction(x) { x } else { result }
}

/// The cosine; where it [`needs_long_reduction`], the argument itself.
#[inline(always)]
pub fn cos<const FMA: bool>(x: f32) -> f32 {
    let result = sine::<FMA>(x, 1);
    if needs_long_reduction(x) { x } else { result }
}
