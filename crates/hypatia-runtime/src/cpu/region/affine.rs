//! Regions that only scale and shift: what follows most norms.

use crate::kernels::region::{Meaning, Op, Region};

/// The first input times another, and perhaps a third added, all in the type of the first; inputs may be widened to it,
/// and the result narrowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Affine {
    /// The numbers of the inputs.
    pub(crate) scale: usize,
    pub(crate) shift: Option<usize>,
}

/// What a value is.
#[derive(Clone, Copy)]
enum Part {
    Input(usize),
    Result(Affine),
}

impl Affine {
    /// What a region is, if it is no more than that.
    pub(crate) fn of(region: &Region) -> Option<Affine> {
        let Meaning {
            instructions,
            types,
            outputs,
            ..
        } = region.meaning();
        let mut parts: Vec<Part> = (0..region.inputs().len()).map(Part::Input).collect();
        for instruction in instructions {
            let value = parts.len();
            let args = instruction.args.iter().map(|a| (parts[*a], types[*a]));
            let same = types[value] == types[0];
            let part = match (instruction.op, &args.collect::<Vec<_>>()[..]) {
                (Op::Cast(_), &[(Part::Input(i), from)]) if same && from.is_float() => Part::Input(i),
                // Whatever takes the narrowed result is not of this kind, so it is the last.
                (Op::Cast(_), &[(result @ Part::Result(_), _)]) if value + 1 == types.len() => result,
                (Op::Mul, &[(Part::Input(0), _), (Part::Input(k), _)])
                | (Op::Mul, &[(Part::Input(k), _), (Part::Input(0), _)])
                    if same && k > 0 =>
                {
                    Part::Result(Affine { scale: k, shift: None })
                }
                (Op::Add, &[(Part::Result(product), _), (Part::Input(k), _)])
                | (Op::Add, &[(Part::Input(k), _), (Part::Result(product), _)])
                    if same && k > 0 && product.shift.is_none() =>
                {
                    Part::Result(Affine {
                        shift: Some(k),
                        ..product
                    })
                }
                _ => return None,
            };
            parts.push(part);
        }
        match (parts.last(), &outputs[..]) {
            (Some(Part::Result(affine)), [output]) if output + 1 == parts.len() => Some(*affine),
            _ => None,
        }
    }
}
