//! Fused pointwise regions: an expression over any number of inputs, evaluated a tile at a time in the first-level
//! cache.
//!
//! A [`Region`] is turned into vector loops over tile registers once, when it is fitted to the shape of its tensors
//! ([`Region::fit`]); running the [`Fit`] compiles nothing.
//!
//! ```
//! use hypatia_core::ty::DType;
//! use hypatia_runtime::cpu::region::{View, ViewMut};
//! use hypatia_runtime::kernels::region::{Instruction, Op, Region, Rounding};
//!
//! // gelu(x + y), y broadcast over the rows of x.
//! let code = vec![Instruction::new(Op::Add, [0, 1]), Instruction::new(Op::Gelu, [2])];
//! let region = Region::new(&[DType::F32, DType::F32], code, &[3], Rounding::EveryOp)?;
//! let (x, y, mut out) = ([-1.0f32, 0.0, 1.0, 2.0], [1.0f32, 0.0], [0.0f32; 4]);
//! let inputs = [View::new(&x, &[2, 1]), View::new(&y, &[0, 1])];
//! region.run(1, &[2, 2], &inputs, &mut [ViewMut::new(&mut out, &[2, 1])])?;
//! assert_eq!(out[0], 0.0);
//! # Ok::<(), hypatia_runtime::Error>(())
//! ```

mod access;
mod affine;
mod loops;
mod program;
mod rounding;
mod run;
mod table;
mod view;

#[cfg(test)]
mod tests;

#[cfg(doc)]
use crate::kernels::region::Region;

pub(crate) use access::{Access, Layout, accesses};
pub(crate) use affine::Affine;
pub(crate) use program::Program;
pub use run::Fit;
pub(crate) use run::{Bound, Line, Runner};
pub use view::{Element, View, ViewMut};
pub(crate) use view::{check_bounds, distinct_layouts, layouts};
