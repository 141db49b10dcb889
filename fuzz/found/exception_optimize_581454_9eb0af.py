"""exception, by hypatia.optimize in inference.

Found by seed 581454: a batch norm by cuDNN of an input with steps, on a GPU
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
        self.w0 = nn.Parameter(T((4,), seed=6862, scale=0.5).make())
        self.w1 = nn.Parameter(T((4,), seed=338, scale=0.5).make())
        self.register_buffer("b2", T((4,), seed=1857, scale=0.5).make())
        self.w3 = nn.Parameter(T((4, 2, 2, 2), seed=1803, scale=0.5).make())
        self.w4 = nn.Parameter(T((4, 2, 3, 3), seed=9551, scale=0.5).make())
        self.w5 = nn.Parameter(T((4, 6, 1, 2), seed=310, scale=0.5).make())
        self.w9 = nn.Parameter(T((4, 2, 1, 1), seed=3948, scale=0.5).make())

    def forward(self, x0):
        v0 = F.batch_norm(x0, self.b2, self.b2.abs() + 0.5, self.w0, self.w1)
        v1 = F.conv_transpose2d(v0, self.w3, None, stride=2)
        v2 = torch.addcmul(v1, v1, v1, value=0.5)
        v3 = F.conv2d(v2, self.w4, padding=1)
        v4 = torch.cat([v2, v3], 1)
        v6 = F.conv2d(v4, self.w5)
        v7 = F.avg_pool2d(v6, 2)
        v12 = F.adaptive_avg_pool2d(v2, 1)
        v13 = F.conv2d(v12, self.w9)
        v19 = v7.flatten()
        v21 = torch.div(v13, v0.abs() + 0.5, rounding_mode='floor')
        v22 = F.instance_norm(v21)
        return {"r0": v22, "r1": v19}


ENTRY = Entry(name='optimize', options=(('verify', 'off'), ('disabled_rules', ('gelu-through-permute', 'slice-none', 'attention-efficient-item', 'mul-div', 'batch-norm-linear', 'slice-of-cat', 'fuse-linear-silu', 'fuse-linear-gelu', 'rms-norm-div', 'div-power-of-two', 'layer-norm-div', 'div-expanded', 'fuse-linear-tanh', 'fused-mlp-gelu-tanh', 'fused-mlp-tanh', 'mul-expanded', 'bmm-right', 'bmm-expanded', 'cat-inputs', 'tanh-through-reshape', 'scale-columns', 'layer-norm-scale-into-linear', 'rms-norm-weight', 'log-softmax-shift', 'cast-cast', 'scale-rows-bias', 'fuse-add-rms-norm', 'slice-slice', 'fuse-linear-add', 'merge-linears', 'batch-norm-item', 'pad-none', 'divide-matmul', 'neg-through-reshape', 'gelu-of-tanh', 'var-item', 'merge-rows', 'neg-sub', 'twice', 'pow-one', 'mm-left', 'square-is-mul', 'rms-norm-item', 'mul-mul', 'reshape-none', 'lora', 'mish-of-softplus', 'linear-bias-batch-norm', 'bmm-left', 'add-expanded', 'divide-bmm', 'mul-number-through-reshape', 'gelu_tanh-through-permute', 'layer-norm-reshape', 'layer-norm-item')), ('ilp_deadline_ms', 0)), random_costs=871071427, examples=False)

CALLS = [
    Call((T((3, 4, 6, 6), layout='channels last', seed=2715),)),
    Call((T((3, 4, 6, 6), values='ties', seed=7618),), change='load'),
    Call((T((3, 4, 6, 6), layout='steps', seed=2117),), change='copy'),
    Call((T((3, 4, 6, 6), values='zeros', seed=9011),), change='zero'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
