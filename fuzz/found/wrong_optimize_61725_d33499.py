"""wrong, by hypatia.optimize in training.

Found by seed 61725: gradient of w0 is None, eager's torch.float32[32]
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w0 = nn.Parameter(T((32,), seed=6588, scale=0.5).make())
        self.w1 = nn.Parameter(T((32, 4), seed=7007, scale=0.5).make())
        self.w2 = nn.Parameter(T((16, 32), seed=684, scale=0.5).make())
        self.register_buffer("b3", T((4,), seed=6838, scale=0.5).make())
        self.w4 = nn.Parameter(T((16, 16), seed=3541, scale=0.5).make())
        self.w5 = nn.Parameter(T((16,), seed=9531, scale=0.5).make())
        self.w12 = nn.Parameter(T((5,), seed=7947, scale=0.5).make())
        self.w13 = nn.Parameter(T((5, 16), seed=8423, scale=0.5).make())

    def forward(self, a, b=()):
        x0, x1, x2, x3, = [*(a if isinstance(a, (list, tuple)) else [a]), *(b if isinstance(b, (list, tuple)) else [b])]
        v0 = F.linear(x0, self.w1, self.w0)
        v1 = F.linear(v0, self.w2)
        v2 = v1.transpose(-1, -2) @ v1
        v3 = self.b3.copy_(x0.detach().reshape(-1, x0.shape[-1])[0])
        v4 = F.linear(v2, self.w4, self.w5)
        v5 = v4 * v2
        v20 = v5.detach()
        v22 = v20.div_(3.0)
        v25 = F.linear(v5, self.w13, self.w12)
        return v25


ENTRY = Entry(name='optimize', training=True, options=(('verify', 'off'), ('disabled_rules', ('transpose-linear', 'permute-before-merge', 'cat-inputs', 'tanh-through-permute', 'fused-mlp-gelu-tanh', 'twice', 'cast-through-permute', 'pow-one', 'conv-batch-norm', 'rms-norm-into-linear', 'layer-norm-var-mean', 'relu-abs', 'softmax-cast', 'gelu-of-erf', 'dropout-none', 'rms-norm', 'bmm-expanded-reshaped', 'mm-is-linear', 'scale-rows-bias', 'min-item', 'slice-of-cat', 'add-through-permute', 'mul-one', 'linear-of-linear', 'expand-expand', 'fuse-linear-relu', 'div-div', 'softmax-shift', 'linear-batch-norm', 'relu-relu', 'slice-into-weight', 'transpose-bmm', 'scale-linear-bias', 'mish-of-softplus', 'layer-norm-reshape', 'linear-of-scaled', 'mul-number-through-permute', 'gelu_tanh-through-reshape', 'fused-mlp', 'lora-scaled', 'abs-relu', 'gelu-through-permute', 'neg-sub', 'softmax-largest', 'number-last-add', 'matmul-expanded', 'bmm-of-one', 'div-power-of-two', 'cast-none', 'add-inputs-bias', 'transpose-matmul', 'reshape-reshape', 'mm-left', 'matmul-is-linear', 'scale-conv-bias', 'pad-none', 'div-one', 'add-through-reshape', 'split-item', 'mean-before-linear', 'layer-norm-scale-into-linear', 'slice-none', 'mul-neg', 'fused-mlp-sigmoid', 'abs-neg', 'matmul-left', 'mul-expanded', 'select-before-linear', 'gelu_tanh-through-permute', 'fuse-linear-add', 'cat-inputs-biases', 'var-item', 'fuse-linear-sigmoid', 'copy-none', 'add-neg', 'linear-of-linear-bias', 'fuse-linear-gelu-tanh', 'cat-inputs-bias', 'sub-inputs', 'gelu-of-tanh', 'gelu-of-erf-scaled', 'log-softmax-f32', 'bmm-right', 'batch-norm-conv', 'conv-of-scaled', 'linear-of-divided', 'mm-right', 'slice-into-weight-and-bias', 'pow-two-is-mul', 'matmul-right', 'layer-norm-var-mean-div', 'batch-norm-conv-bias', 'layer-norm-item', 'scale-columns', 'mul-reciprocal', 'layer-norm-div', 'hardsigmoid-of-clamp', 'add-add', 'bmm-expanded', 'one-over', 'bmm-left', 'batch-norm-linear', 'mul-minus-one', 'silu-through-permute', 'scale-conv', 'fuse-add-layer-norm', 'fused-mlp-gelu', 'square-is-mul', 'cudnn-batch-norm-item', 'merge-bmms')), ('weight_copies', 0), ('ilp_deadline_ms', 0)), random_costs=190063849, again=True)

CALLS = [
    Call((T((4, 2, 4, 4), seed=3586, grad=True), [T((), seed=1393), T((), seed=9342, grad=True), T((16,), dtype='int32', seed=696)]), change='load'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
