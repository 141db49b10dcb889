//! Plans for a GPU mean what their programs do: the reference device runs them. No GPU is needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use egg::Id;
use hypatia_core::eval::{Mode, Val};
use hypatia_core::ir::node::Op;
use hypatia_core::ir::program::Program;
use hypatia_core::ir::text::{Weights, parse};
use hypatia_core::random::Random;
use hypatia_core::ty::{DType, Ty};
use hypatia_core::{Options, optimize};
use hypatia_runtime::device::{Device, Registered};
use hypatia_runtime::kernels::region::Read;
use hypatia_runtime::lower::plan::{Wish, lower};
use hypatia_runtime::plan::{Memory, Pool, Task, WindowOp};
use hypatia_runtime::reference::Reference;
use hypatia_runtime::step::ColumnKind;

const CUDA: &[Registered] = &[("cuda", &hypatia_cuda::ABILITIES)];

/// Whether a step is the one that a program is there for.
type Holds = fn(&Task) -> bool;

/// Programs, and what their plans must hold.
const PROGRAMS: &[(&str, Holds)] = &[
    // Put together of what is computed on the way, of what somebody else reads, and of what lies otherwise.
    (
        "(let y (tanh y:[3,4])) (tuple (linear w:[5,12] none (cat -1 (exp x:[3,4]) y (permute z:[4,3] [1,0]))) (exp y))",
        |s| matches!(s, Task::Region(r) if r.slices.len() == 3 && r.inputs.len() == 3),
    ),
    (
        "(tuple (cat -2 (exp x:[2,3]) y:[2,3]) (cat -1 x x))",
        |s| matches!(s, Task::Region(r) if r.slices.len() == 2),
    ),
    (
        "(tuple (add r:[7,20] (linear w:[20,40] b:[20] (relu (linear v:[40,16] c:[40] x:[7,16])))))",
        |s| matches!(s, Task::Linear(l) if l.r.is_some() && l.b.is_some()),
    ),
    (
        "(tuple (sum (exp x:[4,5,6]) [-3,-2] false) (softmax x -1))",
        |s| matches!(s, Task::Columns(c) if c.rows == 2),
    ),
    // Elements of columns that lie side by side, and several numbers of each.
    (
        "(tuple (var (exp x:[4,5,6]) [-1] 1.0 false) (vector_norm x [-2,-1] 2.0 true))",
        |s| matches!(s, Task::Columns(c) if matches!(c.kinds[..], [ColumnKind::Moments { .. }])),
    ),
    // Norms of groups of channels, and of whole images.
    (
        "(let y (conv x:bf16[2,6,6,5] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (relu (group_norm y 3 g:bf16[6] b:bf16[6] 1e-5)) (exp (group_norm y 1 none none 1e-5)))",
        |s| matches!(s, Task::Columns(c) if matches!(c.kinds[..], [ColumnKind::Moments { .. }])),
    ),
    // Attention in windows: biases and masks in two shapes, and windows put back.
    (
        "(let a (reshape (add (mul s:[6,2,5,5] 0.5) b:[2,5,5]) [2,3,2,5,5]))
(tuple (exp (softmax (reshape (add a m:[1,3,1,5,5]) [6,2,5,5]) -1)))",
        |s| matches!(s, Task::Rows(r) if r.shape == [2, 3, 2, 5, 5] && r.inputs.len() == 3),
    ),
    (
        "(let x (reshape (permute x:[2,3,4,5,6,7] [0,1,3,2,4,5]) [2,15,24,7]))
(tuple (tanh (add (add x r:[2,15,24,7]) b:[7])))",
        |s| matches!(s, Task::Region(r) if r.shape == [2, 3, 5, 4, 6, 7] && r.inputs.len() == 3),
    ),
    (
        "(let y (roll (exp x:[2,5,6,7]) [3,-2] [1,-2])) (tuple (tanh (add y r:[2,5,6,7])) (roll x [1,2,4] [0,3,3]))",
        |s| is_read(s, |r| matches!(r, Read::Rolled { by } if by[..] == [0, 2, 2, 0])),
    ),
    (
        "(tuple (mul (permute (roll x:[3,4,5] [2] [2]) [2,0,1]) r:[5,3,4]))",
        |s| is_read(s, |r| matches!(r, Read::Rolled { by } if by[..] == [3, 0, 0])),
    ),
    // Windows of an image, for a product over them.
    (
        "(let u (permute (unfold (unfold x:[2,4,7,5] -2 3 2) -2 3 2) [0,1,4,5,2,3]))
(let v (permute (reshape u [2,2,2,9,6]) [0,1,4,3,2]))
(tuple (linear w:[3,18] none (reshape v [2,12,18])))",
        |s| matches!(s, Task::Region(r) if r.shape == [2, 2, 3, 2, 3, 3, 2]),
    ),
    (
        "(let x (reshape (permute x:[1,3,4,5,6,7] [0,1,3,2,4,5]) [1,15,24,7])) (tuple (tanh (add x r:[1,15,24,7])))",
        |s| matches!(s, Task::Region(r) if r.shape == [1, 3, 5, 4, 6, 7] && r.inputs.len() == 2),
    ),
    // What repeats is computed where it is read.
    (
        "(tuple (mul x:[4,5,6] (rsqrt (add (sum (mul x x) [-1] true) 1e-5))) (exp (add x (tanh b:[6]))))",
        |s| matches!(s, Task::Region(r) if r.region.meaning().instructions.len() == 7 && r.outputs.len() == 2),
    ),
    (
        "(tuple (mul x:[4,5,6] (tanh (roll y:[6] [2] [0]))) (add x (exp (pad z:[5] [1,0] 0.5))))",
        |s| matches!(s, Task::Region(r) if r.shape == [4, 5, 6]),
    ),
    (
        "(tuple (mul x:[4,5,6] (tanh (cat -1 (exp y:[3]) z:[3]))))",
        |s| matches!(s, Task::Region(r) if r.shape == [4, 5, 6]),
    ),
    // One query for each head; keys and values of heads that share them are read where they are.
    (
        "(tuple (attention q:bf16[2,3,1,16] k:bf16[2,3,5,16] v:bf16[2,3,5,16] none false none))",
        |s| matches!(s, Task::Attention(a) if a.k.shape == [2, 3, 5, 16]),
    ),
    (
        "(let k (reshape (expand (reshape k:bf16[2,3,5,16] [2,3,1,5,16]) [2,3,4,5,16]) [2,12,5,16]))
(let v (reshape (expand (reshape v:bf16[2,3,5,16] [2,3,1,5,16]) [2,3,4,5,16]) [2,12,5,16]))
(tuple (attention (permute q:bf16[2,1,12,16] [0,2,1,3]) k v m:bf16[2,1,1,5] false 0.3))",
        |s| matches!(s, Task::Attention(a) if a.k.shape == [2, 3, 5, 16] && a.q.shape == [2, 3, 4, 16]),
    ),
    (
        "(let k (reshape (expand (reshape (permute k:bf16[2,5,3,16] [0,2,1,3]) [2,3,1,5,16]) [2,3,4,5,16]) [2,12,5,16]))
(let v (reshape (expand (reshape v:bf16[2,3,5,16] [2,3,1,5,16]) [2,3,4,5,16]) [2,12,5,16]))
(tuple (attention q:bf16[2,12,1,16] k v (lt m:bf16[5] 2) false none) (exp k))",
        |s| matches!(s, Task::Attention(a) if a.mask.is_some() && a.k.shape == [2, 3, 5, 16]),
    ),
    // Two groups of channels that are added: no reduction.
    (
        "(let y (conv x:bf16[2,6,6,5] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (relu (sum (mul (reshape y [2,2,3,6,5]) (sigmoid (reshape p:bf16[2,6] [2,2,3,1,1]))) [-4] false)))",
        |s| matches!(s, Task::Region(r) if r.shape == [2, 6, 5, 3]),
    ),
    // Gradients of weight and bias: the product gives both.
    (
        "(let g (reshape g:[2,8,24] [16,24]))
(tuple (mm (permute g [1,0]) (reshape x:[2,8,32] [16,32])) (sum g [-2] false))",
        |s| matches!(s, Task::Linear(l) if l.gradient.x_transposed && l.gradient.sums.is_some()),
    ),
    (
        "(let n (native_layer_norm x:[4,32] [32] w:[32] b:[32] 1e-5))
(tuple (mul 2.0 (getitem n 0)) (exp (getitem n 1)) (exp (getitem n 2)))",
        |s| matches!(s, Task::Norm(n) if n.centered && n.eps.is_some()),
    ),
    (
        "(let n (native_rms_norm x:[4,32] [32] w:[32] 1e-5)) (tuple (mul 2.0 (getitem n 0)) (exp (getitem n 1)))",
        |s| matches!(s, Task::Norm(n) if !n.centered && n.eps.is_some()),
    ),
    (
        "(let d (layer_norm_backward g:[4,32] x:[4,32] [32] m:[4,1] s:[4,1] w:[32] b:[32]))
(tuple (exp (getitem d 0)) (exp (getitem d 1)) (exp (getitem d 2)))",
        |s| matches!(s, Task::Norm(n) if n.centered && n.eps.is_none()),
    ),
    (
        "(let d (rms_norm_backward g:[4,32] x:[4,32] [32] s:[4,1] w:[32]))
(tuple (exp (getitem d 0)) (exp (getitem d 1)))",
        |s| matches!(s, Task::Norm(n) if !n.centered && n.eps.is_none()),
    ),
    (
        "(tuple (relu_backward (mm g:[7,9] w:[9,20]) h:[7,20]) (gelu_backward (exp h) h))",
        |s| matches!(s, Task::Region(_)),
    ),
    (
        "(tuple (silu (conv x:bf16[2,6,9,8] w:bf16[6,1,3,5] b:bf16[6] [2,1] [1,2] [1,2] 6)))",
        |s| matches!(s, Task::Depthwise(d) if d.inputs.len() == 2),
    ),
    // What is read several times takes nothing over; the other one does.
    (
        "(let a (conv x:bf16[1,6,5,5] w:bf16[6,1,5,5] none [1,1] [2,2] [1,1] 6))
(tuple (add (mul a a) (relu (conv a v:bf16[6,1,1,3] none [1,1] [0,1] [1,1] 6))) (exp a))",
        |s| matches!(s, Task::Depthwise(d) if d.window.size == [1, 3] && d.inputs.len() == 2),
    ),
    // Paddings, also such that crop, of what is dense, permuted, expanded and pointwise.
    (
        "(tuple (pad x:[2,3,5] [1,2,0,0,3,1] 0.5) (exp (pad (permute x [2,0,1]) [-1,2,1,-1] -2.0)))",
        |s| is_read(s, |r| matches!(r, Read::Within { .. })),
    ),
    (
        "(tuple (add y:[4,9] (pad (expand x:[1,5] [4,5]) [2,2] 1.0)) (neg (pad (exp y) [-1,-2,-1,0] 0.0)))",
        |s| is_read(s, |r| matches!(r, Read::Within { .. })),
    ),
    (
        "(let a (conv x:bf16[2,6,9,8] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (silu (conv (pad (silu a) [0,1,2,1] 0.25) v:bf16[6,1,3,5] b:bf16[6] [2,2] [0,0] [1,1] 6)))",
        |s| {
            is_read(
                s,
                |r| matches!(r, Read::Within { before, .. } if before[..] == [0, 2, 0, 0]),
            )
        },
    ),
    // Zeros around images are the convolution's own.
    (
        "(let a (conv x:bf16[2,6,9,8] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (silu (conv (pad (silu a) [0,1,2,1] 0.0) v:bf16[6,1,3,5] b:bf16[6] [2,2] [0,1] [1,1] 6)))",
        |s| matches!(s, Task::Depthwise(d) if d.window.padding == [2, 1] && d.x.shape == [2, 9, 8, 6]),
    ),
    (
        "(tuple (conv (pad x:[2,6,9,8] [3,1,0,2] 0.0) v:[6,1,4,3] none [1,2] [0,0] [2,1] 6))",
        |s| matches!(s, Task::Depthwise(d) if d.window.padding == [0, 3] && d.x.shape == [2, 9, 8, 6]),
    ),
    (
        "(tuple (conv (pad x:[2,6,9,8] [3,-2,-1,2] 0.0) v:[6,1,4,3] none [1,2] [1,0] [1,1] 6))",
        |s| matches!(s, Task::Depthwise(d) if d.window.padding == [1, 3] && d.x.shape == [2, 8, 6, 6]),
    ),
    // Where the region is of several parts, or before an op on rows, what is padded is a step of its own.
    (
        "(tuple (add (pad x:[4,3] [2,1] 0.0) (cat -1 (exp y:[4,3]) (neg (pad x [1,-1] 2.0)))))",
        |s| is_read(s, |r| matches!(r, Read::Within { .. })),
    ),
    (
        "(tuple (softmax (exp (pad x:[4,3] [2,1] 0.0)) -1) (softmax (pad x [0,2] -1.0) -1))",
        |s| is_read(s, |r| matches!(r, Read::Within { .. })),
    ),
    // Patches of an image with few channels, with a bias and what follows; odd windows are none.
    (
        "(tuple (relu (conv x:bf16[2,3,8,12] w:bf16[16,3,4,2] b:bf16[16] [4,2] [0,0] [1,1] 1)))",
        |s| matches!(s, Task::Linear(l) if l.m == 24),
    ),
    (
        "(tuple (reshape (conv x:f16[1,2,8,8] w:f16[8,2,2,2] none [2,2] [0,0] [1,1] 1) [1,8,16]))",
        |s| matches!(s, Task::Linear(l) if l.m == 16),
    ),
    // Parts of different sizes, put together before something pointwise or for results, repeated and turned.
    (
        "(tuple (relu (add (cat -1 x:[4,3] (exp y:[4,5]) z:[4,1]) b:[9])) (cat -2 x w:[2,3]))",
        |s| is_read(s, |r| matches!(r, Read::Beside { before, sizes, other: 2 } if before[1] == 3 && sizes[1] == 5)),
    ),
    (
        "(let t (cat -2 (expand c:[1,1,6] [2,1,6]) x:[2,7,6])) (tuple (add t p:[1,8,6]) (exp (permute (cat -2 x c2:[2,3,6]) [0,2,1])))",
        |s| is_read(s, |r| matches!(r, Read::Beside { before, .. } if before[..] == [0, 0, 0])),
    ),
    (
        "(let t (cat -2 c:[2,1,6] x:[2,7,6])) (tuple (mul t (softmax t -1)) (cat -1 a:i64[3,2] (mul a 3) b:i64[3,1]))",
        |s| is_read(s, |r| matches!(r, Read::Beside { .. })),
    ),
    (
        "(let a (relu (conv x:bf16[2,6,9,8] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6)))
(let b (relu (conv x v:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6)))
(tuple (relu (mul (cat -3 a (slice b -3 1 4 1)) s:bf16[1,9,1,1])))",
        |s| is_read(s, |r| matches!(r, Read::Beside { sizes, .. } if sizes[..] == [2, 9, 8, 6])),
    ),
    // Gathers along any dimension, by an index that is expanded, and turned afterwards.
    (
        "(let i (expand i:i64[4,5] [3,4,5]))
(tuple (add y:[3,4,5] (div (gather x:[3,4,6] -1 i) 3.0)) (exp (gather x -2 (expand j:i64[1,2,6] [3,2,6]))))",
        |s| is_read(s, |r| matches!(r, Read::At { size: 6, stride: 1, .. })),
    ),
    (
        "(let i (expand i:i64[4,5] [3,4,5]))
(tuple (add y:[3,5,4] (permute (gather (exp x:[3,4,6]) -1 i) [0,2,1])) (gather (permute x [0,2,1]) -1 j:i64[3,6,7]))",
        |s| is_read(s, |r| matches!(r, Read::At { size: 6, stride: 1, .. })),
    ),
    (
        "(tuple (softmax (exp (permute (gather x:[3,4,6] -1 i:i64[3,4,5]) [0,2,1])) -1))",
        |s| is_read(s, |r| matches!(r, Read::At { .. })),
    ),
    // Layers over places: gated, two with an activation between them, in parts, of a part and without a bias.
    (
        "(tuple (mul u:bf16[2,5,64] (permute (linear w:bf16[5,7] b:bf16[5] (permute x:bf16[2,7,64] [0,2,1])) [0,2,1])))",
        is_batch,
    ),
    (
        "(let h (gelu (linear w:bf16[9,7] b:bf16[9] (permute x:bf16[2,7,64] [0,2,1]))))
(tuple (add x (permute (linear v:bf16[7,9] c:bf16[7] h) [0,2,1])))",
        is_batch,
    ),
    (
        "(let h (linear w:bf16[18,7] b:bf16[18] (permute x:bf16[2,7,64] [0,2,1])))
(let g (mul (silu (slice h -1 0 9 1)) (slice h -1 9 18 1)))
(tuple (permute (linear v:bf16[7,9] none g) [0,2,1]))",
        is_batch,
    ),
    (
        "(let x (slice x:bf16[2,9,80] -1 8 72 1))
(tuple (exp (permute (linear w:bf16[5,7] none (permute (slice x -2 1 8 1) [0,2,1])) [0,2,1])))",
        is_batch,
    ),
    // Parts of what is made: also of what repeats, and of a chain.
    (
        "(let h (gelu (add x:[4,12] b:[12])))
(tuple (mul (slice h -1 0 6 1) (layer_norm (slice h -1 6 12 1) [6] w:[6] c:[6] 1e-5)))",
        |s| matches!(s, Task::Rows(r) if r.rows.prologue().is_some()),
    ),
    (
        "(let h (exp (mul m:[4,1] (sub x:[3,4,12] y:[4,12]))))
(tuple (mul (silu (slice h -1 0 6 1)) (slice h -1 6 12 1)) (exp (sub x 1.0)))",
        |s| matches!(s, Task::Region(r) if r.shape == [3, 4, 6]),
    ),
    (
        "(let h (add (mul x:[8,3] 2.0) (exp y:[8,1]))) (tuple (add (slice h -2 0 3 1) (slice h -2 4 7 1)))",
        |s| matches!(s, Task::Region(r) if r.shape == [3, 3]),
    ),
    // Poolings of all kinds, at sizes at which windows hang over the end.
    (
        "(let a (conv x:bf16[2,6,9,8] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (sub (avg_pool2d a [3,3] [1,1] [1,1] false false) a) (exp (avg_pool2d a [2,3] [2,2] [1,1] true true)))",
        |s| matches!(s, Task::Depthwise(d) if d.op == WindowOp::Pool(Pool::Mean { counts_padding: true }) && d.shape[1..3] == [5, 5]),
    ),
    (
        "(let a (conv x:bf16[2,6,9,8] w:bf16[6,1,3,3] none [1,1] [1,1] [1,1] 6))
(tuple (avg_pool2d a [3,3] [2,2] [1,1] true false) (relu (max_pool2d a [3,2] [3,2] [1,1] [1,3] true)))",
        |s| matches!(s, Task::Depthwise(d) if d.op == WindowOp::Pool(Pool::Max) && !d.after.is_input()),
    ),
];

