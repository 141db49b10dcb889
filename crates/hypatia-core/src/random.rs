//! Random values of a type, the same for a seed everywhere.

use crate::args::known_shape;
use crate::eval::{Arr, Val};
use crate::ty::{DType, Ty};

/// Elements of a value that is evaluated; the reference device keeps 8 bytes of each.
pub const LARGEST: usize = 1 << 26;

/// A small generator, so that a seed gives the same values everywhere.
pub struct Random(pub u64);

impl Random {
    /// 64 random bits (splitmix).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// A number in -1..1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A random value of a type, if all of its sizes are known and it is no larger than [`LARGEST`].
    pub fn value(&mut self, ty: &Ty) -> Option<Val> {
        match ty {
            Ty::Tensor(t) => {
                let shape = known_shape(&t.shape).ok()?;
                let n = shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size))?;
                if n > LARGEST {
                    return None;
                }
                let mut data = Vec::with_capacity(n);
                for _ in 0..n {
                    data.push(match t.dtype {
                        d if d.is_float() => d.round(self.unit() * 2.0),
                        DType::Bool => self.below(2) as f64,
                        _ => self.below(2) as f64,
                    });
                }
                Some(Val::arr(Arr::new(shape, data)))
            }
            Ty::Tuple(items) => items
                .iter()
                .map(|t| self.value(t))
                .collect::<Option<_>>()
                .map(Val::Tuple),
            Ty::Attr(a) => Some(Val::Attr(a.clone())),
            Ty::Unknown => None,
        }
    }
}
