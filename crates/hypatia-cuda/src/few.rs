//! Linear layers of at most 16 rows in 16 bits, as of a decoder that makes one token at a time.
//!
//! Such a product takes as long as reading its weight does. The kernel reads every number of it once, 16 bytes at a
//! time, and always has the next ones on their way. It is chosen where it is faster than cuBLASLt's kernels.

use std::collections::BTreeMap;

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::product::Activation;
use hypatia_runtime::tuning::{Database, Entry, Key};

use crate::driver::{Device, Function, Stream};
use crate::gemm::{Epilogue, Launch, Operands, Problem};
use crate::setting::{Setting, key_of, times};
use crate::{Error, Result, kernel};

const SOURCE: &str = include_str!("few.cu");

/// What the kernel is called in its source.
pub(crate) const NAME: &str = "few";

/// Of the kernel; measurements of others do not count.
const VERSION: u32 = 5;

/// Weights of fewer numbers are read in no time.
pub(crate) const WORTH: usize = 1 << 16;

/// Numbers of 16 bits in 16 bytes.
pub(crate) const UNIT: usize = 8;

/// How the kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Rows of the weight that a block has at a time.
    rows: usize,
    /// Warps of a block, which share K.
    warps: usize,
    /// Steps of 32 of K that a warp reads at once.
    depth: usize,
    /// Blocks of a multiprocessor.
    per: usize,
}

/// Those that were the fastest somewhere, for up to 8 rows of `x` and for more.
const SHAPES: [&[Shape]; 2] = [
    &[
        Shape::new(8, 8, 4, 2),
        Shape::new(8, 8, 8, 2),
        Shape::new(8, 16, 4, 1),
        Shape::new(8, 16, 4, 2),
        Shape::new(16, 8, 4, 2),
        Shape::new(16, 16, 4, 1),
        Shape::new(32, 16, 2, 1),
    ],
    &[
        Shape::new(8, 16, 4, 1),
        Shape::new(16, 16, 2, 1),
        Shape::new(32, 8, 4, 1),
    ],
];

impl Shape {
    const fn new(rows: usize, warps: usize, depth: usize, per: usize) -> Shape {
        Shape {
            rows,
            warps,
            depth,
            per,
        }
    }

    /// The ways that are worth measuring for a product.
    fn candidates(problem: &Problem) -> &'static [Shape] {
        SHAPES[usize::from(problem.m > UNIT)]
    }

    fn name(self) -> String {
        format!("{}x{}x{}x{}", self.rows, self.warps, self.depth, self.per)
    }

    fn source(self, problem: &Problem) -> String {
        let (tiles, half) = (problem.m.div_ceil(UNIT), u32::from(problem.input == DType::F16));
        let Shape {
            rows,
            warps,
            depth,
            per,
        } = self;
        format!(
            "#define ROWS {rows}\n#define WARPS {warps}\n#define DEPTH {depth}\n#define PER {per}\n\
             #define TILES {tiles}\n#define HALF {half}\n{SOURCE}"
        )
    }
}

/// What follows a product and is none of the library's epilogues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct After {
    /// It takes the place of that of the problem.
    pub(crate) activation: Activation,
    /// What the problem adds is multiplied by instead, after the activation.
    pub(crate) multiplies: bool,
}

/// A product by the kernel.
#[derive(Debug)]
pub(crate) struct Few {
    function: Function,
    shape: Shape,
    problem: Problem,
    after: After,
    /// The step before launches kernels of ours, and nothing that the plan launches writes the weight: it is fetched
    /// while those are at work.
    early: bool,
    microseconds: f64,
}

impl Few {
    /// True if the kernel computes it, and it is worth trying.
    fn serves(p: &Problem) -> bool {
        let aligned = |n: usize| n.is_multiple_of(UNIT);
        matches!(p.input, DType::BF16 | DType::F16)
            && p.output == p.input
            && activation(p.epilogue).is_some()
            && (p.batch, p.alignment) == (1, 16)
            && !p.left.transposed
            && p.right.transposed
            && p.m <= 2 * UNIT
            && [p.k, p.left.ld, p.right.ld].into_iter().all(aligned)
            && p.n.saturating_mul(p.k) >= WORTH
    }

