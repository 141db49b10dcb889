"""exception, by hypatia.compile in inference.

Found by seed 820852: AttributeError: 'NoneType' object has no attribute 'shape'
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
        self.w0 = nn.Parameter(T((16,), seed=9816, scale=0.5).make())
        self.w1 = nn.Parameter(T((2, 16), seed=5588, scale=0.5).make())
        self.w2 = nn.Parameter(T((2,), seed=7281, scale=0.5).make())
        self.w3 = nn.Parameter(T((16, 2), seed=8735, scale=0.5).make())

    def forward(self, x0=None, other=None):
        x0 = x0 if other is None else other * 0.5
        v0 = torch.cat([x0, x0], 1).narrow(1, 0, 2)
        v1 = torch.cat(v0.chunk(2, -2)[::-1], -2)
        v2 = v1 ** 3
        v3 = torch.cat([v2.narrow(-1, 0, 4), v2.narrow(-1, 4, 4)], -1)
        v4 = v3 @ v3.transpose(-1, -2)
        v5 = v4 @ self.w1
        v6 = v5 + self.w0
        v7 = v6 * torch.sigmoid(v6)
        v8 = torch.einsum('...k,kn->...n', v7, self.w3)
        v9 = v8 + self.w2
        return (v9, v2,)


ENTRY = Entry(options=(('disabled_rules', ('cast-through-permute', 'gelu-of-erf-scaled', 'layer-norm-item', 'sigmoid-through-reshape', 'scale-rows-bias', 'sub-number', 'sum-of-products', 'number-last-add', 'mul-neg', 'div-number-through-permute', 'attention-cudnn-item', 'scale-columns', 'layer-norm-reshape', 'scale-rows', 'max-all', 'silu-through-reshape', 'number-last-mul', 'batch-norm-of-rows', 'layer-norm-weight', 'slice-none', 'linear-between-reshapes', 'attention-efficient-item', 'div-number-through-reshape', 'div-div', 'linear-of-linear', 'sum-before-linear', 'mul-number-through-permute', 'scale-linear-bias', 'gelu-of-erf', 'gelu_tanh-through-reshape', 'fused-mlp-gelu-tanh', 'linear-of-linear-bias', 'bmm-expanded-reshaped', 'min-item', 'add-zero', 'relu-abs', 'sub-zero', 'layer-norm-bias', 'clamp-clamp', 'add-through-reshape', 'batch-norm-item', 'merge-linears', 'mul-number-through-reshape', 'add-neg', 'fuse-linear-sigmoid', 'fuse-add-rms-norm', 'mul-expanded', 'matmul-is-linear', 'mul-neg-neg', 'divide-bmm', 'conv-bias-batch-norm', 'mul-minus-one', 'hardsigmoid-of-clamp', 'slice-slice', 'max-item', 'matmul-expanded')), ('freeze', True), ('ilp_deadline_ms', 0)))

CALLS = [
    Call((T((5, 2, 8), seed=7823),)),
    Call((None, T((5, 2, 8), values='ties', seed=8948))),
    Call((T((5, 2, 8), layout='steps', seed=5438),)),
    Call((T((5, 2, 8), values='huge', seed=8688),), change='zero'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
