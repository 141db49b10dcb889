//! Norms of groups of channels, of images with channels last.

use egg::Id;
use hypatia_core::attr::Attr;
use hypatia_core::dim::Dim;
use hypatia_core::ty::DType;

use super::super::no_plan;
use super::super::slopes::wide;
use super::{Turned, image};
use crate::device::Convolutions;
use crate::error::Result;

impl Turned<'_> {
    /// The operands of a norm of groups of channels that is put together from others. On a CPU with all channels in one
    /// group: torch's own kernel for images with channels last subtracts the square of the mean from the mean of
    /// squares, and so loses digits that eager has. On a GPU torch would turn the image around.
    pub(super) fn norm_of_groups(&self, id: Id) -> Option<Vec<Id>> {
        let source = &self.copy.source.program;
        let norm = self.call_of(id);
        if !matches!(self.copy.name(norm), "group_norm" | "native_group_norm") {
            return None;
        }
        let known = image(source.ty(id))?.shape.iter().all(|d| d.known().is_some());
        let operands = source.node(norm).children.to_vec();
        let whole = self.how.by != Convolutions::Onednn || self.copy.int(operands[1]) == Some(1);
        (known && whole && self.last.contains_key(&operands[0])).then_some(operands)
    }

    pub(super) fn normed_by_groups(&mut self, operands: &[Id]) -> Result<Id> {
        let x = self.with_last(operands[0])?;
        let (Some(t), Some(groups)) = (
            self.copy.made.program.ty(x).tensor().cloned(),
            self.copy.int(operands[1]),
        ) else {
            return Err(no_plan("a norm of no tensor"));
        };
        let within = wide(t.dtype);
        let sizes: Vec<i64> = t.shape.iter().filter_map(Dim::known).collect();
        let eps = self.copy.place[&operands[4]];
        let mut y = match self.how.by {
            Convolutions::Onednn => self.normed_as_rows(x, &sizes, within, eps)?,
            Convolutions::Cudnn => self.normed_by_moments(x, &sizes, within, groups, eps)?,
        };
        let shape = self.copy.made.program.attr(Attr::ints(&sizes));
        for (op, operand) in [("mul", operands[2]), ("add", operands[3])] {
            if self.copy.source.program.ty(operand).tensor().is_some() {
                let expanded = self.copy.op("expand", [self.copy.place[&operand], shape])?;
                let expanded = self.copy.cast(expanded, within)?;
                y = self.copy.op(op, [y, expanded])?;
            }
        }
        self.copy.cast(y, t.dtype)
    }

    /// A norm of whole images, each of which is a row.
    fn normed_as_rows(&mut self, x: Id, sizes: &[i64], within: DType, eps: Id) -> Result<Id> {
        let row: i64 = sizes[1..].iter().product();
        let none = self.copy.made.program.attr(Attr::None);
        let wide = self.copy.cast(x, within)?;
        let flat = self.copy.reshaped(wide, &[sizes[0], row])?;
        let row = self.copy.made.program.attr(Attr::ints(&[row]));
        let normed = self.copy.op("layer_norm", [flat, row, none, none, eps])?;
        self.copy.reshaped(normed, sizes)
    }

    /// A norm of groups of channels, by the mean and the spread of each.
    fn normed_by_moments(&mut self, x: Id, sizes: &[i64], within: DType, groups: i64, eps: Id) -> Result<Id> {
        let &[n, height, width, channels] = sizes else {
            return Err(no_plan("a norm of no image"));
        };
        let each = channels / groups;
        let apart = self.copy.reshaped(x, &[n, height * width, groups, each])?;
        let apart = self.copy.cast(apart, within)?;
        let [dims, drop, zero, shape] = [
            Attr::ints(&[-3, -1]),
            Attr::Bool(false),
            Attr::float(0.0),
            Attr::ints(sizes),
        ]
        .map(|attr| self.copy.made.program.attr(attr));
        let mean = self.copy.op("mean", [apart, dims, drop])?;
        let var = self.copy.op("var", [apart, dims, zero, drop])?;
        let mut seen = vec![];
        for mut number in [mean, var] {
            if groups > 1 {
                let all = self.copy.made.program.attr(Attr::ints(&[n, groups, each]));
                number = self.copy.reshaped(number, &[n, groups, 1])?;
                number = self.copy.op("expand", [number, all])?;
            }
            let last = if groups > 1 { channels } else { 1 };
            number = self.copy.reshaped(number, &[n, 1, 1, last])?;
            seen.push(self.copy.op("expand", [number, shape])?);
        }
        // The root is taken where it is read, so that it needs no kernel of its own.
        let spread = self.copy.op("add", [seen[1], eps])?;
        let factor = self.copy.op("rsqrt", [spread])?;
        let x = self.copy.cast(x, within)?;
        let centered = self.copy.op("sub", [x, seen[0]])?;
        self.copy.op("mul", [centered, factor])
    }
}