    /// The product by the shape that is the fastest, measured now or before; none if the kernel does not serve it. It
    /// may begin `early`, before the kernels in front of it are done. What comes `after` it is not measured.
    ///
    /// # Safety
    /// The setting's memory is the device's.
    pub(crate) unsafe fn new(
        device: &'static Device,
        problem: &Problem,
        after: After,
        early: bool,
        setting: &mut Setting<'_>,
    ) -> Result<Option<Few>> {
        if !Few::serves(problem) || number(after.activation).is_none() {
            return Ok(None);
        }
        let key = Few::key(device, problem, early)?;
        let known = setting.database.known_or(key, || {
            // SAFETY: promised by the caller.
            let times = unsafe { measured(device, problem, early, setting)? };
            let chosen = best(&times).map(|(shape, _)| shape.name()).unwrap_or_default();
            let data = vec![];
            Ok::<_, Error>(Entry { chosen, times, data })
        })?;
        let Some((shape, microseconds)) = best(&known.times) else {
            return Ok(None);
        };
        let few = Few::of(device, problem, early, shape)?;
        Ok(Some(Few {
            after,
            microseconds,
            ..few
        }))
    }

    fn key(device: &Device, problem: &Problem, early: bool) -> Result<Key> {
        let op = if early { "few rows, early" } else { "few rows" };
        key_of(device, problem, op, Some(VERSION))
    }

    /// Sources of the kernels that [`Few::new`] will ask for.
    pub(crate) fn sources(device: &Device, problem: &Problem, early: bool, database: &Database) -> Vec<String> {
        if !Few::serves(problem) {
            return vec![];
        }
        let known = Few::key(device, problem, early).ok().and_then(|key| database.get(&key));
        let shapes = match known.and_then(|entry| best(&entry.times)) {
            Some((shape, _)) => vec![shape],
            None => Shape::candidates(problem).to_vec(),
        };
        shapes.into_iter().map(|shape| shape.source(problem)).collect()
    }

    fn of(device: &'static Device, problem: &Problem, early: bool, shape: Shape) -> Result<Few> {
        Ok(Few {
            function: kernel::function(device, NAME, &shape.source(problem))?,
            shape,
            problem: *problem,
            after: After::default(),
            early,
            microseconds: f64::INFINITY,
        })
    }

    fn blocks(&self) -> u32 {
        let most = self.shape.per * self.function.device().multiprocessors() as usize;
        self.problem.n.div_ceil(self.shape.rows).min(most) as u32
    }

    /// About what a run takes.
    pub(crate) fn microseconds(&self) -> f64 {
        self.microseconds
    }

    /// # Safety
    /// As of [`Gemm::launch`](crate::gemm::Gemm::launch).
    pub(crate) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let p = &self.problem;
        let (bias, residual) = (p.epilogue.adds_bias(), p.residual.is_some());
        let lacks = [o.left, o.right, o.out].contains(&0) || bias && o.bias == 0 || residual && o.residual == 0;
        if lacks || ![o.left, o.right].iter().all(|a| a.is_multiple_of(16)) {
            return Err(Error::malformed(format!(
                "{p}: {o:x?} lacks something or is not aligned"
            )));
        }
        let given = |has: bool, address: u64| if has { address } else { 0 };
        let mut arguments = vec![o.left, o.right, given(bias, o.bias), given(residual, o.residual), o.out];
        let residual_row = p.residual.map_or(0, |r| r.ld);
        arguments.extend([p.m, p.n, p.k, p.left.ld, p.right.ld, p.out.ld, residual_row].map(|n| n as u64));
        let activation = match self.after.activation {
            Activation::None => activation(p.epilogue).unwrap_or_default(),
            other => other,
        };
        arguments.extend([
            number(activation).unwrap_or_default(),
            u64::from(self.after.multiplies),
            u64::from(self.early),
        ]);
        let blocks = [self.blocks(), 1, 1];
        // SAFETY: promised by the caller; sizes and strides are those of the operands.
        unsafe {
            self.function
                .launch(stream, blocks, 32 * self.shape.warps as u32, &arguments)
        }
    }
}

