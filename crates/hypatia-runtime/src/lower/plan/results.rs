//! What a plan returns: one way for inference and for both passes of a training step.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use hypatia_core::ty::Ty;
use serde::{Deserialize, Serialize};

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::operand::dense_strides;
use crate::step::{Operand, Task};

/// A result of a program: an output or an input of its plan, as it is or seen otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Returned {
    /// True for an input.
    pub given: bool,
    /// Its place among the plan's inputs or outputs.
    pub at: usize,
    /// Elements before the first.
    pub offset: usize,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Strides.
    pub strides: Vec<isize>,
    /// True if it is what is given or written, and no view.
    pub whole: bool,
    /// The size that it is, for a result that is no tensor.
    pub number: Option<i64>,
}

impl Returned {
    /// A result that is a size.
    fn number(size: i64) -> Returned {
        Returned {
            given: false,
            at: 0,
            offset: 0,
            shape: vec![],
            strides: vec![],
            whole: true,
            number: Some(size),
        }
    }
}

/// A result as it lies in eager.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Strides, where they matter.
    pub strides: Option<Vec<isize>>,
    /// Elements before its first: in memory that results share, or after the first of an input.
    pub offset: isize,
    /// There is nothing else in its memory.
    pub whole: bool,
    /// Whose memory it is.
    pub memory: Owner,
}

/// Whose memory a result lies in.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// It is all the same: the result is kept for a backward pass, or is a gradient.
    #[default]
    Any,
    /// Its own, or that of all results with this number.
    Own(usize),
    /// That of the input of this name.
    Input(String),
}

impl Wanted {
    /// A result in memory of its own, one element after the other.
    fn plain(place: usize) -> Wanted {
        Wanted {
            whole: true,
            memory: Owner::Own(place),
            ..Wanted::default()
        }
    }

    /// How a result of these sizes lies.
    fn lying(&self, shape: &[usize]) -> Lying {
        Lying {
            offset: self.offset,
            shape: shape.to_vec(),
            strides: self.strides.clone().unwrap_or_else(|| dense_strides(shape)),
        }
    }
}

/// Elements in eager's memory.
#[derive(Debug, Clone)]
struct Lying {
    offset: isize,
    shape: Vec<usize>,
    strides: Vec<isize>,
}

impl Lying {
    /// The first element and the one after the last.
    fn range(&self) -> (isize, isize) {
        if self.shape.contains(&0) {
            return (self.offset, self.offset);
        }
        let steps = self.shape.iter().zip(&self.strides);
        let last: isize = steps.map(|(n, s)| (*n as isize - 1) * s).sum();
        (self.offset, self.offset + last + 1)
    }

    /// Whether all that another one sees are elements of this one.
    fn covers(&self, other: &Lying) -> bool {
        let ((start, end), (first, last)) = (self.range(), other.range());
        let gapless = (end - start) as usize == self.shape.iter().product::<usize>();
        gapless && start <= first && last <= end
    }
}

