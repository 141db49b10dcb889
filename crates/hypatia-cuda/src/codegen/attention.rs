//! The kernel of attention with one query for each head.

use hypatia_core::ty::DType;
use hypatia_runtime::plan::{AttentionStep, Plan};

use super::body::stored;
use super::{Operand, PRELUDE};
use crate::kernel::Kernel;
use crate::nvrtc::Arch;
use crate::{Error, Result};

const TEXT: &str = include_str!("attention.cu");

/// Blocks of a cluster that may share the keys of a head.
const SPLITS: [usize; 4] = [1, 2, 4, 8];
/// Fewer keys for a block are not worth a block.
const LEAST: usize = 64;
/// The first with clusters of blocks.
const CLUSTERS: Arch = Arch::new(9, 0);

/// Attention of one query for each head. Groups of heads share their keys and values.
#[derive(Debug)]
pub struct Attention {
    /// Batch, groups of heads, heads of a group, keys, numbers of a head.
    pub sizes: [usize; 5],
    /// `[batch, groups, heads, width]`; the numbers of a head follow each other, as those of a key and a value do.
    pub q: Operand,
    /// `[batch, groups, keys, width]`.
    pub k: Operand,
    /// The same.
    pub v: Operand,
    /// `[batch, groups, heads, keys]`: flags, or what is added to the scores.
    pub mask: Option<Operand>,
    /// What scores are multiplied by.
    pub scale: f64,
}

impl Attention {
    /// That of a step.
    pub fn of(plan: &Plan, a: &AttentionStep) -> Result<Attention> {
        let (&[batch, groups, heads, width], &[_, _, keys, _]) = (&a.q.shape[..], &a.k.shape[..]) else {
            return Err(Error::malformed("attention of other dimensions"));
        };
        Ok(Attention {
            sizes: [batch, groups, heads, keys, width],
            q: Operand::of(plan, &a.q),
            k: Operand::of(plan, &a.k),
            v: Operand::of(plan, &a.v),
            mask: a.mask.as_ref().map(|m| Operand::of(plan, m)),
            scale: a.scale,
        })
    }

    /// The kernel. Operands: queries, keys, values, the mask if there is one, the result.
    pub fn kernel(&self, arch: Arch, multiprocessors: usize) -> Result<Kernel> {
        let [batch, groups, heads, keys, width] = self.sizes;
        let dtype = self.q.dtype;
        let halves = matches!(dtype, DType::BF16 | DType::F16);
        if !halves || !width.is_multiple_of(8) || width > 256 || heads > 8 || heads * width > 1024 {
            return Err(Error::unsupported(format!(
                "attention of {heads} heads of {width} {dtype}"
            )));
        }
        let number = |o: &Operand, name: &str, dims: &[usize]| {
            let lines = dims
                .iter()
                .map(|d| format!("#define {name}{d} {}ll\n", o.strides[dims_at(dims, *d)]));
            lines.collect::<String>()
        };
        let mask = self.mask.as_ref().map_or("#define NO_MASK\n".to_string(), |m| {
            format!("#define MASK {}\n{}", stored(m.dtype), number(m, "M", &[0, 1, 2, 3]))
        });
        let blocks = batch * groups;
        let fits = |split: &usize| *split == 1 || arch >= CLUSTERS && keys >= split * LEAST;
        let wanted = |split: &usize| blocks * split >= multiprocessors;
        let mut all = SPLITS.into_iter().filter(fits);
        let split = all.clone().find(wanted).or(all.next_back()).unwrap_or(1);
        // What a warp leaves takes shared memory, what it has on its way registers.
        let warps = if width <= 64 && heads * width <= 512 { 16 } else { 8 };
        let source = format!(
            "{PRELUDE}\n#define T {}\n#define WIDTH {width}\n#define HEADS {heads}\n#define SPLIT {split}\n\
             #define WARPS {warps}\n\
             #define SCALE {:e}\n{}{}{}{mask}{TEXT}",
            stored(dtype),
            self.scale,
            number(&self.q, "Q", &[0, 1, 2]),
            number(&self.k, "K", &[0, 1, 3]),
            number(&self.v, "V", &[0, 1, 3]),
        );
        let masks = self.mask.as_ref().map(|m| m.dtype.size());
        Ok(Kernel {
            name: "attention".into(),
            source,
            blocks: [split, groups, batch].map(|n| n as u32),
            threads: 32 * warps,
            alignments: [16, 16, 16].into_iter().chain(masks).chain([dtype.size()]).collect(),
            numbers: vec![keys as u64],
        })
    }
}

/// Which stride of an operand a name in the text means: keys have no heads of their own.
fn dims_at(dims: &[usize], dim: usize) -> usize {
    match dims {
        [0, 1, 3] if dim == 3 => 2,
        _ => dim,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::testing::has;
    use crate::nvrtc;

    fn attention(sizes: [usize; 5], dtype: DType, mask: Option<DType>) -> Attention {
        let [batch, groups, heads, keys, width] = sizes;
        Attention {
            sizes,
            q: Operand::dense(dtype, &[batch, groups, heads, width]),
            k: Operand::dense(dtype, &[batch, groups, keys, width]),
            v: Operand::dense(dtype, &[batch, groups, keys, width]),
            mask: mask.map(|m| Operand::dense(m, &[batch, groups, heads, keys])),
            scale: 0.125,
        }
    }

    #[test]
    fn many_keys_are_shared_by_a_cluster() {
        let split = |sizes, arch| {
            let kernel = attention(sizes, DType::BF16, None).kernel(arch, 132).unwrap();
            kernel.blocks
        };
        let hopper = Arch::new(9, 0);
        assert_eq!(split([1, 8, 4, 1088, 64], hopper), [8, 8, 1]);
        assert_eq!(split([16, 8, 4, 1088, 64], hopper), [2, 8, 16]);
        assert_eq!(split([1, 8, 4, 100, 64], hopper), [1, 8, 1]);
        assert_eq!(split([1, 8, 4, 1088, 64], Arch::new(8, 0)), [1, 8, 1]);
    }

    #[test]
    fn it_compiles() {
        if !has("NVRTC", nvrtc::version().err()) {
            return;
        }
        for (arch, mask) in [
            (Arch::new(8, 0), None),
            (Arch::new(9, 0), Some(DType::Bool)),
            (Arch::new(9, 0), Some(DType::F16)),
            (Arch::new(10, 0), Some(DType::F32)),
        ] {
            for (heads, width) in [(1, 8), (4, 64), (2, 96), (8, 128), (4, 256)] {
                let made = attention([2, 3, heads, 4096, width], DType::F16, mask).kernel(arch, 132);
                let made = made.unwrap();
                nvrtc::compile(&made.name, &made.source, arch).unwrap();
            }
        }
    }
}
