//! What plans for a CPU may hold.

use hypatia_core::ty::DType;

use crate::device::{Abilities, Convolutions, Images, Packing};

const PRODUCTS: &[DType] = &[DType::F32, DType::BF16];

/// What a CPU can do: weights are packed once, and every activation follows its product.
pub const ABILITIES: Abilities = Abilities {
    name: "cpu",
    products: PRODUCTS,
    activations: |_| PRODUCTS,
    adds_after_activation: true,
    // One panel: wider products are torch's, which are as fast and need no copy.
    packs_at_calls: Some(Packing {
        rows: 256,
        terms: 256,
        columns: 32..=64,
    }),
    rows_by_matrix: true,
    weights_of_any_rank: true,
    empty_products: true,
    columns_apart: true,
    channels_last: Some(Images {
        dtypes: PRODUCTS,
        linear: PRODUCTS,
        by: Convolutions::Onednn,
    }),
    puts_together: true,
    ..Abilities::NONE
};
