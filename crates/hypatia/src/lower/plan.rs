//! The chosen program as a plan: linear layers with what follows them, fused pointwise regions, views
//! as names. A program with anything else has no plan and runs on torch.

mod inline;
mod pointwise;

use egg::{Id, Language};
use rustc_hash::FxHashMap;

use crate::error::{Error, Result};
use crate::ir::node::Op;
use crate::ir::program::Program;
use crate::ops::table;
use crate::optimize::Optimized;
use crate::runtime::cpu::linear::Activation;
use crate::runtime::plan::{LinearStep, Plan, Task, Value, ValueId};
use crate::ty::{DType, Device, Ty};
use inline::Inlined;
use pointwise::lane;

/// A plan, and what its inputs and constants are in the program that it came from.
#[derive(Debug)]
pub struct Lowered {
    /// The plan.
    pub plan: Plan,
    /// Inputs of the program that are inputs of the plan, in its order.
    pub inputs: Vec<Id>,
    /// Weight-only nodes of the program that are constants of the plan, in its order.
    pub constants: Vec<Id>,
}

fn no_plan(why: impl Into<String>) -> Error {
    Error::Graph(format!("no native plan: {}", why.into()))
}

/// Lowers an optimized program with so many results.
pub fn lower(optimized: &Optimized, results: usize) -> Result<Lowered> {
    let output = &optimized.output;
    let roots = &output.node(output.root).children;
    if roots.len() != results {
        return Err(no_plan("calls with effects"));
    }
    let inlined = Inlined::new(output, &|id| optimized.weights[usize::from(id)])?;
    Lowering::new(&inlined).lower()
}

/// A linear layer and the nodes that its step takes over.
struct Tail {
    last: Id,
    activation: Activation,
    residual: Option<Id>,
}

struct Lowering<'a> {
    source: &'a Inlined,
    program: &'a Program,
    uses: Vec<usize>,
    plan: Plan,
    inputs: Vec<Id>,
    constants: Vec<Id>,
    value: FxHashMap<Id, ValueId>,
    /// Linear nodes by the last node that their step takes over.
    tails: FxHashMap<Id, (Id, Tail)>,
    /// Nodes that are computed inside a step of another.
    inside: Vec<bool>,
}

impl<'a> Lowering<'a> {
    fn new(source: &'a Inlined) -> Lowering<'a> {
        let program = &source.program;
        let mut uses = vec![0; program.nodes().len()];
        for id in program.reachable() {
            if !source.weight[usize::from(id)] {
                program.node(id).for_each(|c| uses[usize::from(c)] += 1);
            }
        }
        Lowering {
            source,
            program,
            inside: vec![false; program.nodes().len()],
            uses,
            plan: Plan::default(),
            inputs: vec![],
            constants: vec![],
            value: FxHashMap::default(),
            tails: FxHashMap::default(),
        }
    }

    fn lower(mut self) -> Result<Lowered> {
        let order: Vec<Id> = self
            .program
            .reachable()
            .into_iter()
            .filter(|id| !self.source.weight[usize::from(*id)] && !self.is_attr(*id) && *id != self.program.root)
            .collect();
        for id in &order {
            if self.product(*id).is_some() {
                self.follow(*id);
            }
        }
        for id in order.iter().rev() {
            if self.row_op(*id).is_some() {
                self.absorb(*id);
            }
            if !self.inside[usize::from(*id)] && !self.tails.contains_key(id) && lane(self.name(*id)).is_some() {
                self.absorb(*id);
            }
        }
        for id in &order {
            if !self.inside[usize::from(*id)] {
                self.step(*id)?;
            }
        }
        for id in self.program.node(self.program.root).children.clone() {
            let value = self.value_of(id)?;
            let written = self.plan.steps.iter().any(|s| s.writes().contains(&value));
            if !written || self.plan.outputs.contains(&value) {
                return Err(no_plan("a result that no step writes, or that is returned twice"));
            }
            self.plan.outputs.push(value);
        }
        Ok(Lowered {
            plan: self.plan,
            inputs: self.inputs,
            constants: self.constants,
        })
    }

    fn is_attr(&self, id: Id) -> bool {
        matches!(self.program.node(id).op, Op::Attr(_))
    }

    fn name(&self, id: Id) -> &'static str {
        match &self.program.node(id).op {
            Op::Row(op) => table().row(*op).name,
            _ => "",
        }
    }

    fn shape(&self, id: Id) -> Result<(Vec<usize>, DType)> {
        let Ty::Tensor(t) = self.program.ty(id) else {
            return Err(no_plan(format!("{} is no tensor", self.program.ty(id))));
        };
        if t.device != Device::default() {
            return Err(no_plan("a value that is not in the CPU's memory"));
        }
        let shape: Option<Vec<usize>> = t.shape.iter().map(|d| d.known().map(|v| v as usize)).collect();
        Ok((shape.ok_or_else(|| no_plan("sizes that are not known"))?, t.dtype))
    }

    /// The only user of a node, if there is one.
    fn user(&self, id: Id) -> Option<Id> {
        if self.uses[usize::from(id)] != 1 {
            return None;
        }
        let reads = |u: &Id| self.program.node(*u).children.contains(&id) && *u != self.program.root;
        self.program.reachable().into_iter().find(reads)
    }

