//! How a thread reads the inputs of a region: as their strides say, within bounds, several as one, rolled, or by index.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::{Read, Scalar};

use super::Operand;
use super::body::literal;
use super::pack::Slot;
use super::space::{Space, pack_width};
use crate::{Error, Result};

/// An input inside a loop over packs.
pub(super) struct Source {
    slot: Slot,
    from: From,
}

enum From {
    Plain,
    Within {
        /// Whether all of a pack is inside, as far as the dimensions above say, and element `j` of it; empty if so.
        pack: String,
        element: String,
        /// What is read there.
        outside: String,
    },
    Rolled {
        /// How far the pack lies from where it is read, as far as the dimensions above say, and element `j` of it; empty
        /// if it is not moved.
        pack: String,
        element: String,
    },
    At {
        /// The index for element `j`.
        index: String,
        stride: isize,
        size: usize,
    },
}

/// Dimensions along which some input is read within bounds or rolled, and how the positions along them are called.
pub(super) struct Bounds<'a> {
    shape: &'a [usize],
    /// How each input is read; none if all are plain.
    reads: &'a [Read],
    /// Of the dimensions with bounds, in order.
    dims: Vec<usize>,
    /// No pack is on both sides of a bound, along the innermost dimension either.
    whole_packs: bool,
}

/// Positions before what lies in memory and its sizes, where the rest is read elsewhere.
fn bounds_of(read: &Read) -> Option<(&[usize], &[usize])> {
    match read {
        Read::Within { before, sizes, .. } | Read::Beside { before, sizes, .. } => Some((before, sizes)),
        Read::Plain | Read::Rolled { .. } | Read::At { .. } => None,
    }
}

