//! Products of matrices of a batch.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::{Region, Rounding};
use hypatia_runtime::plan::{BatchStep, Operand, Plan};

use super::Setting;
use super::torch::TorchProduct;
use crate::codegen::{self, Operand as Lying, alignment};
use crate::driver::{Device, Stream};
use crate::gemm::{Factor, Gemm, Operands, Problem};
use crate::setting::tuned;
use crate::{Error, Result};

/// Rows that begin at multiples of so many bytes are read fast.
const UNIT: usize = 16;

/// Products of matrices of a batch, ready to run.
pub(super) enum Batch {
    Ours {
        gemm: Gemm,
        /// Where a left factor is whose rows were moved apart, if it was.
        left: Option<u64>,
    },
    Torch(TorchProduct),
}

impl Batch {
    /// # Safety
    /// The setting's memory is the device's, and the constants are there.
    pub(super) unsafe fn new(
        device: &'static Device,
        plan: &Plan,
        b: &BatchStep,
        constants: &[u64],
        setting: &mut Setting<'_>,
    ) -> Result<Batch> {
        let problem = problem(plan, b)?;
        // SAFETY: promised by the caller.
        let plain = unsafe { tuned(device, problem, setting) };
        let weight = plan.constants.iter().position(|c| *c == b.left.value);
        if let Some(at) = weight
            && let Some(apart) = moved_apart(&problem, &b.left)
        {
            let limit = plain.as_ref().map_or(f64::INFINITY, |(_, took)| *took);
            // SAFETY: promised by the caller.
            let found = unsafe { with_rows_apart(device, (&problem, apart), constants[at], limit, setting) };
            match found {
                Ok(Some(batch)) => return Ok(batch),
                Ok(None) => {}
                Err(e) => tracing::debug!("{problem}: not with rows apart: {e}"),
            }
        }
        let error = match plain {
            Ok((gemm, _)) => return Ok(Batch::Ours { gemm, left: None }),
            Err(error) => error,
        };
        let form = |o: &Operand| (o.shape.clone(), o.strides.clone());
        let y = Operand::dense(b.y, &plan.values[b.y].shape);
        let forms = [form(&b.left), form(&b.right), form(&y)];
        TorchProduct::new(device, "aten::bmm", problem.input, forms, setting)
            .map(Batch::Torch)
            .map_err(|_| error)
    }

    /// Whether torch computes it.
    pub(super) fn calls_torch(&self) -> bool {
        matches!(self, Batch::Torch(_))
    }

    pub(super) fn workspace(&self) -> usize {
        match self {
            Batch::Ours { gemm, .. } => gemm.workspace(),
            Batch::Torch(_) => 0,
        }
    }

    /// # Safety
    /// The operands are those of the step, and live until it is done.
    pub(super) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        match self {
            Batch::Ours { gemm, left } => {
                let operands = Operands {
                    left: left.unwrap_or(o.left),
                    ..*o
                };
                // SAFETY: promised by the caller; a copy of the left factor lives as long as the plan.
                unsafe { gemm.launch(stream, &operands) }
            }
            // SAFETY: promised by the caller.
            Batch::Torch(torch) => unsafe { torch.launch(o) },
        }
    }
}

/// The problem with the rows of a weight so far apart that all begin at multiples of 16 bytes, if they do not.
fn moved_apart(problem: &Problem, left: &Operand) -> Option<Problem> {
    let elements = UNIT / problem.input.size();
    let whole = left.offset == 0 && !problem.left.transposed && problem.left.ld == problem.k && problem.left.batch == 0;
    if !whole || problem.k.is_multiple_of(elements) {
        return None;
    }
    let mut apart = *problem;
    apart.left.ld = problem.k.next_multiple_of(elements);
    Some(apart)
}

/// The product by a copy of the weight with its rows apart; none if it takes longer than that.
///
/// # Safety
/// The weight is there, and the setting's memory is the device's.
unsafe fn with_rows_apart(
    device: &'static Device,
    (problem, apart): (&Problem, Problem),
    weight: u64,
    limit: f64,
    setting: &mut Setting<'_>,
) -> Result<Option<Batch>> {
    // SAFETY: promised by the caller.
    let (gemm, took) = unsafe { tuned(device, apart, setting)? };
    if took >= limit {
        return Ok(None);
    }
    let (m, k, ld, dtype) = (problem.m, problem.k, apart.left.ld, problem.input);
    let (room, done) = (setting.room)(weight, m * ld * dtype.size())?;
    if !done {
        let region = Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?;
        let dense = Lying::dense(dtype, &[m, k]);
        let spread = Lying {
            strides: vec![ld as isize, 1],
            ..dense.clone()
        };
        let copy = codegen::pointwise(&region, &[m, k], &[dense], &[spread])?.load(device)?;
        // SAFETY: promised by the caller; there is room for the copy.
        unsafe { copy.launch(setting.stream, &[weight, room])? };
    }
    let left = Some(room);
    Ok(Some(Batch::Ours { gemm, left }))
}