    /// What a linear layer's step takes over: an activation, then an addition of the same shape.
    fn follow(&mut self, linear: Id) {
        let mut tail = Tail {
            last: linear,
            activation: Activation::None,
            residual: None,
        };
        if let Some(user) = self.user(tail.last)
            && let Some(activation) = activation(self.name(user))
        {
            tail = Tail {
                last: user,
                activation,
                residual: None,
            };
        }
        if let Some(user) = self.user(tail.last)
            && self.name(user) == "add"
            && let [a, b] = self.program.node(user).children[..]
        {
            let other = if a == tail.last { b } else { a };
            let alike = self.program.ty(other) == self.program.ty(tail.last);
            if alike && !self.is_attr(other) && other != tail.last {
                tail.residual = Some(other);
                tail.last = user;
            }
        }
        let mut at = linear;
        while at != tail.last {
            self.inside[usize::from(at)] = true;
            match self.user(at) {
                Some(user) => at = user,
                None => break,
            }
        }
        self.tails.insert(tail.last, (linear, tail));
    }

    /// Marks the pointwise nodes that are computed inside the region of a node; before an op on rows, only
    /// those that its rows come from.
    fn absorb(&mut self, root: Id) {
        let children = self.program.node(root).children.clone();
        let pointwise = lane(self.name(root)).is_some();
        let count = if pointwise { children.len() } else { 1 };
        for child in children.into_iter().take(count) {
            let single = self.uses[usize::from(child)] == 1;
            let alike = !pointwise || self.shape(child).map(|s| s.0).ok() == self.shape(root).map(|s| s.0).ok();
            let free = !self.inside[usize::from(child)] && !self.tails.contains_key(&child);
            if single && alike && free && lane(self.name(child)).is_some() && !self.source.weight[usize::from(child)] {
                self.inside[usize::from(child)] = true;
                self.absorb(child);
            }
        }
    }

    fn new_value(&mut self, id: Id) -> Result<ValueId> {
        let (shape, dtype) = self.shape(id)?;
        self.plan.values.push(Value { shape, dtype });
        self.value.insert(id, self.plan.values.len() - 1);
        Ok(self.plan.values.len() - 1)
    }

    /// The value of a node that some step reads.
    fn value_of(&mut self, id: Id) -> Result<ValueId> {
        if let Some(known) = self.value.get(&id) {
            return Ok(*known);
        }
        if self.source.weight[usize::from(id)] {
            let origin = self
                .source
                .origin
                .get(&id)
                .ok_or_else(|| no_plan("a weight without a name"))?;
            let value = self.new_value(id)?;
            self.constants.push(*origin);
            self.plan.constants.push(value);
            return Ok(value);
        }
        Err(no_plan(format!("{} is read before it is computed", self.name(id))))
    }

    fn step(&mut self, id: Id) -> Result<()> {
        if let Some((linear, tail)) = self.tails.remove(&id) {
            return self.linear(id, linear, &tail);
        }
        match (&self.program.node(id).op, self.name(id)) {
            (Op::Input(_), _) => {
                let value = self.new_value(id)?;
                self.inputs.push(self.source.origin[&id]);
                self.plan.inputs.push(value);
                Ok(())
            }
            // Values are dense: another shape is another name.
            (_, "reshape") => {
                let from = self.program.node(id).children[0];
                let value = self.value_of(from)?;
                self.value.insert(id, value);
                Ok(())
            }
            (_, name) if lane(name).is_some() => self.region(id),
            _ if self.row_op(id).is_some() => self.rows(id),
            (Op::Opaque(_), _) => Err(no_plan("a call that only torch knows")),
            (_, name) => Err(no_plan(format!("the op {name}"))),
        }
    }

    /// The operands of a product with a frozen matrix.
    fn product(&self, id: Id) -> Option<Product> {
        let children = &self.program.node(id).children;
        let (w, b, x, transposed) = match (self.name(id), &children[..]) {
            ("linear", &[w, b, x]) => (w, (!self.is_attr(b)).then_some(b), x, false),
            ("addmm", &[b, x, m]) => (m, Some(b), x, true),
            ("mm", &[x, m]) => (m, None, x, true),
            _ => return None,
        };
        let weight = |id: Id| self.source.weight[usize::from(id)];
        let (shape, dtype) = self.shape(w).ok()?;
        let columns = *if transposed { shape.last() } else { shape.first() }?;
        let bias = b.is_none_or(|b| weight(b) && self.shape(b).is_ok_and(|(s, d)| s == [columns] && d == dtype));
        let usable = weight(w) && bias && shape.len() == 2 && matches!(dtype, DType::F32 | DType::BF16);
        usable.then_some(Product { w, b, x, transposed })
    }

    fn linear(&mut self, id: Id, linear: Id, tail: &Tail) -> Result<()> {
        let product = self
            .product(linear)
            .ok_or_else(|| no_plan("a product of another form"))?;
        let (x, w) = (self.value_of(product.x)?, self.value_of(product.w)?);
        let b = product.b.map(|b| self.value_of(b)).transpose()?;
        let r = tail.residual.map(|r| self.value_of(r)).transpose()?;
        let y = self.new_value(id)?;
        self.plan.steps.push(Task::Linear(LinearStep {
            x,
            w,
            transposed: product.transposed,
            b,
            r,
            activation: tail.activation,
            y,
        }));
        Ok(())
    }
}

/// A product with a frozen matrix, and a bias.
struct Product {
    w: Id,
    b: Option<Id>,
    x: Id,
    transposed: bool,
}

fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        "silu" => Activation::Silu,
        "sigmoid" => Activation::Sigmoid,
        "tanh" => Activation::Tanh,
        _ => return None,
    })
}
