//! The names under which plans know the default kinds.

use super::{Epilogue, Kind, LinearError, Packed, Rows, RowsMut};
use crate::ty::DType;
use half::bf16;

macro_rules! packed {
    ($name:ident, $t:ty, $kind:literal, $dtype:expr) => {
        #[doc = concat!("[`Packed`] of kind `", $kind, "`.")]
        pub struct $name(Packed);

        impl $name {
            /// Packs `n` rows of `k` weights.
            pub fn pack(weight: Rows<$t>, n: usize, k: usize) -> Result<$name, LinearError> {
                let kind = Kind::named($kind, $dtype).expect("a row of the table");
                Packed::pack(kind, weight, n, k).map($name)
            }

            /// See [`Packed::bytes`].
            pub fn bytes(&self) -> usize {
                self.0.bytes()
            }

            /// See [`Packed::run`].
            pub fn run(
                &self,
                threads: usize,
                x: Rows<$t>,
                m: usize,
                y: RowsMut<$t>,
                epilogue: &Epilogue<$t>,
            ) -> Result<(), LinearError> {
                self.0.run(threads, x, m, y, epilogue)
            }
        }
    };
}
packed!(PackedF32, f32, "f32", DType::F32);
packed!(PackedBf16, bf16, "bf16", DType::BF16);
