//! What no kernel serves is a call into torch.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::emit::emit_node;
use hypatia_core::ir::captured::{CapturedArg, CapturedDim};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Opaque;
use hypatia_core::ops::Row;
use hypatia_core::ty::{DType, Ty};
use serde::Serialize;

use super::images::{ORDER, channels_last_strides, is_pool};
use super::layouts::order;
use super::{Lowering, is_number, no_plan};
use crate::device::{Convolutions, Images};
use crate::error::Result;
use crate::operand::dense_strides;
use crate::step::{Operand, Task, TorchStep, Value};

/// A call into torch, for whoever binds the plan.
#[derive(Debug, Clone, Serialize)]
pub struct TorchCall {
    /// The captured call that is made again; none for a call of the op table.
    pub origin: Option<u32>,
    /// The op to call; empty for a captured call.
    pub target: String,
    /// Arguments in schema order; nodes are numbers of `operands`. Empty for a captured call.
    pub args: Vec<CapturedArg>,
    /// What the node's operands are: tensors that the step reads, in order, or integers.
    pub operands: Vec<CallOperand>,
    /// Which of its results are written, where not all are.
    pub kept: Option<Vec<usize>>,
    /// It is called in the form that changes its first operand.
    pub in_place: bool,
    /// Its result is a vector.
    pub is_vector: bool,
    /// It is a convolution of images with channels last, for oneDNN: their element type.
    pub onednn: Option<&'static str>,
}

/// Elements of a window that are slow to add up by one thread. On an H200 an image of 2048 channels and 64 x 64 places
/// takes 2173 us for 3 x 3 windows with channels last, and 129 us with a copy; windows of 16 are as fast either way.
const LARGE_WINDOW: usize = 64;

/// What is called, and its arguments.
type Call = (String, Vec<CapturedArg>);

/// An operand of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOperand {
    /// One of the tensors that the step reads.
    Tensor(usize),
    /// A size.
    Int(i64),
    /// An argument that the call's description holds.
    Attr,
}

