//! The chosen program as a plan: linear layers with what follows them, fused pointwise regions, views
//! as names, and calls into torch for the rest.

mod activations;
mod again;
mod batch_norms;
mod batches;
mod calls;
mod columns;
mod copying;
mod decoding;
mod depthwise;
mod effects;
mod gradients;
mod images;
mod inline;
mod joined;
mod layouts;
mod norms;
mod numbers;
mod padded;
mod pairs;
mod parts;
mod places;
mod pointwise;
mod products;
mod reads;
mod reshaped;
mod results;
mod scaled;
mod slices;
mod slopes;
mod small;
mod views;

use std::collections::{BTreeMap, BTreeSet};

use egg::{Id, Language};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Program;
use hypatia_core::ops::{Row, table};
use hypatia_core::optimize::Optimized;
use hypatia_core::ty::{DType, Device, TensorType, Ty};
use rustc_hash::FxHashMap;
use serde::Deserialize;

use crate::device::{Abilities, Registered, find};
use crate::error::{Error, Result};
use crate::step::{Operand, Plan, Value, ValueId};
pub use calls::{CallOperand, TorchCall};
use gradients::Gate;
use inline::Inlined;
pub use layouts::Layouts;
use products::Tail;
pub use results::{Owner, Returned, Wanted};

/// A plan, and what its inputs and constants are in the program that it came from.
#[derive(Debug)]
pub struct Lowered {
    /// The plan.
    pub plan: Plan,
    /// Inputs of the program that are inputs of the plan, in its order.
    pub inputs: Vec<Id>,
    /// Weight-only nodes of the program that are constants of the plan, in its order.
    pub constants: Vec<Id>,
    /// For each of them the order in which its dimensions are to lie, if it is not the usual one. Along those that are
    /// not in it the tensor repeats, and its first elements are enough.
    pub orders: Vec<Option<Vec<usize>>>,
    /// Calls into torch, in the order of their steps.
    pub calls: Vec<TorchCall>,
    /// What each result of the program is.
    pub results: Vec<Returned>,
    /// Outputs of the plan beside which the mask of a ReLU can be kept.
    pub keeps: Vec<usize>,
    /// Inputs of the plan that serve as the mask of a ReLU, and only so where their mask can be given instead.
    pub masks: Vec<usize>,
    /// Inputs of the plan that its last steps change in place.
    pub changes: Vec<usize>,
}

/// What a plan is to be made for.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wish {
    /// Values of symbols.
    pub sizes: BTreeMap<String, i64>,
    /// It is a pass of a training step.
    pub saved: bool,
    /// A pass of a training step that was traced with images that have channels last.
    pub images: bool,
    /// How tensors lie in eager.
    pub layouts: Layouts,
    /// Outputs whose masks are outputs, too, after all others; see [`Lowered::keeps`].
    pub keep: Vec<usize>,
    /// Inputs whose masks are inputs, too, after all others; see [`Lowered::masks`].
    pub masked: Vec<usize>,
    /// Captured calls that could write into their first operand instead of a copy of it.
    pub in_place: BTreeSet<String>,
    /// The devices that it may be made for; the program's tensors say which of them it is.
    #[serde(skip)]
    pub devices: &'static [Registered],
}

impl Wish {
    /// A plan of plain results on one of these devices.
    pub fn on(devices: &'static [Registered]) -> Wish {
        Wish {
            devices,
            ..Wish::default()
        }
    }

    /// The same at these sizes.
    pub fn at(self, sizes: &BTreeMap<String, i64>) -> Wish {
        Wish {
            sizes: sizes.clone(),
            ..self
        }
    }
}

fn no_plan(why: impl Into<String>) -> Error {
    Error::Unsupported(why.into())
}

/// Lowers an optimized program with so many results.
pub fn lower(optimized: &Optimized, results: usize, wish: &Wish) -> Result<Lowered> {
    lower_program(&optimized.output, &optimized.weights, results, wish)
}

