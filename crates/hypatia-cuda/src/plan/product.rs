//! The products of a plan, and sums over rows.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::product::Activation;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::plan::{ColumnKind, ColumnStep, Operand, Plan};

use super::apart::Apart;
use super::cut::Cut;
use super::{LinearStep, Setting};
use crate::codegen::{self, Columns, alignment};
use crate::driver::{Device, Stream};
use crate::few::{self, After, Few};
use crate::fp32;
use crate::gemm::{Epilogue, Gemm, Operands, Problem};
use crate::interleaved::{self, Interleaved};
use crate::kernel::Loaded;
use crate::padded::Padded;
use crate::setting::tuned;
use crate::unaligned::{self, Unaligned};
use crate::{Error, Result};

/// About what a launch takes in a graph, in microseconds.
const LAUNCH: f64 = 1.5;

/// A product, with sums of its left factor where they are asked for.
pub(super) struct Product {
    how: How,
    /// Sums by kernels of their own; none if the product makes them.
    sums: Option<Sums>,
}

enum How {
    Whole(fp32::Product),
    /// What cuBLASLt does faster by rows that start alike.
    Interleaved(Box<Interleaved>),
    /// What a kernel of ours does faster for few rows.
    Few(Box<Few>),
    /// What cuBLASLt does faster into memory in which rows are aligned.
    Padded(Box<Padded>),
    /// What a kernel of ours does faster into rows that begin anywhere.
    Unaligned(Box<Unaligned>),
    /// What it does faster without the last columns of its left factor.
    Cut(Box<Cut>),
    /// What cuBLASLt does not do as one.
    Apart(Box<Apart>),
}

impl From<Gemm> for How {
    fn from(gemm: Gemm) -> How {
        How::Whole(gemm.into())
    }
}

