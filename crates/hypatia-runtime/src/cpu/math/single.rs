//! Functions of one f32, without branches: in a loop they become vector code.
//!
//! The polynomials are minimax fits in the variable and over the range named beside them. `FMA` says whether
//! `mul_add` is one instruction; without it [`fma`] goes through f64, so that results agree.

use crate::cpu::lanes::fma;

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
/// 1/(1 + e) for 0 <= e <= 1.
const INVERSE: [f32; 4] = [0.998_266_9, -0.942_807_6, 0.665_511_25, -0.221_837_09];
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

/// 2√(2/π), and that times 0.044715, each in two parts, for [`gelu_tanh`].
const GELU_LINEAR: (f32, f32) = (1.595_769_2, -4.534_068e-8);
const GELU_CUBIC: (f32, f32) = (0.071_354_814, 2.398_832_5e-9);

/// Horner's scheme, the constant term first.
#[inline(always)]
pub(super) fn poly<const FMA: bool, const N: usize>(x: f32, c: [f32; N]) -> f32 {
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

/// `(bits, r)` with x = n ln 2 + r, where the low nine bits of `bits` are n + BIAS.
#[inline(always)]
fn reduce<const FMA: bool, const BIAS: u32>(x: f32) -> (u32, f32) {
    let round = ROUND + BIAS as f32;
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, round);
    let n = shifted - round;
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x));
    (shifted.to_bits(), r)
}

/// `(bits, r, e)` with `x + low = n ln 2 + r + e`, the bits as those of [`reduce`]; `low` is what `x` lacks in precision,
/// and `e` what `r` does.
#[inline(always)]
fn reduce_long<const FMA: bool, const BIAS: u32>(x: f32, low: f32) -> (u32, f32, f32) {
    let round = ROUND + BIAS as f32;
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, round);
    let n = shifted - round;
    let (large, small) = (fma::<FMA>(n, -LN2_HI, x), fma::<FMA>(n, -LN2_LO, low));
    let r = large + small;
    (shifted.to_bits(), r, small - (r - large))
}

/// The bias of exponents in f32.
const BIAS: u32 = 127;
/// As many binary places are taken from small results until the end, so that denormal ones are rounded once.
const DEEP: u32 = 64;
/// 2^-DEEP.
const SHALLOW: f32 = f32::from_bits((BIAS - DEEP) << 23);

/// The power of two whose biased exponent is in the low bits.
#[inline(always)]
fn power_of_two(bits: u32) -> f32 {
    f32::from_bits(bits << 23)
}

/// exp(r) - 1 for a reduced argument.
#[inline(always)]
fn expm1_reduced<const FMA: bool>(r: f32) -> f32 {
    fma::<FMA>(r * r, poly::<FMA, 5>(r, EXP), r)
}

/// exp(r) for a reduced argument.
#[inline(always)]
fn exp_reduced<const FMA: bool>(r: f32) -> f32 {
    poly::<FMA, 7>(r, [1.0, 1.0, EXP[0], EXP[1], EXP[2], EXP[3], EXP[4]])
}

/// Almost 1 / (1 + e) for 0 <= e <= 1, 0.2% off at most.
#[inline(always)]
fn rough_inverse<const FMA: bool>(e: f32) -> f32 {
    if FMA {
        poly::<FMA, 4>(e, INVERSE)
    } else {
        1.0 / (1.0 + e)
    }
}

/// 1 / (1 - off) - 1 for a small `off`: what an inverse lacks whose product with the number is 1 - off. Together with
/// [`rough_inverse`] it takes less time than a division.
#[inline(always)]
fn mend<const FMA: bool>(off: f32) -> f32 {
    fma::<FMA>(off, off, off)
}

/// a b (1 + c), rounded once if c is small.
#[inline(always)]
fn product<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    let product = a * b;
    product + fma::<FMA>(product, c, fma::<FMA>(a, b, -product))
}

/// eˣ.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    // Two factors of 2ⁿ, neither of which leaves the range of normal numbers.
    let (bits, r) = reduce::<FMA, { 2 * BIAS }>(at_most(at_least(x, -104.0), 89.0));
    let half = bits >> 1;
    exp_reduced::<FMA>(r) * power_of_two(half) * power_of_two(bits.wrapping_sub(half))
}

/// eˣ for x that is not above zero; zero where the result would be denormal.
#[inline(always)]
pub fn exp_below<const FMA: bool>(x: f32) -> f32 {
    let (bits, r) = reduce::<FMA, BIAS>(x);
    let result = exp_reduced::<FMA>(r) * power_of_two(bits);
    if x < -87.0 { 0.0 } else { result }
}

