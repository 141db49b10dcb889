//! Programs that plans are tested on.

/// Programs that have a plan, with the number of its steps.
pub const PLANNED: &[(&str, usize)] = &[
    ("(tuple (relu (linear w:[33,17] b:[33] x:[5,17])))", 1),
    (
        "(tuple (linear w2:[10,40] b2:[10] (relu (linear w1:[40,20] b1:[40] x:[7,20]))))",
        2,
    ),
    (
        "(tuple (add r:[7,20] (linear w2:[20,40] none (gelu (linear w1:[40,20] b1:[40] x:[7,20])))))",
        2,
    ),
    (
        "(tuple (linear w3:[8,24] none (mul (silu (linear w1:[24,16] none x:[2,5,16])) (linear w2:[24,16] none x))))",
        4,
    ),
    ("(tuple (relu (addmm b:[9] x:[5,7] w:[7,9])) (mm y:[2,7] w))", 2),
    // Activations of several ops.
    ("(tuple (tanh (hardswish (mul 4.0 x:[5,7]))))", 1),
    ("(tuple (tanh (hardsigmoid (mul 4.0 x:[5,7]))))", 1),
    ("(tuple (tanh (leaky_relu x:[5,7] 0.2)))", 1),
    ("(tuple (tanh (elu x:[5,7] 1.5)))", 1),
    ("(tuple (tanh (softplus (mul 4.0 x:[5,7]) 2.0 3.0)))", 1),
    ("(tuple (tanh (mish x:[5,7])))", 1),
    // Two products that are added: one step takes the other's result.
    (
        "(tuple (add (linear w1:[9,7] none (tanh x:[5,7])) (linear w2:[9,8] none (tanh y:[5,8]))))",
        4,
    ),
    // Parts of a merged product that are results are written where they belong.
    (
        "(let h (linear w:[24,16] b:[24] x:[5,16]))
         (tuple (slice h -1 0 10 1) (exp (slice h -1 10 16 1)) (reshape (slice h -1 16 24 1) [5,2,4]))",
        4,
    ),
    (
        "(let h (split (mm x:[5,16] w:[16,24]) [4,20] -1)) (tuple (getitem h 0) (getitem h 1))",
        2,
    ),
    // Parts that are only read are not.
    (
        "(let h (linear w:[24,16] none x:[5,16])) (tuple (mul (slice h -1 0 12 1) (slice h -1 12 24 1)))",
        2,
    ),
    // Neither are parts that overlap.
    (
        "(let h (linear w:[24,16] none x:[5,16])) (tuple (slice h -1 0 14 1) (slice h -1 12 24 1))",
        3,
    ),
    // Narrow products of two activations.
    ("(tuple (relu (mm x:[256,260] y:[260,40])))", 1),
    (
        "(tuple (matmul x:[2,130,256] y:[256,64]) (relu (matmul x w:[256,8])))",
        2,
    ),
    ("(tuple (mm x:[256,256] (permute y:[33,256] [1,0])))", 1),
    ("(tuple (add (linear y:[32,256] b:[32] x:[2,140,256]) r:[2,140,32]))", 1),
    (
        "(tuple (mm x:[256,256] (slice y:[300,40] -2 0 256 1)) (mm x (exp z:[256,33])))",
        4,
    ),
    ("(tuple (add (mul (exp x:[3,4,5]) y:[4,1]) 1.5))", 1),
    ("(tuple (where (gt x:[9] 0.25) (sub x 1.0) (clamp x none 0.0)))", 1),
    ("(tuple (tanh x:[6,7]) (sigmoid x))", 2),
    ("(tuple (softmax x:[3,5,7] -1) (log_softmax x -1))", 2),
    ("(tuple (layer_norm x:[4,6] [6] w:[6] b:[6] 1e-5))", 1),
    ("(tuple (layer_norm (add x:[4,6] r:[4,6]) [6] w:[6] none 1e-5))", 1),
    ("(tuple (rms_norm (mul x:[2,3,6] 0.5) [6] w:[6] 1e-5))", 1),
    (
        "(tuple (sum x:[4,6] [-1] false) (mean (exp x) [-1] true) (amax x [-2,-1] false))",
        3,
    ),
    // Every second value lies in a result that is not written yet, some of them in the later one of two.
    (
        "(tuple (softmax (layer_norm (softmax (layer_norm x:[3,16] [16] none none 1e-5) -1) [16] none none 1e-5) -1))",
        4,
    ),
    (
        "(tuple (layer_norm (softmax (layer_norm x:[4,6] [6] none none 1e-5) -1) [6] none none 1e-5) (softmax (softmax x -1) -1))",
        5,
    ),
];

/// Programs of views, with the number of steps.
pub const VIEWED: &[(&str, usize)] = &[
    ("(tuple (relu (permute x:[3,4,5] [2,0,1])))", 1),
    ("(tuple (add (slice x:[3,8] -1 0 4 1) (slice x -1 4 8 1)))", 1),
    ("(tuple (reshape (permute (exp x:[3,4,5]) [1,0,2]) [4,15]))", 2),
    ("(tuple (permute (exp x:[3,4]) [1,0]))", 2),
    (
        "(tuple (mul (select x:[3,4,5] -2 1) 2.0) (softmax (permute x [0,2,1]) -1))",
        2,
    ),
    ("(tuple (linear w:[6,4] none (slice x:[5,8] -1 2 6 1)))", 1),
    ("(tuple (linear w:[6,4] none (permute x:[4,5] [1,0])))", 2),
    ("(tuple (add (expand x:[4,1] [4,7]) y:[4,7]))", 1),
    // Rotary positions: halves that are put together inside a region, of a permuted tensor and of a dense one.
    (
        "(let q (permute (reshape x:[2,5,32] [2,5,4,8]) [0,2,1,3]))
         (let r (add (mul q c:[5,8]) (mul (cat -1 (neg (slice q -1 4 8 1)) (slice q -1 0 4 1)) s:[5,8])))
         (tuple (reshape (permute r [0,2,1,3]) [2,5,32]))",
        1,
    ),
    ("(tuple (mul 2.0 (cat -2 (exp x:[6,5]) y:[6,5])))", 1),
    (
        "(tuple (relu (getitem (split x:[5,9] [2,3,4] -1) 1)) (relu (getitem (split x [2,3,4] -1) 2)))",
        2,
    ),
];
