"""rolled back, by hypatia.compile in inference.

Found by seed 700721: hypatia: the compiled inference graph is wrong; it runs without kernel 'native plan': add_1 float64[8] on cuda:0: error 1.2e-07 to float64, eager's 0, allowed 1.1e-13; 1.2e-07 to eager
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
        self.w0 = nn.Parameter(T((5,), dtype='float64', seed=182, scale=0.5).make())
        self.w1 = nn.Parameter(T((5, 8), dtype='float64', seed=9100, scale=0.5).make())
        self.w2 = nn.Parameter(T((32, 1), dtype='float64', seed=6150, scale=0.5).make())
        self.w3 = nn.Parameter(T((32,), dtype='float64', seed=1228, scale=0.5).make())

    def forward(self, x0, x1, x2, x3):
        v0 = x3.detach()
        v1 = x3.contiguous()
        v2 = v1.exp_()
        v3 = v1.view_as(v1)
        v4 = v2 + v3 * 0.5
        v5 = F.hardswish(v4)
        v6 = v0[..., None]
        v7 = v2 + v5
        v8 = v4[0]
        v9 = v8 / (v3.abs() + 0.5)
        v10 = F.linear(v2, self.w1, self.w0)
        v12 = torch.exp(-v6.abs())
        v14 = F.linear(v6, self.w2, self.w3)
        v15 = v14[::2]
        return [v15, v10, v12, v7, v9, v15]


ENTRY = Entry(options=(('numerics', 'wider'), ('ilp_deadline_ms', 0)), form='graph')

CALLS = [
    Call((), kwargs=(('x3', T((8,), dtype='float64', seed=586)), ('x2', T((8,), dtype='int64', seed=6898)), ('x1', T((1,), seed=7737)), ('x0', T((8,), seed=2877)))),
    Call((), kwargs=(('x0', T((8,), seed=5127)), ('x1', T((1,), seed=4173)), ('x2', T((8,), dtype='int64', seed=3691)), ('x3', T((8,), dtype='float64', seed=2746))), change='replace'),
    Call((T((8,), values='nan', seed=1170), T((1,), values='nan', seed=528)), kwargs=(('x3', T((8,), dtype='float64', values='nan', seed=9961)), ('x2', T((8,), dtype='int64', values='nan', seed=8996))), change='load'),
    Call((T((8,), values='mixed', seed=2834), T((1,), seed=2145)), kwargs=(('x3', T((8,), dtype='float64', values='mixed', seed=6367)), ('x2', T((8,), dtype='int64', values='mixed', seed=5937))), change='load'),
    Call((), kwargs=(('x3', T((8,), dtype='float64', seed=396)), ('x2', T((8,), dtype='int64', seed=4110)), ('x1', T((1,), seed=7326)), ('x0', T((8,), seed=4343))), change='add'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