impl Lowering<'_> {
    /// All results, as far as there are memory and layouts for them that are eager's.
    pub(super) fn results(&mut self) -> Result<Vec<Returned>> {
        let ids = self.program.node(self.program.root).children[..self.results].to_vec();
        let mut found: Vec<Option<Returned>> = vec![None; ids.len()];
        for place in 0..ids.len() {
            match self.program.ty(ids[place]) {
                Ty::Attr(Attr::Int(size)) => {
                    let size = size.known().ok_or_else(|| no_plan("a size that is not known"))?;
                    found[place] = Some(Returned::number(size));
                    continue;
                }
                Ty::Tensor(t) if t.device != self.device => return Err(no_plan("a result on another device")),
                _ => (),
            }
            let leader = self.leader(place, &ids)?;
            if found[leader].is_none() {
                found[leader] = Some(self.returned(ids[leader], leader)?);
            }
            if let (None, Some(first)) = (&found[place], &found[leader]) {
                found[place] = Some(self.beside(ids[place], place, (leader, ids[leader], first))?);
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    pub(super) fn wanted(&self, place: usize) -> Wanted {
        let known = self.wish.layouts.outputs.get(place).cloned();
        known.unwrap_or_else(|| Wanted::plain(place))
    }

    /// Of the results in one memory, the one that takes most of it.
    fn leader(&self, place: usize, ids: &[Id]) -> Result<usize> {
        let Owner::Own(memory) = self.wanted(place).memory else {
            return Ok(place);
        };
        let mut largest: Option<(isize, usize)> = None;
        for (at, id) in ids.iter().enumerate() {
            let wanted = self.wanted(at);
            if wanted.memory == Owner::Own(memory) {
                let (start, end) = wanted.lying(&self.shape(*id)?.0).range();
                if largest.is_none_or(|(most, _)| most < end - start) {
                    largest = Some((end - start, at));
                }
            }
        }
        Ok(largest.map_or(place, |(_, at)| at))
    }

    /// A result that no other was made for.
    fn returned(&mut self, id: Id, place: usize) -> Result<Returned> {
        let wanted = self.wanted(place);
        let (shape, _) = self.shape(id)?;
        let lying = wanted.lying(&shape);
        if let Owner::Input(name) = &wanted.memory {
            return self.given(name, &lying);
        }
        let operand = self.operand(id)?;
        let given = self.plan.inputs.iter().position(|v| *v == operand.value);
        // A backward pass was traced with strides that a copy may have given to what it takes.
        let alike = wanted.strides.as_ref().is_none_or(|strides| operand.lies_as(strides));
        if let (Owner::Any, Some(at), true) = (&wanted.memory, given, alike) {
            if self.is_changed_later(operand.value) {
                // What it was before is kept for the backward pass.
                let strides = operand.strides.clone();
                let copy = self.written(id, &operand, &strides)?;
                return Ok(self.output(&copy));
            }
            return Ok(self.seen(&operand, true, at));
        }
        let constant = self.plan.constants.contains(&operand.value);
        let operand = if wanted.memory == Owner::Any {
            if constant {
                return Err(no_plan("a result that is made of weights only"));
            }
            match &wanted.strides {
                Some(strides) => self.as_wanted(id, operand, Some(strides))?,
                None => operand,
            }
        } else {
            let own = given.is_none() && !constant && !self.plan.outputs.contains(&operand.value);
            let all = self.plan.values[operand.value].numel() == shape.iter().product::<usize>();
            let alike = own && (all || !wanted.whole) && operand.lies_as(&lying.strides);
            match alike {
                // Strides of single elements are eager's, too.
                true => Operand {
                    strides: lying.strides,
                    ..operand
                },
                false => self.written(id, &operand, &lying.strides)?,
            }
        };
        Ok(self.output(&operand))
    }

    /// A result that shares memory with one that was made before.
    fn beside(&mut self, id: Id, place: usize, (leader, of, first): (usize, Id, &Returned)) -> Result<Returned> {
        let lying = self.wanted(place).lying(&self.shape(id)?.0);
        let base = self.wanted(leader).lying(&self.shape(of)?.0);
        let offset = first.offset as isize + lying.offset - base.offset;
        let operand = self.operand(id)?;
        // Where a step has it is where it belongs.
        let there = self.plan.outputs.get(first.at) == Some(&operand.value)
            && operand.offset as isize == offset
            && operand.lies_as(&lying.strides);
        match usize::try_from(offset) {
            Ok(offset) if there || base.covers(&lying) => Ok(Returned {
                given: false,
                at: first.at,
                whole: first.whole
                    && (first.offset, &first.shape, &first.strides) == (offset, &lying.shape, &lying.strides),
                offset,
                shape: lying.shape,
                strides: lying.strides,
                number: None,
            }),
            _ => Err(no_plan("results share memory that the plan has apart")),
        }
    }

    /// A view of an input.
    fn given(&self, name: &str, lying: &Lying) -> Result<Returned> {
        let named = |id: &Id| match &self.program.node(*id).op {
            Op::Input(i) => self.program.leaves.inputs[*i as usize].name == name,
            _ => false,
        };
        let input = self.program.reachable().into_iter().find(named);
        let value = input.and_then(|id| self.given.get(&id)).map(|o| o.value);
        let at = self.plan.inputs.iter().position(|v| Some(*v) == value);
        let (Some(at), Ok(offset)) = (at, usize::try_from(lying.offset)) else {
            return Err(no_plan("a result in the memory of a weight or before that of an input"));
        };
        let (shape, strides) = self.plan.form(self.plan.inputs[at]);
        Ok(Returned {
            given: true,
            at,
            whole: offset == 0 && (&shape, &strides) == (&lying.shape, &lying.strides),
            offset,
            shape: lying.shape.clone(),
            strides: lying.strides.clone(),
            number: None,
        })
    }

    /// A result among the plan's outputs.
    fn output(&mut self, operand: &Operand) -> Returned {
        let known = self.plan.outputs.iter().position(|v| *v == operand.value);
        let at = known.unwrap_or_else(|| {
            self.plan.outputs.push(operand.value);
            self.plan.outputs.len() - 1
        });
        let whole =
            operand.is_dense() && operand.shape.iter().product::<usize>() == self.plan.values[operand.value].numel();
        // Products and torch know a value by its shape.
        let fixed = self.plan.steps.iter().any(|s| {
            let torch = matches!(s, Task::Torch(t) if t.writes.contains(&operand.value));
            torch || s.weights().contains(&operand.value)
        });
        if known.is_none() && whole && !fixed {
            // Made in the shape in which it is wanted, it needs no view.
            self.plan.values[operand.value].shape.clone_from(&operand.shape);
        }
        self.seen(operand, false, at)
    }

    fn seen(&self, operand: &Operand, given: bool, at: usize) -> Returned {
        // An output is made as its value lies; an input is what its caller sees.
        let (shape, strides) = match given {
            true => self.plan.form(operand.value),
            false => {
                let shape = self.plan.values[operand.value].shape.clone();
                let strides = dense_strides(&shape);
                (shape, strides)
            }
        };
        Returned {
            whole: operand.offset == 0 && operand.shape == shape && operand.lies_as(&strides),
            given,
            at,
            offset: operand.offset,
            shape: operand.shape.clone(),
            strides: operand.strides.clone(),
            number: None,
        }
    }
}
