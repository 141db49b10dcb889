//! What a product computes.

use std::fmt;

use hypatia_core::ty::DType;

use super::tune::REPEATS;
use crate::{Error, Result};

/// Rows of a product that takes as long as reading its weight.
const FEW: usize = 16;
/// Bytes of a large weight, and of weights that no cache holds.
const LARGE: usize = 4 << 20;
const CACHE: usize = 128 << 20;

/// What is done to the sums before they are written. With `v` for a product, the residual added:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// `v`.
    None,
    /// `v + bias`, one number for each column.
    Bias,
    /// `relu(v)`.
    Relu,
    /// `relu(v + bias)`.
    ReluBias,
    /// `gelu(v)` in its tanh form, as in all below: cuBLASLt has no other.
    Gelu,
    /// `gelu(v + bias)`.
    GeluBias,
    /// `relu(v + bias)`; a bit for each element, set where it is positive, is kept.
    ReluAuxBias,
    /// `gelu(v + bias)`; `v + bias` is kept.
    GeluAuxBias,
    /// `v` where the bit that was kept is set, else zero.
    Drelu,
    /// The same; and the sum of each column of that.
    DreluSum,
    /// `v · gelu'(x)` with the `x` that was kept; and the sum of each column of that.
    DgeluSum,
    /// `v`; and the sum of each row of the left factor, over what the product sums over.
    SumLeft,
    /// `v`; and the sum of each column of the right factor, over what the product sums over.
    SumRight,
}

/// What the bias pointer of an epilogue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// Over the rows of the result.
    Result,
    Left,
    Right,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Epilogue; 13] = [
        Epilogue::None,
        Epilogue::Bias,
        Epilogue::Relu,
        Epilogue::ReluBias,
        Epilogue::Gelu,
        Epilogue::GeluBias,
        Epilogue::ReluAuxBias,
        Epilogue::GeluAuxBias,
        Epilogue::Drelu,
        Epilogue::DreluSum,
        Epilogue::DgeluSum,
        Epilogue::SumLeft,
        Epilogue::SumRight,
    ];

    /// Its name here and its number in the library's header.
    fn row(self) -> (&'static str, u32) {
        match self {
            Epilogue::None => ("none", 1),
            Epilogue::Bias => ("bias", 4),
            Epilogue::Relu => ("relu", 2),
            Epilogue::ReluBias => ("relu_bias", 6),
            Epilogue::Gelu => ("gelu", 32),
            Epilogue::GeluBias => ("gelu_bias", 36),
            Epilogue::ReluAuxBias => ("relu_aux_bias", 134),
            Epilogue::GeluAuxBias => ("gelu_aux_bias", 164),
            Epilogue::Drelu => ("drelu", 136),
            Epilogue::DreluSum => ("drelu_sum", 152),
            Epilogue::DgeluSum => ("dgelu_sum", 208),
            Epilogue::SumLeft => ("sum_left", 512),
            Epilogue::SumRight => ("sum_right", 256),
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// The epilogue of this name.
    pub fn named(name: &str) -> Option<Epilogue> {
        Epilogue::ALL.into_iter().find(|e| e.name() == name)
    }

    pub(super) fn number(self) -> u32 {
        self.row().1
    }

    /// True if a bias is read.
    pub fn adds_bias(self) -> bool {
        self.number() & 4 != 0
    }

    /// What is summed, if anything.
    pub(super) fn sums(self) -> Option<Sums> {
        match self {
            Epilogue::DreluSum | Epilogue::DgeluSum => Some(Sums::Result),
            Epilogue::SumLeft => Some(Sums::Left),
            Epilogue::SumRight => Some(Sums::Right),
            _ => None,
        }
    }

    /// True if something is kept for the backward pass, or taken from the forward pass.
    pub fn has_aux(self) -> bool {
        self.number() & 128 != 0
    }

    /// True if what the forward pass kept is read.
    pub(super) fn reads_aux(self) -> bool {
        matches!(self, Epilogue::Drelu | Epilogue::DreluSum | Epilogue::DgeluSum)
    }

    /// True if what is kept is a bit for each element.
    pub(super) fn aux_is_bits(self) -> bool {
        matches!(self, Epilogue::ReluAuxBias | Epilogue::Drelu | Epilogue::DreluSum)
    }
}

/// How a factor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Factor {
    /// True if what lies in memory is its transpose.
    pub transposed: bool,
    /// Elements from one row in memory to the next.
    pub ld: usize,
    /// Elements from one matrix of the batch to the next.
    pub batch: usize,
}

/// How a result, or what is added to it, lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slab {
    /// Elements from one row to the next.
    pub ld: usize,
    /// Elements from one matrix of the batch to the next.
    pub batch: usize,
}

/// `out[m,n] = epilogue(left[m,k] · right[k,n] + residual[m,n])`, for each matrix of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// What is summed over.
    pub k: usize,
    /// Number of matrices.
    pub batch: usize,
    /// Type of the factors: f32, bf16 or f16. Sums are taken in f32.
    pub input: DType,
    /// Type of the result, the residual, the bias and the sums: that of the factors, or f32.
    pub output: DType,
    /// Factors of f32 may be rounded to 10 bits, as torch does where it is told to.
    pub tf32: bool,
    /// The left factor.
    pub left: Factor,
    /// The right factor.
    pub right: Factor,
    /// The result.
    pub out: Slab,
    /// What is added to the product.
    pub residual: Option<Slab>,
    /// What is done to the sums.
    pub epilogue: Epilogue,
    /// Bytes that divide all addresses.
    pub alignment: u32,
}

