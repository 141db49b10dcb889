//! The table of ways to compute a linear layer.

use hypatia_core::ty::DType;

use super::Rows;
use super::packed::Layer;
use crate::cpu::{gemm_bf16, gemm_f32, gemv};
use half::bf16;
use std::fmt;

/// How far a result may be from that of torch's linear layer in the same element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ErrorClass {
    /// At least as close to float64 as sums of fp32 products in fp32.
    Fp32,
    /// About 16 bits of a product: for callers that have an error budget.
    Bits16,
}

/// None: the kind cannot stand for some of the weights. The rows are as long as the sizes say.
pub type Pack<T> = fn(weight: Rows<T>, n: usize, k: usize) -> Option<Box<dyn Layer<T>>>;

pub(super) enum AnyPack {
    F32(Pack<f32>),
    Bf16(Pack<bf16>),
}

/// A way to compute a linear layer: a row of [`KINDS`].
pub struct Kind {
    name: &'static str,
    error: ErrorClass,
    in_place: bool,
    margin: f64,
    worth: fn(usize) -> bool,
    available: fn() -> bool,
    pub(super) pack: AnyPack,
}

/// Differences below this factor are noise.
const USUAL: f64 = 1.04;
/// Tiles take up to twice as long while the other half of a core is busy, which may be so after a measurement though it
/// was not during it. Other fp32 kinds do not depend on that.
const SPLIT: f64 = 1.5;

/// Every kind. A kind has one row for each element type.
pub static KINDS: [Kind; 6] = [
    Kind {
        name: "f32",
        error: ErrorClass::Fp32,
        in_place: false,
        margin: USUAL,
        worth: |_| true,
        available: || true,
        pack: AnyPack::F32(gemm_f32::pack),
    },
    Kind {
        name: "bf16",
        error: ErrorClass::Fp32,
        in_place: false,
        margin: USUAL,
        worth: |_| true,
        available: || true,
        pack: AnyPack::Bf16(gemm_bf16::pack),
    },
    Kind {
        name: "bf16x6",
        error: ErrorClass::Fp32,
        in_place: false,
        margin: SPLIT,
        worth: |m| m > 4,
        available: gemm_bf16::has_tiles,
        pack: AnyPack::F32(gemm_bf16::pack_six),
    },
    Kind {
        name: "bf16x3",
        error: ErrorClass::Bits16,
        in_place: false,
        margin: SPLIT,
        worth: |m| m > 4,
        available: gemm_bf16::has_tiles,
        pack: AnyPack::F32(gemm_bf16::pack_three),
    },
    Kind {
        name: "rows",
        error: ErrorClass::Fp32,
        in_place: true,
        margin: USUAL,
        worth: |m| m <= gemv::ROWS,
        available: || true,
        pack: AnyPack::F32(gemv::pack),
    },
    Kind {
        name: "rows",
        error: ErrorClass::Fp32,
        in_place: true,
        margin: USUAL,
        worth: |m| m <= gemv::ROWS,
        available: || true,
        pack: AnyPack::Bf16(gemv::pack),
    },
];

impl Kind {
    /// The kind of this name for elements of a type.
    pub fn named(name: &str, dtype: DType) -> Option<&'static Kind> {
        KINDS.iter().find(|kind| kind.name == name && kind.dtype() == dtype)
    }

    /// Kinds of this machine that may be the fastest for `m` rows within an error class. The first is the one to use
    /// where nothing can be timed. Those that read weights in place are left out unless the caller can vouch for them.
    pub fn candidates(dtype: DType, m: usize, error: ErrorClass, in_place: bool) -> Vec<&'static Kind> {
        let fits = |kind: &&Kind| {
            kind.dtype() == dtype && kind.error <= error && (in_place || !kind.in_place) && (kind.worth)(m)
        };
        KINDS.iter().filter(|kind| (kind.available)()).filter(fits).collect()
    }

    /// What it is called in tables, reports and the tuning database.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of weights, operands and results.
    pub fn dtype(&self) -> DType {
        match self.pack {
            AnyPack::F32(_) => DType::F32,
            AnyPack::Bf16(_) => DType::BF16,
        }
    }

    /// How exact it is.
    pub fn error(&self) -> ErrorClass {
        self.error
    }

    /// It reads the weights where they are, and holds no copy.
    pub fn in_place(&self) -> bool {
        self.in_place
    }

    /// How many times as fast as the first candidate it must be to be chosen in its place.
    pub fn margin(&self) -> f64 {
        self.margin
    }

    /// The machine can run it.
    pub fn available(&self) -> bool {
        (self.available)()
    }
}

impl PartialEq for Kind {
    fn eq(&self, other: &Kind) -> bool {
        self.name == other.name && self.dtype() == other.dtype()
    }
}

impl Eq for Kind {}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.name, self.dtype().name())
    }
}
