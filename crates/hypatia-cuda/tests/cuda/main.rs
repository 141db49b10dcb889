//! The CUDA runtime on a GPU, its kernels beside the CPU's of the same regions. Without a GPU every test says so and
//! passes.

mod graphs;
mod images;
mod lowering;
mod meaning;
mod places;
mod pointwise;
mod products;
mod rows;
mod sums;
mod support;
