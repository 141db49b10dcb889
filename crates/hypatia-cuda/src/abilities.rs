//! What plans for a GPU may hold.

use hypatia_core::ty::DType;
use hypatia_runtime::device::{Abilities, Convolutions, FewRows, Images};
use hypatia_runtime::kernels::product::Activation;

use crate::few;

const PRODUCTS: &[DType] = &[DType::F32, DType::BF16, DType::F16];

/// What a GPU of NVIDIA's can do. Products are cuBLASLt's: it has no empty ones, adds before the activation, and has
/// few of those.
pub const ABILITIES: Abilities = Abilities {
    name: "cuda",
    products: PRODUCTS,
    activations: |activation| match activation {
        Activation::Relu => PRODUCTS,
        // Its tanh is exact enough for 16 bits only.
        Activation::GeluTanh => &[DType::BF16, DType::F16],
        _ => &[],
    },
    adds_after_activation: false,
    // One kernel reads the weight, and nothing that it does beside takes time.
    few_rows: Some(FewRows {
        rows: 2 * few::UNIT,
        elements: few::WORTH,
        unit: few::UNIT,
        dtypes: &[DType::BF16, DType::F16],
    }),
    live_weights: true,
    packs_at_calls: None,
    weights_of_any_rank: true,
    transposed_rows: true,
    // Its fast algorithms read 16 bytes at a time.
    pads_rows: true,
    rows_by_matrix: false,
    // Those of f32 are made of several, as single products.
    batches: &[DType::BF16, DType::F16],
    empty_products: false,
    columns_apart: false,
    column_sums: true,
    // As cuBLASLt wants them.
    relu_masks: Some(128),
    // Wider rows do not fit into the registers of a block.
    norm_statistics: Some(8192),
    // Its kernels read 16 bytes at a time.
    aligned_attention: true,
    attention_as_query: true,
    decodes: &[DType::BF16, DType::F16],
    channels_last: Some(Images {
        dtypes: PRODUCTS,
        // In fp32 torch lets convolutions take TF32, and products not.
        linear: &[DType::BF16, DType::F16],
        by: Convolutions::Cudnn,
    }),
    // A row of a larger window does not fit into the registers of a thread.
    depthwise: Some(31),
    whole_addends: true,
    multiplies_by_sixths: true,
    // Launching a kernel takes longer.
    changes_inputs: true,
    computes_repeated: true,
    any_reads: true,
    puts_together: true,
};