impl Problem {
    /// The product of dense matrices. `left` is `[m,k]`, or `[k,m]` if it is transposed; `right` is `[k,n]`, or `[n,k]`
    /// as the weight of a linear layer is.
    pub fn new(dtype: DType, [m, n, k]: [usize; 3], transposed: [bool; 2]) -> Problem {
        let [left, right] = transposed;
        Problem {
            m,
            n,
            k,
            batch: 1,
            input: dtype,
            output: dtype,
            tf32: false,
            left: Factor {
                transposed: left,
                ld: if left { m } else { k },
                batch: m * k,
            },
            right: Factor {
                transposed: right,
                ld: if right { k } else { n },
                batch: k * n,
            },
            out: Slab { ld: n, batch: m * n },
            residual: None,
            epilogue: Epilogue::None,
            alignment: 16,
        }
    }

    /// A linear layer: `x[m,k]` times the transpose of `w[n,k]`.
    pub fn linear(dtype: DType, m: usize, n: usize, k: usize) -> Problem {
        Problem::new(dtype, [m, n, k], [false, true])
    }

    /// The same with an epilogue.
    pub fn with_epilogue(self, epilogue: Epilogue) -> Problem {
        Problem { epilogue, ..self }
    }

    /// The same with something of the result's layout added to the product.
    pub fn with_residual(self) -> Problem {
        Problem {
            residual: Some(self.out),
            ..self
        }
    }

    /// The same for as many matrices, one after the other.
    pub fn with_batch(self, batch: usize) -> Problem {
        Problem { batch, ..self }
    }

    /// How many weights a measurement reads in turns. A product of few rows takes as long as reading its weight; a large
    /// one was in no cache since the last call, which other weights ran through.
    pub(super) fn weights(&self) -> usize {
        let bytes = self.n * self.k * self.input.size();
        match self.batch == 1 && self.m <= FEW && bytes >= LARGE {
            true => CACHE.div_ceil(bytes).min(REPEATS),
            false => 1,
        }
    }

    /// Elements from one row of what the epilogue keeps to the next: bits for a mask.
    pub fn aux_ld(&self) -> usize {
        self.n
            .next_multiple_of(if self.epilogue.aux_is_bits() { 128 } else { 8 })
    }

    /// Bytes of what the epilogue keeps.
    pub fn aux_bytes(&self) -> usize {
        match self.epilogue {
            e if !e.has_aux() => 0,
            e if e.aux_is_bits() => self.batch * self.m * self.aux_ld() / 8,
            _ => self.batch * self.m * self.aux_ld() * self.output.size(),
        }
    }

    /// Elements of the bias, or of the sums.
    pub fn bias_len(&self) -> usize {
        match self.epilogue.sums() {
            Some(Sums::Left) => self.m,
            Some(_) => self.n,
            None if self.epilogue.adds_bias() => self.n,
            None => 0,
        }
    }

    /// Refuses what the library does not do, or what is not tested.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |message: &str| Err(Error::unsupported(format!("{self}: {message}")));
        if !matches!(self.input, DType::F32 | DType::BF16 | DType::F16) {
            return refuse("the factors are not f32, bf16 or f16");
        }
        if self.output != self.input && self.output != DType::F32 {
            return refuse("the result is neither of the factors' type nor f32");
        }
        if self.m == 0 || self.n == 0 || self.k == 0 || self.batch == 0 {
            return refuse("there is nothing to compute");
        }
        if self.m.max(self.n).max(self.k).max(self.batch) > i32::MAX as usize {
            return refuse("a size is above 31 bits");
        }
        if self.batch > 1 && (self.epilogue.has_aux() || self.epilogue.sums().is_some()) {
            return refuse("this epilogue is for single matrices");
        }
        let narrow = |f: &Factor, rows, columns| f.ld < if f.transposed { rows } else { columns };
        if narrow(&self.left, self.m, self.k) || narrow(&self.right, self.k, self.n) || self.out.ld < self.n {
            return refuse("rows overlap");
        }
        if !self.alignment.is_power_of_two() || (self.alignment as usize) < self.input.size().max(self.output.size()) {
            return refuse("the alignment does not fit the types");
        }
        Ok(())
    }
}

impl fmt::Display for Problem {
    /// All that an algorithm may depend on, for the key of a record.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { m, n, k, batch, .. } = self;
        let math = if self.tf32 && self.input == DType::F32 {
            "tf32"
        } else {
            self.input.name()
        };
        let letter = |f: &Factor| if f.transposed { 't' } else { 'n' };
        write!(f, "gemm {math}>{} {batch}x{m}x{n}x{k} ", self.output)?;
        write!(
            f,
            "{}{} {}",
            letter(&self.left),
            letter(&self.right),
            self.epilogue.name()
        )?;
        if self.residual.is_some() {
            f.write_str("+residual")?;
        }
        let dense = Problem {
            alignment: self.alignment,
            ..Problem::new(
                self.input,
                [self.m, self.n, self.k],
                [self.left.transposed, self.right.transposed],
            )
        };
        let rows = |p: &Problem| (p.left.ld, p.right.ld, p.out.ld, p.residual.map_or(p.out.ld, |r| r.ld));
        if rows(self) != rows(&dense) {
            let (left, right, out, residual) = rows(self);
            write!(f, " rows {left},{right},{out},{residual}")?;
        }
        let steps = |p: &Problem| {
            (
                p.left.batch,
                p.right.batch,
                p.out.batch,
                p.residual.map_or(p.out.batch, |r| r.batch),
            )
        };
        if *batch > 1 && steps(self) != steps(&dense) {
            let (left, right, out, residual) = steps(self);
            write!(f, " steps {left},{right},{out},{residual}")?;
        }
        write!(f, " align {}", self.alignment)
    }
}
