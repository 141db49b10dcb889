//! Which way is the fastest among those that are exact enough.

use std::collections::BTreeMap;

use hypatia_runtime::tuning::{Entry, Key};

use super::pieces::{self, Pieces};
use super::tiles::{self, Shape, TOPS, Tiles};
use super::trials::{self, Trials, counts};
use super::{Linear, Product, Way};
use crate::driver::Device;
use crate::gemm::{Gemm, Problem};
use crate::setting::{Setting, key_of, tuned};
use crate::{Error, Result};

/// Of the kernels here; measurements of others do not count.
const VERSION: u32 = 1;
const LIBRARY: &str = "fp32";

/// A product by the way that is the fastest for its shape, measured now or before. `weight` is the address of a right
/// factor that stays as it is.
///
/// # Safety
/// The weight is there; `memory` and `room` give memory of the device.
pub unsafe fn choose(
    device: &'static Device,
    problem: Problem,
    weight: Option<u64>,
    setting: &mut Setting<'_>,
) -> Result<Product> {
    let linear = Linear::of(&problem).filter(|_| setting.split);
    let Some(linear) = linear.filter(|l| Tiles::serve(l) || Pieces::serve(l)) else {
        // SAFETY: promised by the caller.
        return Ok(unsafe { tuned(device, problem, setting)?.0 }.into());
    };
    let key = key(device, &problem)?;
    let known = setting.database.known_or(key, || {
        // SAFETY: promised by the caller.
        let times = unsafe { measured(device, &problem, linear, setting)? };
        let chosen = ranked(&times).first().map(|w| w.to_string()).unwrap_or_default();
        let data = vec![];
        Ok::<_, Error>(Entry { chosen, times, data })
    });
    let known = known.inspect_err(|e| tracing::debug!("{problem}: only the library's product is used: {e}"));
    for name in known.iter().flat_map(|entry| ranked(&entry.times)) {
        // SAFETY: promised by the caller.
        match unsafe { built(name, device, &problem, linear, weight, setting) } {
            Ok(Some(product)) => return Ok(product),
            Ok(None) => {}
            Err(e) => tracing::debug!("{problem}: not by {name}: {e}"),
        }
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { tuned(device, problem, setting)?.0 }.into())
}

fn key(device: &Device, problem: &Problem) -> Result<Key> {
    key_of(device, problem, "linear fp32", Some(VERSION))
}

/// Names and sources of the kernels that [`choose`] will ask for.
pub fn sources(device: &Device, problem: &Problem, setting: &Setting<'_>) -> Vec<(&'static str, String)> {
    let Some(linear) = Linear::of(problem).filter(|_| setting.split) else {
        return vec![];
    };
    let known = key(device, problem).ok().and_then(|key| setting.database.get(&key));
    let shapes = match &known {
        // That of the fastest: what is not for a weight is rare.
        Some(entry) => ranked(&entry.times)
            .first()
            .and_then(|name| Shape::named(name))
            .into_iter()
            .collect(),
        None => shapes(device, &linear),
    };
    let judges = known.is_none() || shapes.iter().any(|s| s.is_top());
    let pieces = (judges && !shapes.is_empty()).then(|| (pieces::NAME, pieces::SOURCE.to_owned()));
    shapes
        .into_iter()
        .map(|s| (tiles::NAME, s.source()))
        .chain(pieces)
        .collect()
}

/// Kernels of ours that are worth measuring.
fn shapes(device: &Device, linear: &Linear) -> Vec<Shape> {
    let tiles = if Tiles::serve(linear) {
        Shape::candidates(device, linear)
    } else {
        vec![]
    };
    let tops = Pieces::serve(linear).then_some(TOPS).into_iter().flatten();
    tiles.into_iter().chain(tops).collect()
}

/// Names by time.
fn ranked(times: &BTreeMap<String, f64>) -> Vec<&str> {
    let mut order: Vec<(&str, f64)> = times.iter().map(|(name, t)| (name.as_str(), *t)).collect();
    order.sort_by(|a, b| a.1.total_cmp(&b.1));
    order.into_iter().map(|(name, _)| name).collect()
}

