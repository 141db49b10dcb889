//! Products of f32 by several products of shorter numbers, done as one: each number is a sum of pieces, and the pieces of a
//! row stand one after the other, so that one long product adds all products of pieces.
//!
//! Numbers that are not finite become NaN, and pieces below the smallest normal number are lost.

use hypatia_core::ty::DType;

use super::pack::Shell;
use super::parameters;
use super::space::blocks;
use crate::gemm::{Factor, Problem};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// How numbers are split. Which pieces meet is written with the smallest product first: a sum loses least when it begins
/// with its smallest terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Two pieces of bf16, three products: about 16 bits.
    Bf16x3,
    /// Three pieces of bf16, six products: nearly f32's 24 bits.
    Bf16x6,
    /// Two pieces of tf32, three products: about 22 bits.
    Tf32x3,
}

impl Split {
    /// All of them.
    pub const ALL: [Split; 3] = [Split::Bf16x3, Split::Bf16x6, Split::Tf32x3];

    /// The pieces of the left and of the right factor that meet, 0 being the greatest.
    fn pieces(self) -> [&'static [usize]; 2] {
        match self {
            Split::Bf16x3 | Split::Tf32x3 => [&[1, 0, 0], &[0, 1, 0]],
            Split::Bf16x6 => [&[2, 0, 1, 1, 0, 0], &[0, 2, 1, 0, 1, 0]],
        }
    }

    /// Type of the pieces in memory.
    pub fn dtype(self) -> DType {
        match self {
            Split::Tf32x3 => DType::F32,
            _ => DType::BF16,
        }
    }

    /// How often a row of pieces is longer than the row that they are of.
    pub fn times(self) -> usize {
        self.pieces()[0].len()
    }

    /// The product of pieces that stands for a product of f32, whose factors must both lie along what is summed over, as
    /// those of a linear layer do.
    pub fn problem(self, problem: &Problem) -> Result<Problem> {
        let along = !problem.left.transposed && problem.right.transposed && problem.batch == 1;
        if problem.input != DType::F32 || problem.output != DType::F32 || !along {
            return Err(Error::unsupported(format!("{problem}: it cannot be split")));
        }
        let k = problem.k * self.times();
        let factor = |f: Factor| Factor { ld: k, batch: 0, ..f };
        Ok(Problem {
            k,
            input: self.dtype(),
            tf32: self == Split::Tf32x3,
            left: factor(problem.left),
            right: factor(problem.right),
            ..*problem
        })
    }

    /// The kernel that splits a factor with dense rows of `k` elements. Operands: the factor, the pieces.
    pub fn kernel(self, right: bool, rows: usize, k: usize) -> Result<Kernel> {
        let width = if k.is_multiple_of(4) { 4 } else { 1 };
        let pieces = self.pieces()[usize::from(right)];
        let (out, round) = match self {
            Split::Tf32x3 => ("float", "tf32"),
            _ => ("bf16", "shortened"),
        };
        let store: String = (pieces.iter().enumerate())
            .map(|(place, piece)| format!("write(to + {}, piece{piece});\n", place * k))
            .collect();
        let text = format!(
            "const i64 pack = blockIdx.x * 256ll + threadIdx.x;
if (pack >= packs) return;
const i64 row = pack / {per_row};
const int c = (int)(pack - row * {per_row}) * {width};
const auto x = read<{width}>(x0 + row * {k} + c);
Pack<{out}, {width}> piece0, piece1, piece2;
for (int j = 0; j < {width}; j++) {{
    const float first = {round}(x.at[j]), rest = x.at[j] - first;
    const float second = {round}(rest);
    piece0.at[j] = As<{out}>::of(first);
    piece1.at[j] = As<{out}>::of(second);
    piece2.at[j] = As<{out}>::of(rest - second);
}}
auto* to = y0 + row * {long} + c;
{store}",
            per_row = k / width,
            long = k * pieces.len(),
        );
        let side = if right { "right" } else { "left" };
        let name = format!("split_{side}_{}", format!("{self:?}").to_lowercase());
        let shell = Shell {
            name: &name,
            comment: &[format!("y0 = pieces {pieces:?} of rows of {k}, 0 the greatest")],
            parameters: parameters(&[DType::F32], &[self.dtype()], &["packs"]),
            threads: 256,
            body: text,
        };
        let packs = rows * k / width;
        Ok(Kernel {
            source: shell.source(),
            name,
            blocks: blocks(packs, 256)?,
            threads: 256,
            alignments: vec![16, 16],
            numbers: vec![packs as u64],
        })
    }
}
