//! Kernels of norms in training steps.

use hypatia_core::ty::DType;
use hypatia_runtime::plan::{NormStep, Plan};

use super::body::stored;
use super::space::blocks;
use crate::kernel::Kernel;
use crate::{Error, Result};

const TEXT: &str = include_str!("norms.cu");
const THREADS: usize = 256;
/// Elements of a row that a thread keeps at most.
const KEPT: usize = 32;
/// Blocks that sum over rows: one for each processor of a large GPU, since their registers fill it.
const SUMMING: usize = 132;

/// A norm over dense rows of so many elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// What `x`, results and parameters are; statistics are f32.
    pub dtype: DType,
    /// How many rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// The mean is taken away, and there is a bias.
    pub centered: bool,
}

/// The gradients of a norm in two kernels, run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormBackward {
    /// Operands: gradient, `x`, mean, factor, weight, the gradient of `x`, sums of blocks.
    pub rows: Kernel,
    /// Operands: sums of blocks, the gradients of weight and bias.
    pub finish: Kernel,
    /// Bytes of the sums of blocks.
    pub partial_bytes: usize,
}

impl Norm {
    /// That of a step.
    pub(crate) fn of(plan: &Plan, n: &NormStep) -> Result<Norm> {
        let (statistics, read) = (if n.centered { 2 } else { 1 }, n.reads.len());
        let wanted = match n.eps {
            Some(_) => (1 + statistics, 1 + statistics),
            None => (3 + statistics, 1 + statistics),
        };
        if (read, n.writes.len()) != wanted {
            return Err(Error::malformed("a norm of other operands"));
        }
        Ok(Norm {
            dtype: plan.values[n.writes[0]].dtype,
            rows: n.rows,
            width: n.width,
            centered: n.centered,
        })
    }

    /// The kernels of the forward pass, or of the backward pass if nothing is added to the spread.
    pub(super) fn kernels(&self, eps: Option<f64>) -> Result<Vec<Kernel>> {
        let Some(eps) = eps else {
            let NormBackward { rows, finish, .. } = self.backward()?;
            return Ok(vec![rows, finish]);
        };
        Ok(vec![self.forward(eps)?])
    }

    /// The kernel of the forward pass. Operands: `x`, weight, bias, the result, mean, factor.
    pub fn forward(&self, eps: f64) -> Result<Kernel> {
        let lanes = self.lanes()?;
        let (data, statistics) = (if self.centered { 4 } else { 3 }, if self.centered { 2 } else { 1 });
        Ok(Kernel {
            name: "norm_forward".into(),
            source: self.source(eps)?,
            blocks: blocks(self.rows, THREADS / lanes)?,
            threads: THREADS as u32,
            alignments: [vec![16; data], vec![4; statistics]].concat(),
            numbers: vec![self.rows as u64],
        })
    }

    /// The kernels of the backward pass.
    pub fn backward(&self) -> Result<NormBackward> {
        let count = self.rows.div_ceil(THREADS / self.lanes()?).min(SUMMING);
        let sums = if self.centered { 2 } else { 1 };
        let source = self.source(0.0)?;
        let rows = Kernel {
            name: "norm_backward".into(),
            source: source.clone(),
            blocks: [count as u32, 1, 1],
            threads: THREADS as u32,
            alignments: [vec![16; 2], vec![4; sums], vec![16; 2], vec![4]].concat(),
            numbers: vec![self.rows as u64],
        };
        let finish = Kernel {
            name: "norm_sums".into(),
            source,
            blocks: blocks(sums * self.width, 32)?,
            threads: 1024,
            alignments: [vec![4], vec![self.dtype.size(); sums]].concat(),
            numbers: vec![count as u64],
        };
        Ok(NormBackward {
            rows,
            finish,
            partial_bytes: count * sums * self.width * size_of::<f32>(),
        })
    }

    /// Threads for a row: a warp, or a block.
    fn lanes(&self) -> Result<usize> {
        let served = matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16);
        match self.width {
            1..=1024 if served => Ok(32),
            1025..=8192 if served => Ok(THREADS),
            _ => Err(Error::unsupported(format!(
                "norms of {} {}",
                self.width,
                self.dtype.name()
            ))),
        }
    }

    fn source(&self, eps: f64) -> Result<String> {
        let lanes = self.lanes()?;
        // As many as 16 bytes hold and rows are multiples of, but no more than a thread's share.
        let share = self.width.div_ceil(lanes).next_power_of_two().min(KEPT);
        let mut pack = (16 / self.dtype.size()).min(share);
        while !self.width.is_multiple_of(pack) {
            pack /= 2;
        }
        let head = [
            format!("#define ELEMENT {}\n", stored(self.dtype)),
            format!(
                "#define WIDTH {}\n#define LANES {lanes}\n#define PACK {pack}\n",
                self.width
            ),
            format!(
                "#define CENTERED {}\n#define EPS {:e}f\n",
                i32::from(self.centered),
                eps as f32
            ),
        ];
        Ok(format!("{}{}{TEXT}", super::PRELUDE, head.concat()))
    }
}
