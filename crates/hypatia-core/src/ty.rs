//! What is known of a value before it exists: dtype, device, shape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::attr::Attr;
use crate::dim::{Dim, product};
pub use crate::dtype::{DType, truncated_32, truncated_64};

/// A device, as an index into the program's device table; 0 is the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Device(pub u8);

/// Type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Sizes, outermost first; symbolic sizes are equal only when provably so.
    pub shape: Arc<[Dim]>,
    /// Element type.
    pub dtype: DType,
    /// Where it lives.
    pub device: Device,
}

impl TensorType {
    /// A tensor type on the CPU.
    pub fn new(shape: impl Into<Arc<[Dim]>>, dtype: DType) -> Self {
        TensorType {
            shape: shape.into(),
            dtype,
            device: Device::default(),
        }
    }

    /// The same dtype and device with another shape.
    pub fn with_shape(&self, shape: impl Into<Arc<[Dim]>>) -> Self {
        TensorType {
            shape: shape.into(),
            dtype: self.dtype,
            device: self.device,
        }
    }

    /// The same shape and device with another dtype.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        TensorType {
            shape: self.shape.clone(),
            dtype,
            device: self.device,
        }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Whether its known sizes leave room for it in memory.
    pub fn can_exist(&self) -> bool {
        let mut known = self.shape.iter().filter_map(Dim::known);
        let bytes = known.try_fold(self.dtype.size() as i64, |n, size| match size {
            0.. => n.checked_mul(size.max(1)),
            _ => None,
        });
        bytes.is_some()
    }

    /// Number of elements.
    pub fn numel(&self) -> Dim {
        product(&self.shape)
    }

    /// Size of the dimension counted from the end (`-1` is the last).
    pub fn dim(&self, from_end: i64) -> Option<&Dim> {
        let index = self.rank() as i64 + from_end;
        (from_end < 0 && index >= 0).then(|| &self.shape[index as usize])
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

/// Type of any node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Ty {
    /// A tensor.
    Tensor(TensorType),
    /// Several values, taken apart by `getitem`.
    Tuple(Arc<[Ty]>),
    /// A compile-time value.
    Attr(Attr),
    /// Nothing is known: no rule may look at it.
    Unknown,
}

impl Ty {
    /// With sizes in the place of symbols, where they are known.
    pub fn at(&self, sizes: &BTreeMap<String, i64>) -> Ty {
        match self {
            Ty::Tensor(t) => Ty::Tensor(t.with_shape(t.shape.iter().map(|d| d.at(sizes)).collect::<Vec<_>>())),
            Ty::Tuple(items) => Ty::Tuple(items.iter().map(|t| t.at(sizes)).collect()),
            Ty::Attr(a) => Ty::Attr(a.at(sizes)),
            Ty::Unknown => Ty::Unknown,
        }
    }

    /// The tensor type, if it is one.
    pub fn tensor(&self) -> Option<&TensorType> {
        match self {
            Ty::Tensor(t) => Some(t),
            _ => None,
        }
    }

    /// The compile-time value, if it is one.
    pub fn attr(&self) -> Option<&Attr> {
        match self {
            Ty::Attr(a) => Some(a),
            _ => None,
        }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ty::Tensor(t) => t.fmt(f),
            Ty::Attr(a) => a.fmt(f),
            Ty::Unknown => f.write_str("?"),
            Ty::Tuple(ts) => {
                f.write_str("(")?;
                for (i, t) in ts.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    t.fmt(f)?;
                }
                f.write_str(")")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_wrap_at_the_limits_of_their_type() {
        for (dtype, from, to) in [
            (DType::U8, 256.0, 0.0),
            (DType::U8, -1.0, 255.0),
            (DType::I8, 128.0, -128.0),
            (DType::I8, -129.0, 127.0),
            (DType::I16, 32768.0, -32768.0),
            (DType::I32, 2147483648.0, -2147483648.0),
            (DType::I64, 9223372036854775808.0, -9223372036854775808.0),
            (DType::I64, -1.0, -1.0),
            (DType::I8, -0.0, 0.0),
        ] {
            assert_eq!(dtype.round(from).to_bits(), f64::to_bits(to), "{dtype} {from}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn floats_out_of_range_become_what_torch_makes_of_them() {
        for (dtype, from, to) in [
            (DType::I32, 2147483648.0, -2147483648.0),
            (DType::I32, 2147483647.0, 2147483647.0),
            (DType::I32, f64::NAN, -2147483648.0),
            (DType::I64, f64::INFINITY, -9223372036854775808.0),
            (DType::I16, 2147483904.0, 0.0),
            (DType::U8, 4294967303.0, 7.0),
            (DType::I8, 4294967303.0, 0.0),
            (DType::I8, 300.0, 44.0),
            (DType::U8, -1.0, 255.0),
        ] {
            assert_eq!(dtype.convert(from, DType::F64), to, "{dtype} {from}");
        }
    }
}