impl Product {
    /// It may begin `early` if the step before ends with a kernel of ours.
    ///
    /// # Safety
    /// The setting's memory is the device's, and the constants are there.
    pub(super) unsafe fn new(
        device: &'static Device,
        plan: &Plan,
        l: &LinearStep,
        constants: &[u64],
        early: bool,
        setting: &mut Setting<'_>,
    ) -> Result<Product> {
        if l.gradient.sums.is_none() {
            let weight = plan.constants.iter().position(|c| *c == l.w).map(|i| constants[i]);
            let problem = problem(plan, l, setting.tf32);
            // SAFETY: promised by the caller.
            if let Some(how) = unsafe { fastest(device, plan, l, &problem, early && weight.is_some(), setting) } {
                return Ok(Product { how, sums: None });
            }
            // SAFETY: promised by the caller.
            let whole = problem.and_then(|problem| unsafe { fp32::choose(device, problem, weight, setting) });
            let how = match whole {
                Ok(product) => How::Whole(product),
                // SAFETY: promised by the caller.
                Err(error) => How::Apart(Box::new(
                    unsafe { Apart::new(device, plan, l, setting) }.map_err(|_| error)?,
                )),
            };
            return Ok(Product { how, sums: None });
        }
        let problem = problem(plan, l, setting.tf32)?;
        // SAFETY: promised by the caller.
        let plain = match unsafe { faster_cut(device, &problem, setting) } {
            Some(cut) => {
                let took = cut.microseconds();
                Ok((How::Cut(Box::new(cut)), took))
            }
            // SAFETY: promised by the caller.
            None => unsafe { tuned(device, problem, setting) }.map(|(gemm, took)| (gemm.into(), took)),
        };
        // SAFETY: promised by the caller.
        let both = unsafe { tuned(device, problem.with_epilogue(Epilogue::SumLeft), setting) };
        let apart = plain.and_then(|p| Ok((p, Sums::of_one(device, plan, &l.x, 1)?)));
        match (both, apart) {
            (Ok((gemm, took)), Ok(((_, alone), sums))) if took <= alone + sums.microseconds() => Ok(Product {
                how: gemm.into(),
                sums: None,
            }),
            (Ok((gemm, _)), Err(_)) => Ok(Product {
                how: gemm.into(),
                sums: None,
            }),
            (_, Ok(((how, _), sums))) => Ok(Product { how, sums: Some(sums) }),
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// Names and sources of kernels that [`Product::new`] may ask for. What asks for more is compiled then.
    pub(super) fn sources(
        device: &'static Device,
        plan: &Plan,
        l: &LinearStep,
        setting: &Setting<'_>,
    ) -> Vec<(&'static str, String)> {
        let mut found = vec![];
        if l.gradient.sums.is_some() {
            return found;
        }
        if let Some((bare, _)) = few_rows(plan, l, setting.tf32) {
            let both = [false, true].map(|early| Few::sources(device, &bare, early, setting.database));
            found.extend(both.into_iter().flatten().map(|s| (few::NAME, s)));
        }
        if let Ok(problem) = problem(plan, l, setting.tf32) {
            found.extend(fp32::sources(device, &problem, setting));
            if Interleaved::serves(&problem) {
                found.push((interleaved::MODULE.0, interleaved::MODULE.1.to_owned()));
            }
            if Unaligned::serves(device, &problem) {
                found.push((unaligned::NAME, unaligned::source(device, &problem)));
            }
        }
        found
    }

    /// How it is computed.
    pub(super) fn kind(&self) -> &'static str {
        match &self.how {
            How::Whole(product) => product.kind(),
            How::Interleaved(_) => "interleaved",
            How::Few(_) => "few",
            How::Padded(_) => "padded",
            How::Unaligned(_) => "unaligned",
            How::Cut(_) => "cut",
            How::Apart(apart) => apart.kind(),
        }
    }

    /// Whether torch computes it.
    pub(super) fn calls_torch(&self) -> bool {
        matches!(&self.how, How::Apart(apart) if apart.calls_torch())
    }

    /// Whether the kernel for few rows computes it.
    pub(super) fn is_few(&self) -> bool {
        matches!(self.how, How::Few(_))
    }

    pub(super) fn workspace(&self) -> usize {
        let product = match &self.how {
            How::Whole(product) => product.workspace(),
            How::Interleaved(product) => product.workspace(),
            How::Few(_) | How::Unaligned(_) => 0,
            How::Padded(product) => product.workspace(),
            How::Cut(product) => product.workspace(),
            How::Apart(apart) => apart.workspace(),
        };
        product.max(self.sums.as_ref().map_or(0, Sums::workspace))
    }

    /// # Safety
    /// As of [`Gemm::launch`]; `sums` is where sums go, if the step has any.
    pub(super) unsafe fn launch(&self, stream: Stream, operands: Operands, sums: Option<u64>) -> Result<()> {
        let bias = match (&self.sums, sums) {
            (None, Some(address)) => address,
            _ => operands.bias,
        };
        // SAFETY: promised by the caller; the kernels of the sums follow the product, whose room they use.
        unsafe {
            match &self.how {
                How::Whole(product) => product.launch(stream, &Operands { bias, ..operands })?,
                How::Interleaved(product) => product.launch(stream, &operands)?,
                How::Few(product) => product.launch(stream, &operands)?,
                How::Padded(product) => product.launch(stream, &operands)?,
                How::Unaligned(product) => product.launch(stream, &operands)?,
                How::Cut(product) => product.launch(stream, &operands)?,
                How::Apart(apart) => apart.launch(stream, &operands)?,
            }
            if let (Some(kernels), Some(address)) = (&self.sums, sums) {
                kernels.launch(stream, &[operands.left], operands.workspace, &[address])?;
            }
        }
        Ok(())
    }
}

/// The fastest of the ways that are not the library's product as a whole, if one is faster than that.
///
/// # Safety
/// The setting's memory is the device's.
unsafe fn fastest(
    device: &'static Device,
    plan: &Plan,
    l: &LinearStep,
    problem: &Result<Problem>,
    early: bool,
    setting: &mut Setting<'_>,
) -> Option<How> {
    let mut found: Vec<(f64, How)> = vec![];
    if let Some((bare, after)) = few_rows(plan, l, setting.tf32) {
        // The library leaves what it does not do to another kernel.
        let spared = if after == After::default() { 0.0 } else { LAUNCH };
        // SAFETY: promised by the caller.
        let few = unsafe {
            let few = Few::new(device, &bare, after, early, setting);
            if_faster(device, &bare, setting, few, "by the kernel for few rows", |few| {
                few.microseconds() - spared
            })
        };
        found.extend(few.map(|way| (way.microseconds() - spared, How::Few(Box::new(way)))));
    }
    if let Ok(problem) = problem {
        // SAFETY: promised by the caller.
        let (unaligned, cut) = unsafe {
            let kernel = Unaligned::new(device, problem, setting);
            let took = Unaligned::microseconds;
            let kernel = if_faster(
                device,
                problem,
                setting,
                kernel,
                "by the kernel for unaligned rows",
                took,
            );
            (kernel, faster_cut(device, problem, setting))
        };
        // Where it computes hardly any row for nothing, it is faster than these two, which take long to measure.
        if !unaligned.as_ref().is_some_and(Unaligned::fills) {
            // SAFETY: promised by the caller.
            let (interleaved, padded) = unsafe {
                let rows = Interleaved::new(device, problem, setting);
                let took = Interleaved::microseconds;
                let rows = if_faster(device, problem, setting, rows, "by interleaved rows", took);
                let padded = Padded::new(device, problem, setting);
                let took = Padded::microseconds;
                (
                    rows,
                    if_faster(device, problem, setting, padded, "with padded rows", took),
                )
            };
            found.extend(interleaved.map(|way| (way.microseconds(), How::Interleaved(Box::new(way)))));
            found.extend(padded.map(|way| (way.microseconds(), How::Padded(Box::new(way)))));
        }
        found.extend(unaligned.map(|way| (way.microseconds(), How::Unaligned(Box::new(way)))));
        found.extend(cut.map(|way| (way.microseconds(), How::Cut(Box::new(way)))));
    }
    let best = found.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, how)| how)
}