/// Lowers a program of which it is known which nodes are made of weights only.
pub fn lower_program(output: &Program, weights: &[bool], results: usize, wish: &Wish) -> Result<Lowered> {
    let roots = &output.node(output.root).children;
    if roots.len() < results {
        return Err(no_plan("results that are not computed"));
    }
    let inlined = Inlined::new(output, &|id| weights[usize::from(id)], &wish.sizes)?;
    let device = device_of(&inlined.program)?;
    let name = output.leaves.devices.name(device).unwrap_or_default();
    let abilities = find(wish.devices, name).ok_or_else(|| no_plan(format!("values on the device {name:?}")))?;
    let inlined = match wish.saved && abilities.column_sums {
        true => batch_norms::in_parts(inlined, wish.images)?,
        false => inlined,
    };
    let inlined = match &abilities.channels_last {
        Some(_) if !wish.saved => pairs::added(inlined)?,
        _ => inlined,
    };
    let inlined = match &abilities.channels_last {
        Some(how) if !wish.saved || wish.images => images::channels_last(inlined, how)?,
        _ => inlined,
    };
    let inlined = match wish.saved {
        true => inlined,
        false => {
            let inlined = places::over_places(reshaped::pushed(inlined)?, abilities)?;
            slices::in_parts(inlined, abilities)?
        }
    };
    let lowered = Lowering::new(&inlined, results, device, abilities, wish).lower()?;
    tracing::debug!(
        device = name,
        steps = lowered.plan.steps.len(),
        calls = lowered.calls.len(),
        constants = lowered.constants.len(),
        "plan lowered"
    );
    Ok(lowered)
}

/// The device of all tensors; numbers on the CPU may be beside those of another one.
fn device_of(program: &Program) -> Result<Device> {
    let mut found = None;
    for id in program.reachable() {
        if let Ty::Tensor(t) = program.ty(id)
            && !is_number(t)
        {
            if found.is_some_and(|d| d != t.device) {
                return Err(no_plan("values on several devices"));
            }
            found = Some(t.device);
        }
    }
    Ok(found.unwrap_or_default())
}

/// Whether a tensor is one number on the CPU, which ops on any device take; plans have it where the others are.
fn is_number(t: &TensorType) -> bool {
    t.shape.is_empty() && t.device == Device::default()
}

struct Lowering<'a> {
    wish: &'a Wish,
    device: Device,
    /// What the device can do.
    can: &'static Abilities,
    source: &'a Inlined,
    program: &'a Program,
    /// So many first items of the root are results; the others are calls with effects.
    results: usize,
    uses: Vec<usize>,
    /// The last user of each node.
    users: Vec<Id>,
    plan: Plan,
    inputs: Vec<Id>,
    /// Where inputs are given.
    given: FxHashMap<Id, Operand>,
    constants: Vec<Id>,
    /// The order in which the dimensions of each constant lie, if it is not the usual one.
    orders: Vec<Option<Vec<usize>>>,
    /// Where nodes are that steps can read.
    place: FxHashMap<Id, Operand>,
    /// Copies of nodes with other strides.
    copies: FxHashMap<(Id, Vec<isize>), Operand>,
    /// Values of nodes with several results.
    items: FxHashMap<Id, Vec<Option<Operand>>>,
    calls: Vec<TorchCall>,
    /// Linear nodes by the last node that their step takes over.
    tails: FxHashMap<Id, (Id, Tail)>,
    /// Nodes that are computed inside a step of another.
    inside: Vec<bool>,
    /// Nodes that a region can compute.
    pointwise: Vec<bool>,
    /// Steps that do nothing but mask a gradient.
    gates: Vec<Gate>,
    /// Calls that change an input themselves, and that input.
    in_place: FxHashMap<Id, Id>,
    /// The region that is made may put parts together, which it can do once.
    may_join: bool,
    /// Products of a norm and a weight that the step of the norm computes, and that norm.
    scaled: FxHashMap<Id, Id>,
    /// Nodes that may be sums of columns, in the order of the program.
    reductions: Vec<Id>,
}