/// The same of products that are large enough for longer rows.
const LARGE: &[(&str, Holds)] = &[
    // Rows that begin anywhere are written longer, for products and for sums over them ...
    (
        "(let g (mul (exp x:bf16[128,517]) s:bf16[128,1]))
(tuple (mm g w:bf16[517,1024]) (mm (permute g [1,0]) h:bf16[128,1024]) (sum g [-2] false))",
        |s| matches!(s, Task::Linear(l) if (l.x_stride, l.m) == (520, 128)),
    ),
    (
        "(let g (reshape (softmax x:bf16[2,64,517] -1) [128,517]))
(tuple (mm g w:bf16[517,1024]) (mm (permute g [1,0]) h:bf16[128,1024]))",
        |s| matches!(s, Task::Rows(r) if r.dense == [64 * 520, 520, 1]),
    ),
    // ... and copied where others see them.
    (
        "(tuple (mm g:bf16[128,517] w:bf16[517,1024]) (mm (permute g [1,0]) h:bf16[128,1024]) (exp g))",
        |s| matches!(s, Task::Region(r) if r.shape == [128, 520]),
    ),
];

/// Passes of training steps, with images that have channels last.
const TRAINING: &[(&str, Holds)] = &[
    // The norm of a batch, with what follows it, and moments that come with no mean.
    (
        "(let n (batch_norm_train x:[9,5] w:[5] b:[5] m:[5] v:[5] 1e-5 0.1))
(tuple (relu (getitem n 0)) (getitem n 1) (getitem n 2) (getitem n 3) (getitem n 4))",
        |s| matches!(s, Task::Columns(c) if c.kinds == [MOMENTS]),
    ),
    (
        "(let c (conv x:bf16[2,3,4,5] w:bf16[6,3,1,1] none [1,1] [0,0] [1,1] 1))
(let n (batch_norm_train c g:bf16[6] none m:bf16[6] v:bf16[6] 1e-5 0.1))
(tuple (relu (add (getitem n 0) y:bf16[2,6,4,5])) (getitem n 1) (getitem n 2) (getitem n 3) (getitem n 4))",
        |s| matches!(s, Task::Columns(c) if c.kinds == [MOMENTS] && c.shape == [2, 4, 5, 6] && c.rows == 3),
    ),
    (
        "(tuple (var (exp x:[9,5]) [-2] 1.0 true))",
        |s| matches!(s, Task::Columns(c) if c.kinds == [ColumnKind::Moments { correction: 1 }]),
    ),
    // Both sums of its gradient, with the ReLU before them; each kernel masks for itself.
    (
        "(let g (relu_backward g:[9,5] y:[9,5]))
(let d (batch_norm_backward g x:[9,5] w:[5] none none m:[5] f:[5] 1e-5))
(tuple (getitem d 0) (getitem d 1) (getitem d 2))",
        |s| matches!(s, Task::Columns(c) if c.kinds == [ColumnKind::Sum; 2] && c.inputs.len() == 4),
    ),
    (
        "(let g (relu_backward (permute g:bf16[2,3,4,6] [0,3,1,2]) (permute y:bf16[2,3,4,6] [0,3,1,2])))
(let d (batch_norm_backward g (permute x:bf16[2,3,4,6] [0,3,1,2]) w:bf16[6] none none m:f32[6] f:f32[6] 1e-5))
(tuple (permute (getitem d 0) [0,2,3,1]) (getitem d 1) (getitem d 2))",
        |s| matches!(s, Task::Columns(c) if c.kinds == [ColumnKind::Sum; 2] && c.inputs.len() == 4),
    ),
    // A gradient that somebody else reads is written once.
    (
        "(let g (relu_backward g:[9,5] y:[9,5]))
(let d (batch_norm_backward g x:[9,5] w:[5] none none m:[5] f:[5] 1e-5))
(tuple (getitem d 0) (getitem d 1) (getitem d 2) g)",
        |s| matches!(s, Task::Columns(c) if c.kinds == [ColumnKind::Sum; 2] && c.inputs.len() == 3),
    ),
];