/// A product in two parts, where that is faster than as a whole.
///
/// # Safety
/// The setting's memory is the device's.
unsafe fn faster_cut(device: &'static Device, problem: &Problem, setting: &mut Setting<'_>) -> Option<Cut> {
    // SAFETY: promised by the caller.
    let found = unsafe { Cut::new(device, problem, setting) };
    // SAFETY: promised by the caller.
    unsafe { if_faster(device, problem, setting, found, "in two parts", Cut::microseconds) }
}

/// What was found, if there is something and it takes less time than the library's product.
///
/// # Safety
/// The setting's memory is the device's.
unsafe fn if_faster<W>(
    device: &'static Device,
    problem: &Problem,
    setting: &mut Setting<'_>,
    found: Result<Option<W>>,
    how: &str,
    took: impl Fn(&W) -> f64,
) -> Option<W> {
    let way = found
        .inspect_err(|e| tracing::debug!("{problem}: not {how}: {e}"))
        .ok()??;
    // SAFETY: promised by the caller.
    match unsafe { tuned(device, *problem, setting) } {
        Ok((_, library)) if library <= took(&way) => None,
        _ => Some(way),
    }
}

/// Reductions over the first dimensions of operands, by two kernels.
pub(super) struct Sums {
    chunks: Loaded,
    finish: Option<Loaded>,
    partial_bytes: usize,
    bytes: usize,
}

impl Sums {
    /// Sums over the first dimensions of an operand.
    fn of_one(device: &'static Device, plan: &Plan, x: &Operand, rows: usize) -> Result<Sums> {
        let dtype = plan.values[x.value].dtype;
        let region = Region::widening(dtype)?;
        let lying = [codegen::Operand::of(plan, x)];
        let kernels = codegen::columns(&[ColumnKind::Sum], &region, &x.shape, rows, &lying, &[dtype])?;
        Sums::load(device, &kernels, x.shape.iter().product::<usize>() * dtype.size())
    }

