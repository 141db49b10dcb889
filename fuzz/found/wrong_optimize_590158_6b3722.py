"""wrong, by hypatia.optimize in inference.

Found by seed 590158: result 0: 32 of 64 values are wrong, at [1, 0, 0]: -4.59177481e-41, eager -4.54062741e-41, float64 -4.54053855e-41
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
        self.w0 = nn.Parameter(T((24, 1), seed=7387, scale=0.5).make())
        self.w1 = nn.Parameter(T((1,), seed=2544, scale=0.5).make())
        self.w2 = nn.Parameter(T((8, 1), seed=2051, scale=0.5).make())

    def forward(self, x0, x1, x2):
        v0 = x1 * x0
        v1 = torch.neg(v0)
        v2 = F.linear(v1, self.w0)
        v3 = v2.split(8, -1)[0]
        v4 = v2.split(8, -1)[1]
        v5 = v2.split(8, -1)[2]
        v6 = v3.reshape(v3.shape[0], v3.shape[1], 2, 4).transpose(1, 2)
        v7 = v4.reshape(v4.shape[0], v4.shape[1], 2, 4).transpose(1, 2)
        v8 = v5.reshape(v5.shape[0], v5.shape[1], 2, 4).transpose(1, 2)
        v9 = v6 @ v7.transpose(-2, -1) * 0.5
        v10 = v9.softmax(-1)
        v11 = torch.matmul(v10, v8)
        v12 = v11.transpose(1, 2).reshape(v11.shape[0], v11.shape[2], -1)
        v13 = torch.einsum('...k,kn->...n', v12, self.w2)
        v14 = v13 + self.w1
        v15 = v1 + v14
        v16 = torch.remainder(v14, v15.abs() + 0.5)
        v17 = x2.remainder(5)
        v18 = v12.movedim(-3, 0)[v17]
        return (v18, v16, v18,)


ENTRY = Entry(name='optimize', options=(('ilp_deadline_ms', 0),), form='graph', dynamic=True)

CALLS = [
    Call((T((5, 4, 1), seed=1777), T((1,), seed=7146), T((2,), dtype='int64', seed=1415))),
    Call((T((11, 4, 1), values='tiny', seed=9303), T((1,), values='tiny', seed=6457), T((2,), dtype='int64', values='tiny', seed=4111))),
    Call((T((5, 4, 1), values='ties', seed=688), T((1,), values='ties', seed=3446), T((2,), dtype='int64', seed=1479)), change='zero'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
