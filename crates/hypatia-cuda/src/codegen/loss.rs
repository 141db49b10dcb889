//! Cross-entropy of logits and class numbers.

use hypatia_core::ty::DType;

use super::body::{computed, kept};
use super::pack::Shell;
use super::rows::exponentials;
use super::space::blocks;
use super::{Operand, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// The loss in two kernels, run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Operands: logits, classes (i64), the loss of each row (f32, or f64 if the logits are), and the logarithm of the
    /// sum of exponentials of each row, of the same type, which the backward pass needs.
    pub rows: Kernel,
    /// Operands: the losses, classes, the loss of all. Absent where none is wanted.
    pub finish: Option<Kernel>,
}

/// Cross-entropy of logits `[rows, classes]` with dense rows. Rows whose class is `ignored` count nothing. `mean` asks for
/// the mean of those that count, or the sum; without, each row's loss is the result.
pub fn cross_entropy(logits: &Operand, shape: [usize; 2], ignored: i64, mean: Option<bool>) -> Result<Loss> {
    let [count, classes] = shape;
    let dtype = logits.dtype;
    if !dtype.is_float() || classes == 0 || logits.strides.len() != 2 || logits.strides[1] != 1 {
        return Err(Error::unsupported(format!(
            "cross-entropy of {dtype} of shape {shape:?}"
        )));
    }
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let number = computed(wide);
    let (plan, exponentials) = exponentials(logits, shape)?;
    let last = format!(
        "if (lane == 0) {{
    const i64 target = x1[row];
    const bool known = target >= 0 && target < {classes};
    const {number} log_sum = log(sum);
    y0[row] = target == {ignored}ll ? 0 : log_sum - ((known ? value(x0_row[target]) : INFINITE - INFINITE) - most);
    y1[row] = most + log_sum;
}}
"
    );
    let name = "cross_entropy".to_owned();
    let shell = Shell {
        name: &name,
        comment: &[format!(
            "y0 = log(sum(exp(x0))) - x0[x1], y1 = log(sum(exp(x0))), rows of {classes}"
        )],
        parameters: parameters(&[dtype, DType::I64], &[wide, wide], &["rows"]),
        threads: plan.block(),
        body: exponentials + &last,
    };
    let rows = Kernel {
        source: shell.source(),
        name,
        blocks: blocks(count, plan.rows)?,
        threads: plan.block(),
        alignments: vec![logits.alignment, 8, wide.size(), wide.size()],
        numbers: vec![count as u64],
    };
    let finish = mean.map(|mean| finish(dtype, wide, count, ignored, mean));
    Ok(Loss { rows, finish })
}

/// The mean or the sum of the losses, by one block.
fn finish(dtype: DType, wide: DType, count: usize, ignored: i64, mean: bool) -> Kernel {
    let number = computed(wide);
    let result = if mean { "sum / many" } else { "sum" };
    let text = format!(
        "{number} sum_part = 0, many_part = 0;
for (i64 row = threadIdx.x; row < rows; row += 1024) {{
    sum_part += x0[row];
    many_part += x1[row] != {ignored}ll;
}}
const {number} sum = total<1024>(sum_part);
const {number} many = total<1024>(many_part);
if (threadIdx.x == 0) y0[0] = {};
",
        kept(dtype, result)
    );
    let name = if mean {
        "cross_entropy_mean"
    } else {
        "cross_entropy_sum"
    }
    .to_owned();
    let shell = Shell {
        name: &name,
        comment: &[format!("y0 = {result}, many: the rows that count")],
        parameters: parameters(&[wide, DType::I64], &[dtype], &["rows"]),
        threads: 1024,
        body: text,
    };
    Kernel {
        source: shell.source(),
        name,
        blocks: [1, 1, 1],
        threads: 1024,
        alignments: vec![wide.size(), 8, dtype.size()],
        numbers: vec![count as u64],
    }
}
