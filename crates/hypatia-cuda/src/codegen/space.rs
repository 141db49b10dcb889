//! The positions that a kernel goes through, and where operands have their elements.

use hypatia_core::ty::DType;

use super::Operand;
use crate::{Error, Result};

/// Dimensions, outermost first, as few as say the same, and every operand's strides along them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) sizes: Vec<usize>,
    /// For each operand, one for each dimension.
    pub(super) strides: Vec<Vec<isize>>,
}

impl Space {
    /// Leaves out dimensions of one element and joins those that all operands go through as one.
    pub(super) fn new(shape: &[usize], operands: &[Vec<isize>]) -> Space {
        let dims = (0..shape.len()).filter(|d| shape[*d] != 1);
        Space::over(shape, operands, &dims.collect::<Vec<_>>())
    }

    /// The same with dimensions in the order of an operand's strides, for kernels that may go through them in any order.
    pub(super) fn ordered_by(shape: &[usize], operands: &[Vec<isize>], by: usize) -> Space {
        let mut dims: Vec<usize> = (0..shape.len()).filter(|d| shape[*d] != 1).collect();
        dims.sort_by_key(|d| std::cmp::Reverse(operands[by][*d].unsigned_abs()));
        Space::over(shape, operands, &dims)
    }

    fn over(shape: &[usize], operands: &[Vec<isize>], dims: &[usize]) -> Space {
        let mut sizes: Vec<usize> = vec![];
        let mut strides: Vec<Vec<isize>> = vec![vec![]; operands.len()];
        for &d in dims {
            let joins = !sizes.is_empty()
                && (operands.iter().zip(&strides)).all(|(o, s)| s.last() == Some(&(o[d] * shape[d] as isize)));
            for (operand, strides) in operands.iter().zip(&mut strides) {
                if joins {
                    strides.pop();
                }
                strides.push(operand[d]);
            }
            match sizes.last_mut() {
                Some(size) if joins => *size *= shape[d],
                _ => sizes.push(shape[d]),
            }
        }
        Space { sizes, strides }
    }

    pub(super) fn len(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The size of the innermost dimension.
    pub(super) fn inner(&self) -> usize {
        self.sizes.last().copied().unwrap_or(1)
    }

    /// The stride of an operand along the innermost dimension.
    pub(super) fn inner_stride(&self, operand: usize) -> isize {
        self.strides[operand].last().copied().unwrap_or(0)
    }

    /// True if an operand's elements lie in the order of the positions, without gaps.
    fn is_dense(&self, operand: usize) -> bool {
        let mut step = 1;
        self.sizes
            .iter()
            .zip(&self.strides[operand])
            .rev()
            .all(|(size, stride)| {
                let fits = *stride == step;
                step *= *size as isize;
                fits
            })
    }

    /// Statements that take the position `index` apart into coordinates `{index}_0`, `{index}_1`, …, those that any of
    /// the operands needs.
    pub(super) fn coordinates(&self, index: &str, operands: impl Iterator<Item = usize>) -> String {
        let rank = self.sizes.len();
        let mut used = vec![false; rank];
        for operand in operands.filter(|o| !self.is_dense(*o)) {
            for (used, stride) in used.iter_mut().zip(&self.strides[operand]) {
                *used |= *stride != 0;
            }
        }
        let Some(first) = used.iter().position(|u| *u).filter(|_| rank > 1) else {
            return String::new();
        };
        let mut text = String::new();
        let mut rest = index.to_owned();
        for d in (first..rank).rev() {
            if d == 0 {
                text += &format!("const auto {index}_0 = {rest};\n");
                break;
            }
            if used[d] {
                text += &format!("const auto {index}_{d} = {rest} % {};\n", self.sizes[d]);
            }
            if d > first {
                text += &format!("const auto {index}_above_{d} = {rest} / {};\n", self.sizes[d]);
                rest = format!("{index}_above_{d}");
            }
        }
        text
    }

    /// Where an operand has its element of the position `index`.
    pub(super) fn offset(&self, operand: usize, index: &str) -> String {
        if self.is_dense(operand) && !self.sizes.is_empty() {
            return index.into();
        }
        let single = self.sizes.len() == 1;
        let terms = self.strides[operand]
            .iter()
            .enumerate()
            .filter(|(_, stride)| **stride != 0);
        let terms = terms.map(|(d, stride)| {
            let coordinate = if single { index.into() } else { format!("{index}_{d}") };
            if *stride == 1 {
                coordinate
            } else {
                format!("{coordinate} * {stride}")
            }
        });
        let text = terms.collect::<Vec<_>>().join(" + ");
        if text.is_empty() { "0".into() } else { text }
    }

    /// The farthest that any operand's element is away.
    pub(super) fn reach(&self) -> usize {
        let far = |strides: &Vec<isize>| {
            let reach = self.sizes.iter().zip(strides).map(|(n, s)| (n - 1) * s.unsigned_abs());
            reach.sum::<usize>()
        };
        self.strides.iter().map(far).max().unwrap_or(0).max(self.len())
    }
}

/// Elements that a thread takes at a time: as many as make 16 bytes of the smallest type, at most 8, if all operands that
/// lie side by side allow it.
pub(super) fn pack_width(outer: Option<&Space>, inner: &Space, operands: &[&Operand]) -> usize {
    let side_by_side = || (0..operands.len()).filter(|i| inner.inner_stride(*i) == 1);
    let smallest = side_by_side().map(|i| operands[i].dtype.size()).min().unwrap_or(16);
    let mut width = (16 / smallest).min(8);
    while width > 1 {
        let fits = |i: usize| {
            let size = operands[i].dtype.size();
            let bytes = (width * size).min(16);
            let above = inner.strides[i].iter().rev().skip(1);
            let outer = outer.map_or(&[][..], |o| &o.strides[i]);
            operands[i].alignment.is_multiple_of(bytes)
                && above
                    .chain(outer)
                    .all(|s| (s.unsigned_abs() * size).is_multiple_of(bytes))
        };
        if inner.inner().is_multiple_of(width) && side_by_side().all(fits) {
            break;
        }
        width /= 2;
    }
    width
}

/// The type of positions: 32 bits where they are enough, since dividing longer ones is slow.
pub(super) fn index_type(reach: usize) -> &'static str {
    if reach < 1 << 30 { "int" } else { "i64" }
}

/// Refuses shapes whose size does not fit a launch.
pub(super) fn blocks(count: usize, per_block: usize) -> Result<[u32; 3]> {
    let blocks = u32::try_from(count.div_ceil(per_block))
        .ok()
        .filter(|b| *b <= i32::MAX as u32);
    let blocks = blocks.ok_or_else(|| Error::unsupported(format!("{count} elements are too many for a kernel")))?;
    Ok([blocks, 1, 1])
}

/// Dtypes of operands.
pub(super) fn types(operands: &[Operand]) -> Vec<DType> {
    operands.iter().map(|o| o.dtype).collect()
}