impl Launch for Few {
    unsafe fn launch(&self, stream: Stream, operands: &Operands) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { Few::launch(self, stream, operands) }
    }

    fn begins_early(&self) -> bool {
        self.early
    }
}

/// The activation of an epilogue, if the kernel has that.
fn activation(epilogue: Epilogue) -> Option<Activation> {
    match epilogue {
        Epilogue::None | Epilogue::Bias => Some(Activation::None),
        Epilogue::Relu | Epilogue::ReluBias => Some(Activation::Relu),
        Epilogue::Gelu | Epilogue::GeluBias => Some(Activation::GeluTanh),
        _ => None,
    }
}

/// What the kernel calls the activations that it has.
const NUMBERS: [(Activation, u64); 7] = [
    (Activation::None, 0),
    (Activation::Relu, 1),
    (Activation::GeluTanh, 2),
    (Activation::Gelu, 3),
    (Activation::Silu, 4),
    (Activation::Sigmoid, 5),
    (Activation::Tanh, 6),
];

/// What the kernel calls an activation; none if it does not have it.
fn number(activation: Activation) -> Option<u64> {
    NUMBERS
        .iter()
        .find(|(a, _)| *a == activation)
        .map(|(_, number)| *number)
}

/// The fastest shape that is known here.
fn best(times: &BTreeMap<String, f64>) -> Option<(Shape, f64)> {
    let (name, took) = times.iter().min_by(|a, b| a.1.total_cmp(b.1))?;
    let shape = SHAPES.into_iter().flatten().find(|s| s.name() == *name)?;
    Some((*shape, *took))
}

/// Microseconds of every shape whose results are right.
///
/// # Safety
/// As of [`Few::new`].
unsafe fn measured(
    device: &'static Device,
    problem: &Problem,
    early: bool,
    setting: &mut Setting<'_>,
) -> Result<BTreeMap<String, f64>> {
    let shapes = Shape::candidates(problem);
    let made: Vec<(Shape, Few)> = shapes
        .iter()
        .filter_map(|shape| Some((*shape, Few::of(device, problem, early, *shape).ok()?)))
        .collect();
    let ways: Vec<(String, &dyn Launch)> = made.iter().map(|(s, few)| (s.name(), few as &dyn Launch)).collect();
    // SAFETY: promised by the caller.
    unsafe { times(problem, &ways, 0, setting) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc::{self, Arch};

    #[test]
    fn it_is_for_few_rows_of_16_bits() {
        let layer = Problem::linear(DType::BF16, 1, 2048, 2048);
        assert!(Few::serves(&layer));
        assert!(Few::serves(&layer.with_epilogue(Epilogue::ReluBias).with_residual()));
        assert!(Few::serves(&Problem::linear(DType::F16, 16, 3, 1 << 15)));
        assert!(!Few::serves(&Problem::linear(DType::BF16, 17, 2048, 2048)));
        assert!(!Few::serves(&Problem::linear(DType::BF16, 1, 2048, 2044)));
        assert!(!Few::serves(&Problem::linear(DType::F32, 1, 2048, 2048)));
        assert!(!Few::serves(&layer.with_epilogue(Epilogue::Drelu)));
        assert!(!Few::serves(&Problem::new(
            DType::BF16,
            [1, 2048, 2048],
            [false, false]
        )));
    }

    #[test]
    fn every_shape_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for (dtype, m, arch) in [
            (DType::BF16, 1, Arch::new(8, 0)),
            (DType::F16, 1, Arch::new(9, 0)),
            (DType::F16, 9, Arch::new(8, 0)),
            (DType::BF16, 16, Arch::new(10, 0)),
        ] {
            let problem = Problem::linear(dtype, m, 64, 64);
            for shape in Shape::candidates(&problem) {
                nvrtc::compile(NAME, &shape.source(&problem), arch).unwrap();
            }
        }
    }
}
