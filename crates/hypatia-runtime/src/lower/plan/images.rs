//! Images with their channels last: convolutions on tensor cores run fastest so, and what follows them fuses.
//!
//! A pass over the inlined program. Every image that a convolution makes is held with its channels last, and seen as
//! torch has it by a view. A convolution with a window of one is a linear layer over channels, where the device
//! says so (on a GPU not in fp32: torch lets convolutions take TF32, and products not); the bias of another one is added
//! after it, in the region of what follows, if the library does not add it. Batch norms are pointwise ops there. A
//! convolution of patches that lie side by side is a linear layer, too, if the image has few channels.

mod groups;

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::dim::Dim;
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Program;
use hypatia_core::ops::{op_id, table};
use hypatia_core::ty::{TensorType, Ty};
use rustc_hash::{FxHashMap, FxHashSet};

use super::copying::Copying;
use super::inline::Inlined;
use super::no_plan;
use super::pointwise::has_code;
use super::slopes::wide;
use crate::device::{Convolutions, Images};
use crate::error::Result;
use crate::operand::Operand;

/// Channels for which a convolution of patches is a product.
const FEW_CHANNELS: i64 = 4;

/// Elements that must lie side by side in a patch on a CPU: shorter runs are copied slowly.
const LONG: i64 = 8;

/// Products of 16 bits are fast where rows have a multiple of so many elements.
const ALIGNED: i64 = 8;

/// Dimensions of an image with its channels last, and back.
pub(super) const LAST: [i64; 4] = [0, 2, 3, 1];
pub(super) const FIRST: [i64; 4] = [0, 3, 1, 2];

/// The order in which the dimensions of an image, or of a convolution's weight, lie with channels last.
pub(super) const ORDER: [usize; 4] = [0, 2, 3, 1];

/// The strides of an image of this shape with channels last.
pub(super) fn channels_last_strides(shape: &[usize]) -> Vec<isize> {
    let lying: Vec<usize> = ORDER.iter().map(|d| shape[*d]).collect();
    Operand::dense(0, &lying).permuted(&[0, 3, 1, 2]).strides
}

/// The program with channels last, if it has convolutions that gain by it.
pub(super) fn channels_last(source: Inlined, how: &Images) -> Result<Inlined> {
    let gains = |id: &Id| convolution(&source.program, *id, how).is_some();
    let image_of = |id: Id| convolution(&source.program, id, how).map(|operands| operands[0]);
    if !source.program.reachable().iter().any(gains) {
        return Ok(source);
    }
    let mut turned = Turned {
        how,
        copy: Copying::of(&source),
        read: source.program.reachable().into_iter().filter_map(image_of).collect(),
        last: FxHashMap::default(),
    };
    turned.copy.made.images = true;
    for id in source.program.reachable() {
        turned.add(id)?;
    }
    Ok(turned.copy.done())
}

/// The operands of a convolution of images that is to have channels last.
fn convolution<'a>(program: &'a Program, id: Id, how: &Images) -> Option<&'a [Id]> {
    let node = program.node(id);
    let t = program.ty(id).tensor()?;
    let known = t.shape.iter().all(|d| d.known().is_some_and(|n| n > 0));
    let good = node.op == Op::Row(op_id("conv")) && t.rank() == 4 && how.dtypes.contains(&t.dtype) && known;
    good.then_some(&node.children[..])
}

struct Turned<'a> {
    how: &'a Images,
    copy: Copying<'a>,
    /// Nodes that convolutions read.
    read: FxHashSet<Id>,
    /// The same with channels last, as new nodes.
    last: FxHashMap<Id, Id>,
}