    /// Those of a step.
    pub(super) fn new(device: &'static Device, plan: &Plan, step: &ColumnStep) -> Result<Sums> {
        let sizes = step.inputs.iter().map(|o| plan.values[o.value].dtype.size());
        let bytes = step.shape.iter().product::<usize>() * sizes.sum::<usize>();
        Sums::load(device, &Columns::of(plan, step)?, bytes)
    }

    fn load(device: &'static Device, kernels: &Columns, bytes: usize) -> Result<Sums> {
        Ok(Sums {
            chunks: kernels.chunks.load(device)?,
            finish: kernels.finish.as_ref().map(|k| k.load(device)).transpose()?,
            partial_bytes: kernels.partial_bytes,
            bytes,
        })
    }

    pub(super) fn workspace(&self) -> usize {
        self.partial_bytes
    }

    /// About what it takes: two launches of a graph, and the reading at three quarters of what memory gives.
    fn microseconds(&self) -> f64 {
        2.0 * LAUNCH + self.bytes as f64 / 3e6
    }

    /// # Safety
    /// The operands' first elements and the results are at these addresses, and there is room for [`Sums::workspace`].
    pub(super) unsafe fn launch(&self, stream: Stream, reads: &[u64], workspace: u64, results: &[u64]) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe {
            let Some(finish) = &self.finish else {
                return self.chunks.launch(stream, &[reads, results].concat());
            };
            self.chunks.launch(stream, &[reads, &[workspace]].concat())?;
            finish.launch(stream, &[&[workspace], results].concat())
        }
    }
}

/// What the kernel for few rows is given: a problem of the library's, and what that does not do.
fn few_rows(plan: &Plan, l: &LinearStep, tf32: bool) -> Option<(Problem, After)> {
    if let Ok(problem) = problem(plan, l, tf32) {
        return Some((problem, After::default()));
    }
    let mut bare = l.clone();
    (bare.activation, bare.multiplies) = (Activation::None, false);
    let after = After {
        activation: l.activation,
        multiplies: l.multiplies,
    };
    Some((problem(plan, &bare, tf32).ok()?, after))
}

pub(super) fn problem(plan: &Plan, l: &LinearStep, tf32: bool) -> Result<Problem> {
    let weight = &plan.values[l.w];
    let Some((n, k)) = l.sizes(&weight.shape) else {
        return Err(Error::malformed("a weight that is no matrix"));
    };
    let left = l.gradient.x_transposed;
    let mut problem = Problem::new(weight.dtype, [l.m, n, k], [left, !l.transposed]);
    problem.tf32 = tf32;
    if if left { k } else { l.m } > 1 {
        problem.left.ld = l.x_stride;
    }
    let mut aligned = alignment(l.x.offset * weight.dtype.size());
    if let Some((r, stride)) = &l.r {
        problem = problem.with_residual();
        if let Some(residual) = &mut problem.residual {
            residual.ld = if l.m > 1 { *stride } else { n };
        }
        aligned = aligned.min(alignment(r.offset * weight.dtype.size()));
    }
    problem.alignment = aligned as u32;
    if l.multiplies {
        return Err(Error::unsupported("a product that is multiplied"));
    }
    let (keeps, masked) = (l.gradient.keeps.is_some(), l.gradient.masked.is_some());
    Ok(problem.with_epilogue(match (l.activation, l.b.is_some()) {
        (Activation::Relu, true) if keeps => Epilogue::ReluAuxBias,
        (Activation::None, false) if masked => Epilogue::Drelu,
        (other, _) if keeps || masked => return Err(Error::unsupported(format!("a mask with {other:?}"))),
        (Activation::None, false) => Epilogue::None,
        (Activation::None, true) => Epilogue::Bias,
        (Activation::Relu, false) => Epilogue::Relu,
        (Activation::Relu, true) => Epilogue::ReluBias,
        (Activation::GeluTanh, false) if weight.dtype != DType::F32 => Epilogue::Gelu,
        (Activation::GeluTanh, true) if weight.dtype != DType::F32 => Epilogue::GeluBias,
        (other, _) => return Err(Error::unsupported(format!("a product with {other:?}"))),
    }))
}
