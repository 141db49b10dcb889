//! Kernels of convolutions and poolings of each channel by itself, over images with channels last.
//!
//! A thread computes some channels at some places side by side in a row: it reads each pixel and each element of the
//! window once for all of them. Threads of a block are neighbours in channels, in the row and in rows above each other,
//! so that most of what windows have in common is found in the first-level cache.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::Region;
use hypatia_runtime::plan::{DepthwiseStep, Plan, Pool, Window, WindowOp};

use super::body::{body, describe, inputs_used, kernel_name, stored};
use super::pack::{Shell, Slot, all, each};
use super::space::{blocks, index_type};
use super::{Operand, indent, parameters};
use crate::kernel::Kernel;
use crate::{Error, Result};

const CONVOLVE: &str = include_str!("depthwise.cu");
const POOL: &str = include_str!("pool.cu");

/// Threads of a block, at most.
const THREADS: usize = 128;
/// Places in a row that a thread computes, at most.
const STRIP: usize = 8;
/// Sums and elements of the window that a thread keeps, at most.
const KEPT: usize = 104;
/// Bytes of neighbouring channels that the threads of a block read: a line of the cache.
const LINE: usize = 128;
/// Threads that fill a large GPU. Where there are fewer, each gets less to do.
const FILLING: usize = 132 * 512;
/// Multiplications, or what a pooling does instead, that are written out one after the other, at most, where a row of the window does not need more.
const WRITTEN_OUT: usize = 1024;

/// Places in a row that a thread computes where windows have no pixels in common: reads of several are under way at once.
const APART: usize = 2;

/// A convolution or a pooling of each channel by itself, and what follows it.
#[derive(Debug)]
pub struct Depthwise<'a> {
    /// What a pooling takes; none is a convolution.
    pub pool: Option<Pool>,
    /// How the window moves.
    pub window: Window,
    /// Rows and pixels of a row of the images.
    pub image: [usize; 2],
    /// The shape of the result, with channels last.
    pub shape: [usize; 4],
    /// The images, with channels last and side by side.
    pub x: Operand,
    /// What follows.
    pub after: &'a Region,
    /// What that reads, in the shape of the result; none is what was made.
    pub inputs: Vec<Option<Operand>>,
}

/// What a thread computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    /// Channels.
    pub(super) pack: usize,
    /// Places in a row.
    pub(super) strip: usize,
}

/// Threads of a block: along channels, along a row, and along rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) packs: usize,
    pub(super) strips: usize,
    pub(super) rows: usize,
}

impl<'a> Depthwise<'a> {
    /// That of a step.
    pub fn of(plan: &Plan, d: &'a DepthwiseStep) -> Result<Depthwise<'a>> {
        let (&[_, height, width, _], &[n, oh, ow, channels]) = (&d.x.shape[..], &d.shape[..]) else {
            return Err(Error::malformed("a window over what are no images"));
        };
        let given = |o: &Option<_>| o.as_ref().map(|o| Operand::of(plan, o));
        Ok(Depthwise {
            pool: match d.op {
                WindowOp::Conv(_) => None,
                WindowOp::Pool(pool) => Some(pool),
            },
            window: d.window,
            image: [height, width],
            shape: [n, oh, ow, channels],
            x: Operand::of(plan, &d.x),
            after: &d.after,
            inputs: d.inputs.iter().map(given).collect(),
        })
    }
}

impl Depthwise<'_> {
    /// The kernel. Its operands are images, the weight of a convolution, what follows reads, and the result.
    pub fn kernel(&self) -> Result<Kernel> {
        self.expect()?;
        let share = self.share();
        let block = self.block(share);
        let [n, oh, ow, channels] = self.shape;
        let lines = n * oh;
        let tiles = ow.div_ceil(share.strip).div_ceil(block.strips);
        let chunks = (channels / share.pack).div_ceil(block.packs);
        let given: Vec<&Operand> = self.inputs.iter().flatten().collect();
        let own = if self.pool.is_some() { 1 } else { 2 };
        let types: Vec<DType> = [self.x.dtype; 2][..own]
            .iter()
            .copied()
            .chain(given.iter().map(|o| o.dtype))
            .collect();
        let (what, made) = match self.pool {
            None => ("depthwise", "conv"),
            Some(Pool::Max) => ("max_pool", "max"),
            Some(Pool::Mean { .. }) => ("avg_pool", "mean"),
        };
        let name = kernel_name(what, &[Some(self.after)]);
        let mut next = own;
        let names: Vec<String> = (self.inputs.iter())
            .map(|o| match o {
                None => made.to_owned(),
                Some(_) => {
                    next += 1;
                    format!("x{}", next - 1)
                }
            })
            .collect();
        let comment = describe(self.after, |i| names[i].clone());
        let threads = block.packs * block.strips * block.rows;
        let shell = Shell {
            name: &name,
            comment: &[format!("y0 = {}", comment[0])],
            parameters: parameters(&types, self.after.outputs(), &["lines"]),
            threads: threads as u32,
            body: self.text(share, block, &names),
        };
        let count = lines.div_ceil(block.rows) * tiles * chunks;
        let alignments = [
            [self.x.alignment, 16][..own].to_vec(),
            given.iter().map(|o| o.alignment).collect(),
            vec![16],
        ];
        Ok(Kernel {
            source: shell.source_with(&self.functions(share)),
            name,
            blocks: blocks(count, 1)?,
            threads: threads as u32,
            alignments: alignments.concat(),
            numbers: vec![lines as u64],
        })
    }

