//! Products with what their steps take over: bias, activation, what is added.

use egg::Id;
use hypatia_core::ty::DType;

use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::product::Activation;
use crate::step::{Gradient, LinearStep, Operand, Task, ValueId};

/// A linear layer and the nodes that its step takes over.
pub(super) struct Tail {
    last: Id,
    activation: Activation,
    residual: Option<Id>,
    multiplies: bool,
}

/// A product with a frozen matrix, and a bias.
pub(super) struct Product {
    w: Id,
    b: Option<Id>,
    x: Id,
    transposed: bool,
}

impl Lowering<'_> {
    /// What a linear layer's step takes over: an activation, then an addition of the same shape. With few rows it may be a
    /// multiplication.
    pub(super) fn follow(&mut self, linear: Id) {
        let mut tail = Tail {
            last: linear,
            activation: Activation::None,
            residual: None,
            multiplies: false,
        };
        if let Some(user) = self.user(tail.last)
            && let Some(activation) = Activation::named(self.name(user))
            && self.takes(linear, activation)
        {
            tail = Tail {
                last: user,
                activation,
                ..tail
            };
        }
        if let Some(user) = self.user(tail.last)
            && let multiplies = self.name(user) == "mul"
            && (self.name(user) == "add" || multiplies && self.has_few_rows(linear))
            && let [a, b] = self.program.node(user).children[..]
        {
            let other = if a == tail.last { b } else { a };
            let alike = self.program.ty(other) == self.program.ty(tail.last);
            let last = multiplies || self.can.adds_after_activation || tail.activation == Activation::None;
            // Of two products that are added, one takes the sum over.
            let free = !self.tails.contains_key(&user);
            if alike && last && free && !self.is_attr(other) && other != tail.last {
                tail = Tail {
                    last: user,
                    residual: Some(other),
                    multiplies,
                    ..tail
                };
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

    /// Whether the kernel of a linear layer takes an activation over.
    fn takes(&self, linear: Id, activation: Activation) -> bool {
        let dtype = self.shape(linear).map(|(_, dtype)| dtype);
        dtype.is_ok_and(|dtype| self.can.applies(activation, dtype)) || self.has_few_rows(linear)
    }

    /// Whether the kernel of a linear layer takes everything over, since there are few rows.
    fn has_few_rows(&self, linear: Id) -> bool {
        let (Some(few), Some(product)) = (&self.can.few_rows, self.product(linear)) else {
            return false;
        };
        let (Ok((shape, dtype)), Ok((weight, _))) = (self.shape(linear), self.shape(product.w)) else {
            return false;
        };
        let rows = shape.split_last().map_or(0, |(_, rows)| rows.iter().product());
        let terms = weight[usize::from(!product.transposed)];
        few.dtypes.contains(&dtype)
            && (1..=few.rows).contains(&rows)
            && weight.iter().product::<usize>() >= few.elements
            && terms.is_multiple_of(few.unit)
    }

    /// Rows of a product's operand or of what is added to it: how many and how far apart.
    fn row_operand(&mut self, id: Id) -> Result<(Operand, usize, usize)> {
        let operand = self.operand(id)?;
        let operand = if operand.rows().is_some() {
            operand
        } else {
            self.dense(id)?
        };
        let (count, stride) = operand.rows().ok_or_else(|| no_plan("rows without columns"))?;
        Ok((operand, count, stride))
    }

    /// The operands of a product with a frozen matrix.
    pub(super) fn product(&self, id: Id) -> Option<Product> {
        let children = &self.program.node(id).children;
        let (w, b, x, transposed) = match (self.name(id), &children[..]) {
            ("linear", &[w, b, x]) => (w, (!self.is_attr(b)).then_some(b), x, false),
            ("addmm", &[b, x, m]) => (m, Some(b), x, true),
            ("mm", &[x, m]) => (m, None, x, true),
            ("matmul", &[x, m]) if self.is_rows_by_matrix(x, m) => (m, None, x, true),
            _ => return None,
        };
        let is_weight = |id: Id| self.source.weight[usize::from(id)];
        // The weight of a convolution may be seen as a matrix.
        let seen = |id: Id| self.name(id) == "reshape" && is_weight(self.program.node(id).children[0]);
        let weight = |id: Id| is_weight(id) || self.can.weights_of_any_rank && seen(id);
        let (shape, dtype) = self.shape(w).ok()?;
        let columns = *if transposed { shape.last() } else { shape.first() }?;
        let empty = self.shape(id).ok()?.0.contains(&0) || shape.contains(&0);
        let constant = |id: Id| self.can.live_weights || weight(id);
        let bias = b.is_none_or(|b| constant(b) && self.shape(b).is_ok_and(|(s, d)| s == [columns] && d == dtype));
        let served = self.can.products.contains(&dtype) && (self.can.empty_products || !empty);
        let known = constant(w) || self.is_packed_each_time(id, w);
        (known && bias && shape.len() == 2 && served).then_some(Product { w, b, x, transposed })
    }

    /// Whether a general product multiplies rows by one matrix, on a device that takes those.
    fn is_rows_by_matrix(&self, x: Id, m: Id) -> bool {
        let rank = |id: Id| self.shape(id).map_or(0, |(shape, _)| shape.len());
        self.can.rows_by_matrix && rank(x) >= 2 && rank(m) == 2
    }

    /// Whether a product of two activations is large enough that its right factor is worth packing at each call.
    fn is_packed_each_time(&self, id: Id, w: Id) -> bool {
        let Some(worth) = &self.can.packs_at_calls else {
            return false;
        };
        let (Ok((result, dtype)), Ok((factor, _))) = (self.shape(id), self.shape(w)) else {
            return false;
        };
        let Some((columns, rows)) = result.split_last() else {
            return false;
        };
        let terms = factor.iter().product::<usize>() / (*columns).max(1);
        let rows: usize = rows.iter().product();
        let large = rows >= worth.rows && terms >= worth.terms && worth.columns.contains(columns);
        !self.wish.saved && dtype == DType::F32 && large
    }

    pub(super) fn linear(&mut self, id: Id, linear: Id, tail: &Tail) -> Result<()> {
        let product = self
            .product(linear)
            .ok_or_else(|| no_plan("a product of another form"))?;
        let (x, m, x_stride, x_transposed) = self.left(product.x)?;
        let (w, flipped) = self.right(product.w)?;
        let b = product.b.map(|b| self.whole(b)).transpose()?;
        let r = tail.residual.map(|r| self.row_operand(r)).transpose()?;
        let constant = self.source.weight[usize::from(product.w)];
        let parts = match self.parts(id).filter(|_| id == linear && constant) {
            Some(parts) => parts.into_iter().map(|(part, columns)| (part, Some(columns))).collect(),
            None => vec![(id, None)],
        };
        for (part, columns) in parts {
            // Nothing is left to do for a part.
            self.inside[usize::from(part)] |= columns.is_some();
            let y = self.new_value(part)?;
            self.plan.steps.push(Task::Linear(LinearStep {
                x: x.clone(),
                x_stride,
                m,
                w,
                transposed: product.transposed != flipped,
                b,
                columns,
                r: r.as_ref().map(|(operand, _, stride)| (operand.clone(), *stride)),
                multiplies: tail.multiplies,
                activation: tail.activation,
                y,
                gradient: Gradient {
                    x_transposed,
                    ..Gradient::default()
                },
            }));
        }
        Ok(())
    }

    /// A product's right factor, and whether its transpose lies there.
    fn right(&mut self, id: Id) -> Result<(ValueId, bool)> {
        let operand = self.operand(id)?;
        // Steps take sizes from a factor's value, if that is a matrix: a part of one or another shape is copied. What
        // has more dimensions serves on some devices as it lies.
        let is_value = |o: &Operand| {
            let value = &self.plan.values[o.value];
            let whole = o.offset == 0 && o.is_dense() && value.numel() == o.shape.iter().product::<usize>();
            whole && (value.shape == o.shape || (self.can.weights_of_any_rank && value.shape.len() != 2))
        };
        if is_value(&operand) {
            return Ok((operand.value, false));
        }
        if operand.shape.len() == 2 && is_value(&operand.permuted(&[1, 0])) {
            return Ok((operand.value, true));
        }
        Ok((self.copied(id, &operand)?, false))
    }

    /// A product's left factor: where it is, its rows, their distance, and whether its transpose lies there.
    fn left(&mut self, id: Id) -> Result<(Operand, usize, usize, bool)> {
        let operand = self.operand(id)?;
        if self.can.transposed_rows && operand.shape.len() == 2 && operand.rows().is_none() {
            let lying = operand.permuted(&[1, 0]);
            if let Some((_, stride)) = lying.rows() {
                return Ok((lying, operand.shape[0], stride, true));
            }
        }
        let (operand, m, stride) = self.row_operand(id)?;
        Ok((operand, m, stride, false))
    }
}
