//! Products of fp32 as exact as fp32, by tensor cores where that is faster.
//!
//! Three ways to compute a linear layer: cuBLASLt's fp32 product; [tiles](tiles), a kernel for small ones; and
//! [pieces](pieces), cuBLASLt's bf16 products for large ones. Both of the latter split numbers into three bf16 pieces,
//! which together are the number, and notice those that have none. A way counts for a shape if its error against float64
//! is at most twice that of the fp32 product, measured beside it; the fastest that counts is kept in the tuning database.

mod choice;
mod pieces;
mod tiles;
mod trials;

pub use choice::{choose, sources};
use hypatia_core::ty::DType;

use crate::Result;
use crate::driver::Stream;
use crate::gemm::{Epilogue, Gemm, Operands, Problem};
use pieces::Pieces;
use tiles::Tiles;

/// `y = act(x · wᵀ + residual + bias)`, rows of the weight along K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Linear {
    m: usize,
    n: usize,
    k: usize,
    /// Elements from one row of x to the next.
    x_row: usize,
    residual_row: usize,
    residual: bool,
    bias: bool,
    relu: bool,
    /// Bytes that divide all addresses.
    alignment: u32,
}

impl Linear {
    /// What a product is, if it is a linear layer of true fp32.
    fn of(problem: &Problem) -> Option<Linear> {
        let fp32 = problem.input == DType::F32 && problem.output == DType::F32 && !problem.tf32;
        let along = !problem.left.transposed && problem.right.transposed && problem.right.ld == problem.k;
        let (bias, relu) = match problem.epilogue {
            Epilogue::None => (false, false),
            Epilogue::Bias => (true, false),
            Epilogue::Relu => (false, true),
            Epilogue::ReluBias => (true, true),
            _ => return None,
        };
        (fp32 && along && problem.batch == 1 && problem.out.ld == problem.n).then_some(Linear {
            m: problem.m,
            n: problem.n,
            k: problem.k,
            x_row: problem.left.ld,
            residual_row: problem.residual.map_or(problem.n, |r| r.ld),
            residual: problem.residual.is_some(),
            bias,
            relu,
            alignment: problem.alignment,
        })
    }
}

/// A product that is ready to run, one way or another.
#[derive(Debug)]
pub struct Product(Way);

#[derive(Debug)]
enum Way {
    Library(Box<Gemm>),
    Tiles(Box<Tiles>),
    Pieces(Box<Pieces>),
}

impl From<Gemm> for Product {
    fn from(gemm: Gemm) -> Product {
        Product(Way::Library(Box::new(gemm)))
    }
}

impl Product {
    /// What it is called in reports.
    pub fn kind(&self) -> &'static str {
        match &self.0 {
            Way::Library(gemm) if gemm.problem().tf32 && gemm.problem().input == DType::F32 => "tf32",
            Way::Library(gemm) => gemm.problem().input.name(),
            Way::Tiles(_) => "tiles",
            Way::Pieces(_) => "pieces",
        }
    }

    /// Bytes that it works with.
    pub fn workspace(&self) -> usize {
        match &self.0 {
            Way::Library(gemm) => gemm.workspace(),
            Way::Tiles(_) => 0,
            Way::Pieces(pieces) => pieces.workspace(),
        }
    }

    /// Launches it, within [`Device::enter`](crate::driver::Device::enter).
    ///
    /// # Safety
    /// All operands of the problem must be given, have its sizes and alignment, and live until it is done.
    pub unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe {
            match &self.0 {
                Way::Library(gemm) => gemm.launch(stream, operands),
                Way::Tiles(tiles) => tiles.launch(stream, operands),
                Way::Pieces(pieces) => pieces.launch(stream, operands),
            }
        }
    }
}
