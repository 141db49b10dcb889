//! Products of one matrix and each of a batch, and what torch's products of batches read.

use egg::Id;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::operand::Operand;
use crate::step::{BatchStep, Task};

impl Lowering<'_> {
    /// The factors of a product of one matrix and each of a batch, on a device that has such steps.
    pub(super) fn batch(&self, id: Id) -> Option<[Id; 2]> {
        let &[left, right] = &self.program.node(id).children[..] else {
            return None;
        };
        if self.name(id) != "matmul" {
            return None;
        }
        let ((one, dtype), (many, _)) = (self.shape(left).ok()?, self.shape(right).ok()?);
        let full = !one.contains(&0) && !many.contains(&0);
        let served = self.can.batches.contains(&dtype) && full && (one.len(), many.len()) == (2, 3);
        served.then_some([left, right])
    }

    pub(super) fn batch_step(&mut self, id: Id) -> Result<()> {
        let [left, right] = self.batch(id).ok_or_else(|| no_plan("a product of another form"))?;
        let batch = self.shape(id)?.0[0];
        let left = self.factor(left)?;
        let shape = [&[batch], &left.shape[..]].concat();
        let left = left
            .broadcast(&shape)
            .ok_or_else(|| no_plan("a factor of another form"))?;
        let right = self.factor(right)?;
        let y = self.new_value(id)?;
        self.plan
            .steps
            .push(Task::Batch(Box::new(BatchStep { left, right, y })));
        Ok(())
    }

    /// Where a factor of torch's product is: matrices of one batch, each of them as it lies or swapped. Torch would copy
    /// others, and swap what lies swapped.
    pub(super) fn one_batch(&mut self, id: Id) -> Result<Operand> {
        let operand = self.operand(id)?;
        if self.can.batches.is_empty() || is_one_batch(&operand) {
            return Ok(operand);
        }
        let rank = operand.shape.len();
        let mut order: Vec<usize> = (0..rank).collect();
        if operand.strides[rank - 2] == 1 {
            order.swap(rank - 2, rank - 1);
        }
        let lying: Vec<usize> = order.iter().map(|d| operand.shape[*d]).collect();
        // Swapping twice changes nothing.
        let strides = Operand::dense(0, &lying).permuted(&order).strides;
        self.as_wanted(id, operand, Some(&strides))
    }

    /// Where a factor is: its rows or its columns follow each other without gaps.
    fn factor(&mut self, id: Id) -> Result<Operand> {
        let operand = self.operand(id)?;
        match is_factor(&operand) {
            true => Ok(operand),
            false => self.dense(id),
        }
    }
}

/// Whether the last two dimensions lie as a matrix or its transpose does.
fn is_factor(o: &Operand) -> bool {
    let last = o.shape.len().saturating_sub(2);
    let &[rows, columns] = &o.shape[last..] else {
        return false;
    };
    let &[down, along] = &o.strides[last..] else {
        return false;
    };
    // Sizes of one have any stride; those are copied, which costs nothing.
    let lies = |inner: isize, outer: isize, length: usize| inner == 1 && outer >= length as isize;
    o.strides.iter().all(|s| *s >= 0) && (lies(along, down, columns) || lies(down, along, rows))
}

/// Whether all dimensions before the last two can be seen as one.
fn is_one_batch(o: &Operand) -> bool {
    let leading = o.shape.len().saturating_sub(2);
    let dims = (0..leading).filter(|d| o.shape[*d] != 1);
    let dims: Vec<(usize, isize)> = dims.map(|d| (o.shape[d], o.strides[d])).collect();
    dims.windows(2).all(|pair| pair[0].1 == pair[1].1 * pair[1].0 as isize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_and_their_transposes_are_factors() {
        let whole = Operand::dense(0, &[3, 4, 5]);
        assert!(is_factor(&whole));
        assert!(is_factor(&whole.permuted(&[0, 2, 1])));
        assert!(is_factor(&whole.sliced(2, 1, 3, 1)) && is_factor(&whole.sliced(1, 1, 2, 1)));
        assert!(is_factor(&whole.permuted(&[1, 0, 2])));
        assert!(is_factor(&whole.permuted(&[1, 2, 0])));
        assert!(!is_factor(&whole.permuted(&[2, 0, 1])));
        assert!(!is_factor(&whole.sliced(2, 0, 2, 2)));
        assert!(!is_factor(&Operand::dense(0, &[5]).broadcast(&[3, 4, 5]).unwrap()));
    }

    #[test]
    fn batches_of_several_dimensions() {
        let whole = Operand::dense(0, &[2, 3, 4, 5]);
        assert!(is_one_batch(&whole) && is_one_batch(&whole.permuted(&[0, 1, 3, 2])));
        // Heads of a layer.
        assert!(!is_one_batch(&whole.permuted(&[0, 2, 1, 3])));
        assert!(is_one_batch(&Operand::dense(0, &[1, 3, 4, 5]).permuted(&[0, 2, 1, 3])));
        assert!(!is_one_batch(
            &Operand::dense(0, &[2, 1, 4, 5]).broadcast(&[2, 3, 4, 5]).unwrap()
        ));
    }
}