/// A way by its name; none if it is not for this weight.
///
/// # Safety
/// As of [`choose`].
unsafe fn built(
    name: &str,
    device: &'static Device,
    problem: &Problem,
    linear: Linear,
    weight: Option<u64>,
    setting: &mut Setting<'_>,
) -> Result<Option<Product>> {
    if name == LIBRARY {
        // SAFETY: promised by the caller.
        return Ok(Some(unsafe { tuned(device, *problem, setting)?.0 }.into()));
    }
    let Some(shape) = Shape::named(name) else {
        return Ok(None);
    };
    if !shape.is_top() {
        let tiles = Tiles::new(device, linear, shape)?;
        return Ok(Some(Product(Way::Tiles(Box::new(tiles)))));
    }
    let Some(weight) = weight else {
        return Ok(None);
    };
    // SAFETY: promised by the caller.
    unsafe {
        let gemms = products(device, problem, setting)?;
        let mut pieces = Pieces::new(device, linear, gemms, shape)?;
        let spare = (setting.memory)(8)?;
        if !pieces.survey(setting.stream, weight, spare)? {
            return Ok(None);
        }
        let (room, done) = (setting.room)(weight, Pieces::weight_bytes(&linear))?;
        pieces.take(setting.stream, weight, room, done)?;
        Ok(Some(Product(Way::Pieces(Box::new(pieces)))))
    }
}

/// # Safety
/// As of [`choose`].
unsafe fn products(
    device: &'static Device,
    problem: &Problem,
    setting: &mut Setting<'_>,
) -> Result<Vec<(pieces::Part, Gemm)>> {
    let parts = pieces::parts(problem).into_iter();
    parts
        // SAFETY: promised by the caller.
        .map(|part| Ok((part, unsafe { tuned(device, part.problem, setting)?.0 })))
        .collect()
}

/// Microseconds of every way that is exact enough.
///
/// # Safety
/// As of [`choose`].
unsafe fn measured(
    device: &'static Device,
    problem: &Problem,
    linear: Linear,
    setting: &mut Setting<'_>,
) -> Result<BTreeMap<String, f64>> {
    let mut times = BTreeMap::new();
    // SAFETY: promised by the caller; the memory is as long as is asked for.
    unsafe {
        let library: Product = tuned(device, *problem, setting)?.0.into();
        let mut workspace = library.workspace();
        let by_pieces = Pieces::serve(&linear);
        if by_pieces {
            workspace += setting.budget.workspace + 6 * linear.m * linear.k + 4 * linear.m + 1024;
        }
        let memory = (setting.memory)(trials::bytes(&linear, workspace))?;
        let trials = Trials::new(setting.stream, linear, memory)?;
        let fp32 = trials.errors(&library)?;
        times.insert(LIBRARY.to_string(), trials.time(&library)?);
        let mut attempt = |name: String, product: Result<Product>| {
            let tried = product.and_then(|product| {
                let errors = trials.errors(&product)?;
                tracing::debug!("{problem}: {name} has errors {errors:?}, fp32 {fp32:?}");
                Ok(if counts(&errors, &fp32) {
                    Some(trials.time(&product)?)
                } else {
                    None
                })
            });
            match tried {
                Ok(Some(time)) => {
                    times.insert(name, time);
                }
                Ok(None) => {}
                Err(e) => tracing::debug!("{problem}: not by {name}: {e}"),
            }
        };
        for shape in shapes(device, &linear).into_iter().filter(|s| !s.is_top()) {
            let tiles = Tiles::new(device, linear, shape);
            attempt(shape.name(), tiles.map(|t| Product(Way::Tiles(Box::new(t)))));
        }
        if by_pieces {
            let room = (setting.memory)(Pieces::weight_bytes(&linear))?;
            for shape in TOPS {
                let product = products(device, problem, setting).and_then(|gemms| {
                    let mut pieces = Pieces::new(device, linear, gemms, shape)?;
                    pieces.survey(setting.stream, trials.weight(), trials.spare())?;
                    pieces.take(setting.stream, trials.weight(), room, false)?;
                    Ok(Product(Way::Pieces(Box::new(pieces))))
                });
                attempt(shape.name(), product);
            }
        }
    }
    Ok(times)
}
