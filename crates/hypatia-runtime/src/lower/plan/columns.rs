//! Sums, means, norms and moments over some dimensions, such as the places of images with channels last. Pointwise ops
//! before them are computed while they are summed, and several reductions of the same numbers are one step.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ty::DType;

use super::pointwise::Making;
use super::slopes::wide;
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Instruction, Op as Lane, Region, Rounding};
use crate::operand::dense_strides;
use crate::step::{ColumnKind, ColumnStep, Task, Value, ValueId};

/// Numbers that one step makes of a column, at most.
const NUMBERS: usize = 4;

/// What a node makes of the columns of its first operand.
pub(super) struct Reduction {
    kind: ColumnKind,
    /// The dimensions of the operand, those first that are reduced.
    order: Vec<usize>,
    /// How many these are.
    rows: usize,
}

impl Lowering<'_> {
    /// What a node reduces, and to what; whether these are columns depends on how its operand lies.
    pub(super) fn reduction(&self, id: Id) -> Option<Reduction> {
        if !self.can.column_sums {
            return None;
        }
        let children = &self.program.node(id).children;
        let number = |i: usize| self.attr(*children.get(i)?).and_then(Attr::number);
        let kind = match self.name(id) {
            "sum" => ColumnKind::Sum,
            "mean" => ColumnKind::Mean,
            "vector_norm" if number(2) == Some(2.0) => ColumnKind::Norm,
            "var" => ColumnKind::Moments {
                correction: number(2).filter(|c| *c == 0.0 || *c == 1.0)? as u32,
            },
            _ => return None,
        };
        let x = *children.first()?;
        let (shape, from) = self.shape(x).ok()?;
        let dims = self.attr(*children.get(1)?).and_then(Attr::known_ints)?;
        let rank = shape.len();
        let reduced: Vec<bool> = (0..rank).map(|d| dims.contains(&(d as i64 - rank as i64))).collect();
        let rows = reduced.iter().filter(|r| **r).count();
        let to = self.shape(id).ok()?.1;
        // torch's norm of one number is that number without its sign, and a square may overflow.
        if kind == ColumnKind::Norm && (0..rank).all(|d| !reduced[d] || shape[d] == 1) {
            return None;
        }
        if rows == 0 || rows == rank || from != to || !to.is_float() || shape.contains(&0) {
            return None;
        }
        let order = (0..rank)
            .filter(|d| reduced[*d])
            .chain((0..rank).filter(|d| !reduced[*d]))
            .collect();
        Some(Reduction { kind, order, rows })
    }

    /// Whether what a node reduces is innermost in memory.
    pub(super) fn is_of_rows(&self, id: Id) -> bool {
        let x = self.program.node(id).children[0];
        let (Some(reduction), Ok((shape, _))) = (self.reduction(id), self.shape(x)) else {
            return false;
        };
        let strides = match self.place.get(&x) {
            Some(operand) => operand.strides.clone(),
            None => self.lies_as(x).unwrap_or_else(|| dense_strides(&shape)),
        };
        let innermost = (0..shape.len())
            .filter(|d| shape[*d] > 1 && strides[*d] > 0)
            .min_by_key(|d| strides[*d]);
        innermost.is_some_and(|d| reduction.order[..reduction.rows].contains(&d))
    }

    /// How the elements lie that a pointwise node is computed of: the strides of the first leaf of its shape.
    fn lies_as(&self, id: Id) -> Option<Vec<isize>> {
        let (shape, _) = self.shape(id).ok()?;
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if let Some(operand) = self.place.get(&id) {
                if operand.shape == shape {
                    return Some(operand.strides.clone());
                }
                continue;
            }
            if self.inside[usize::from(id)] {
                stack.extend(self.program.node(id).children.iter().rev());
            }
        }
        None
    }

    /// Whether all is there that a node is computed of.
    fn is_ready(&self, id: Id) -> bool {
        if self.is_attr(id) || self.place.contains_key(&id) || self.source.weight[usize::from(id)] {
            return true;
        }
        let children = &self.program.node(id).children;
        self.inside[usize::from(id)] && self.pointwise[usize::from(id)] && children.iter().all(|c| self.is_ready(*c))
    }

    /// Values that a node is computed of, which are there.
    fn made_of(&self, id: Id, found: &mut Vec<ValueId>) {
        match self.place.get(&id) {
            Some(operand) => found.push(operand.value),
            None if self.inside[usize::from(id)] => {
                let children = &self.program.node(id).children;
                children.iter().for_each(|c| self.made_of(*c, found));
            }
            None => {}
        }
    }

    /// Nodes whose reductions one step makes: this one, and others of the same numbers that are all there.
    fn reduced_together(&self, id: Id, first: &Reduction) -> Vec<(Id, ColumnKind)> {
        let x = self.program.node(id).children[0];
        // Sums are made in one type.
        let alike = |id: Id| self.shape(id).ok().map(|(shape, dtype)| (shape, wide(dtype)));
        let of_first = alike(x);
        let mut values = vec![];
        self.made_of(x, &mut values);
        let mut group = vec![(id, first.kind)];
        let mut numbers = first.kind.results();
        for other in self.reductions.iter().copied().filter(|other| *other != id) {
            let of = self.program.node(other).children[0];
            if self.place.contains_key(&other) || alike(of) != of_first || !self.is_ready(of) {
                continue;
            }
            let mut its = vec![];
            self.made_of(of, &mut its);
            let shared = its.iter().any(|v| values.contains(v)) && self.is_of_rows(other) == self.is_of_rows(id);
            let Some(reduction) = self.reduction(other).filter(|_| shared) else {
                continue;
            };
            numbers += reduction.kind.results();
            if (&reduction.order, reduction.rows) != (&first.order, first.rows) || numbers > NUMBERS {
                numbers -= reduction.kind.results();
                continue;
            }
            group.push((other, reduction.kind));
        }
        group
    }

    pub(super) fn columns(&mut self, id: Id) -> Result<()> {
        if self.place.contains_key(&id) {
            return Ok(());
        }
        let first = self.reduction(id).ok_or_else(|| no_plan("sums of another kind"))?;
        let group = self.reduced_together(id, &first);
        let (shape, dtype) = self.shape(self.program.node(id).children[0])?;
        let mut made = Making::over(&shape);
        for (id, _) in &group {
            let x = self.program.node(*id).children[0];
            if self.inside[usize::from(x)] && !self.place.contains_key(&x) {
                self.leaves(x, &mut made)?;
            } else if !made.place.contains_key(&x) {
                let operand = self.operand(x)?;
                made.read(x, operand, self.shape(x)?.1);
            }
        }
        let mut parts: Vec<Part> = vec![];
        for (id, kind) in &group {
            let x = self.program.node(*id).children[0];
            let result = self.summed(x, *kind, &mut made)?;
            // The mean comes with the other moment.
            let moments = |k: &ColumnKind| matches!(k, ColumnKind::Moments { .. });
            let pair = |p: &&mut Part| p.result == result && moments(&p.kind) != moments(kind) && p.nodes.len() == 1;
            let joins =
                |p: &&mut Part| matches!((p.kind, *kind), (ColumnKind::Mean, _) | (_, ColumnKind::Mean)) && pair(p);
            match parts.iter_mut().find(joins) {
                Some(part) => {
                    part.nodes.push((*id, moments(kind)));
                    if moments(kind) {
                        part.kind = *kind;
                    }
                }
                None => parts.push(Part {
                    kind: *kind,
                    result,
                    nodes: vec![(*id, moments(kind))],
                }),
            }
        }
        let results: Vec<usize> = parts.iter().map(|p| p.result).collect();
        let region = Region::new(&made.dtypes, made.code, &results, Rounding::EveryOp)?;
        let mut outputs = vec![];
        for part in &parts {
            for second in 0..part.kind.results() {
                let node = part.nodes.iter().find(|(_, is_second)| *is_second == (second == 1));
                outputs.push(match node {
                    Some((id, _)) => self.new_value(*id)?,
                    None => self.unread(part.nodes[0].0, dtype)?,
                });
            }
        }
        self.plan.steps.push(Task::Columns(Box::new(ColumnStep {
            region,
            kinds: parts.iter().map(|p| p.kind).collect(),
            shape: first.order.iter().map(|d| shape[*d]).collect(),
            rows: first.rows,
            inputs: made.inputs.iter().map(|o| o.permuted(&first.order)).collect(),
            outputs,
        })));
        Ok(())
    }

    /// The place of what is summed, in the type that sums are made in.
    fn summed(&self, x: Id, kind: ColumnKind, made: &mut Making) -> Result<usize> {
        let mut result = self.code(x, made)?;
        let (_, from) = self.shape(x)?;
        if from != wide(from) {
            result = made.push(Instruction::new(Lane::Cast(wide(from)), [result]));
        }
        if kind == ColumnKind::Norm {
            result = made.push(Instruction::new(Lane::Square, [result]));
        }
        Ok(result)
    }

    /// A value like that of a node, which nobody reads.
    fn unread(&mut self, like: Id, dtype: DType) -> Result<ValueId> {
        let (shape, _) = self.shape(like)?;
        self.plan.values.push(Value { shape, dtype });
        Ok(self.plan.values.len() - 1)
    }
}

/// What one result of the region is reduced to.
struct Part {
    kind: ColumnKind,
    result: usize,
    /// Nodes, and whether each is the second number.
    nodes: Vec<(Id, bool)>,
}
