//! Batch norms of training steps as sums of columns and pointwise ops.
//!
//! A pass over the inlined program. Torch's kernels read an image once for each of their parts, and what comes before
//! and after reads it again. In these words it is all fused: the ReLU after a norm, its gradient, additions.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ir::node::Op;
use hypatia_core::ops::table;
use hypatia_core::ty::{DType, TensorType};
use rustc_hash::FxHashMap;

use super::copying::Copying;
use super::images::{FIRST, LAST};
use super::inline::Inlined;
use super::slopes::wide;
use crate::error::Result;

/// The program with other words for its batch norms, if it has any. Those of images only where they have channels last.
pub(super) fn in_parts(source: Inlined, images: bool) -> Result<Inlined> {
    let served = |id: Id| {
        let rank = norm_of(&source, id).map(TensorType::rank);
        is_norm(&source, id) && (rank == Some(2) || images && rank == Some(4))
    };
    let order = source.program.reachable();
    if !order.iter().any(|id| served(*id)) {
        return Ok(source);
    }
    let mut norms = Norms {
        copy: Copying::of(&source),
        items: FxHashMap::default(),
    };
    for id in order {
        let children = norms.copy.children(id);
        let item = || {
            norms
                .items
                .get(children.first()?)?
                .get(norms.copy.int(children[1])? as usize)
        };
        let new = match norms.copy.name(id) {
            "getitem" if item().is_some() => item().copied(),
            _ => None,
        };
        let new = match new {
            Some(new) => new,
            None => norms.copy.as_it_is(id)?,
        };
        norms.copy.note(id, new);
        if served(id) {
            let items = match norms.copy.name(id) {
                "batch_norm_train" => norms.forward(children)?,
                _ => norms.backward(children)?,
            };
            norms.items.extend(items.map(|items| (id, items)));
        }
    }
    Ok(norms.copy.done())
}

fn is_norm(source: &Inlined, id: Id) -> bool {
    let name = match &source.program.node(id).op {
        Op::Row(op) => table().row(*op).name,
        _ => "",
    };
    matches!(name, "batch_norm_train" | "batch_norm_backward") && !source.weight[usize::from(id)]
}

/// What a norm is of, or what its gradient is.
fn norm_of(source: &Inlined, id: Id) -> Option<&TensorType> {
    let x = source.program.node(id).children.first()?;
    source.program.ty(*x).tensor()
}

struct Norms<'a> {
    copy: Copying<'a>,
    /// The results of norms, as new nodes.
    items: FxHashMap<Id, Vec<Id>>,
}

