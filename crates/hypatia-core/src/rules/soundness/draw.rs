//! Random operands, drawn near what is there already so that ops take them.

use super::sample::Sampler;
use crate::attr::Attr;
use crate::dim::{Dim, dims};
use crate::ops::Kind;
use crate::random::Random;
use crate::ty::{DType, TensorType, Ty};

/// The last one has no equal in 16 bits.
pub(super) const FLOATS: [f64; 9] = [1.0, 0.0, -1.0, 2.0, 0.5, -0.0, 3.0, -0.25, 0.7];
pub(super) const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F16,
    DType::Bool,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
];
/// Whole numbers at the limits of integer types and beyond.
const WHOLE: [i64; 10] = [127, 128, -128, 255, 256, 300, -32769, 1 << 31, 1 << 53, i64::MIN];

impl Sampler<'_> {
    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.random.below(n) == 0
    }

    fn size(&mut self) -> i64 {
        *pick(self.random, &[0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5])
    }

    fn float(&mut self) -> Attr {
        Attr::float(match self.one_in(3) {
            true => self.random.unit() * 3.0,
            false => *pick(self.random, &FLOATS),
        })
    }

    pub(super) fn operand(&mut self, kind: Kind, name: &str, known: &[Ty]) -> Ty {
        let x = known.iter().find_map(Ty::tensor).cloned();
        let shape: Vec<i64> = x.as_ref().map_or(vec![], sizes);
        let r = shape.len();
        Ty::Attr(match kind {
            Kind::OptTensor if self.one_in(3) => Attr::None,
            Kind::Scalar if self.one_in(3) => match self.one_in(5) {
                true if self.one_in(3) => Attr::int(*pick(self.random, &WHOLE)),
                true => Attr::int(self.random.below(5) as i64 - 1),
                false => self.float(),
            },
            // A vector along some dimension, rows for a matrix.
            Kind::OptTensor if r > 0 && self.one_in(2) => {
                let near = self.near(known);
                let size = *pick(self.random, &near);
                return Ty::Tensor(TensorType::new(dims(&[size]), self.dtype));
            }
            Kind::Tensor if name == "x" && r > 0 && self.one_in(3) => {
                let mut rows = self.far();
                let lead = match rows.is_empty() || self.one_in(2) {
                    true => self.fresh(),
                    false => rows.swap_remove(self.random.below(rows.len())),
                };
                let rows = [&lead[..lead.len().saturating_sub(1)], &shape[r - 1..]].concat();
                return Ty::Tensor(TensorType::new(dims(&rows), self.dtype));
            }
            Kind::Tensor | Kind::OptTensor | Kind::Scalar | Kind::Tensors => return Ty::Tensor(self.tensor(known)),
            Kind::Dim => Attr::int(-1 - self.random.below(if r == 0 { 3 } else { r }) as i64),
            Kind::Dims => {
                let all: Vec<i64> = (1..=r as i64).rev().map(|d| -d).collect();
                match self.one_in(2) {
                    true => Attr::ints(&all[self.random.below(r)..]),
                    false => Attr::ints(&all.into_iter().filter(|_| self.one_in(2)).collect::<Vec<_>>()),
                }
            }
            Kind::Perm => {
                let mut perm: Vec<i64> = (0..r as i64).collect();
                match self.random.below(4) {
                    0 => {}
                    1 if r >= 2 => perm.swap(r - 2, r - 1),
                    _ => (1..r).for_each(|i| perm.swap(i, self.random.below(i + 1))),
                }
                Attr::ints(&perm)
            }
            Kind::Shape => Attr::ints(&self.shape(&shape)),
            Kind::Ints => Attr::ints(&self.list(name, &shape)),
            Kind::OptInt if self.one_in(4) => Attr::None,
            Kind::Int | Kind::OptInt => Attr::int(match self.random.below(4) {
                0 if r > 0 => *pick(self.random, &shape),
                1 if r > 1 => shape[2..].iter().product(),
                _ => self.random.below(6) as i64 - 1,
            }),
            Kind::OptFloat if self.one_in(4) => Attr::None,
            Kind::Float | Kind::OptFloat if name == "eps" && !self.one_in(8) => {
                Attr::float(*pick(self.random, &[1e-5, 0.5]))
            }
            Kind::Float | Kind::OptFloat => self.float(),
            Kind::Bool => Attr::Bool(self.one_in(2)),
            Kind::DType => Attr::DType(if self.one_in(3) {
                self.dtype
            } else {
                *pick(self.random, &DTYPES)
            }),
            Kind::Str => Attr::None,
        })
    }

    /// A tensor whose shape has something in common with what is there.
    fn tensor(&mut self, known: &[Ty]) -> TensorType {
        let near: Vec<Vec<i64>> = known.iter().filter_map(shape_of).collect();
        let pool = if near.is_empty() || self.one_in(4) {
            self.far()
        } else {
            near
        };
        let shape: Vec<i64> = match pool.is_empty() {
            true => self.fresh(),
            // A matrix from the end of one to the end of another.
            false if self.one_in(8) => {
                let ends = [pick(self.random, &pool), pick(self.random, &pool)];
                ends.iter().filter_map(|t| t.last().copied()).collect()
            }
            false => {
                let t = pick(self.random, &pool).clone();
                self.like(t)
            }
        };
        let dtype = match self.one_in(10) {
            true => *pick(self.random, &DTYPES),
            false => self.dtype,
        };
        TensorType::new(dims(&shape), dtype)
    }

    /// The shapes of everything that was drawn before.
    fn far(&self) -> Vec<Vec<i64>> {
        let all = self.bound.values().map(|b| &b.ty).chain(&self.beside);
        all.filter_map(shape_of).collect()
    }

    /// The sizes of one of the known tensors, which has some.
    fn near(&mut self, known: &[Ty]) -> Vec<i64> {
        let all: Vec<Vec<i64>> = known.iter().filter_map(shape_of).filter(|s| !s.is_empty()).collect();
        pick(self.random, &all).clone()
    }

    fn fresh(&mut self) -> Vec<i64> {
        let rank = *pick(self.random, &[0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]);
        (0..rank).map(|_| self.size()).collect()
    }

    fn like(&mut self, mut t: Vec<i64>) -> Vec<i64> {
        let r = t.len();
        if r == 0 {
            return self.fresh();
        }
        let (first, last) = (t[0], t[r - 1]);
        match self.random.below(16) {
            0..3 => t,
            3 => {
                t.drain(..self.random.below(r + 1));
                t.iter_mut().for_each(|s| *s = if self.one_in(3) { 1 } else { *s });
                t
            }
            4 => vec![last],
            5 | 6 => vec![first],
            7 => vec![*pick(self.random, &t)],
            8 => vec![self.size(), last],
            9 => vec![*pick(self.random, &t), last],
            // What a product takes on its right.
            10 => [t[..r.saturating_sub(2)].to_vec(), vec![last, self.size()]].concat(),
            // Rows for a matrix, a kernel for an image.
            11 => [self.fresh(), vec![last]].concat(),
            12 if r > 2 => {
                let window = (2..r).map(|_| 1 + self.random.below(2) as i64).collect();
                [vec![self.size(), t[1]], window].concat()
            }
            12 | 13 => {
                let at = self.random.below(r);
                t[at] = self.size();
                t
            }
            14 => t
                .iter()
                .map(|s| if self.one_in(2) { *s } else { self.size() })
                .collect(),
            _ => self.fresh(),
        }
    }

    /// A shape for a view of `x`: as many elements, or more of the same.
    fn shape(&mut self, x: &[i64]) -> Vec<i64> {
        let (r, n) = (x.len(), x.iter().product::<i64>());
        let others: Vec<Vec<i64>> = self.bound.values().filter_map(|b| shape_of(&b.ty)).collect();
        match self.random.below(8) {
            0 => x.to_vec(),
            1 if r > 1 => vec![x[..r - 1].iter().product(), x[r - 1]],
            2 if r > 0 => {
                let (rows, last) = (n / x[r - 1].max(1), x[r - 1]);
                [self.factors(rows), vec![last]].concat()
            }
            3 if r > 0 && !others.is_empty() => {
                let mut s = pick(self.random, &others).clone();
                if let Some(end) = s.last_mut() {
                    *end = x[r - 1];
                }
                s
            }
            4 => {
                let mut s = x.to_vec();
                s.insert(self.random.below(r + 1), 1);
                s
            }
            5 | 6 => {
                let mut s: Vec<i64> = (0..self.random.below(3)).map(|_| self.size()).collect();
                s.extend(
                    x.iter()
                        .map(|d| if *d == 1 { self.size() } else { *d })
                        .collect::<Vec<_>>(),
                );
                s
            }
            _ => self.factors(n),
        }
    }

    /// Random factors of a number.
    fn factors(&mut self, mut n: i64) -> Vec<i64> {
        let mut out = vec![];
        for _ in 0..self.random.below(4) {
            let divisors: Vec<i64> = (1..=n).filter(|d| n % d == 0).collect();
            let d = divisors.get(self.random.below(divisors.len())).copied().unwrap_or(1);
            out.push(d);
            n /= d;
        }
        out.push(n);
        out
    }

    /// Integers: one small number for each dimension of a window, parts of a dimension, last sizes.
    fn list(&mut self, name: &str, x: &[i64]) -> Vec<i64> {
        let r = x.len();
        match name {
            "stride" | "dilation" | "kernel" => (2..r).map(|_| 1 + self.random.below(2) as i64).collect(),
            "padding" if self.one_in(2) => vec![0; r.saturating_sub(2)],
            "padding" => (2..r).map(|_| self.random.below(3) as i64).collect(),
            "shape" if r > 0 => x[self.random.below(r)..].to_vec(),
            _ if r > 0 => {
                let mut left = *pick(self.random, x);
                let mut parts = vec![];
                for _ in 0..self.random.below(3) {
                    parts.push(self.random.below(left as usize + 1) as i64);
                    left -= parts[parts.len() - 1];
                }
                parts.push(left);
                parts
            }
            _ => vec![],
        }
    }
}

pub(super) fn pick<'t, T>(random: &mut Random, from: &'t [T]) -> &'t T {
    &from[random.below(from.len())]
}

fn sizes(t: &TensorType) -> Vec<i64> {
    t.shape.iter().filter_map(Dim::known).collect()
}

/// The shape of a tensor, or one that a list could be.
fn shape_of(ty: &Ty) -> Option<Vec<i64>> {
    match ty {
        Ty::Tensor(t) => Some(sizes(t)),
        Ty::Attr(list @ Attr::Ints(_)) => list.known_ints().filter(|v| v.iter().all(|d| *d >= 0)),
        _ => None,
    }
}
