//! Paddings, rolls, gathers and parts of different sizes that are put together, on devices whose regions read within
//! bounds and by index: a region reads what was not padded, rolled, gathered or put together yet. It is the region of the
//! pointwise ops that follow, or one of its own.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::ty::DType;

use super::layouts::order;
use super::pointwise::Making;
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Read, Region, Rounding, Scalar};
use crate::operand::{Operand, dense_strides};
use crate::step::{RegionStep, Task};

/// More parts would be many operands of one kernel.
const MOST_PARTS: usize = 6;

/// How a node is read that is not in memory: what is, in the node's shape. Only the first one is the node; it may refer
/// to those behind it.
pub(super) struct Reading(Vec<(Operand, DType, Read)>);

/// What a padding leaves of its operand, along each dimension.
struct Kept {
    /// Elements before it that are cut off.
    cut: Vec<usize>,
    /// Elements that are left.
    sizes: Vec<usize>,
    /// Positions before them.
    before: Vec<usize>,
    outside: Scalar,
}

impl Reading {
    /// The operand that the result lies as, if not in the usual order. Torch puts parts together in that order, but for
    /// images with channels last.
    fn like(&self) -> Option<&Operand> {
        let part = |(o, _, read): &'_ (Operand, DType, Read)| match read {
            Read::Beside { sizes, .. } | Read::Within { sizes, .. } => sizes.iter().product(),
            _ => o.shape.iter().product::<usize>(),
        };
        let (first, _, read) = self.0.first()?;
        let operand = match read {
            Read::Beside { .. } => &self.0.iter().max_by_key(|of| part(of))?.0,
            _ => first,
        };
        let last = |s: &[isize]| matches!(s, [_, 1, rest @ ..] if rest.len() > 1 && rest.is_sorted_by(|a, b| a >= b));
        let usual = matches!(read, Read::Beside { .. }) && !last(&operand.strides);
        let repeats = |(s, n): (&isize, &usize)| *s == 0 && *n > 1;
        let repeated = operand.strides.iter().zip(&operand.shape).any(repeats);
        (!usual && !repeated).then_some(operand)
    }

    fn permuted(self, order: &[usize]) -> Reading {
        let inputs = self.0.into_iter();
        Reading(
            inputs
                .map(|(o, dtype, read)| (o.permuted(order), dtype, read.permuted(order)))
                .collect(),
        )
    }
}

impl Making {
    /// Notes an input that is not read as its strides say, and those that it refers to.
    pub(super) fn read_as(&mut self, id: Id, Reading(inputs): Reading) {
        let at = self.inputs.len();
        self.place.insert(id, at);
        for (operand, dtype, read) in inputs {
            self.inputs.push(operand);
            self.dtypes.push(dtype);
            self.reads.push(read.behind(at));
        }
    }
}

