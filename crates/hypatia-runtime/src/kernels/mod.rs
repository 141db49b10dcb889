//! What a step of a plan can compute, in words that every machine understands.
//!
//! | module | what it describes |
//! |---|---|
//! | [`product`] | what follows a matrix product |
//! | [`region`] | fused pointwise work |
//! | [`rowwise`] | softmax, norms and sums along rows |
//! | [`call`] | what is left to torch |

pub mod call;
pub mod product;
pub mod region;
pub mod rowwise;