/// eˣ for x that is not above zero, with denormal results. What is zero underflows nowhere, which would take long.
#[inline(always)]
pub fn exp_deep<const FMA: bool>(x: f32) -> f32 {
    let (bits, r) = reduce::<FMA, { BIAS + DEEP }>(at_least(x, LEAST));
    let shallow = if x < LEAST { 0.0 } else { SHALLOW };
    exp_reduced::<FMA>(r) * power_of_two(bits) * shallow
}

/// Below this an exponential is zero.
const LEAST: f32 = -104.0;

/// eˣ - 1.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    // Half of the power of two, which overflows before the result does.
    let (bits, r) = reduce::<FMA, { BIAS - 1 }>(at_most(at_least(x, -30.0), 89.0));
    let half = power_of_two(bits);
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

/// The hyperbolic tangent, (1 - e)/(1 + e) for e = exp(-2|x|).
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let (bits, r) = reduce::<FMA, BIAS>(-2.0 * at_most(x.abs(), 20.0));
    let power = power_of_two(bits);
    let reduced = expm1_reduced::<FMA>(r);
    let top = fma::<FMA>(-power, reduced, 1.0 - power);
    let inverse = rough_inverse::<FMA>(fma::<FMA>(power, reduced, power));
    // 1 + e is 2 - top, which is exact.
    let off = fma::<FMA>(inverse, top, fma::<FMA>(-2.0, inverse, 1.0));
    product::<FMA>(top, inverse, mend::<FMA>(off)).copysign(x)
}

/// The error function.
#[inline(always)]
pub fn erf<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let near = fma::<FMA>(poly::<FMA, 7>(x * x, ERF_NEAR), x, x);
    let b = at_most(a, 4.0);
    let (bits, r) = reduce::<FMA, BIAS>(b * poly::<FMA, 7>(b, ERF_FAR));
    let power = power_of_two(bits);
    let far = (1.0 - power) - power * expm1_reduced::<FMA>(r);
    if a > 0.95 { far.copysign(x) } else { near }
}

/// `y` times 1 / (1 + eᶻ) if `upper`, and eᶻ / (1 + eᶻ) if not, for z = `z + low` <= 0.
#[inline(always)]
fn gate<const FMA: bool>(y: f32, z: f32, low: f32, upper: bool) -> f32 {
    let (bits, r, _) = reduce_long::<FMA, { BIAS + DEEP }>(at_least(z, -120.0), low);
    let power = power_of_two(bits);
    let reduced = expm1_reduced::<FMA>(r);
    let e = fma::<FMA>(power, reduced, power) * SHALLOW;
    let inverse = rough_inverse::<FMA>(e);
    let lacks = mend::<FMA>(fma::<FMA>(-inverse, e, 1.0 - inverse));
    let both = fma::<FMA>(lacks, reduced, lacks + reduced);
    // Without the instruction the inverse may lack nothing, and infinity times nothing is NaN.
    let upper_result = if FMA {
        fma::<FMA>(y * inverse, lacks, y * inverse)
    } else {
        y / (1.0 + e)
    };
    let lower_result = product::<FMA>(y, inverse, both) * power * SHALLOW;
    if upper { upper_result } else { lower_result }
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
    zero_times_infinity(x, gate::<FMA>(at_least(x, -200.0), -x.abs(), 0.0, x > 0.0).copysign(x))
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
    let (bits, r, r_error) =
        reduce_long::<FMA, { BIAS + DEEP }>(at_least(-0.5 * square, -120.0), -0.5 * fma::<FMA>(y, y, -square));
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
    let below = fma::<FMA>(product, w, fma::<FMA>(product + rest, w_error, w * rest)) * power_of_two(bits) * SHALLOW;
    let result = if x > 0.0 { x - below } else { below };
    zero_times_infinity(x, result.copysign(x))
}

/// The tanh form of GELU, x σ(2√(2/π) (x + 0.044715 x³)).
#[inline(always)]
pub fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    // Far to the left the exponential magnifies the rounding of its argument: carry along what it takes.
    let a = at_most(x.abs(), 30.0);
    let square = a * a;
    let cubic = GELU_CUBIC.0 * square;
    let cubic_error = fma::<FMA>(
        GELU_CUBIC.1,
        square,
        fma::<FMA>(
            GELU_CUBIC.0,
            fma::<FMA>(a, a, -square),
            fma::<FMA>(GELU_CUBIC.0, square, -cubic),
        ),
    );
    let sum = GELU_LINEAR.0 + cubic;
    let added = sum - GELU_LINEAR.0;
    let sum_error = (GELU_LINEAR.0 - (sum - added)) + (cubic - added);
    let product = -a * sum;
    let error = fma::<FMA>(
        -a,
        sum_error + (cubic_error + GELU_LINEAR.1),
        fma::<FMA>(-a, sum, -product),
    );
    let result = gate::<FMA>(at_least(x, -30.0), product, error, x > 0.0);
    zero_times_infinity(x, result.copysign(x))
}