    fn expect(&self) -> Result<()> {
        let of = |o: &Option<Operand>| o.as_ref().map_or(self.x.dtype, |o| o.dtype);
        let fits = |o: &Operand| o.strides.len() == 4;
        let served = matches!(self.x.dtype, DType::F32 | DType::BF16 | DType::F16);
        let good = served
            && self.x.strides.len() == 4
            && self.x.strides[3] == 1
            && self.inputs.iter().flatten().all(fits)
            && self.inputs.iter().map(of).eq(self.after.inputs().iter().copied())
            && self.after.outputs().len() == 1
            && !self.shape[1..].contains(&0);
        match good {
            true => Ok(()),
            false => Err(Error::unsupported(format!("a window over {self:?}"))),
        }
    }

    /// Whether so many channels can be read and written at once.
    fn can_pack(&self, pack: usize) -> bool {
        let fits = |o: &Operand| {
            let bytes = (pack * o.dtype.size()).min(16);
            let aligned = |stride: &isize| (stride.unsigned_abs() * o.dtype.size()).is_multiple_of(bytes);
            o.strides[3] != 1 || o.alignment.is_multiple_of(bytes) && o.strides[..3].iter().all(aligned)
        };
        self.shape[3].is_multiple_of(pack) && [&self.x].into_iter().chain(self.inputs.iter().flatten()).all(fits)
    }

    /// Much for each thread, but no more than it can keep, and less if threads would be few.
    pub(super) fn share(&self) -> Share {
        let [n, oh, ow, channels] = self.shape;
        let taps = if self.pool.is_some() { 1 } else { self.window.size[1] };
        let kept = |s: Share| s.pack * (s.strip + taps);
        let threads = |s: Share| n * oh * ow.div_ceil(s.strip) * (channels / s.pack);
        // Strips of one length.
        let even = |most: usize| ow.div_ceil(ow.div_ceil(most));
        // Windows with gaps have few pixels in common.
        let most = match self.window.dilation[1] {
            3.. => 1,
            _ if self.pool.is_some() && self.window.stride[1] >= self.window.size[1] => APART,
            _ => STRIP,
        };
        let mut pack = 16 / self.x.dtype.size();
        while pack > 1 && !self.can_pack(pack) {
            pack /= 2;
        }
        let mut share = Share {
            pack,
            strip: even(most),
        };
        while share.pack > 1 && kept(share) > KEPT {
            share.pack /= 2;
        }
        // Reads of less than four bytes would not be worth it.
        let least = 4 / self.x.dtype.size();
        while threads(share) < FILLING && (share.strip > 1 || share.pack > least) {
            match share.strip > 1 && (share.strip > 4 || share.pack <= least) {
                true => share.strip = even(share.strip.div_ceil(2)),
                false if share.pack > least => share.pack /= 2,
                false => share.strip = even(share.strip.div_ceil(2)),
            }
        }
        share
    }

