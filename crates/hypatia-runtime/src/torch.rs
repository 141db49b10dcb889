//! Steps that torch computes: any op, through the C functions that libtorch exports. No Python in between.
//!
//! What these functions cannot express (old versions of torch, exotic arguments) is a [`Call`](crate::kernels::call::Call) of another kind,
//! given by whoever binds the plan.

mod handed;
mod shim;

pub use shim::{Argument, DispatcherCall, Shim, parallel_for};