impl<'a> Lowering<'a> {
    fn new(
        source: &'a Inlined,
        results: usize,
        device: Device,
        can: &'static Abilities,
        wish: &'a Wish,
    ) -> Lowering<'a> {
        let program = &source.program;
        let mut uses = vec![0; program.nodes().len()];
        let mut users = vec![program.root; program.nodes().len()];
        for id in program.reachable() {
            if !source.weight[usize::from(id)] {
                program.node(id).for_each(|c| {
                    uses[usize::from(c)] += 1;
                    users[usize::from(c)] = id;
                });
            }
        }
        let mut lowering = Lowering {
            wish,
            device,
            can,
            source,
            program,
            results,
            inside: vec![false; program.nodes().len()],
            pointwise: vec![false; program.nodes().len()],
            may_join: false,
            reductions: vec![],
            scaled: FxHashMap::default(),
            uses,
            users,
            plan: Plan {
                device: can.name,
                ..Plan::default()
            },
            inputs: vec![],
            given: FxHashMap::default(),
            constants: vec![],
            orders: vec![],
            place: FxHashMap::default(),
            copies: FxHashMap::default(),
            items: FxHashMap::default(),
            calls: vec![],
            tails: FxHashMap::default(),
            gates: vec![],
            in_place: FxHashMap::default(),
        };
        lowering.in_place = lowering.changing_in_place();
        for id in program.reachable() {
            lowering.pointwise[usize::from(id)] = lowering.is_pointwise(id);
        }
        lowering
    }

    fn lower(mut self) -> Result<Lowered> {
        let wish = self.wish;
        let order: Vec<Id> = self
            .in_order()
            .into_iter()
            .filter(|id| !self.source.weight[usize::from(*id)] && *id != self.program.root)
            .filter(|id| !matches!(self.program.ty(*id), Ty::Attr(_)))
            .collect();
        for id in &order {
            if self.product(*id).is_some() {
                self.follow(*id);
            }
            self.absorb_zeros(*id);
            self.absorb_repeated_heads(*id);
        }
        let reduces = |id: &Id| self.reduction(*id).is_some();
        self.reductions = order.iter().copied().filter(reduces).collect();
        self.compute_again(&order);
        self.widen_where_read(&order);
        order.iter().for_each(|id| self.scale_norm(*id));
        for id in order.iter().rev() {
            self.may_join = false;
            if self.row_op(*id).is_some() || self.reductions.contains(id) {
                self.absorb(*id);
            }
            if !self.inside[usize::from(*id)] && !self.tails.contains_key(id) && self.pointwise[usize::from(*id)] {
                self.may_join = true;
                self.absorb(*id);
            }
            if !self.inside[usize::from(*id)]
                && let Some((_, parts)) = self.join_step(*id)
            {
                self.absorb_parts(&parts);
            }
        }
        for id in &order {
            if !self.inside[usize::from(*id)] && !self.changes_operands(*id) {
                self.step(*id)?;
            }
        }
        let results = self.results()?;
        let changes = self.change(&order)?;
        self.merge_sums();
        self.merge_depthwise();
        self.merge_small()?;
        let (keeps, masks) = (self.keeps(), self.masks());
        wish.keep.iter().try_for_each(|at| self.keep(*at))?;
        wish.masked.iter().try_for_each(|at| self.mask(*at))?;
        if self.can.pads_rows {
            padded::pad_rows(&mut self.plan)?;
        }
        Ok(Lowered {
            plan: self.plan,
            inputs: self.inputs,
            constants: self.constants,
            orders: self.orders,
            calls: self.calls,
            results,
            keeps,
            masks,
            changes,
        })
    }

    fn is_attr(&self, id: Id) -> bool {
        matches!(self.program.node(id).op, Op::Attr(_))
    }

    fn row(&self, id: Id) -> Option<&'static Row> {
        match &self.program.node(id).op {
            Op::Row(op) => Some(table().row(*op)),
            _ => None,
        }
    }

    fn name(&self, id: Id) -> &'static str {
        self.row(id).map_or("", |row| row.name)
    }

    fn shape(&self, id: Id) -> Result<(Vec<usize>, DType)> {
        let Ty::Tensor(t) = self.program.ty(id) else {
            return Err(no_plan(format!("{} is no tensor", self.program.ty(id))));
        };
        if t.device != self.device && !is_number(t) {
            return Err(no_plan("a value on another device"));
        }
        let shape: Option<Vec<usize>> = t.shape.iter().map(|d| d.known().map(|v| v as usize)).collect();
        Ok((shape.ok_or_else(|| no_plan("sizes that are not known"))?, t.dtype))
    }

    /// The only user of a node, if there is one.
    fn user(&self, id: Id) -> Option<Id> {
        let user = self.users[usize::from(id)];
        (self.uses[usize::from(id)] == 1 && user != self.program.root).then_some(user)
    }

    /// Marks the pointwise nodes that are computed inside the region of a node; before an op on rows, only
    /// those that its rows come from.
    fn absorb(&mut self, root: Id) {
        let children = self.program.node(root).children.clone();
        let pointwise = self.pointwise[usize::from(root)];
        let count = if pointwise { children.len() } else { 1 };
        for child in children.into_iter().take(count) {
            let single = self.uses[usize::from(child)] == 1;
            let alike = !pointwise || self.shape(child).map(|s| s.0).ok() == self.shape(root).map(|s| s.0).ok();
            let free = !self.inside[usize::from(child)] && !self.tails.contains_key(&child);
            let computed = single && self.is_free_pointwise(child);
            if computed && alike {
                self.inside[usize::from(child)] = true;
                self.absorb(child);
            } else if computed && let Some(ops) = self.repeated(child, root) {
                ops.iter().for_each(|op| self.inside[usize::from(*op)] = true);
            } else if single && alike && free && pointwise && self.absorb_read(child) {
                self.inside[usize::from(child)] = true;
            } else if single
                && alike
                && free
                && self.may_join
                && !self.source.weight[usize::from(child)]
                && let Some((_, parts)) = self.join(child)
            {
                self.may_join = false;
                self.absorb_join(child, &parts);
            }
        }
    }

    fn new_value(&mut self, id: Id) -> Result<ValueId> {
        let (shape, dtype) = self.shape(id)?;
        self.plan.values.push(Value { shape, dtype });
        let value = self.plan.values.len() - 1;
        self.place(id, value)?;
        Ok(value)
    }

    /// Notes that a node is a whole value.
    fn place(&mut self, id: Id, value: ValueId) -> Result<()> {
        let (shape, _) = self.shape(id)?;
        self.place.insert(id, Operand::dense(value, &shape));
        Ok(())
    }

    /// Where a node is that some step reads.
    fn operand(&mut self, id: Id) -> Result<Operand> {
        if let Some(known) = self.place.get(&id) {
            return Ok(known.clone());
        }
        if self.source.weight[usize::from(id)] {
            let origin = self
                .source
                .origin
                .get(&id)
                .ok_or_else(|| no_plan("a weight without a name"))?;
            let value = self.new_value(id)?;
            self.constants.push(*origin);
            self.orders.push(None);
            self.plan.constants.push(value);
            return Ok(self.place[&id].clone());
        }
        Err(no_plan(format!("{} is read before it is computed", self.name(id))))
    }

    /// The value that a node is, without gaps and from its first element on.
    fn whole(&mut self, id: Id) -> Result<ValueId> {
        let operand = self.dense(id)?;
        if operand.offset == 0 {
            return Ok(operand.value);
        }
        self.copied(id, &operand)
    }

    /// Where a node is, without gaps: it is copied if there are some.
    fn dense(&mut self, id: Id) -> Result<Operand> {
        let operand = self.operand(id)?;
        if operand.is_dense() {
            return Ok(operand);
        }
        self.copy_of(id, &operand)
    }

    /// A value in memory of its own, without gaps; later steps read it there too.
    fn copy_of(&mut self, id: Id, operand: &Operand) -> Result<Operand> {
        let copy = self.copied(id, operand)?;
        let copy = Operand::dense(copy, &operand.shape);
        self.place.insert(id, copy.clone());
        Ok(copy)
    }

    fn step(&mut self, id: Id) -> Result<()> {
        if let Some((linear, tail)) = self.tails.remove(&id) {
            return self.linear(id, linear, &tail);
        }
        match (&self.program.node(id).op, self.name(id)) {
            (Op::Input(i), _) => {
                let (shape, dtype) = self.shape(id)?;
                let name = &self.program.leaves.inputs[*i as usize].name;
                let input = self.laid(&shape, dtype, self.wish.layouts.result(name, 0))?;
                self.inputs.push(self.source.origin[&id]);
                self.plan.inputs.push(input.value);
                self.given.insert(id, input.clone());
                self.place.insert(id, input);
                Ok(())
            }
            // The parts are views, made where they are taken.
            (_, "split" | "unbind") => Ok(()),
            _ if self.scaled.contains_key(&id) => self.scaled_norm(id),
            _ if self.pointwise[usize::from(id)] => self.region(id),
            _ if self.reductions.contains(&id) && !self.is_of_rows(id) => self.columns(id),
            _ if self.row_op(id).is_some() => self.rows(id, None),
            _ if self.batch(id).is_some() => self.batch_step(id),
            _ if self.reductions.contains(&id) => self.columns(id),
            _ if self.norm(id).is_some() => self.norm_step(id),
            _ if self.depthwise(id).is_some() => self.depthwise_step(id),
            _ if self.is_read(id) => self.read_step(id),
            _ if self.join_step(id).is_some() => self.joined_region(id, id),
            _ if self.pool(id).is_some() => self.pool_step(id),
            _ if self.decodes(id) => self.decode_step(id),
            _ => match self.view(id)? {
                Some(view) => {
                    self.place.insert(id, view);
                    Ok(())
                }
                None if self.in_place.contains_key(&id) => self.run_in_place(id),
                None => self.torch(id),
            },
        }
    }
}