    pub(super) fn block(&self, share: Share) -> Block {
        let [n, oh, ow, channels] = self.shape;
        let (lines, strips, packs) = (n * oh, ow.div_ceil(share.strip), channels / share.pack);
        let line = LINE / (share.pack * self.x.dtype.size());
        let most = line.max(THREADS / (lines * strips).clamp(1, THREADS)).min(THREADS);
        let packs = packs.div_ceil(packs.div_ceil(most));
        // About 16 places in a row; the rest of the block is above each other.
        let strips = strips
            .min((2 * STRIP).div_ceil(share.strip))
            .min((THREADS / packs).max(1));
        let rows = (THREADS / (packs * strips)).clamp(1, lines.max(1));
        Block { packs, strips, rows }
    }

    /// What the kernel calls.
    fn functions(&self, share: Share) -> String {
        match self.pool {
            None => self.head(share) + CONVOLVE,
            Some(pool) => self.head(share) + &self.pool_head(pool) + POOL,
        }
    }

    /// What the text of a pooling leaves open beside.
    fn pool_head(&self, pool: Pool) -> String {
        let Window { size, padding, .. } = self.window;
        let ([_, oh, ow, _], counts) = (self.shape, pool == Pool::Mean { counts_padding: true });
        // A window with all its pixels at every place has a number of them that is known here.
        let padded = padding.map(|p| if counts { p } else { 0 });
        let whole = [oh, ow] == self.window.places(self.image) && (counts || padding == [0; 2]);
        let count = if whole { size[0] * size[1] } else { 0 };
        let numbers = [("COUNT", count), ("PH", padded[0]), ("PW", padded[1])];
        let mean = matches!(pool, Pool::Mean { .. });
        let constants = numbers.map(|(name, number)| format!("constexpr int {name} = {number};\n"));
        format!("constexpr bool MEAN = {mean};\n{}", constants.concat())
    }

    /// What both texts leave open.
    fn head(&self, share: Share) -> String {
        let Window {
            size: [kh, kw],
            stride: [_, sw],
            dilation: [dh, dw],
            ..
        } = self.window;
        let step = if share.strip == 1 { dw } else { gcd(sw, dw) };
        let row = share.strip * kw * share.pack;
        let numbers = [
            ("PACK", share.pack as isize),
            ("STRIP", share.strip as isize),
            ("KH", kh as isize),
            ("KW", kw as isize),
            ("SW", sw as isize),
            ("DH", dh as isize),
            ("DW", dw as isize),
            ("STEP", step as isize),
            ("HEIGHT", self.image[0] as isize),
            ("WIDTH", self.image[1] as isize),
            ("ROW", self.x.strides[1]),
            ("PIXEL", self.x.strides[2]),
            ("CHANNELS", self.shape[3] as isize),
            ("UNROLL", (WRITTEN_OUT / row).clamp(1, kh) as isize),
        ];
        let mut text = format!("typedef {} ELEMENT;\n", stored(self.x.dtype));
        for (name, number) in numbers {
            let kind = index_type(number.unsigned_abs());
            text += &format!("constexpr {kind} {name} = {number};\n");
        }
        text
    }

