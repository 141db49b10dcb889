//! Element types of tensors.

use std::fmt;

/// Element types. Types that torch has and this list lacks make a value opaque.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DType {
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    C128,
}

impl DType {
    /// Every element type that ops of the table take, narrowest first; torch alone computes with complex numbers.
    pub const ALL: [DType; 10] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    /// The short name used in program text.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::C64 => "c64",
            DType::C128 => "c128",
        }
    }

    /// torch's name, without the `torch.` in front.
    pub fn torch_name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "uint8",
            DType::I8 => "int8",
            DType::I16 => "int16",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::C64 => "complex64",
            DType::C128 => "complex128",
        }
    }

    /// Reads either the short or torch's name.
    pub fn parse(text: &str) -> Option<DType> {
        (DType::ALL.into_iter())
            .chain([DType::C64, DType::C128])
            .find(|d| d.name() == text || d.torch_name() == text)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 | DType::C64 => 8,
            DType::C128 => 16,
        }
    }

    /// True for the four floating types.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// True for integers, not for bool.
    pub fn is_int(self) -> bool {
        !self.is_float() && !self.is_complex() && self != DType::Bool
    }

    /// True for complex numbers, with which torch alone computes.
    pub fn is_complex(self) -> bool {
        matches!(self, DType::C64 | DType::C128)
    }

    /// torch's promotion of two tensor dtypes of the same priority.
    pub fn promote(self, other: DType) -> DType {
        use DType::*;
        if self == other {
            return self;
        }
        match (self, other) {
            (F16, BF16) | (BF16, F16) => F32,
            (U8, I8 | I16 | I32 | I64) | (I8 | I16 | I32 | I64, U8) => {
                let signed = if self == U8 { other } else { self };
                if signed == I8 { I16 } else { signed }
            }
            _ => self.max(other),
        }
    }

    /// The value of this type that a result is stored as: floats are rounded, whole numbers wrap.
    pub fn round(self, v: f64) -> f64 {
        match self {
            DType::F64 | DType::C64 | DType::C128 => v,
            DType::F32 => v as f32 as f64,
            // torch computes in f32 and rounds from there.
            DType::F16 => half::f16::from_f32(v as f32).to_f64(),
            DType::BF16 => half::bf16::from_f32(v as f32).to_f64(),
            DType::Bool => f64::from(v != 0.0),
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => self.wrap(v.trunc()),
        }
    }

    /// A whole number modulo the size of an integer type.
    fn wrap(self, v: f64) -> f64 {
        let all = 2f64.powi(8 * self.size() as i32);
        // Exact, as is the sum below.
        let rest = v % all;
        let (least, most) = match self {
            DType::U8 => (0.0, all),
            _ => (-all / 2.0, all / 2.0),
        };
        match rest {
            r if r >= most => r - all,
            r if r < least => r + all,
            r if r.is_nan() => 0.0,
            // Of zeros there is one.
            r => r + 0.0,
        }
    }

    /// A value of another type in this one, as torch converts it on a CPU. What an integer type has no place for is what
    /// the processor's conversion to 32 bits leaves of it, or to 64 bits for bytes without sign and the widest type.
    pub fn convert(self, v: f64, from: DType) -> f64 {
        if !from.is_float() || !self.is_int() {
            return self.round(v);
        }
        self.round(match self {
            DType::U8 | DType::I64 => truncated_64(v) as f64,
            _ => truncated_32(v) as f64,
        })
    }

    /// Unit roundoff of a floating type; zero for the others.
    pub fn epsilon(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON / 2.0,
            DType::F32 => f32::EPSILON as f64 / 2.0,
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        }
    }
}

/// Whether conversions of what is out of range give the least number; elsewhere they give the nearest, and zero for NaN.
const LEAST_OUTSIDE: bool = cfg!(any(target_arch = "x86", target_arch = "x86_64"));

/// Truncation to 32 bits, by this machine's conversion.
#[inline(always)]
pub fn truncated_32(x: f64) -> i64 {
    let inside = x > -2_147_483_649.0 && x < 2_147_483_648.0;
    i64::from(if inside || !LEAST_OUTSIDE { x as i32 } else { i32::MIN })
}

/// Truncation to 64 bits, by this machine's conversion.
#[inline(always)]
pub fn truncated_64(x: f64) -> i64 {
    let inside = x.abs() < 9_223_372_036_854_775_808.0;
    if inside || !LEAST_OUTSIDE { x as i64 } else { i64::MIN }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