impl Lowering<'_> {
    /// Whether a region can read a node that is not computed.
    pub(super) fn is_read(&self, id: Id) -> bool {
        let known = || {
            let moved = self.padding(id).is_some() || self.rolling(id).is_some();
            moved || self.gathering(id).is_some() || self.uneven(id).is_some()
        };
        self.can.any_reads && known()
    }

    /// Whether the region of a node's only user can read it so; what is in between is then inside that region, too.
    pub(super) fn absorb_read(&mut self, id: Id) -> bool {
        if self.name(id) != "permute" {
            return self.is_read(id);
        }
        let from = self.program.node(id).children[0];
        let at = usize::from(from);
        let free = !self.inside[at] && !self.tails.contains_key(&from) && !self.source.weight[at];
        let turned = self.can.any_reads && free && self.uses[at] == 1 && self.is_read(from);
        self.inside[at] |= turned;
        turned
    }

    /// Whether a node is inside a region that reads it so.
    pub(super) fn is_inner_read(&self, id: Id) -> bool {
        self.inside[usize::from(id)]
            && !self.pointwise[usize::from(id)]
            && !self.place.contains_key(&id)
            && (self.name(id) == "permute" || self.is_read(id))
    }

    /// What a padding keeps, and the number around it.
    fn padding(&self, id: Id) -> Option<Kept> {
        if self.name(id) != "pad" {
            return None;
        }
        let &[x, pads, value] = &self.program.node(id).children[..] else {
            return None;
        };
        let ((shape, dtype), pads) = (self.shape(x).ok()?, self.attr(pads)?.known_ints()?);
        let rank = shape.len();
        let mut kept = Kept {
            cut: vec![0; rank],
            sizes: shape,
            before: vec![0; rank],
            outside: number(self.attr(value)?.number()?, dtype)?,
        };
        for (k, pair) in pads.chunks(2).enumerate() {
            let d = rank.checked_sub(k + 1)?;
            let &[first, last] = pair else { return None };
            let left = kept.sizes[d] as i64 + first.min(0) + last.min(0);
            kept.cut[d] = (-first).max(0) as usize;
            kept.before[d] = first.max(0) as usize;
            kept.sizes[d] = usize::try_from(left).ok()?;
        }
        (!kept.sizes.contains(&0)).then_some(kept)
    }

    /// Whether a node, or what is padded and permuted to be it, puts zeros before and behind the last two of four
    /// dimensions.
    pub(super) fn puts_zeros_around_images(&self, image: Id, padded: Id) -> bool {
        let Some(kept) = self.padding(padded) else {
            return false;
        };
        let order = match image == padded {
            true => Some(vec![0, 1, 2, 3]),
            false => self.permutation(image).ok(),
        };
        let zero = matches!(kept.outside, Scalar::Float(x) if x.to_bits() == 0);
        let whole = |order: Vec<usize>| {
            let sizes = order[..2].iter().map(|d| kept.sizes[*d]);
            self.shape(image)
                .is_ok_and(|(shape, _)| sizes.eq(shape[..2].iter().copied()))
        };
        zero && order.filter(|o| o.len() == 4).is_some_and(whole)
    }

    fn permutation(&self, id: Id) -> Result<Vec<usize>> {
        let order = self.attr(self.program.node(id).children[1]).and_then(Attr::known_ints);
        let order = order.ok_or_else(|| no_plan("sizes that are not known"))?;
        Ok(order.into_iter().map(|d| d as usize).collect())
    }

    /// What is inside of a node that is padded, and positions before that.
    pub(super) fn unpadded(&mut self, id: Id) -> Result<(Operand, Vec<usize>)> {
        let Reading(inputs) = self.reading(id)?;
        match inputs.into_iter().next() {
            Some((mut operand, _, Read::Within { before, sizes, .. })) => {
                operand.shape = sizes;
                Ok((operand, before))
            }
            Some((operand, _, Read::Plain)) => Ok((operand, vec![0; self.shape(id)?.0.len()])),
            _ => Err(no_plan("a node that is not padded")),
        }
    }

    /// How far along each dimension the operand of a roll lies.
    fn rolling(&self, id: Id) -> Option<Vec<usize>> {
        let &[x, shifts, dims] = &self.program.node(id).children[..] else {
            return None;
        };
        let (shape, _) = self.shape(x).ok().filter(|_| self.name(id) == "roll")?;
        let (shifts, dims) = (self.attr(shifts)?.known_ints()?, self.attr(dims)?.known_ints()?);
        let mut by = vec![0; shape.len()];
        for (shift, d) in shifts.iter().zip(dims) {
            let d = d.rem_euclid(shape.len() as i64) as usize;
            let size = i64::try_from(shape[d]).ok().filter(|n| *n > 0)?;
            by[d] = (by[d] as i64 - shift).rem_euclid(size) as usize;
        }
        (!shape.contains(&0)).then_some(by)
    }

    /// The dimension along which a node puts parts together that are not all of one size, and the parts.
    fn uneven(&self, id: Id) -> Option<(usize, Vec<Id>)> {
        if self.name(id) != "cat" || self.join(id).is_some() {
            return None;
        }
        let children = &self.program.node(id).children;
        let (shape, dtype) = self.shape(id).ok()?;
        let dim = self.dimension(*children.first()?, shape.len()).ok()?;
        let parts = children[1..].to_vec();
        let fits = |part: &Id| {
            let of = self.shape(*part).ok();
            of.is_some_and(|(s, d)| d == dtype && s.len() == shape.len() && !s.contains(&0))
        };
        let copies = || Region::new(&[dtype], vec![], &[0], Rounding::EveryOp).is_ok() && !dtype.is_complex();
        ((2..=MOST_PARTS).contains(&parts.len()) && parts.iter().all(fits) && copies()).then_some((dim, parts))
    }

    /// The dimension of a gather.
    fn gathering(&self, id: Id) -> Option<usize> {
        if self.name(id) != "gather" {
            return None;
        }
        let children = &self.program.node(id).children;
        let ((x, dtype), (shape, _)) = (self.shape(children[0]).ok()?, self.shape(id).ok()?);
        let dim = self.dimension(children[1], x.len()).ok()?;
        let index = self.shape(children[2]).ok()?;
        let full = !x.contains(&0) && !shape.contains(&0);
        (dtype.is_float() && full && index == (shape, DType::I64)).then_some(dim)
    }

    /// How a node is read: where its operand lies, and what of it.
    pub(super) fn reading(&mut self, id: Id) -> Result<Reading> {
        let (shape, dtype) = self.shape(id)?;
        let children = self.program.node(id).children.clone();
        if self.name(id) == "permute" {
            let order = self.permutation(id)?;
            return Ok(self.reading(children[0])?.permuted(&order));
        }
        if let Some((dim, parts)) = self.uneven(id) {
            return self.beside_each_other(id, dim, &parts);
        }
        let mut operand = self.operand(children[0])?;
        if let Some(dim) = self.gathering(id) {
            let (stride, size) = (operand.strides[dim], operand.shape[dim]);
            (operand.strides[dim], operand.shape) = (0, shape);
            let index = self.index(children[2])?;
            let at = Read::At { index: 1, stride, size };
            return Ok(Reading(vec![(operand, dtype, at), (index, DType::I64, Read::Plain)]));
        }
        if let Some(by) = self.rolling(id) {
            let read = match by.iter().all(|n| *n == 0) {
                true => Read::Plain,
                false => Read::Rolled { by },
            };
            return Ok(Reading(vec![(operand, dtype, read)]));
        }
        let kept = self.padding(id).ok_or_else(|| no_plan("a node that is not read so"))?;
        for (d, cut) in kept.cut.iter().enumerate() {
            operand = operand.sliced(d, *cut, kept.sizes[d], 1);
        }
        let read = match operand.shape == shape {
            true => Read::Plain,
            false => Read::Within {
                before: kept.before,
                sizes: kept.sizes,
                outside: kept.outside,
            },
        };
        operand.shape = shape;
        Ok(Reading(vec![(operand, dtype, read)]))
    }

    /// How parts are read that a node puts together.
    fn beside_each_other(&mut self, id: Id, dim: usize, parts: &[Id]) -> Result<Reading> {
        let (shape, dtype) = self.shape(id)?;
        let mut before = vec![0; shape.len()];
        let mut inputs = vec![];
        for (at, part) in parts.iter().enumerate() {
            let mut operand = self.operand(*part)?;
            let sizes = std::mem::replace(&mut operand.shape, shape.clone());
            let (start, length) = (before.clone(), sizes[dim]);
            let read = match at + 1 < parts.len() {
                true => Read::Beside {
                    before: start,
                    sizes,
                    other: at + 1,
                },
                false => Read::Within {
                    before: start,
                    sizes,
                    outside: zero(dtype),
                },
            };
            before[dim] += length;
            inputs.push((operand, dtype, read));
        }
        Ok(Reading(inputs))
    }

    /// Where an index is. One that is made of weights and expanded is bound as it was before: it would be large.
    fn index(&mut self, id: Id) -> Result<Operand> {
        if self.name(id) != "expand" || !self.is_free_weight(id) {
            return self.operand(id);
        }
        let ((shape, _), (from, _)) = (self.shape(id)?, self.shape(self.program.node(id).children[0])?);
        let extra = shape.len() - from.len();
        let kept: Vec<usize> = (0..shape.len())
            .filter(|d| *d >= extra && from[d - extra] == shape[*d])
            .collect();
        self.constant_lying(id, &kept)
    }

    /// Computes a node that is only read, in a region of its own; the result lies as its operand does.
    pub(super) fn read_step(&mut self, id: Id) -> Result<()> {
        let reading = self.reading(id)?;
        let (shape, dtype) = self.shape(id)?;
        // Images with channels last are nodes with channels last.
        let strides = match reading.like().filter(|_| !self.source.images) {
            Some(like) => like.strides_like(&shape),
            None => dense_strides(&shape),
        };
        let y = self.laid(&shape, dtype, Some(&strides))?;
        let lying = order(&shape, &y.strides).ok_or_else(|| no_plan("a result with gaps"))?;
        let shape: Vec<usize> = lying.iter().map(|d| shape[*d]).collect();
        let mut made = Making::over(&shape);
        made.read_as(id, reading.permuted(&lying));
        self.plan.steps.push(Task::Region(Box::new(RegionStep {
            region: Region::new(&made.dtypes, vec![], &[0], Rounding::EveryOp)?,
            dense: dense_strides(&shape),
            placed: vec![],
            shape,
            inputs: made.inputs,
            reads: some_reads(made.reads),
            outputs: vec![y.value],
            slices: vec![],
        })));
        self.place.insert(id, y);
        Ok(())
    }

    /// The same for a node inside a region that cannot read so, if it is one.
    pub(super) fn read_apart(&mut self, id: Id) -> Result<()> {
        if !self.is_inner_read(id) {
            return Ok(());
        }
        if self.name(id) != "permute" {
            return self.read_step(id);
        }
        self.read_step(self.program.node(id).children[0])?;
        let view = self.view(id)?.ok_or_else(|| no_plan("a view that is none"))?;
        self.place.insert(id, view);
        Ok(())
    }
}

/// How inputs are read, if not all as their strides say.
pub(super) fn some_reads(reads: Vec<Read>) -> Vec<Read> {
    match reads.iter().all(|r| *r == Read::Plain) {
        true => vec![],
        false => reads,
    }
}

/// Zero of a dtype.
pub(super) fn zero(dtype: DType) -> Scalar {
    match dtype.is_float() {
        true => Scalar::Float(0.0),
        false => Scalar::Int(0),
    }
}

/// The number around what is padded, as one of a dtype; none if torch must be asked.
fn number(value: f64, dtype: DType) -> Option<Scalar> {
    let rounded = dtype.round(value);
    if dtype.is_float() {
        return (rounded.is_finite() || !value.is_finite()).then_some(Scalar::Float(rounded));
    }
    (!dtype.is_complex() && rounded == value && value.abs() < 1e15).then_some(Scalar::Int(value as i64))
}