impl<'a> Bounds<'a> {
    /// Refuses reads that do not fit.
    pub(super) fn new(shape: &'a [usize], inputs: &[Operand], reads: &'a [Read]) -> Result<Bounds<'a>> {
        let within = |before: &[usize], sizes: &[usize]| {
            let inside = |d: usize| sizes[d] > 0 && before[d] + sizes[d] <= shape[d];
            before.len() == shape.len() && sizes.len() == shape.len() && (0..shape.len()).all(inside)
        };
        let fits = |(at, read): (usize, &Read)| match read {
            Read::Plain => true,
            Read::Within { before, sizes, .. } => within(before, sizes),
            Read::Beside { before, sizes, other } => {
                let dtype = |i: usize| inputs.get(i).map(|o| o.dtype);
                within(before, sizes) && *other > at && *other < reads.len() && dtype(*other) == dtype(at)
            }
            Read::Rolled { by } => by.len() == shape.len() && by.iter().zip(shape).all(|(by, n)| by < n),
            Read::At { index, .. } => {
                let plain = reads.get(*index) == Some(&Read::Plain);
                plain && inputs.get(*index).is_some_and(|o| o.dtype == DType::I64)
            }
        };
        let floats = |(read, o): (&Read, &Operand)| !matches!(read, Read::At { .. }) || o.dtype.is_float();
        if !reads.is_empty() && reads.len() != inputs.len()
            || !reads.iter().enumerate().all(fits)
            || !reads.iter().zip(inputs).all(floats)
        {
            return Err(Error::malformed(format!("a kernel that reads by {reads:?}")));
        }
        let bounded = |d: &usize| {
            let rolls = |r: &Read| matches!(r, Read::Rolled { by } if by[*d] > 0);
            let cuts = |r: &Read| bounds_of(r).is_some_and(|(_, sizes)| sizes[*d] < shape[*d]);
            reads.iter().any(|r| rolls(r) || cuts(r))
        };
        let dims = (0..shape.len()).filter(bounded).collect();
        Ok(Bounds {
            shape,
            reads,
            dims,
            whole_packs: false,
        })
    }

    /// Strides that keep each of these dimensions apart from the others, as those of an operand that counts along it.
    pub(super) fn counters(&self) -> impl Iterator<Item = Vec<isize>> {
        let count = |d: &usize| {
            let mut strides = vec![0; self.shape.len()];
            strides[*d] = 1;
            strides
        };
        self.dims.iter().map(count)
    }

    /// Inputs that others read by, or read instead.
    pub(super) fn marks_others(&self, used: &mut [bool]) {
        for (at, read) in self.reads.iter().enumerate() {
            if let Read::At { index: other, .. } | Read::Beside { other, .. } = read {
                used[*other] |= used[at];
            }
        }
    }

    /// The width of packs. Where bounds along the innermost dimension would cut wide ones, such inputs are read
    /// element by element, or packs are half as wide.
    pub(super) fn width(&mut self, space: &Space, counters: usize, operands: &[&Operand]) -> usize {
        let apart = pack_width(None, &self.packed(space, counters), operands);
        let uncut = self.inner(space, counters).map_or(apart, |d| self.uncut(d));
        self.whole_packs = true;
        let whole = pack_width(None, &self.packed(space, counters), operands).min(uncut);
        self.whole_packs = whole > 1 && 2 * whole >= apart;
        if self.whole_packs { whole } else { apart }
    }

    /// The widest packs along a dimension that no bound cuts.
    fn uncut(&self, d: usize) -> usize {
        let widest = |n: usize| 1 << n.trailing_zeros().min(3);
        let of = |read: &Read| match read {
            Read::Rolled { by } if by[d] > 0 => widest(by[d]).min(widest(self.shape[d])),
            _ => bounds_of(read).map_or(8, |(before, sizes)| {
                let end = before[d] + sizes[d];
                let last = if end < self.shape[d] { widest(end) } else { 8 };
                widest(before[d]).min(last)
            }),
        };
        self.reads.iter().map(of).min().unwrap_or(8)
    }

    /// The space for the choice of a pack's width: what is not read in packs has no say.
    fn packed(&self, space: &Space, counters: usize) -> Space {
        let mut packed = space.clone();
        for (at, read) in self.reads.iter().enumerate() {
            let apart = match (read, self.inner(space, counters)) {
                (Read::At { .. }, _) => true,
                (Read::Rolled { by }, Some(d)) => by[d] > 0,
                (_, Some(d)) => bounds_of(read).is_some_and(|(_, sizes)| sizes[d] < self.shape[d]),
                (_, None) => false,
            };
            if apart {
                packed.strides[at].fill(0);
            }
        }
        packed
    }

    /// The dimension with bounds that is the innermost one of the space, given the first of the counters, if its bounds
    /// cut packs.
    fn inner(&self, space: &Space, counters: usize) -> Option<usize> {
        if self.whole_packs {
            return None;
        }
        let at = (0..self.dims.len()).find(|i| space.inner_stride(counters + i) != 0);
        at.map(|i| self.dims[i])
    }

    /// How an input is read; all of them lie as their slots say.
    pub(super) fn source(
        &self,
        input: usize,
        inputs: &[Operand],
        slots: &dyn Fn(usize) -> Slot,
        space: &Space,
        counters: usize,
    ) -> Source {
        let (mut slot, strides) = (slots(input), &inputs[input].strides);
        let from = match self.reads.get(input) {
            None | Some(Read::Plain) => From::Plain,
            Some(Read::At {
                index: by,
                stride,
                size,
            }) => From::At {
                index: slots(*by).element(),
                stride: *stride,
                size: *size,
            },
            Some(Read::Rolled { by }) => {
                let inner = self.inner(space, counters);
                let (mut pack, mut element) = (vec![], vec![]);
                for (i, d) in self.dims.iter().enumerate().filter(|(_, d)| by[**d] > 0) {
                    let position = space.offset(counters + i, "e");
                    let (ahead, size) = (by[*d] as isize, self.shape[*d] as isize);
                    let (near, far) = (ahead * strides[*d], (ahead - size) * strides[*d]);
                    let list = match inner == Some(*d) {
                        true => &mut element,
                        false => &mut pack,
                    };
                    let j = if inner == Some(*d) { " + j" } else { "" };
                    list.push(format!("({position}{j} < {} ? {near} : {far})", size - ahead));
                }
                From::Rolled {
                    pack: pack.join(" + "),
                    element: element.join(" + "),
                }
            }
            Some(read @ (Read::Within { before, sizes, .. } | Read::Beside { before, sizes, .. })) => {
                let missing: isize = before.iter().zip(strides).map(|(b, s)| *b as isize * s).sum();
                if missing != 0 {
                    slot.offset += &format!(" - {missing}");
                }
                let inner = self.inner(space, counters);
                let (mut pack, mut element) = (vec![], vec![]);
                for (i, d) in self.dims.iter().enumerate() {
                    let mut position = space.offset(counters + i, "e");
                    let list = if inner == Some(*d) {
                        position += " + j";
                        &mut element
                    } else {
                        &mut pack
                    };
                    let end = before[*d] + sizes[*d];
                    if before[*d] > 0 {
                        list.push(format!("{position} >= {}", before[*d]));
                    }
                    if end < self.shape[*d] {
                        list.push(format!("{position} < {end}"));
                    }
                }
                let outside = match read {
                    Read::Beside { other, .. } => {
                        let other = self.source(*other, inputs, slots, space, counters);
                        format!("({})", other.element())
                    }
                    Read::Within { outside, .. } => literal(*outside, slot.dtype),
                    Read::Plain | Read::Rolled { .. } | Read::At { .. } => String::new(),
                };
                From::Within {
                    pack: pack.join(" && "),
                    element: element.join(" && "),
                    outside,
                }
            }
        };
        Source { slot, from }
    }

    /// What an input is called in a comment.
    pub(super) fn describe(&self, input: usize) -> String {
        match self.reads.get(input) {
            Some(Read::Within { .. }) => format!("padded(x{input})"),
            Some(Read::Beside { other, .. }) => format!("x{input} beside {}", self.describe(*other)),
            Some(Read::Rolled { .. }) => format!("rolled(x{input})"),
            Some(Read::At { index, .. }) => format!("x{input}[x{index}]"),
            _ => format!("x{input}"),
        }
    }
}

