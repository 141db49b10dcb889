"""wrong, by hypatia.compile in inference.

Found by seed 840107: result 1: 1 of 1 values are wrong, at [0, 0]: 0.249967709, eager -0.249967709, float64 -0.249967709
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
        self.register_buffer("b0", T((1,), dtype='int32', values='below 2', seed=1815).make())
        self.register_buffer("b1", T((2, 1)).make())
        self.w2 = nn.Parameter(T((16,), seed=9259, scale=0.5).make())
        self.w3 = nn.Parameter(T((16, 1), seed=3415, scale=0.5).make())
        self.w4 = nn.Parameter(T((1, 16), seed=5148, scale=0.5).make())
        self.w5 = nn.Parameter(T((32, 1), seed=8524, scale=0.5).make())
        self.w6 = nn.Parameter(T((32,), seed=9365, scale=0.5).make())
        self.w7 = nn.Parameter(T((1, 32), seed=7511, scale=0.5).make())

    def forward(self, a, b=()):
        x0, x1, x2, x3, = [*(a if isinstance(a, (list, tuple)) else [a]), *(b if isinstance(b, (list, tuple)) else [b])]
        v1 = x0[None]
        v2 = F.layer_norm(v1, v1.shape[-1:])
        v3 = v2 * v1
        v4 = v3 * 100.0
        v6 = v1.detach().reshape(-1, v1.shape[-1])[:1]
        v7 = self.b1.index_add_(0, self.b0, v6)
        v8 = self.b0.add_(1)
        v9 = self.b1.index_select(0, self.b0 % self.b1.shape[0]) * v6
        v11 = v6.reshape(1, 1, 1, 1)
        v12 = v11.reshape(-1)
        v15 = torch.matmul(v9, self.w3.t())
        v16 = v15 + self.w2
        v17 = F.gelu(v16)
        v18 = F.linear(v17, self.w4)
        v19 = torch.minimum(v18, v12)
        v21 = x1[None]
        v22 = torch.matmul(v19, self.w5.t())
        v23 = F.silu(v22)
        v24 = torch.einsum('...k,kn->...n', v19, self.w7)
        v25 = v24 + self.w6
        v26 = v23 * v25
        v27 = torch.matmul(v26, self.w7.t())
        v28 = torch.copysign(v27, v4)
        return [v7, (v28, v21, None), {'n': 3}]


ENTRY = Entry(options=(('verify', 'off'), ('disabled_rules', ('var-item', 'scale-bmm', 'slice-slice', 'abs-abs', 'fused-mlp-gelu-tanh', 'layer-norm-into-linear', 'add-inputs-biases', 'expand-none', 'linear-bias-batch-norm', 'log-softmax-shift', 'mul-reciprocal', 'lora-scaled', 'softmax-of-exp', 'gelu_tanh-through-permute', 'neg-sub', 'batch-norm-conv', 'max-item', 'fused-mlp-gelu', 'cast-none', 'one-over', 'fuse-linear-sigmoid', 'scale-columns', 'linear-of-scaled', 'mish-of-softplus', 'neg-neg', 'add-add', 'min-all', 'fused-mlp-silu')), ('ilp_deadline_ms', 0)))

CALLS = [
    Call((T((), seed=550), [T((), seed=7019), T((3,), dtype='int16', seed=7795), T((), seed=854)])),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
