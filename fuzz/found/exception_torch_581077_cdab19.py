"""exception, by torch.compile in training.

Found by seed 581077: a layer norm of images with channels last, in training on a GPU
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
        self.w0 = nn.Parameter(T((8,), seed=7090, scale=0.5).make())
        self.w1 = nn.Parameter(T((8,), seed=6476, scale=0.5).make())
        self.w2 = nn.Parameter(T((8, 8), seed=4140, scale=0.5).make())
        self.w3 = nn.Parameter(T((4, 8, 1, 1), seed=6280, scale=0.5).make())
        self.w7 = nn.Parameter(T((16, 6), seed=2525, scale=0.5).make())
        self.w18 = nn.Parameter(T((16,), seed=6096, scale=0.5).make())
        self.w21 = nn.Parameter(T((16, 16), seed=5496, scale=0.5).make())

    def forward(self, tree):
        x0, = tree
        v0 = x0.permute(0, 2, 3, 1)
        v1 = F.layer_norm(v0, (8,), self.w0, self.w1)
        v2 = F.linear(v1, self.w2, self.w1)
        v3 = v2.permute(0, 3, 1, 2)
        v4 = F.conv2d(v3, self.w3, None, padding=(1, 0))
        v8 = F.linear(v4, self.w7)
        v32 = F.linear(v8, self.w21, self.w18)
        return {"r0": v32, "r1": v32}


ENTRY = Entry(name='torch', training=True, options=(('verify', 'off'), ('disabled_rules', ('not-not', 'add-inputs', 'addmm-is-linear', 'add-through-permute', 'fuse-swiglu', 'conv-of-scaled', 'silu-of-sigmoid', 'div-expanded', 'add-weights', 'mul-neg', 'one-over', 'gelu_tanh-through-permute', 'transpose-linear', 'layer-norm-reshape', 'sub-expanded', 'mean-before-linear', 'softmax-cast', 'zero-sub', 'bmm-of-one', 'matmul-is-linear', 'layer-norm-scale-into-linear', 'slice-before-fill', 'fused-mlp-tanh', 'layer-norm', 'cast-through-permute', 'div-one', 'mul-div')), ('ilp_deadline_ms', 0)), random_costs=439157324)

CALLS = [
    Call(([T((3, 8, 5, 6), layout='channels last', seed=4667, grad=True)],)),
    Call(([T((3, 8, 5, 6), values='zeros', layout='channels last', seed=7769, grad=True)],), change='add'),
    Call(([T((3, 8, 5, 6), values='zeros', layout='channels last', seed=2673, grad=True)],), change='zero'),
    Call(([T((3, 8, 5, 6), values='nan', layout='steps', seed=4544, grad=True)],), change='replace'),
    Call(([T((3, 8, 5, 6), layout='channels last', seed=6764, grad=True)],)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
