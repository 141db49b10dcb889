//! Instruction sets: which of them the machine has, and code compiled once for each.
//!
//! A [`Kernel`] is plain Rust that the compiler vectorises. [`dispatch`] picks the widest instance that
//! the machine runs; the choice is made once per process.

mod ahead;

use std::sync::OnceLock;

pub(crate) use ahead::Ahead;

/// Instruction sets that kernels are compiled for, narrowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every processor of the target has.
    Baseline,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// Every level, whether this machine has it or not.
    pub const ALL: [Level; 3] = [Level::Baseline, Level::Avx2, Level::Avx512];
}

/// The widest level that this machine runs.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

/// True where the baseline has fused multiply-add in hardware; elsewhere it would be a library call.
const BASELINE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Code that is compiled once for each [`Level`].
pub trait Kernel {
    /// What it returns.
    type Output;

    /// Does the work. `FMA` says whether `mul_add` is one instruction. Must be `#[inline(always)]`, as must be
    /// everything hot that it calls: code that is not inlined is compiled for the baseline.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// Runs a kernel at the widest level of this machine.
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    dispatch_at(level(), kernel)
}

/// Runs a kernel at a level, or at the widest of this machine if that is narrower.
#[inline]
pub fn dispatch_at<K: Kernel>(wanted: Level, kernel: K) -> K::Output {
    match wanted.min(level()) {
        // SAFETY: the level is at most the one that was detected.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2(kernel) },
        _ => kernel.run::<BASELINE_FMA>(),
    }
}

/// # Safety
/// The machine must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

/// # Safety
/// The machine must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

/// `a * b + c`, rounded once. Without the instruction the product is exact in f64, and the sum is rounded twice
/// only in rare ties.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA {
        a.mul_add(b, c)
    } else {
        (f64::from(a) * f64::from(b) + f64::from(c)) as f32
    }
}

/// Widens bf16.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to bf16, ties to even; every NaN becomes the same one, as in torch.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { 0x7fc0 } else { rounded }
}

/// Widens f16 without branches, so that loops over it vectorise without F16C.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // Read as f32 the exponent is 112 too small, and a denormal is one of f32: a product mends both.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = magnitude >= 0x7c00 << 13;
    let value = scaled.to_bits() | if special { 0xff << 23 } else { 0 };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// Rounds to f16, ties to even, without branches.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Below the least normal f16 an addition to 0.5 rounds at the place where the denormals end.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let normal = magnitude
        .wrapping_sub(112 << 23)
        .wrapping_add(0xfff + ((magnitude >> 13) & 1))
        >> 13;
    let finite = if magnitude < 113 << 23 { small } else { normal };
    let limited = if magnitude >= 0x4780_0000 { 0x7c00 } else { finite };
    let value = if magnitude > 0x7f80_0000 { 0x7e00 } else { limited };
    (value | (bits >> 16) & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Where(Level);

    impl Kernel for Where {
        type Output = (Level, bool);
        #[inline(always)]
        fn run<const FMA: bool>(self) -> (Level, bool) {
            (self.0, FMA)
        }
    }

    #[test]
    fn every_level_can_be_asked_for() {
        for wanted in Level::ALL {
            let (_, fma) = dispatch_at(wanted, Where(wanted));
            assert_eq!(fma, BASELINE_FMA || wanted.min(level()) > Level::Baseline);
        }
    }

    #[test]
    fn every_f16_widens_as_half_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
            assert_eq!(ours.is_sign_negative(), theirs.is_sign_negative(), "{bits:#x}");
        }
    }

    fn narrows_as_half_does(x: f32) {
        let (f, b) = (half::f16::from_f32(x), half::bf16::from_f32(x));
        if x.is_nan() {
            assert!(half::f16::from_bits(f32_to_f16(x)).is_nan() && half::bf16::from_bits(f32_to_bf16(x)).is_nan());
        } else {
            assert_eq!(f32_to_f16(x), f.to_bits(), "{x:e}");
            assert_eq!(f32_to_bf16(x), b.to_bits(), "{x:e}");
        }
    }

    #[test]
    fn narrowing_rounds_as_half_does() {
        for high in 0..=u16::MAX {
            for low in [
                0u32, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff,
            ] {
                narrows_as_half_does(f32::from_bits(u32::from(high) << 16 | low));
            }
        }
    }

    proptest! {
        #[test]
        fn narrowing_rounds_as_half_does_anywhere(bits: u32) {
            narrows_as_half_does(f32::from_bits(bits));
        }

        #[test]
        fn fma_without_the_instruction_is_as_good(a in -1e3f32..1e3, b in -1e3f32..1e3, c in -1e6f32..1e6) {
            let (with, without) = (a.mul_add(b, c), fma::<false>(a, b, c));
            prop_assert!((with.to_bits() as i32 - without.to_bits() as i32).abs() <= 1);
        }
    }
}
