//! Reductions over the first dimensions.

use super::{Operand, Step, ValueId};
use crate::kernels::region::Region;

/// What a column step makes of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// The sum of its elements.
    Sum,
    /// Their mean.
    Mean,
    /// The root of the sum of their squares.
    Norm,
    /// Their mean, and the sum of squared distances from it divided by their number less this.
    Moments {
        /// See there.
        correction: u32,
    },
}

impl ColumnKind {
    /// How many numbers are made of a column.
    pub fn results(self) -> usize {
        match self {
            ColumnKind::Moments { .. } => 2,
            _ => 1,
        }
    }
}

/// Sums, means or norms over the first dimensions of what a region computes.
#[derive(Debug)]
pub struct ColumnStep {
    /// What is summed, in the type that sums are made in.
    pub region: Region,
    /// What is made of the columns of each of its results.
    pub kinds: Vec<ColumnKind>,
    /// Sizes of what it reads.
    pub shape: Vec<usize>,
    /// The sums are over so many of the first dimensions.
    pub rows: usize,
    /// What the region reads.
    pub inputs: Vec<Operand>,
    /// What is written: results of the first kind, of the second one and so on.
    pub outputs: Vec<ValueId>,
}

impl ColumnStep {
    /// What is made of one operand as it is.
    pub fn of_one(&self) -> Option<(ColumnKind, &Operand)> {
        match (&self.kinds[..], &self.inputs[..]) {
            ([kind], [x]) if self.region.only_widens() => Some((*kind, x)),
            _ => None,
        }
    }
}

impl Step for ColumnStep {
    fn reads(&self) -> Vec<ValueId> {
        self.inputs.iter().map(|o| o.value).collect()
    }

    fn writes(&self) -> Vec<ValueId> {
        self.outputs.clone()
    }

    fn name(&self) -> String {
        let word = |kind: &ColumnKind| match kind {
            ColumnKind::Sum => "sums",
            ColumnKind::Mean => "means",
            ColumnKind::Norm => "norms",
            ColumnKind::Moments { .. } => "moments",
        };
        let words: Vec<&str> = self.kinds.iter().map(word).collect();
        format!("column {} of {:?}", words.join(" and "), self.shape)
    }
}
