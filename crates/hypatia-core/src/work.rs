//! Work: what an op does, before any machine does it.

use crate::args::Args;
use crate::dim::Dim;
use crate::error::Check;
use crate::ty::Ty;

/// How the work of an op grows with its operands.
#[derive(Clone, Copy)]
pub enum Cost {
    /// Nothing at all.
    Free,
    /// No kernel: a new view of the same memory.
    View,
    /// One pass over the operands, this many operations per element of the result.
    Map(f64),
    /// One pass over the operands, this many operations per element of the largest operand.
    Reduce(f64),
    /// Multiply-adds on matrix units: the function gives their number.
    Matrix(fn(&Args, &Ty) -> Check<Dim>),
    /// Memory traffic of reading and writing the result only, however large the operands.
    Gather,
}

/// The work of one node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Operations on vector units.
    pub vector: f64,
    /// Operations on matrix units.
    pub matrix: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// Kernels launched.
    pub launches: f64,
    /// Views made.
    pub views: f64,
    /// The widest floating type decides the speed of matrix units.
    pub wide: bool,
}

/// Values for symbolic sizes, used for costs only.
pub type Hints<'a> = &'a dyn Fn(&str) -> i64;