fn problem(plan: &Plan, b: &BatchStep) -> Result<Problem> {
    let (&[batch, m, k], &[_, _, n]) = (&b.left.shape[..], &b.right.shape[..]) else {
        return Err(Error::malformed("products of what are no matrices of a batch"));
    };
    let dtype = plan.values[b.y].dtype;
    let mut problem = Problem::new(dtype, [m, n, k], [false, false]).with_batch(batch);
    problem.left = factor(&b.left)?;
    problem.right = factor(&b.right)?;
    problem.alignment = [&b.left, &b.right]
        .map(|o| aligned(o, dtype))
        .into_iter()
        .min()
        .unwrap_or(UNIT) as u32;
    Ok(problem)
}

/// What divides the address of each matrix of a factor.
fn aligned(o: &Operand, dtype: DType) -> usize {
    let starts = [o.offset, o.strides[0].unsigned_abs()];
    starts
        .map(|elements| alignment(elements * dtype.size()))
        .into_iter()
        .min()
        .unwrap_or(UNIT)
}

/// How the matrices of a factor lie.
fn factor(o: &Operand) -> Result<Factor> {
    let &[step, down, along] = &o.strides[..] else {
        return Err(Error::malformed("a factor that is no matrices of a batch"));
    };
    let transposed = along != 1;
    let ld = if transposed { along } else { down };
    let size = |n: isize| usize::try_from(n).map_err(|_| Error::unsupported("a factor that lies backwards"));
    if transposed && down != 1 {
        return Err(Error::unsupported("a factor with gaps in its rows and columns"));
    }
    Ok(Factor {
        transposed,
        ld: size(ld)?,
        batch: size(step)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hypatia_runtime::plan::Value;

    fn step(weight: &[usize], x: &Operand, y: &[usize]) -> (Plan, BatchStep) {
        let value = |shape: &[usize]| Value {
            shape: shape.to_vec(),
            dtype: DType::BF16,
        };
        let plan = Plan {
            values: vec![value(weight), value(&x.shape), value(y)],
            ..Plan::default()
        };
        let left = Operand::dense(0, weight).broadcast(&[&x.shape[..1], weight].concat());
        let left = left.unwrap();
        (
            plan,
            BatchStep {
                left,
                right: x.clone(),
                y: 2,
            },
        )
    }

    #[test]
    fn one_matrix_repeats_and_others_follow_each_other() {
        let x = Operand::dense(1, &[16, 196, 768]);
        let (plan, b) = step(&[384, 196], &x, &[16, 384, 768]);
        let problem = problem(&plan, &b).unwrap();
        assert_eq!((problem.batch, problem.m, problem.n, problem.k), (16, 384, 768, 196));
        assert_eq!(
            (problem.left.ld, problem.left.batch, problem.left.transposed),
            (196, 0, false)
        );
        assert_eq!(
            (problem.right.ld, problem.right.batch, problem.right.transposed),
            (768, 196 * 768, false)
        );
        assert_eq!(
            (problem.out.ld, problem.out.batch, problem.alignment),
            (768, 384 * 768, 16)
        );
        // Every second row of the weight begins between multiples of 16 bytes.
        assert_eq!(moved_apart(&problem, &b.left).unwrap().left.ld, 200);
    }

    #[test]
    fn parts_and_transposes_are_read_where_they_lie() {
        let whole = Operand::dense(1, &[4, 64, 32]);
        let (plan, b) = step(&[8, 32], &whole.permuted(&[0, 2, 1]), &[4, 8, 64]);
        let turned = problem(&plan, &b).unwrap();
        assert_eq!(
            (turned.right.transposed, turned.right.ld, turned.right.batch),
            (true, 32, 2048)
        );
        assert_eq!(moved_apart(&turned, &b.left), None);
        let (plan, b) = step(&[8, 64], &whole.sliced(2, 4, 16, 1), &[4, 8, 16]);
        let part = problem(&plan, &b).unwrap();
        assert_eq!((part.right.ld, part.alignment), (32, 8));
    }
}