impl Source {
    /// Statements that read the elements, or the one that they all are.
    pub(super) fn read(&self, width: usize) -> String {
        let Slot {
            pointer, local, offset, ..
        } = &self.slot;
        let loose = format!("const auto* {local} = {pointer} + {offset};\n");
        match &self.from {
            From::Plain => self.slot.read(width),
            From::At { .. } => loose,
            From::Rolled { pack, element } => {
                let offset = match pack.is_empty() {
                    true => offset.clone(),
                    false => format!("{offset} + {pack}"),
                };
                match element.is_empty() {
                    true => Slot {
                        offset,
                        ..self.slot.clone()
                    }
                    .read(width),
                    false => format!("const auto* {local} = {pointer} + {offset};\n"),
                }
            }
            From::Within { pack, element, .. } => {
                let inside = match pack.is_empty() {
                    true => String::new(),
                    false => format!("const bool {local}_in = {pack};\n"),
                };
                if !element.is_empty() {
                    return inside + &loose;
                }
                // Outside, the first element is read and not used.
                let safe = Slot {
                    offset: match pack.is_empty() {
                        true => offset.clone(),
                        false => format!("({local}_in ? {offset} : 0)"),
                    },
                    ..self.slot.clone()
                };
                inside + &safe.read(width)
            }
        }
    }

    /// The value of element `j`.
    pub(super) fn element(&self) -> String {
        let Slot {
            local, stride, dtype, ..
        } = &self.slot;
        match &self.from {
            From::Plain => self.slot.element(),
            From::Rolled { element, .. } => match element.is_empty() {
                true => self.slot.element(),
                false => format!("value({local}[j * {stride} + {element}])"),
            },
            From::At {
                index,
                stride: step,
                size,
            } => {
                let nan = literal(Scalar::Float(f64::NAN), *dtype);
                format!("(u64)({index}) < {size} ? value({local}[j * {stride} + {index} * {step}]) : {nan}")
            }
            From::Within { pack, element, outside } => {
                let above = (!pack.is_empty()).then(|| format!("{local}_in"));
                let within = (!element.is_empty()).then(|| element.clone());
                let inside: Vec<String> = above.into_iter().chain(within).collect();
                let value = match element.is_empty() {
                    true if *stride == 1 || *stride == 0 => self.slot.element(),
                    _ => format!("value({local}[j * {stride}])"),
                };
                match inside.is_empty() {
                    true => value,
                    false => format!("{} ? {value} : {outside}", inside.join(" && ")),
                }
            }
        }
    }
}
