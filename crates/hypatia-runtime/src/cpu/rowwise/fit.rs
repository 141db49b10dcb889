//! What a run of a row op depends on beside addresses, made once for tensors of one shape.

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use super::{GROUP, short};
use crate::Result;
use crate::cpu::region::{Access, Affine, Layout, Program, accesses, distinct_layouts, layouts};
use crate::kernels::rowwise::{RowOp, Rowwise, fail};

/// A row op's tensors of one shape, wherever they lie.
#[derive(Debug)]
pub struct RowFit {
    pub(super) rows: usize,
    pub(super) width: usize,
    /// Rows that are worked on at a time.
    pub(super) group: usize,
    /// Inputs of the prologue.
    take: Vec<Layout>,
    /// Outputs of the prologue but its first.
    keep: Vec<Layout>,
    /// Inputs of the epilogue but its first.
    join: Vec<Layout>,
    /// Outputs of the epilogue.
    make: Vec<Layout>,
    /// The prologue, compiled.
    prologue: Option<Program>,
    /// The epilogue, compiled.
    epilogue: Option<Program>,
    /// What the epilogue is, if it only scales and shifts.
    pub(super) affine: Option<Affine>,
    /// Whether all of it is one group of rows that lie as they are computed, without other work.
    pub(super) plain: bool,
    /// What computes rows that are that short.
    pub(super) short: Option<short::Kernel>,
}

/// The memory of a run, in the order of a fit.
pub(super) struct Stages<'a> {
    pub(super) take: SmallVec<[Access<'a>; 4]>,
    pub(super) keep: SmallVec<[Access<'a>; 2]>,
    pub(super) join: SmallVec<[Access<'a>; 4]>,
    pub(super) make: SmallVec<[Access<'a>; 2]>,
    pub(super) prologue: Option<&'a Program>,
    pub(super) epilogue: Option<&'a Program>,
    pub(super) affine: Option<Affine>,
    pub(super) short: Option<short::Kernel>,
}

impl RowFit {
    /// The tensors at these addresses.
    pub(super) fn stages(&self, inputs: &[*mut u8], outputs: &[*mut u8]) -> Stages<'_> {
        let (before_in, after_in) = inputs.split_at(self.take.len());
        let (after_out, before_out) = outputs.split_at(self.make.len());
        Stages {
            take: accesses(&self.take, before_in),
            keep: accesses(&self.keep, before_out),
            join: accesses(&self.join, after_in),
            make: accesses(&self.make, after_out),
            prologue: self.prologue.as_ref(),
            epilogue: self.epilogue.as_ref(),
            affine: self.affine,
            short: self.short,
        }
    }
}

impl Rowwise {
    /// Compiles what is around the op, and checks dtypes and strides of tensors for any number of runs; see [`Rowwise::run`] for their order.
    pub fn fit(
        &self,
        shape: &[usize],
        reduced: usize,
        inputs: &[(DType, &[isize])],
        outputs: &[(DType, &[isize])],
    ) -> Result<RowFit> {
        if reduced > shape.len() {
            return Err(fail(
                self.op,
                format!("cannot take {reduced} dimensions of shape {shape:?}"),
            ));
        }
        let (row_shape, columns) = shape.split_at(shape.len() - reduced);
        let (rows, width): (usize, usize) = (row_shape.iter().product(), columns.iter().product());
        if width == 0 && rows > 0 && self.op == RowOp::Amax {
            return Err(fail(self.op, format!("has nothing to choose from in shape {shape:?}")));
        }
        let after = if self.op.reduces() { row_shape } else { shape };
        let taken = self.prologue.as_ref().map_or(1, |p| p.inputs().len());
        let made = self.epilogue.as_ref().map_or(1, |e| e.outputs().len());
        if inputs.len() < taken || outputs.len() < made {
            return Err(fail(
                self.op,
                format!("takes at least {taken} inputs and {made} outputs"),
            ));
        }
        let (before_in, after_in) = inputs.split_at(taken);
        let (after_out, before_out) = outputs.split_at(made);
        let (whole, first) = ([self.dtype], [self.compute]);
        let take_types = self.prologue.as_ref().map_or(&whole[..], |p| p.inputs());
        let keep_types = self.prologue.as_ref().map_or(&first[..], |p| p.outputs());
        let join_types = self.epilogue.as_ref().map_or(&first[..], |e| e.inputs());
        let make_types = self.epilogue.as_ref().map_or(&whole[..], |e| e.outputs());
        self.check_types("inputs", take_types, before_in)?;
        self.check_types("outputs", &keep_types[1..], before_out)?;
        self.check_types("inputs", &join_types[1..], after_in)?;
        self.check_types("outputs", make_types, after_out)?;
        let mut fit = RowFit {
            rows,
            width,
            group: (GROUP / width.max(1)).clamp(1, rows.max(1)),
            take: layouts("input", shape, before_in)?,
            keep: distinct_layouts("output", shape, before_out)?,
            join: layouts("input", after, after_in)?,
            make: distinct_layouts("output", after, after_out)?,
            prologue: self.prologue.as_ref().map(Program::new),
            epilogue: self.epilogue.as_ref().map(Program::new),
            affine: self.epilogue.as_ref().and_then(Affine::of),
            plain: false,
            short: short::kernel(self.op, width).filter(|_| self.compute == DType::F32),
        };
        fit.plain = self.is_plain(&fit);
        Ok(fit)
    }

    fn is_plain(&self, fit: &RowFit) -> bool {
        let count = fit.rows * fit.width;
        let results = if self.op.reduces() { fit.rows } else { count };
        let affine = || fit.affine.is_some() && fit.join.iter().all(|l| l.is_row_of(self.compute, fit.width));
        count > 0
            && fit.rows <= fit.group
            && self.prologue.is_none()
            && (self.epilogue.is_none() || self.op.is_norm() && affine())
            && fit.take[0].is_array(count)
            && fit.make[0].is_array(results)
    }

    fn check_types(&self, what: &str, types: &[DType], given: &[(DType, &[isize])]) -> Result<()> {
        if types.iter().copied().eq(given.iter().map(|v| v.0)) {
            return Ok(());
        }
        Err(fail(self.op, format!("has {what} of {types:?}")))
    }
}
