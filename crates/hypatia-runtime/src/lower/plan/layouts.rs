//! How tensors lie in memory that torch hands over, or wants to be handed.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use egg::Id;
use hypatia_core::ty::DType;
use serde::Deserialize;

use super::results::Wanted;
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::step::{Operand, Task, Value, ValueId};

/// Strides in eager, by names of captured nodes; none for tensors without gaps in the usual order.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layouts {
    /// Of the results of inputs and of calls that only torch knows.
    pub results: BTreeMap<String, Vec<Option<Vec<isize>>>>,
    /// Of what calls read that only torch knows.
    pub reads: BTreeMap<String, Vec<Option<Vec<isize>>>>,
    /// How the program's results lie; those that are not listed have memory of their own and no gaps.
    pub outputs: Vec<Wanted>,
}

impl Layouts {
    fn of<'a>(map: &'a BTreeMap<String, Vec<Option<Vec<isize>>>>, name: &str, item: usize) -> Option<&'a [isize]> {
        map.get(name)?.get(item)?.as_deref()
    }

    /// Strides of a result.
    pub fn result(&self, name: &str, item: usize) -> Option<&[isize]> {
        Layouts::of(&self.results, name, item)
    }

    /// Strides of an operand.
    pub fn read(&self, name: &str, operand: usize) -> Option<&[isize]> {
        Layouts::of(&self.reads, name, operand)
    }
}

impl Lowering<'_> {
    /// A new value that torch sees with these strides, and where its elements are.
    pub(super) fn laid(&mut self, shape: &[usize], dtype: DType, strides: Option<&[isize]>) -> Result<Operand> {
        let Some(strides) = strides.filter(|s| !Operand::dense(0, shape).lies_as(s)) else {
            let value = self.push_value(shape.to_vec(), dtype);
            return Ok(Operand::dense(value, shape));
        };
        if strides.len() != shape.len() || strides.iter().any(|s| *s < 0) {
            return Err(no_plan("strides that do not fit"));
        }
        let operand = match order(shape, strides) {
            Some(order) => {
                let lying: Vec<usize> = order.iter().map(|d| shape[*d]).collect();
                let value = self.push_value(lying.clone(), dtype);
                Operand::dense(value, &lying).permuted(&inverse(&order))
            }
            None => {
                let last: isize = shape
                    .iter()
                    .zip(strides)
                    .map(|(n, s)| (*n as isize - 1).max(0) * s)
                    .sum();
                let value = self.push_value(vec![last as usize + 1], dtype);
                Operand {
                    value,
                    offset: 0,
                    shape: shape.to_vec(),
                    strides: strides.to_vec(),
                }
            }
        };
        (self.plan.seen).insert(operand.value, (shape.to_vec(), operand.strides.clone()));
        Ok(operand)
    }

    fn push_value(&mut self, shape: Vec<usize>, dtype: DType) -> ValueId {
        self.plan.values.push(Value { shape, dtype });
        self.plan.values.len() - 1
    }

    /// An operand with the strides that torch expects: a copy if it lies otherwise.
    pub(super) fn as_wanted(&mut self, id: Id, operand: Operand, wanted: Option<&[isize]>) -> Result<Operand> {
        let dense = Operand::dense(0, &operand.shape).strides;
        let wanted = wanted.unwrap_or(&dense);
        if operand.lies_as(wanted) {
            // Torch chooses kernels by the strides of single elements, too.
            let strides = wanted.to_vec();
            return Ok(Operand { strides, ..operand });
        }
        let key = (id, wanted.to_vec());
        if let Some(known) = self.copies.get(&key) {
            return Ok(known.clone());
        }
        let copy = self.written(id, &operand, wanted)?;
        self.copies.insert(key, copy.clone());
        Ok(copy)
    }

    /// A copy of an operand with these strides.
    pub(super) fn written(&mut self, id: Id, operand: &Operand, strides: &[isize]) -> Result<Operand> {
        // What is seen several times is written once.
        let mut once = operand.clone();
        for (size, _) in once.shape.iter_mut().zip(strides).filter(|(_, stride)| **stride == 0) {
            *size = (*size).min(1);
        }
        let value = match order(&once.shape, strides) {
            Some(order) => self.copied(id, &once.permuted(&order))?,
            None => self.spread(id, &once, strides)?,
        };
        Ok(Operand {
            value,
            offset: 0,
            shape: operand.shape.clone(),
            strides: strides.to_vec(),
        })
    }

    /// A copy with gaps; its value.
    fn spread(&mut self, id: Id, operand: &Operand, strides: &[isize]) -> Result<ValueId> {
        let mut dims: Vec<usize> = (0..strides.len()).filter(|d| operand.shape[*d] > 1).collect();
        dims.sort_by_key(|d| strides[*d]);
        let mut end = 1;
        for d in dims {
            if strides[d] < end {
                return Err(no_plan("a tensor whose elements lie in each other's place"));
            }
            end += strides[d] * (operand.shape[d] as isize - 1);
        }
        let copy = self.copied(id, operand)?;
        self.plan.values[copy].shape = vec![end as usize];
        if let Some(Task::Region(step)) = self.plan.steps.last_mut() {
            step.slices = vec![Operand {
                value: copy,
                offset: 0,
                shape: operand.shape.clone(),
                strides: strides.to_vec(),
            }];
        }
        Ok(copy)
    }
}

/// The dimensions as they lie in memory, the outermost first, if there are no gaps.
pub(super) fn order(shape: &[usize], strides: &[isize]) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    order.sort_by_key(|d| Reverse(strides[*d]));
    let lying = Operand {
        value: 0,
        offset: 0,
        shape: order.iter().map(|d| shape[*d]).collect(),
        strides: order.iter().map(|d| strides[*d]).collect(),
    };
    lying.is_dense().then_some(order)
}

/// The order that undoes another.
pub(super) fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (at, d) in order.iter().enumerate() {
        inverse[*d] = at;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_in_the_order_of_memory() {
        // Heads of attention, and a slice of a wider row.
        let heads = Operand::dense(0, &[2, 5, 3, 4]).permuted(&[0, 2, 1, 3]);
        let found = order(&heads.shape, &heads.strides).unwrap();
        assert_eq!(found, [0, 2, 1, 3]);
        assert_eq!(inverse(&found), [0, 2, 1, 3]);
        assert_eq!(order(&[4, 3], &[6, 1]), None);
        assert_eq!(order(&[1, 3], &[100, 1]), Some(vec![0, 1]));
        let turned = Operand::dense(0, &[2, 3, 4]).permuted(&[2, 0, 1]);
        let found = order(&turned.shape, &turned.strides).unwrap();
        let back = Operand::dense(0, &[2, 3, 4]).permuted(&inverse(&found));
        assert_eq!((back.shape, back.strides), (turned.shape, turned.strides));
    }
}