    /// The body of the kernel: where the thread is, what is made of the window, what follows at each place.
    fn text(&self, share: Share, block: Block, names: &[String]) -> String {
        let [_, oh, ow, channels] = self.shape;
        let Window {
            stride: [sh, sw],
            padding: [ph, pw],
            ..
        } = self.window;
        let Block { packs, strips, rows } = block;
        let Share { pack, strip } = share;
        let count = ow.div_ceil(strip);
        let (chunks, tiles) = ((channels / pack).div_ceil(packs), count.div_ceil(strips));
        let index = index_type(self.shape.iter().product::<usize>());
        let call = match self.pool {
            None => ("convolve", "x1 + channel, "),
            Some(_) => ("pool", ""),
        };
        let start = format!(
            "const int chunk = blockIdx.x % {chunks}, tile = blockIdx.x / {chunks} % {tiles};
const int channel = (chunk * {packs} + (int)threadIdx.x % {packs}) * {pack};
const int strip = tile * {strips} + (int)threadIdx.x / {packs} % {strips};
const {index} line = blockIdx.x / {span} * ({index}){rows} + threadIdx.x / {across};
if (channel >= {channels} || strip >= {count} || line >= lines) return;
const i64 n = line / {oh};
const int row = (int)(line % {oh});
float made[STRIP][PACK];
{function}(x0 + n * {image}ll + channel, {weight}row * {sh} - {ph}, strip * {step} - {pw}, made);\n",
            function = call.0,
            weight = call.1,
            span = chunks * tiles,
            across = packs * strips,
            image = self.x.strides[0],
            step = strip * sw,
        );
        let used = inputs_used(self.after);
        let slot = |(name, o): (&String, &Operand)| Slot {
            pointer: name.clone(),
            local: format!("{name}_at"),
            dtype: o.dtype,
            stride: o.strides[3],
            offset: offset(&o.strides),
        };
        let with = names.iter().zip(&self.inputs).zip(used);
        let read = with.filter_map(|((name, o), used)| o.as_ref().filter(|_| used).map(|o| (name, o)));
        let (fixed, moving): (Vec<_>, Vec<_>) = read.partition(|(_, o)| o.strides[2] == 0);
        let (fixed, moving): (Vec<Slot>, Vec<Slot>) = (
            fixed.into_iter().map(slot).collect(),
            moving.into_iter().map(slot).collect(),
        );
        let written = slot((&"y0".to_owned(), &Operand::dense(self.after.outputs()[0], &self.shape)));
        // The sums of a convolution keep their precision; a mean is what eager has.
        let made = match (self.pool, self.x.dtype) {
            (Some(Pool::Mean { .. }), DType::F16 | DType::BF16) => "rounded<ELEMENT>(made[t][j])".to_owned(),
            _ => "made[t][j]".to_owned(),
        };
        let element = |i: usize| {
            let mut slots = fixed.iter().chain(&moving);
            let known = slots.find(|s| s.pointer == names[i]);
            known.map_or_else(|| made.clone(), Slot::element)
        };
        let body = body(self.after, "v", element);
        let inner = [
            format!("const int column = strip * {strip} + t;\nif (column >= {ow}) continue;\n"),
            all(&moving, |s| s.read(pack)),
            written.declare(pack),
            each(pack, &(body.statements + &written.assign(&body.outputs[0]))),
            written.write(),
        ];
        let places = format!(
            "#pragma unroll\nfor (int t = 0; t < {strip}; t++) {{\n{}}}\n",
            indent(&inner.concat(), 1)
        );
        [start, all(&fixed, |s| s.read(pack)), places].concat()
    }
}

