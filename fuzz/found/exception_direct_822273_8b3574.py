"""exception, by hypatia.compile in training.

Found by seed 822273: RuntimeError: dimensionality of sizes (1) must match dimensionality of strides (2) (torch 2.11)
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
        self.w0 = nn.Parameter(T((32, 16), seed=9290, scale=0.5).make())
        self.w2 = nn.Parameter(T((4, 16), seed=88, scale=0.5).make())
        self.w3 = nn.Parameter(T((8,), dtype='float16', seed=394, scale=0.5).make())
        self.w4 = nn.Parameter(T((8, 16), dtype='float16', seed=554, scale=0.5).make())
        self.w5 = nn.Parameter(T((16, 8), dtype='float16', seed=760, scale=0.5).make())
        self.w6 = nn.Parameter(T((2,), seed=663, scale=0.5).make())
        self.w7 = nn.Parameter(T((2, 4), seed=249, scale=0.5).make())
        self.w8 = nn.Parameter(T((17,), seed=1992, scale=0.5).make())
        self.w9 = nn.Parameter(T((17, 2), seed=103, scale=0.5).make())
        self.w10 = nn.Parameter(T((17, 4), seed=9764, scale=0.5).make())

    def forward(self, x0, x1, x2, x3):
        v0 = x0[0, :, :]
        v1 = 0.1 + v0
        v2 = 0.7 + v1
        v4 = torch.matmul(v2, self.w0.t())
        v5 = torch.log1p(v4.abs())
        v6 = v1.to(torch.bool)
        v7 = v5.clone(memory_format=torch.preserve_format)
        v8 = torch.linalg.vector_norm(v7, 1, -2)
        v9 = v6.to(torch.float16)
        v10 = torch.matmul(v1, self.w2.t())
        v15 = v9 - 0.125
        v16 = v15 + 2.0
        v17 = v16 + 1.0
        v19 = torch.max(v15, torch.zeros_like(v15))
        v21 = torch.matmul(v16, self.w4.t())
        v22 = v21 + self.w3
        v23 = torch.einsum('...k,kn->...n', v16, self.w5)
        v24 = v22 - v23
        v25 = torch.matmul(v10, self.w7.t())
        v26 = v25 + self.w6
        v27 = F.linear(v26, self.w9, self.w8)
        v28 = F.linear(v10, self.w10)
        v29 = v28 + v27
        return (v29, v8, v17, v19, v24, v22, v25,)


ENTRY = Entry(training=True, options=(('verify', 'off'), ('weight_copies', 0), ('ilp_deadline_ms', 0)))

CALLS = [
    Call((T((3, 1, 16), seed=7078), T((1, 1, 16), seed=3117, grad=True), T((1, 16), seed=173), T((3, 1, 16), dtype='int8', seed=7534))),
    Call((T((3, 1, 16), seed=652),), kwargs=(('x3', T((3, 1, 16), dtype='int8', seed=1774)), ('x2', T((1, 16), seed=107)), ('x1', T((1, 1, 16), seed=4644, grad=True)))),
    Call((T((3, 1, 16), seed=5574),), kwargs=(('x3', T((3, 1, 16), dtype='int8', seed=5027)), ('x2', T((1, 16), seed=3013)), ('x1', T((1, 1, 16), seed=5356, grad=True))), change='copy'),
    Call((T((3, 1, 16), seed=6397), T((1, 1, 16), seed=6839, grad=True), T((1, 16), seed=1791), T((3, 1, 16), dtype='int8', seed=2743))),
    Call((T((11, 1, 16), values='mixed', seed=114), T((1, 1, 16), values='mixed', seed=551, grad=True)), kwargs=(('x3', T((11, 1, 16), dtype='int8', values='mixed', seed=4077)), ('x2', T((1, 16), values='mixed', seed=2754)))),
    Call((T((2, 1, 16), values='huge', seed=6736), T((1, 1, 16), values='huge', layout='swapped', seed=8314, grad=True), T((1, 16), values='huge', layout='swapped', seed=1433), T((2, 1, 16), dtype='int8', values='huge', seed=7431)), change='add'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
