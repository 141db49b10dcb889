//! Random layers and their results in float64, and every way to compute them on this machine.

use super::packed::Layer;
use super::{Activation, Element, Epilogue, LinearElement, Rows, RowsMut, Sink};
use crate::cpu::lanes::{self, Level};
use crate::cpu::math::activate;
use crate::cpu::{gemm_bf16, gemm_f32, gemv};

type Pack<T> = Box<dyn Fn(Rows<T>, usize, usize) -> Option<Box<dyn Layer<T>>>>;

/// A way to compute a layer.
pub struct Form<T> {
    /// The kind's name, and what multiplies.
    pub name: String,
    /// Roundings of fp32 that it may be off by, for [`assert_close`].
    pub slack: f64,
    pub pack: Pack<T>,
}

impl<T> Form<T> {
    pub fn new(
        name: impl Into<String>,
        slack: f64,
        pack: impl Fn(Rows<T>, usize, usize) -> Option<Box<dyn Layer<T>>> + 'static,
    ) -> Form<T> {
        Form {
            name: name.into(),
            slack,
            pack: Box::new(pack),
        }
    }
}

/// Instruction sets of this machine.
pub fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|l| *l <= lanes::level())
}

fn in_place<T: Element>() -> impl Iterator<Item = Form<T>> {
    levels().map(|level| {
        Form::new(format!("rows {level:?}"), 4.0, move |w, n, k| {
            Some(gemv::pack_for(level, w, n, k))
        })
    })
}

/// Elements with all their forms.
pub trait Forms: LinearElement {
    fn forms() -> Vec<Form<Self>>;
}

impl Forms for f32 {
    fn forms() -> Vec<Form<f32>> {
        let panels = levels().map(|level| {
            Form::new(format!("f32 {level:?}"), 4.0, move |w, n, k| {
                gemm_f32::pack_for(level, w, n, k)
            })
        });
        panels.chain(gemm_bf16::split_forms()).chain(in_place()).collect()
    }
}

impl Forms for half::bf16 {
    fn forms() -> Vec<Form<half::bf16>> {
        gemm_bf16::forms().into_iter().chain(in_place()).collect()
    }
}

/// Computes a case.
pub fn run<T: Element>(form: &Form<T>, case: &Case<T>, threads: usize, e: &Epilogue<T>) -> Vec<T> {
    let layer = (form.pack)(case.w(), case.n, case.k).expect("weights of any kind");
    case.run(|y| {
        if case.m > 0 && case.n > 0 {
            // SAFETY: a case is as long as its sizes say, and lives until the end.
            unsafe { layer.run(threads, case.m, case.x(), Sink::new(y, e)) };
        }
    })
}

/// A layer with gaps between its rows.
pub struct Case<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub gap: usize,
    pub x: Vec<T>,
    pub w: Vec<T>,
    pub bias: Vec<T>,
    pub residual: Vec<T>,
}

/// Sizes around every boundary: nothing, one, primes, a vector, a panel, a tile, a block, and one more or less.
pub const SIZES: [usize; 13] = [0, 1, 2, 5, 7, 16, 17, 31, 32, 33, 48, 65, 131];

fn numbers<T: Element>(len: usize, seed: &mut u64) -> Vec<T> {
    let mut next = || {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        T::narrow((*seed >> 40) as f32 / (1u32 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

impl<T: Element> Case<T> {
    pub fn new(m: usize, n: usize, k: usize, gap: usize) -> Case<T> {
        let mut seed = (m * 1_000_003 + n * 1009 + k) as u64;
        let mut matrix = |rows: usize, columns: usize| numbers(rows * (columns + gap), &mut seed);
        let (x, w, residual, bias) = (matrix(m, k), matrix(n, k), matrix(m, n), matrix(1, n));
        Case {
            m,
            n,
            k,
            gap,
            x,
            w,
            bias,
            residual,
        }
    }

    pub fn x(&self) -> Rows<'_, T> {
        Rows {
            data: &self.x,
            stride: self.k + self.gap,
        }
    }

    pub fn w(&self) -> Rows<'_, T> {
        Rows {
            data: &self.w,
            stride: self.k + self.gap,
        }
    }

    pub fn epilogue(&self, activation: Activation, all: bool) -> Epilogue<'_, T> {
        Epilogue {
            bias: all.then_some(&self.bias[..]),
            activation,
            residual: all.then_some(Rows {
                data: &self.residual,
                stride: self.n + self.gap,
            }),
            round_before_activation: false,
        }
    }

    /// Runs a layer into rows with gaps, checks that the gaps stay as they were, and returns the rows without them.
    pub fn run(&self, layer: impl FnOnce(RowsMut<'_, T>)) -> Vec<T> {
        let mark = T::narrow(-7.0);
        let mut y = vec![mark; self.m * (self.n + self.gap)];
        layer(RowsMut {
            data: &mut y,
            stride: self.n + self.gap,
        });
        let mut result = vec![];
        for row in y.chunks((self.n + self.gap).max(1)) {
            result.extend_from_slice(&row[..self.n]);
            assert!(row[self.n..].iter().all(|g| g.widen() == -7.0), "written past a row");
        }
        result
    }

    /// For every element: float64's result, that of a plain fp32 loop, and the sum of magnitudes.
    pub fn expected(&self, e: &Epilogue<'_, T>) -> Vec<(f64, f32, f64)> {
        let mut all = vec![];
        for i in 0..self.m {
            for j in 0..self.n {
                let (mut exact, mut plain, mut size) = (0f64, 0f32, 0f64);
                for t in 0..self.k {
                    let x = self.x[i * (self.k + self.gap) + t].widen();
                    let w = self.w[j * (self.k + self.gap) + t].widen();
                    exact += f64::from(x) * f64::from(w);
                    plain += x * w;
                    size += (f64::from(x) * f64::from(w)).abs();
                }
                if let Some(bias) = e.bias {
                    exact += f64::from(bias[j].widen());
                    plain += bias[j].widen();
                }
                exact = in_double(e.activation, exact);
                let mut one = [plain];
                activate(e.activation, &mut one);
                plain = one[0];
                if let Some(residual) = e.residual {
                    let r = residual.data[i * residual.stride + j].widen();
                    exact += f64::from(r);
                    plain += r;
                }
                all.push((exact, plain, size));
            }
        }
        all
    }
}

fn in_double(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
    }
}

pub const ACTIVATIONS: [Activation; 7] = [
    Activation::None,
    Activation::Relu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::Sigmoid,
    Activation::Tanh,
];

/// Fails unless the result is as close to float64 as a plain fp32 loop is, up to a rounding of the element type and
/// `slack` roundings of fp32.
pub fn assert_close<T: Element>(name: &str, result: &[T], expected: &[(f64, f32, f64)], slack: f64) {
    assert_eq!(result.len(), expected.len());
    let plain = expected
        .iter()
        .map(|(exact, plain, _)| (f64::from(*plain) - exact).abs());
    let plain = plain.fold(0.0, f64::max);
    let store = if size_of::<T>() == 2 { 1.0 / 256.0 } else { 0.0 };
    for (i, (y, (exact, _, size))) in result.iter().zip(expected).enumerate() {
        let error = (f64::from(y.widen()) - exact).abs();
        let allowed = 2.0 * plain + slack * f64::from(f32::EPSILON) * (size + 1.0) + store * exact.abs();
        assert!(
            error <= allowed,
            "{name}: element {i}: {} for {exact}, allowed {allowed:e}",
            y.widen()
        );
    }
}