impl Lowering<'_> {
    pub(super) fn torch(&mut self, id: Id) -> Result<()> {
        let node = self.program.node(id).clone();
        let emitted = emit_node(self.program, id)?;
        let opaque = match &node.op {
            Op::Opaque(i) => Some(&self.program.leaves.opaques[i]),
            _ => None,
        };
        let (mut reads, operands) = self.call_reads(id, opaque)?;
        let over_rows = self.over_rows(id, &mut reads);
        let (types, tuple) = match self.program.ty(id) {
            // It is called for what else it does.
            _ if opaque.is_some_and(|o| o.effect) && self.user_count(id) == 0 => (vec![], true),
            Ty::Tuple(items) => (items.to_vec(), true),
            one => (vec![one.clone()], false),
        };
        // What is no tensor cannot be read by other steps, and such a call is made by Python, item by item.
        let odd = tuple && types.iter().any(|t| !matches!(t, Ty::Tensor(_)));
        let mut items = vec![];
        let mut writes = vec![];
        for (at, ty) in types.iter().enumerate() {
            let t = match ty {
                Ty::Tensor(t) if !odd || self.is_item_used(id, at) => t,
                Ty::Tensor(_) => {
                    items.push(None);
                    continue;
                }
                _ if odd => {
                    items.push(None);
                    continue;
                }
                _ => return Err(no_plan(format!("a call that returns {ty}"))),
            };
            let shape: Option<Vec<usize>> = t.shape.iter().map(|d| d.known().map(|v| v as usize)).collect();
            let shape = shape.ok_or_else(|| no_plan("sizes that are not known"))?;
            if t.device != self.device && !is_number(t) {
                return Err(no_plan("a value on another device"));
            }
            let last = opaque.is_some_and(|o| self.transposes_images(id, o));
            let last = last.then(|| channels_last_strides(&shape));
            let layout = opaque.and_then(|o| last.as_deref().or(self.wish.layouts.result(&o.name, at)));
            // What torch would see several times is written once for each.
            let layout = layout.filter(|strides| strides.iter().zip(&shape).all(|(s, n)| *s != 0 || *n < 2));
            let like = reads.first().and_then(|q| self.strides_like(id, q, &shape));
            let item = match &over_rows {
                Some((rows, _)) => self.laid(rows, t.dtype, None)?.reshaped(&shape),
                None => Some(self.laid(&shape, t.dtype, layout.or(like.as_deref()))?),
            };
            let item = item.ok_or_else(|| no_plan("rows of another number"))?;
            writes.push(item.value);
            items.push(Some(item));
        }
        let kept = (0..items.len()).filter(|i| items[*i].is_some()).collect();
        if tuple {
            self.items.insert(id, items);
        } else if let Some(Some(one)) = items.pop() {
            self.place.insert(id, one);
        }
        self.plan.steps.push(Task::Torch(TorchStep {
            name: opaque.map_or_else(|| emitted.target.clone(), |o| o.target.clone()),
            call: self.calls.len(),
            reads,
            writes,
        }));
        let own = self.convolution(id).or(over_rows.map(|(_, call)| call));
        let (target, args) = match own {
            Some(call) => call,
            None if opaque.is_some() => (emitted.target, vec![]),
            None => (emitted.target, emitted.args),
        };
        let onednn = match self.convolves_by(id) {
            Some(Convolutions::Onednn) => Some(self.shape(id)?.1.name()),
            _ => None,
        };
        self.calls.push(TorchCall {
            onednn,
            origin: opaque.and(emitted.origin),
            target,
            args,
            operands,
            kept: if odd || types.is_empty() { Some(kept) } else { None },
            in_place: false,
            is_vector: matches!(self.program.ty(id), Ty::Tensor(t) if t.shape.len() == 1),
        });
        Ok(())
    }

    /// The tensors that a call reads, and what its operands are.
    pub(super) fn call_reads(&mut self, id: Id, opaque: Option<&Opaque>) -> Result<(Vec<Operand>, Vec<CallOperand>)> {
        let mut reads = vec![];
        let mut operands = vec![];
        for child in self.program.node(id).children.clone() {
            operands.push(match self.program.ty(child) {
                Ty::Attr(_) if self.is_attr(child) => CallOperand::Attr,
                Ty::Attr(Attr::Int(d)) => {
                    CallOperand::Int(d.known().ok_or_else(|| no_plan("a size that is not known"))?)
                }
                Ty::Tensor(t) => {
                    let t = t.clone();
                    let operand = match opaque {
                        // Calls that the table does not know may depend on how their operands lie in memory.
                        Some(o) if !o.changes.contains(&operands.len()) => {
                            let last = match operands.len() < 2 && self.transposes_images(id, o) {
                                true => Some(channels_last_strides(&self.shape(child)?.0)),
                                false => None,
                            };
                            let wanted = last.as_deref().or(self.wish.layouts.read(&o.name, operands.len()));
                            match wanted.and_then(|strides| order(&self.shape(child).ok()?.0, strides)) {
                                Some(lying) if self.is_free_weight(child) => self.constant_lying(child, &lying)?,
                                _ => {
                                    let operand = self.operand(child)?;
                                    self.as_wanted(child, operand, wanted)?
                                }
                            }
                        }
                        Some(_) => self.changed(child)?,
                        None if self.is_imprecise_over_channels_last(id) => {
                            let operand = self.operand(child)?;
                            self.as_wanted(child, operand, None)?
                        }
                        None if self.row(id).is_some_and(Row::keeps_layout) => {
                            let operand = self.operand(child)?;
                            let aligned = !self.can.aligned_attention || operand.has_aligned_rows(t.dtype.size());
                            match operand.has_dense_rows() && aligned {
                                true => operand,
                                false => self.copy_of(child, &operand)?,
                            }
                        }
                        // The backward pass takes the same copies.
                        None if self.convolves_by(id) == Some(Convolutions::Cudnn)
                            && operands.len() < 2
                            && self.wish.saved =>
                        {
                            let operand = self.operand(child)?;
                            let wanted = channels_last_strides(&operand.shape);
                            self.as_wanted(child, operand, Some(&wanted))?
                        }
                        None if self.convolves_by(id) == Some(Convolutions::Cudnn) && operands.len() == 1 => {
                            self.kernel_of(child, &ORDER)?
                        }
                        // It would put the channels of its result where those of the image are.
                        None if self.convolves_by(id) == Some(Convolutions::Onednn) && operands.is_empty() => {
                            let operand = self.operand(child)?;
                            let wanted = channels_last_strides(&operand.shape);
                            self.as_wanted(child, operand, Some(&wanted))?
                        }
                        None if is_pool(self.name(id)) => self.pooled(id, child)?,
                        None if self.name(id) == "matmul" => self.one_batch(child)?,
                        None => self.operand(child)?,
                    };
                    reads.push(operand);
                    CallOperand::Tensor(reads.len() - 1)
                }
                other => return Err(no_plan(format!("a call on {other}"))),
            });
        }
        Ok((reads, operands))
    }

    /// A linear layer with a bias as a product of two matrices, and the rows and columns of its result: torch's own writes
    /// into given memory by two ops, which round twice, where the input has more dimensions.
    fn over_rows(&self, id: Id, reads: &mut [Operand]) -> Option<(Vec<usize>, Call)> {
        let [w, _, x] = reads else { return None };
        if self.name(id) != "linear" || x.shape.len() < 3 {
            return None;
        }
        let columns = *w.shape.first()?;
        let rows: usize = x.shape.split_last()?.1.iter().product();
        *x = x.reshaped(&[rows, *x.shape.last()?])?;
        *w = w.permuted(&[1, 0]);
        let args = [1, 2, 0].map(CapturedArg::Node).into();
        Some((vec![rows, columns], ("aten.addmm.default".to_owned(), args)))
    }

    /// Whether one of several results is read.
    fn is_item_used(&self, id: Id, item: usize) -> bool {
        let reads = |user: Id| {
            let node = self.program.node(user);
            let index = node.children.get(1).and_then(|i| self.attr(*i)).and_then(Attr::as_int);
            self.name(user) == "getitem" && node.children[0] == id && index == Some(item as i64)
        };
        self.program.reachable().into_iter().any(reads)
    }

    /// The strides of a result, where they are not the usual ones: attention may write as its query lies, and
    /// anything else would be a copy.
    fn strides_like(&self, id: Id, query: &Operand, shape: &[usize]) -> Option<Vec<isize>> {
        let attention = self.name(id) == "attention" && self.can.attention_as_query;
        if self.has_channels_last(id) {
            return Some(channels_last_strides(shape));
        }
        if is_pool(self.name(id)) {
            // Of operands that lie either way, torch takes the usual one.
            let usual = query.strides == dense_strides(&query.shape);
            return (!usual).then(|| channels_last_strides(shape));
        }
        (attention && query.shape.len() == shape.len()).then(|| query.strides_like(shape))
    }

    /// What a pooling reads: one element after the other, or with channels last. Torch writes the result in the same
    /// way, however the memory lies that it is given.
    fn pooled(&mut self, call: Id, id: Id) -> Result<Operand> {
        let operand = self.operand(id)?;
        let mut ways = vec![dense_strides(&operand.shape)];
        if operand.shape.len() == 4 && !self.pools_slowly(call) {
            ways.push(channels_last_strides(&operand.shape));
        }
        match ways.into_iter().find(|strides| operand.lies_as(strides)) {
            // Strides of one element say something, too.
            Some(strides) => Ok(Operand { strides, ..operand }),
            None => self.as_wanted(id, operand, None),
        }
    }

    /// Whether torch's kernel for a GPU takes far longer over channels last than over a copy: one thread adds up each of
    /// the windows, which have sizes of their own.
    fn pools_slowly(&self, call: Id) -> bool {
        let cudnn = |how: &Images| how.by == Convolutions::Cudnn;
        let places = |id: Id| self.shape(id).map(|(shape, _)| shape.iter().skip(2).product::<usize>());
        let sizes = (places(self.program.node(call).children[0]), places(call));
        self.name(call) == "adaptive_avg_pool2d"
            && self.can.channels_last.as_ref().is_some_and(cudnn)
            && matches!(sizes, (Ok(from), Ok(to)) if from >= LARGE_WINDOW * to)
    }

    /// Whether a call is torch's norm of groups on a CPU, which is less precise over channels last; strides of one
    /// element say which kernel it takes, too.
    fn is_imprecise_over_channels_last(&self, id: Id) -> bool {
        let onednn = |how: &Images| how.by == Convolutions::Onednn;
        self.name(id) == "group_norm" && self.can.channels_last.as_ref().is_some_and(onednn)
    }

    /// Whether a call that the table does not know is a transposed convolution among images with channels last: cuDNN
    /// reads and writes them so, too.
    fn transposes_images(&self, id: Id, call: &Opaque) -> bool {
        let by = self.can.channels_last.as_ref().map(|images| images.by);
        let image = |(shape, dtype): (Vec<usize>, DType)| shape.len() == 4 && self.can.turns_images_of(dtype);
        call.target == "aten.convolution.default"
            && self.source.images
            && !self.wish.saved
            && by == Some(Convolutions::Cudnn)
            && self.shape(id).is_ok_and(image)
    }

    /// Whether a node is a convolution whose images have channels last.
    pub(super) fn has_channels_last(&self, id: Id) -> bool {
        let image = |(shape, dtype): (Vec<usize>, DType)| shape.len() == 4 && self.can.turns_images_of(dtype);
        let by = self.can.channels_last.as_ref().map(|images| images.by);
        self.source.images
            && self.name(id) == "conv"
            && self.shape(id).is_ok_and(image)
            && (by != Some(Convolutions::Cudnn) || self.is_sure_of_cudnn(id))
    }

    /// Whether cuDNN computes a convolution with channels last rightly. Asked to write into given memory, it takes the
    /// layout of its operands for another one than that of its result where a single channel, or a single place, fits
    /// both; and it was seen to be wrong for windows of one with padding. What is left is torch's own call. For a window
    /// of one over one place both layouts are the same. Channels by themselves are computed by kernels of ours.
    fn is_sure_of_cudnn(&self, id: Id) -> bool {
        let children = &self.program.node(id).children;
        let shape = |id: Id| self.shape(id).map(|(shape, _)| shape).unwrap_or_default();
        let ([_, c, h, w], [o, terms, kh, kw], [_, _, oh, ow]) =
            (&shape(children[0])[..], &shape(children[1])[..], &shape(id)[..])
        else {
            return false;
        };
        let padding = self.attr(children[4]).and_then(Attr::known_ints);
        let padded = padding.is_none_or(|sizes| sizes.iter().any(|n| *n != 0));
        let one = |sides: [&usize; 2]| sides == [&1, &1];
        let sure = match one([kh, kw]) {
            true => !padded,
            false => !one([h, w]) || *terms == 1 && one([oh, ow]),
        };
        *c > 1 && *o > 1 && sure
    }

    /// Who computes a node, if it is such a convolution.
    fn convolves_by(&self, id: Id) -> Option<Convolutions> {
        let how = self.can.channels_last.as_ref().filter(|_| self.has_channels_last(id));
        how.map(|how| how.by)
    }

    /// Whether a node is a weight that can be bound in any order of its dimensions.
    pub(super) fn is_free_weight(&self, id: Id) -> bool {
        self.source.weight[usize::from(id)] && !self.place.contains_key(&id)
    }

    /// The weight of a convolution whose dimensions lie in this order.
    pub(super) fn kernel_of(&mut self, id: Id, order: &[usize; 4]) -> Result<Operand> {
        match self.source.weight[usize::from(id)] {
            true => self.constant_lying(id, order),
            false => self.operand(id),
        }
    }

    /// A weight whose dimensions lie in this order in memory; it is bound so. What repeats along a dimension that is not
    /// in the order is bound once.
    pub(super) fn constant_lying(&mut self, id: Id, order: &[usize]) -> Result<Operand> {
        let (shape, dtype) = self.shape(id)?;
        let lying: Vec<usize> = order.iter().map(|d| shape[*d]).collect();
        let mut strides = vec![0; shape.len()];
        for (dim, stride) in order.iter().zip(dense_strides(&lying)) {
            strides[*dim] = stride;
        }
        let constant = |value| Operand {
            value,
            offset: 0,
            shape: shape.clone(),
            strides: strides.clone(),
        };
        let key = (id, constant(0).strides);
        if let Some(known) = self.copies.get(&key) {
            return Ok(known.clone());
        }
        let origin = self.source.origin.get(&id);
        let origin = *origin.ok_or_else(|| no_plan("a weight without a name"))?;
        self.plan.values.push(Value {
            shape: lying.clone(),
            dtype,
        });
        let value = self.plan.values.len() - 1;
        self.constants.push(origin);
        self.orders.push(Some(order.to_vec()));
        self.plan.constants.push(value);
        self.copies.insert(key, constant(value));
        Ok(constant(value))
    }

    /// A convolution with channels last as the call that writes its result where it is told: cuDNN's own.
    fn convolution(&self, id: Id) -> Option<Call> {
        if self.convolves_by(id)? != Convolutions::Cudnn {
            return None;
        }
        let children = &self.program.node(id).children;
        let number = |n: i64| CapturedArg::Int(CapturedDim::Known(n));
        let list = |i: usize| {
            let found = self.attr(children[i])?.known_ints()?;
            Some(CapturedArg::List(found.into_iter().map(number).collect()))
        };
        let groups = self.attr(children[6])?.as_int()?;
        let mut args = vec![CapturedArg::Node(0), CapturedArg::Node(1)];
        args.extend([list(4)?, list(3)?, list(5)?, number(groups)]);
        // Whoever binds the plan puts torch's settings in their places.
        args.extend([false, false, false].map(CapturedArg::Bool));
        Some(("aten.cudnn_convolution.default".to_owned(), args))
    }
}
