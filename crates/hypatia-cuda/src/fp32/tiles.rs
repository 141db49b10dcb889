//! Small fp32 products by a kernel of our own: tiles on tensor cores, sums over K shared by a cluster of blocks.

use super::{Linear, Operands};
use crate::driver::{Device, Function, Stream};
use crate::nvrtc::Arch;
use crate::{Result, kernel};

const SOURCE: &str = include_str!("tiles.cu");

/// What the kernel is called in its source.
pub(super) const NAME: &str = "tiles";

/// How the kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Rows and columns of a block's tile.
    tile: [usize; 2],
    /// Groups of warps that share K inside a block.
    groups: usize,
    /// What of K is in shared memory at a time.
    chunk: usize,
    /// Chunks that are fetched ahead, and the one in use.
    stages: usize,
    /// Blocks that share K.
    split: usize,
    /// Products of pieces: all six that count, or the greatest.
    terms: usize,
}

/// Tiles that were the fastest somewhere, `split` to be filled in.
const SHAPES: [Shape; 2] = [Shape::new([32, 32], 4, 128, 2), Shape::new([64, 64], 1, 64, 2)];

/// Tiles for the greatest products of pieces alone.
pub(super) const TOPS: [Shape; 2] = [
    Shape::new([64, 64], 1, 64, 2).top(),
    Shape::new([128, 64], 1, 64, 2).top(),
];

/// Blocks that may share K.
const SPLITS: [usize; 4] = [1, 2, 4, 8];

/// The first with clusters of blocks.
const CLUSTERS: Arch = Arch::new(9, 0);

impl Shape {
    const fn new(tile: [usize; 2], groups: usize, chunk: usize, stages: usize) -> Shape {
        Shape {
            tile,
            groups,
            chunk,
            stages,
            split: 1,
            terms: 6,
        }
    }

    const fn top(self) -> Shape {
        Shape { terms: 1, ..self }
    }

    /// The ways that are worth measuring for a product: one or two blocks for each multiprocessor, if there is enough to
    /// do.
    pub(super) fn candidates(device: &Device, linear: &Linear) -> Vec<Shape> {
        let most = if device.arch() < CLUSTERS { 1 } else { 8 };
        let room = device.multiprocessors() as usize;
        let mut found = vec![];
        for shape in SHAPES {
            let tiles = shape.blocks(linear);
            let fits = |split: usize, blocks: usize| {
                split == 1 || split <= most && tiles * split <= blocks && linear.k >= split * shape.chunk
            };
            for blocks in [room, 2 * room] {
                let split = SPLITS.into_iter().rev().find(|s| fits(*s, blocks)).unwrap_or(1);
                let way = Shape { split, ..shape };
                // Larger tiles than the smallest are for when there are many.
                if !found.contains(&way) && (shape == SHAPES[0] || 2 * tiles >= room) {
                    found.push(way);
                }
            }
        }
        found
    }

    fn blocks(self, linear: &Linear) -> usize {
        linear.m.div_ceil(self.tile[0]) * linear.n.div_ceil(self.tile[1])
    }

    fn threads(self) -> usize {
        self.tile[0] / 32 * (self.tile[1] / 32) * self.groups * 32
    }

    /// Bytes of shared memory: chunks, and later partial sums.
    fn shared(self) -> usize {
        let [rows, columns] = self.tile;
        let chunks = self.stages * (rows + columns) * self.chunk;
        4 * chunks.max(self.groups * rows * (columns + 8))
    }

    /// The text of the kernel.
    pub(super) fn source(self) -> String {
        let [rows, columns] = self.tile;
        let Shape {
            groups,
            chunk,
            stages,
            split,
            terms,
            ..
        } = self;
        format!(
            "#define BM {rows}\n#define BN {columns}\n#define GROUPS {groups}\n#define CHUNK {chunk}\n\
             #define STAGES {stages}\n#define SPLIT {split}\n#define TERMS {terms}\n{SOURCE}"
        )
    }

    /// What it is called in the tuning database.
    pub(super) fn name(self) -> String {
        let Shape {
            tile: [rows, columns],
            groups,
            chunk,
            stages,
            split,
            terms,
        } = self;
        let kind = if terms == 1 { "pieces" } else { "tiles" };
        format!("{kind} {rows}x{columns} {groups} {chunk} {stages} {split}")
    }

    /// True if it computes the greatest products of pieces alone.
    pub(super) fn is_top(self) -> bool {
        self.terms == 1
    }

    /// The shape of a name.
    pub(super) fn named(name: &str) -> Option<Shape> {
        let all = SHAPES
            .into_iter()
            .flat_map(|s| SPLITS.map(|split| Shape { split, ..s }));
        all.chain(TOPS).find(|s| s.name() == name)
    }
}

/// The kernel for a product.
#[derive(Debug)]
pub(super) struct Tiles {
    function: Function,
    shape: Shape,
    linear: Linear,
}

impl Tiles {
    /// True if the kernel can fetch the rows of both factors 16 bytes at a time.
    pub(super) fn serve(linear: &Linear) -> bool {
        let int = i32::MAX as usize;
        linear.k.is_multiple_of(4)
            && linear.x_row.is_multiple_of(4)
            && linear.alignment >= 16
            && linear.k.max(linear.x_row) < int
            && linear.m.div_ceil(32) < usize::from(u16::MAX)
    }

    pub(super) fn new(device: &'static Device, linear: Linear, shape: Shape) -> Result<Tiles> {
        let function = kernel::module(device, NAME, &shape.source())?.function(NAME)?;
        function.allow_shared(shape.shared() as u32)?;
        Ok(Tiles {
            function,
            shape,
            linear,
        })
    }

    /// # Safety
    /// As of [`super::Product::launch`].
    pub(super) unsafe fn launch(&self, stream: Stream, o: &Operands) -> Result<()> {
        let (l, shape) = (&self.linear, self.shape);
        let [rows, columns] = shape.tile;
        let blocks = [l.n.div_ceil(columns), l.m.div_ceil(rows), shape.split].map(|b| b as u32);
        let mut arguments = vec![o.left, o.right, o.bias, o.residual, o.out];
        arguments.extend([l.m, l.n, l.k, l.x_row, l.residual_row].map(|n| n as u64));
        arguments.push(u64::from(l.relu));
        let (threads, shared) = (shape.threads() as u32, shape.shared() as u32);
        // SAFETY: promised by the caller; sizes and strides are those of the operands.
        unsafe { self.function.launch_with(stream, blocks, threads, shared, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc;

    #[test]
    fn names_are_read_back() {
        for shape in SHAPES {
            let shape = Shape { split: 4, ..shape };
            assert_eq!(Shape::named(&shape.name()), Some(shape));
        }
        assert_eq!(Shape::named("f32"), None);
    }

    #[test]
    fn every_shape_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for shape in SHAPES.into_iter().chain(TOPS) {
            for (arch, split) in [(Arch::new(8, 0), 1), (Arch::new(9, 0), 8), (Arch::new(10, 0), 2)] {
                let source = Shape { split, ..shape }.source();
                nvrtc::compile(NAME, &source, arch).unwrap();
            }
        }
    }
}