/// Where an operand's elements for the thread begin.
fn offset(strides: &[isize]) -> String {
    let terms = ["n", "row", "column", "channel"].iter().zip(strides);
    let terms: Vec<String> = terms
        .filter(|(_, s)| **s != 0)
        .map(|(name, s)| format!("{name} * {s}ll"))
        .collect();
    match terms.is_empty() {
        true => "0".into(),
        false => format!("({})", terms.join(" + ")),
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc::{self, Arch};
    use hypatia_runtime::kernels::region::{Instruction, Op, Rounding};

    const DTYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

    fn alone(dtype: DType) -> Region {
        Region::new(&[dtype], vec![], &[0], Rounding::EveryOp).unwrap()
    }

    /// A convolution that keeps the size of images, but for its stride.
    fn of(dtype: DType, after: &Region, [n, h, w, c]: [usize; 4], size: [usize; 2], stride: usize) -> Depthwise<'_> {
        Depthwise {
            pool: None,
            window: Window {
                size,
                stride: [stride; 2],
                padding: size.map(|k| k / 2),
                dilation: [1; 2],
            },
            image: [h, w],
            shape: [n, h.div_ceil(stride), w.div_ceil(stride), c],
            x: Operand::dense(dtype, &[n, h, w, c]),
            after,
            inputs: vec![None],
        }
    }

    #[test]
    fn threads_have_much_to_do_where_there_are_many() {
        let after = alone(DType::BF16);
        let share = |shape, k: usize| of(DType::BF16, &after, shape, [k, k], 1).share();
        assert_eq!(share([64, 56, 56, 96], 3), Share { pack: 8, strip: 8 });
        // Strips of one length, and not more than fits into registers.
        assert_eq!(share([64, 28, 28, 192], 7), Share { pack: 4, strip: 7 });
        assert_eq!(share([64, 32, 32, 1536], 9), Share { pack: 4, strip: 8 });
        assert_eq!(share([1, 7, 7, 1152], 5), Share { pack: 2, strip: 1 });
        assert_eq!(share([64, 56, 56, 17], 3).pack, 1);
        let after = alone(DType::F32);
        let share = of(DType::F32, &after, [64, 56, 56, 96], [7, 7], 1).share();
        assert_eq!(share, Share { pack: 4, strip: 8 });
    }

    const POOLS: [Pool; 3] = [
        Pool::Max,
        Pool::Mean { counts_padding: true },
        Pool::Mean { counts_padding: false },
    ];

    #[test]
    fn a_pooling_keeps_no_weight_and_takes_little_where_windows_share_nothing() {
        let after = alone(DType::BF16);
        let share = |shape, k: usize, stride| {
            let mut pool = of(DType::BF16, &after, shape, [k, k], stride);
            pool.pool = Some(Pool::Max);
            pool.share()
        };
        assert_eq!(share([64, 56, 56, 96], 7, 1), Share { pack: 8, strip: 8 });
        assert_eq!(share([64, 112, 112, 64], 3, 2), Share { pack: 8, strip: 8 });
        assert_eq!(share([64, 56, 56, 96], 2, 2), Share { pack: 8, strip: 2 });
    }

    #[test]
    fn a_mean_is_of_a_number_that_is_known_where_no_window_hangs_over() {
        let after = alone(DType::BF16);
        let count = |counts_padding, padding: usize, places: usize| {
            let mut pool = of(DType::BF16, &after, [2, 9, 9, 24], [3, 3], 2);
            pool.pool = Some(Pool::Mean { counts_padding });
            (pool.window.padding, pool.shape[1], pool.shape[2]) = ([padding; 2], places, places);
            let source = pool.kernel().unwrap().source;
            source.contains("COUNT = 9;")
        };
        assert!(count(true, 1, 5) && count(false, 0, 4));
        assert!(!count(false, 1, 5) && !count(true, 1, 6));
    }

    #[test]
    fn channels_that_are_part_of_more_are_read_as_they_are_aligned() {
        let after = alone(DType::BF16);
        let mut part = of(DType::BF16, &after, [64, 56, 56, 96], [3, 3], 1);
        part.x.strides = vec![56 * 56 * 100, 56 * 100, 100, 1];
        assert_eq!(part.share().pack, 4);
        part.x.alignment = 2;
        assert_eq!(part.share().pack, 1);
    }

    #[test]
    fn every_element_is_computed_once() {
        let after = alone(DType::BF16);
        let sizes = [(1, 1), (1, 7), (7, 7), (9, 14), (5, 33), (3, 56)];
        for (h, w) in sizes {
            for (n, c) in [(1, 2), (1, 17), (3, 24), (2, 1152), (64, 96)] {
                let d = of(DType::BF16, &after, [n, h, w, c], [3, 3], 1);
                let (share, kernel) = (d.share(), d.kernel().unwrap());
                let block = d.block(share);
                let strips = w.div_ceil(share.strip);
                let chunks = (c / share.pack).div_ceil(block.packs);
                let tiles = strips.div_ceil(block.strips);
                assert!(kernel.threads as usize <= THREADS, "{block:?}");
                let mut count = vec![0; n * h * w * c];
                // As the kernel has it.
                for (b, t) in
                    (0..kernel.blocks[0] as usize).flat_map(|b| (0..kernel.threads as usize).map(move |t| (b, t)))
                {
                    let channel = (b % chunks * block.packs + t % block.packs) * share.pack;
                    let strip = b / chunks % tiles * block.strips + t / block.packs % block.strips;
                    let line = b / (chunks * tiles) * block.rows + t / (block.packs * block.strips);
                    if channel >= c || strip >= strips || line >= n * h {
                        continue;
                    }
                    for column in (strip * share.strip..(strip + 1) * share.strip).filter(|x| *x < w) {
                        for at in channel..channel + share.pack {
                            count[(line * w + column) * c + at] += 1;
                        }
                    }
                }
                assert!(count.iter().all(|n| *n == 1), "{d:?}");
            }
        }
    }

    /// With a bias, what it is added to, and an activation.
    fn busy(dtype: DType) -> Region {
        let ops = [(Op::Add, vec![0, 1]), (Op::Silu, vec![3]), (Op::Add, vec![4, 2])];
        let code = ops.map(|(op, args)| Instruction::new(op, args));
        Region::new(&[dtype; 3], code.into(), &[5], Rounding::EveryOp).unwrap()
    }

    #[test]
    fn all_forms_compile() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        let compiled = |d: &Depthwise| {
            let kernel = d.kernel().unwrap();
            nvrtc::compile(&kernel.name, &kernel.source, Arch::new(9, 0)).unwrap();
        };
        for dtype in DTYPES {
            let after = alone(dtype);
            for (size, stride, shape) in [
                ([1, 1], 1, [1, 1, 1, 8]),
                ([3, 3], 1, [64, 56, 56, 96]),
                ([3, 3], 2, [64, 56, 56, 17]),
                ([5, 5], 2, [1, 14, 14, 1152]),
                ([3, 5], 1, [2, 9, 9, 24]),
                ([7, 7], 1, [64, 28, 28, 192]),
                ([9, 9], 1, [64, 32, 32, 1536]),
                ([31, 31], 1, [64, 32, 32, 128]),
            ] {
                let mut d = of(dtype, &after, shape, size, stride);
                compiled(&d);
                d.pool = Some(POOLS[(size[1] + 2 * stride) % POOLS.len()]);
                compiled(&d);
            }
            let mut far = of(dtype, &after, [8, 65, 65, 320], [3, 3], 1);
            for dilation in [2, 12] {
                (far.window.padding, far.window.dilation) = ([dilation; 2], [dilation; 2]);
                compiled(&far);
            }
            let after = busy(dtype);
            let shape = [8, 56, 56, 96];
            let bias = Operand {
                strides: vec![0, 0, 0, 1],
                ..Operand::dense(dtype, &shape)
            };
            for arch in [Arch::new(8, 0), Arch::new(10, 0)] {
                let mut d = of(dtype, &after, shape, [3, 3], 1);
                d.inputs = vec![None, Some(bias.clone()), Some(Operand::dense(dtype, &shape))];
                let kernel = d.kernel().unwrap();
                nvrtc::compile(&kernel.name, &kernel.source, arch).unwrap();
                // Images with their channels first, and one number for each image.
                d.inputs[2] = Some(Operand {
                    strides: vec![96 * 56 * 56, 56, 1, 56 * 56],
                    ..Operand::dense(dtype, &shape)
                });
                d.inputs[1] = Some(Operand {
                    strides: vec![1, 0, 0, 0],
                    ..Operand::dense(dtype, &shape)
                });
                compiled(&d);
                d.pool = Some(Pool::Mean { counts_padding: false });
                compiled(&d);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let after = busy(DType::BF16);
        let mut d = of(DType::BF16, &after, [2, 9, 9, 24], [3, 3], 1);
        assert!(d.kernel().is_err());
        let one = alone(DType::BF16);
        d.after = &one;
        assert!(d.kernel().is_ok());
        d.x.strides[3] = 2;
        assert!(d.kernel().is_err());
    }
}