impl Norms<'_> {
    /// The results of a norm: itself, mean, factor, and running statistics.
    fn forward(&mut self, operands: &[Id]) -> Result<Option<Vec<Id>>> {
        let &[x, w, b, old_mean, old_var, eps, momentum] = operands else {
            return Ok(None);
        };
        let number = |id: Id| self.copy.source.program.ty(id).attr().and_then(Attr::number);
        let (Some(image), Some(momentum)) = (self.image(x), number(momentum)) else {
            return Ok(None);
        };
        // With channels last, as convolutions before and after have them.
        let turns = image.shape.len() == 4;
        let (mut x, mut shape) = (self.copy.place[&x], image.shape.clone());
        if turns {
            x = self.copy.permuted(x, &LAST)?;
            shape = LAST.iter().map(|d| image.shape[*d as usize]).collect();
        }
        let numbers = self.copy.cast(x, image.within)?;
        let rank = shape.len() as i64;
        let dims: Vec<i64> = (0..rank - 1).map(|d| d - rank).collect();
        let (dims, drop) = (self.ints(&dims), self.copy.made.program.attr(Attr::Bool(false)));
        let none = self.number(0.0);
        let mean = self.copy.op("mean", [numbers, dims, drop])?;
        let var = self.copy.op("var", [numbers, dims, none, drop])?;
        let spread = self.copy.op("add", [var, self.copy.place[&eps]])?;
        let factor = self.copy.op("rsqrt", [spread])?;
        let sizes = self.ints(&shape);
        let mut y = numbers;
        for (op, each) in [("sub", mean), ("mul", factor)] {
            let each = self.copy.op("expand", [each, sizes])?;
            y = self.copy.op(op, [y, each])?;
        }
        for (op, parameter) in [("mul", w), ("add", b)] {
            if self.copy.source.program.ty(parameter).tensor().is_some() {
                let each = self.copy.op("expand", [self.copy.place[&parameter], sizes])?;
                let each = self.copy.cast(each, image.within)?;
                y = self.copy.op(op, [y, each])?;
            }
        }
        y = self.copy.cast(y, image.dtype)?;
        if turns {
            y = self.copy.permuted(y, &FIRST)?;
        }
        // The spread of the batch is a part of that of all there is.
        let unbiased = image.count / (image.count - 1.0);
        let mean_moved = self.moved(mean, momentum, old_mean, momentum, &image)?;
        let var_moved = self.moved(var, momentum * unbiased, old_var, momentum, &image)?;
        Ok(Some(vec![y, mean, factor, mean_moved, var_moved]))
    }

    /// Running statistics on their way to those of a batch.
    fn moved(&mut self, to: Id, share: f64, old: Id, momentum: f64, image: &Image) -> Result<Id> {
        let old = self.copy.cast(self.copy.place[&old], image.within)?;
        let [share, rest] = [self.number(share), self.number(1.0 - momentum)];
        let [to, old] = [self.copy.op("mul", [to, share])?, self.copy.op("mul", [old, rest])?];
        self.copy.op("add", [to, old])
    }

    /// The gradients of what a norm is of, of its weight and of its bias.
    fn backward(&mut self, operands: &[Id]) -> Result<Option<Vec<Id>>> {
        let &[g, x, w, _, _, mean, factor, _] = operands else {
            return Ok(None);
        };
        let Some(image) = self.image(x) else {
            return Ok(None);
        };
        let [g, x] = [g, x].map(|id| self.copy.place[&id]);
        let [g, x] = [self.copy.cast(g, image.within)?, self.copy.cast(x, image.within)?];
        let [mean, factor, w_at] = [mean, factor, w].map(|id| self.copy.place[&id]);
        let [mean, factor_at] = [self.each_channel(mean, &image)?, self.each_channel(factor, &image)?];
        let w_at = self.each_channel(w_at, &image)?;
        let w_at = self.copy.cast(w_at, image.within)?;
        let centered = self.copy.op("sub", [x, mean])?;
        let product = self.copy.op("mul", [g, centered])?;
        let (dims, keep) = (self.ints(&image.dims), self.copy.made.program.attr(Attr::Bool(true)));
        let sum = self.copy.op("sum", [g, dims, keep])?;
        let dot = self.copy.op("sum", [product, dims, keep])?;
        let [sum_at, dot_at] = [self.expanded(sum, &image)?, self.expanded(dot, &image)?];
        let share = self.number(1.0 / image.count);
        let level = self.copy.op("mul", [sum_at, share])?;
        let squared = self.copy.op("mul", [factor_at, factor_at])?;
        let slope = self.copy.op("mul", [dot_at, squared])?;
        let slope = self.copy.op("mul", [slope, share])?;
        let tilt = self.copy.op("mul", [centered, slope])?;
        let rest = self.copy.op("sub", [g, level])?;
        let rest = self.copy.op("sub", [rest, tilt])?;
        let scale = self.copy.op("mul", [factor_at, w_at])?;
        let dx = self.copy.op("mul", [rest, scale])?;
        let dx = self.copy.cast(dx, image.dtype)?;
        let [sum, dot] = [self.flat(sum, &image)?, self.flat(dot, &image)?];
        let dw = self.copy.op("mul", [dot, factor])?;
        let to = self
            .copy
            .source
            .program
            .ty(w)
            .tensor()
            .map_or(image.within, |t| t.dtype);
        Ok(Some(vec![dx, self.copy.cast(dw, to)?, self.copy.cast(sum, to)?]))
    }

    /// What is known of the operand of a norm; none if it has one number in a channel, or sizes that are not known.
    fn image(&self, x: Id) -> Option<Image> {
        let shape = self.copy.shape(x)?;
        let dtype = self.copy.source.program.ty(x).tensor()?.dtype;
        let count: usize = shape
            .iter()
            .enumerate()
            .filter(|(d, _)| *d != 1)
            .map(|(_, n)| n)
            .product();
        let rank = shape.len() as i64;
        (count > 1).then(|| Image {
            within: wide(dtype),
            dtype,
            dims: (0..rank).filter(|d| *d != 1).map(|d| d - rank).collect(),
            count: count as f64,
            shape: shape.iter().map(|n| *n as i64).collect(),
        })
    }

    /// A number for each channel, seen as dimensions of the image.
    fn each_channel(&mut self, id: Id, image: &Image) -> Result<Id> {
        let mut sizes = vec![1; image.shape.len()];
        sizes[1] = image.shape[1];
        let sizes = self.ints(&sizes);
        let each = self.copy.op("reshape", [id, sizes])?;
        self.expanded(each, image)
    }

    fn expanded(&mut self, id: Id, image: &Image) -> Result<Id> {
        let sizes = self.ints(&image.shape);
        self.copy.op("expand", [id, sizes])
    }

    fn flat(&mut self, id: Id, image: &Image) -> Result<Id> {
        let sizes = self.ints(&image.shape[1..2]);
        self.copy.op("reshape", [id, sizes])
    }

    fn ints(&mut self, values: &[i64]) -> Id {
        self.copy.made.program.attr(Attr::ints(values))
    }

    fn number(&mut self, value: f64) -> Id {
        self.copy.made.program.attr(Attr::float(value))
    }
}

/// The operand of a norm.
struct Image {
    dtype: DType,
    /// What it is computed in.
    within: DType,
    /// All dimensions but the channels.
    dims: Vec<i64>,
    /// Numbers of a channel.
    count: f64,
    shape: Vec<i64>,
}