impl Turned<'_> {
    fn add(&mut self, id: Id) -> Result<()> {
        let weight = self.copy.is_weight(id);
        let turned = match weight {
            true => None,
            false => self.turned(id)?,
        };
        let new = match turned {
            Some(last) => {
                self.last.insert(id, last);
                self.copy.permuted(last, &FIRST)?
            }
            None => match self.without_image(id)? {
                Some(new) => new,
                None => self.copy.as_it_is(id)?,
            },
        };
        self.copy.note(id, new);
        match !weight && turned.is_none() {
            true => self.note_last(id, new),
            false => Ok(()),
        }
    }

    /// A node with channels last, if it is an image of convolutions.
    fn turned(&mut self, id: Id) -> Result<Option<Id>> {
        let source = self.copy.source;
        if let Some(operands) = convolution(&source.program, id, self.how) {
            return self.convolved(id, operands).map(Some);
        }
        let Op::Row(op) = &source.program.node(id).op else {
            return Ok(None);
        };
        let children = &source.program.node(id).children;
        let name = table().row(*op).name;
        if let Some(operands) = self.batch_norm(id) {
            return self.normed(&operands).map(Some);
        }
        if let Some(operands) = self.norm_of_groups(id) {
            return self.normed_by_groups(&operands).map(Some);
        }
        if let Some((x, true)) = self.whole_mean(id) {
            return self.mean(x, true).map(Some);
        }
        if let Some((x, pads)) = self.padded(id) {
            let x = self.with_last(x)?;
            let pads = self.copy.made.program.attr(Attr::ints(&pads));
            return self.copy.op("pad", [x, pads, self.copy.place[&children[2]]]).map(Some);
        }
        let concatenated = name == "cat" && self.copy.int(children[0]) == Some(-3);
        if !concatenated && !has_code(name) || !children.iter().any(|c| self.last.contains_key(c)) {
            return Ok(None);
        }
        let Some(out) = image(source.program.ty(id)).cloned() else {
            return Ok(None);
        };
        let mut operands = vec![];
        for child in children {
            operands.push(match source.program.ty(*child) {
                Ty::Attr(_) if concatenated => self.copy.made.program.attr(Attr::int(-1)),
                Ty::Attr(_) => self.copy.place[child],
                ty => match self.broadcast_last(*child, ty, &out)? {
                    Some(operand) => operand,
                    None => return Ok(None),
                },
            });
        }
        Ok(Some(self.copy.made.program.op(*op, operands)?))
    }

    /// The operand of a padding of images, and the pads with channels last.
    fn padded(&self, id: Id) -> Option<(Id, Vec<i64>)> {
        let children = &self.copy.source.program.node(id).children;
        if self.copy.name(id) != "pad" || !self.last.contains_key(&children[0]) && !self.read.contains(&id) {
            return None;
        }
        image(self.copy.source.program.ty(id))?;
        // In pairs from the last dimension on.
        let mut pads = self.copy.ints(children[1])?;
        pads.resize(8, 0);
        pads[..6].rotate_right(2);
        Some((children[0], pads))
    }

    fn convolved(&mut self, id: Id, operands: &[Id]) -> Result<Id> {
        let source = &self.copy.source.program;
        let [x, w, b] = [operands[0], operands[1], operands[2]];
        let shape = |id: Id| source.ty(id).tensor().map(|t| t.shape.clone()).unwrap_or_default();
        let ints = |i: usize| source.ty(operands[i]).attr().and_then(Attr::known_ints);
        let ones = |i: usize, value: i64| ints(i).is_some_and(|v| v.iter().all(|n| *n == value));
        let (weight, none) = (shape(w), source.ty(b).attr().is_some());
        let one = weight[2..].iter().all(|n| n.is(1)) && ones(3, 1) && ones(4, 0);
        let linear = source
            .ty(id)
            .tensor()
            .is_some_and(|t| self.how.linear.contains(&t.dtype));
        if one && linear && self.copy.int(operands[6]) == Some(1) {
            let x = self.with_last(x)?;
            let sizes = Attr::Ints(weight[..2].to_vec().into());
            let sizes = self.copy.made.program.attr(sizes);
            let matrix = self.copy.op("reshape", [self.copy.place[&w], sizes])?;
            return self.copy.op("linear", [matrix, self.copy.place[&b], x]);
        }
        if linear && let Some(product) = self.of_patches(operands)? {
            return Ok(product);
        }
        let mut given: Vec<Id> = operands.iter().map(|o| self.copy.place[o]).collect();
        let none = none || self.how.by == Convolutions::Onednn;
        if !none {
            given[2] = self.copy.made.program.attr(Attr::None);
        }
        let convolved = self.copy.op("conv", given)?;
        debug_assert_eq!(self.copy.made.program.ty(convolved), source.ty(id));
        let last = self.copy.permuted(convolved, &LAST)?;
        match none {
            true => Ok(last),
            false => self.copy.op("add", [last, self.copy.place[&b]]),
        }
    }

    /// A convolution whose windows lie side by side and cover all of the image, as a linear layer over these patches:
    /// libraries are slow where channels are few.
    fn of_patches(&mut self, operands: &[Id]) -> Result<Option<Id>> {
        let ints = |id: Id| self.copy.ints(id);
        let source = &self.copy.source.program;
        let known = |id: Id| {
            let sizes = source
                .ty(id)
                .tensor()
                .map(|t| t.shape.iter().map(|d| d.known()).collect());
            sizes.and_then(|sizes: Vec<_>| sizes.into_iter().collect::<Option<Vec<i64>>>())
        };
        let (Some(x), Some(w)) = (known(operands[0]), known(operands[1])) else {
            return Ok(None);
        };
        let (&[n, c, height, width], &[out, _, kh, kw]) = (&x[..], &w[..]) else {
            return Ok(None);
        };
        let terms = c * kh * kw;
        let alone = ints(operands[3]).is_some_and(|s| s == [kh, kw])
            && ints(operands[4]).is_some_and(|p| p == [0, 0])
            && ints(operands[5]).is_some_and(|d| d == [1, 1])
            && self.copy.int(operands[6]) == Some(1);
        let whole = kh * kw > 1 && height % kh == 0 && width % kw == 0 && terms % ALIGNED == 0;
        let pays = c <= FEW_CHANNELS && (self.how.by == Convolutions::Cudnn || kw >= LONG);
        if !(alone && whole && pays) {
            return Ok(None);
        }
        let (rows, columns) = (height / kh, width / kw);
        let apart = self
            .copy
            .reshaped(self.copy.place[&operands[0]], &[n, c, rows, kh, columns, kw])?;
        let patches = self.copy.permuted(apart, &[0, 2, 4, 1, 3, 5])?;
        let patches = self.copy.reshaped(patches, &[n, rows, columns, terms])?;
        let matrix = self.copy.reshaped(self.copy.place[&operands[1]], &[out, terms])?;
        self.copy
            .op("linear", [matrix, self.copy.place[&operands[2]], patches])
            .map(Some)
    }

    /// The call of which a node is the first result.
    fn call_of(&self, id: Id) -> Id {
        let children = &self.copy.source.program.node(id).children;
        match self.copy.name(id) {
            "getitem" if self.copy.int(children[1]) == Some(0) => children[0],
            _ => id,
        }
    }

    /// The operands of a batch norm of images by given statistics.
    fn batch_norm(&self, id: Id) -> Option<Vec<Id>> {
        let source = &self.copy.source.program;
        let norm = self.call_of(id);
        let known = image(source.ty(id))?.shape.iter().all(|d| d.known().is_some());
        let is_norm = matches!(
            self.copy.name(norm),
            "batch_norm" | "native_batch_norm" | "cudnn_batch_norm"
        );
        (is_norm && known).then(|| source.node(norm).children.to_vec())
    }

    /// A batch norm with channels last, rounded once as torch does. Parameters are expanded before anything is computed
    /// of them, so that all of it is one region.
    fn normed(&mut self, operands: &[Id]) -> Result<Id> {
        let x = self.with_last(operands[0])?;
        let Some(t) = self.copy.made.program.ty(x).tensor().cloned() else {
            return Err(no_plan("a norm of no tensor"));
        };
        let within = wide(t.dtype);
        let sizes = self.copy.made.program.attr(Attr::Ints(t.shape.clone()));
        let mut parameters = [None; 4];
        for (parameter, operand) in parameters.iter_mut().zip(&operands[1..5]) {
            if self.copy.source.program.ty(*operand).tensor().is_some() {
                let expanded = self.copy.op("expand", [self.copy.place[operand], sizes])?;
                *parameter = Some(self.copy.cast(expanded, within)?);
            }
        }
        let [weight, bias, Some(mean), Some(var)] = parameters else {
            return Err(no_plan("a norm without statistics"));
        };
        let x = self.copy.cast(x, within)?;
        let centered = self.copy.op("sub", [x, mean])?;
        let spread = self.copy.op("add", [var, self.copy.place[&operands[5]]])?;
        let mut factor = self.copy.op("rsqrt", [spread])?;
        if let Some(weight) = weight {
            factor = self.copy.op("mul", [factor, weight])?;
        }
        let mut y = self.copy.op("mul", [centered, factor])?;
        if let Some(bias) = bias {
            y = self.copy.op("add", [y, bias])?;
        }
        self.copy.cast(y, t.dtype)
    }

    /// The image with channels last of which a node is the mean over all places, and whether those are kept as
    /// dimensions of size one. torch's own kernel reads such an image in the order in which it lies.
    fn whole_mean(&self, id: Id) -> Option<(Id, bool)> {
        let source = &self.copy.source.program;
        let children = &source.node(id).children;
        let ints = |i: usize| self.copy.ints(children[i]);
        let keep = match self.copy.name(id) {
            "adaptive_avg_pool2d" => (ints(1)? == [1, 1]).then_some(true)?,
            "mean" => {
                let mut dims = ints(1)?;
                dims.sort_unstable();
                let keep = source.ty(children[2]).attr() == Some(&Attr::Bool(true));
                (dims == [-2, -1]).then_some(keep)?
            }
            _ => return None,
        };
        Some((*self.last.get(&children[0])?, keep))
    }

    fn mean(&mut self, x: Id, keep: bool) -> Result<Id> {
        let dims = self.copy.made.program.attr(Attr::ints(&[-3, -2]));
        let keep = self.copy.made.program.attr(Attr::Bool(keep));
        self.copy.op("mean", [x, dims, keep])
    }

    /// An operand that broadcasts to an image, with channels last.
    fn broadcast_last(&mut self, id: Id, ty: &Ty, out: &TensorType) -> Result<Option<Id>> {
        let Some(t) = ty.tensor() else {
            return Ok(None);
        };
        let whole = |d: &Dim| d.is(1);
        Ok(match t.rank() {
            // One number, of whatever shape.
            0..=2 if t.shape.iter().all(whole) => Some(self.copy.place[&id]),
            // One number for each channel.
            3 if t.shape[1..].iter().all(whole) && (t.shape[0] == out.shape[1] || t.shape[0].is(1)) => {
                let size = self.copy.made.program.attr(Attr::Ints(t.shape[..1].to_vec().into()));
                Some(self.copy.op("reshape", [self.copy.place[&id], size])?)
            }
            4 => Some(self.with_last(id)?),
            _ => None,
        })
    }

    fn with_last(&mut self, id: Id) -> Result<Id> {
        match self.last.get(&id) {
            Some(last) => Ok(*last),
            None => self.copy.permuted(self.copy.place[&id], &LAST),
        }
    }

    /// What is no image any more, and best taken from one with channels last.
    fn without_image(&mut self, id: Id) -> Result<Option<Id>> {
        if let Some((x, false)) = self.whole_mean(id) {
            return self.mean(x, false).map(Some);
        }
        let children = &self.copy.source.program.node(id).children;
        // The model itself puts the channels last.
        let turns = self.copy.name(id) == "permute" && self.copy.ints(children[1]).is_some_and(|order| order == LAST);
        Ok(children
            .first()
            .and_then(|x| self.last.get(x))
            .copied()
            .filter(|_| turns))
    }

    /// Notes how a node lies with channels last that was added as it is.
    fn note_last(&mut self, id: Id, new: Id) -> Result<()> {
        let source = &self.copy.source.program;
        let children = &source.node(id).children;
        if image(source.ty(id)).is_none() || children.is_empty() {
            return Ok(());
        }
        let from = match self.copy.name(id) {
            // What the model had with channels last.
            "permute" if self.copy.ints(children[1]).is_some_and(|order| order == FIRST) => {
                self.last.insert(id, self.copy.place[&children[0]]);
                return Ok(());
            }
            // One of several results is of what the call reads.
            "getitem" => source
                .node(children[0])
                .children
                .first()
                .filter(|_| matches!(self.copy.name(children[0]), "split" | "native_max_pool2d")),
            "slice" | "contiguous" | "detach" | "alias" => Some(&children[0]),
            name if is_pool(name) => Some(&children[0]),
            _ => None,
        };
        if from.is_some_and(|x| self.last.contains_key(x)) {
            // It lies as what it reads.
            let last = self.copy.permuted(new, &LAST)?;
            self.last.insert(id, last);
        }
        Ok(())
    }
}

/// Whether an op pools images: its result lies in memory as its operand does.
pub(super) fn is_pool(name: &str) -> bool {
    matches!(
        name,
        "max_pool2d" | "native_max_pool2d" | "avg_pool2d" | "adaptive_avg_pool2d"
    )
}

fn image(ty: &Ty) -> Option<&TensorType> {
    ty.tensor().filter(|t| t.rank() == 4)
}