const MOMENTS: ColumnKind = ColumnKind::Moments { correction: 0 };

/// Whether a step multiplies one matrix and each of a batch.
fn is_batch(step: &Task) -> bool {
    matches!(step, Task::Batch(b) if b.left.strides[0] == 0)
}

/// Whether a step is a region that reads an input so.
fn is_read(step: &Task, how: fn(&Read) -> bool) -> bool {
    matches!(step, Task::Region(r) if r.reads.iter().any(how))
}

fn numbers(value: &Val) -> Vec<f64> {
    match value {
        Val::Arr(a) => a.data.clone(),
        _ => vec![],
    }
}

fn memory(list: &mut [Vec<f32>]) -> Vec<Memory> {
    list.iter_mut().map(|v| Memory(v.as_mut_ptr().cast())).collect()
}

/// The outputs of a program's plan on the reference device, and what they should be.
fn results(text: &str, holds: Holds, wish: &Wish) -> (Vec<Vec<f32>>, Vec<Vec<f64>>) {
    let mut program = parse(text, Weights::Live).unwrap();
    let gpu = program.leaves.devices.index("cuda:0").unwrap();
    for input in &mut program.leaves.inputs {
        if let Ty::Tensor(t) = &mut input.ty {
            t.device = gpu;
        }
    }
    let program = Program::from_expr(&program.leaves, &program.expr().0).unwrap();
    let optimized = optimize(&program, &Options::default()).unwrap();
    let results = &program.node(program.root).children;
    let lowered = lower(&optimized, results.len(), wish).unwrap();
    let steps = &lowered.plan.steps;
    assert!(steps.iter().any(holds), "{text}: {steps:?}");
    let mut random = Random(5);
    let inputs = program.leaves.inputs.iter();
    let given: Vec<Val> = inputs.map(|i| random.value(&i.ty).unwrap()).collect();
    let leaf = |op: &Op, _: &[Val]| match op {
        Op::Input(i) => Ok(given[*i as usize].clone()),
        _ => Err(hypatia_core::Error::Graph("no input".into())),
    };
    let chosen: BTreeMap<Id, Val> = optimized.output.eval(&leaf, Mode::Real).unwrap();
    let meant = program.eval(&leaf, Mode::Real).unwrap();
    let single = |id: &Id| numbers(&chosen[id]).iter().map(|v| *v as f32).collect();
    let mut constants: Vec<Vec<f32>> = lowered.constants.iter().map(single).collect();
    let mut inputs: Vec<Vec<f32>> = lowered.inputs.iter().map(single).collect();
    let mut plan = lowered.plan;
    // 16-bit numbers are given and returned as f32.
    plan.values.iter_mut().for_each(|v| v.dtype = DType::F32);
    let plan = Arc::new(plan);
    let sizes = plan.outputs.iter().map(|id| plan.values[*id].numel());
    let mut outputs: Vec<Vec<f32>> = sizes.map(|n| vec![f32::NAN; n]).collect();
    // SAFETY: every vector has its value's size, and all live on.
    unsafe {
        let bound = Reference.bind(plan, &memory(&mut constants), vec![], ()).unwrap();
        let (inputs, outputs) = (memory(&mut inputs), memory(&mut outputs));
        Reference.run(&bound, (), &inputs, &outputs).unwrap();
    }
    (outputs, results.iter().map(|id| numbers(&meant[id])).collect())
}

#[test]
fn plans_for_a_gpu_compute_what_the_program_means() {
    compare(PROGRAMS, &Wish::on(CUDA));
}

#[test]
fn products_over_longer_rows_compute_what_the_program_means() {
    compare(LARGE, &Wish::on(CUDA));
}

#[test]
fn plans_of_training_steps_compute_what_the_program_means() {
    let wish = Wish {
        saved: true,
        images: true,
        ..Wish::on(CUDA)
    };
    compare(TRAINING, &wish);
}

fn compare(programs: &[(&str, Holds)], wish: &Wish) {
    for (text, holds) in programs {
        let (outputs, expected) = results(text, *holds, wish);
        assert_eq!(outputs.len(), expected.len(), "{text}");
        for (ours, right) in outputs.iter().zip(&expected) {
            assert_eq!(ours.len(), right.len(), "{text}");
            let scale = right.iter().fold(1.0f64, |m, v| m.max(v.abs()));
            for (a, b) in ours.iter().zip(right) {
                assert!((f64::from(*a) - b).abs() <= 1e-5 * scale, "{text}: {a} instead of {b}");
            }
        }
    }
}
