"""internal, by hypatia.compile in training.

Found by seed 582631: the check of the first call fills whole numbers of 64 bits, on a GPU
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
        self.w0 = nn.Parameter(T((96,), dtype='bfloat16', seed=296, scale=0.5).make())
        self.w1 = nn.Parameter(T((2, 96), dtype='bfloat16', seed=1516, scale=0.5).make())
        self.w2 = nn.Parameter(T((32, 2), dtype='bfloat16', seed=6136, scale=0.5).make())

    def forward(self, x0, x1, x2):
        v0 = x1.to(torch.bfloat16)
        v1 = v0.flatten()
        v2 = v0 / v1
        v3 = v2 * 3.0
        v4 = torch.where(v3 > v1, v3, v1)
        v5 = 1e-05 + x0
        v6 = v5.std((0,), keepdim=False)
        v7 = v3.flatten(0)
        v8 = x2.remainder(4)
        v9 = v8[1::3]
        v10 = v6.view_as(v6)
        v11 = v10.reshape(-1)
        v12 = v2.unflatten(-1, (2, 1, 2))
        v13 = torch.einsum('...k,kn->...n', v12, self.w1)
        v14 = v13 + self.w0
        v15 = v14.split(32, -1)[0]
        v16 = v14.split(32, -1)[1]
        v17 = v14.split(32, -1)[2]
        v18 = v15.reshape(v15.shape[0], v15.shape[1], 4, 8).transpose(1, 2)
        v19 = v16.reshape(v16.shape[0], v16.shape[1], 4, 8).transpose(1, 2)
        v20 = v17.reshape(v17.shape[0], v17.shape[1], 4, 8).transpose(1, 2)
        v21 = F.scaled_dot_product_attention(v18, v19, v20, is_causal=True)
        v22 = v21.transpose(1, 2).reshape(v21.shape[0], v21.shape[2], -1)
        v23 = torch.einsum('...k,kn->...n', v22, self.w2)
        v24 = v12 + v23
        v25 = v2 > 3.0
        return (v25, v4, v24, v9, v7, v11,)


ENTRY = Entry(training=True, options=(('ilp_deadline_ms', 0),))

CALLS = [
    Call((T((4,), dtype='bfloat16', seed=3625, grad=True), T((4,), dtype='bfloat16', seed=5935, grad=True)), kwargs=(('x2', T((16,), dtype='int64', seed=9745)),)),
    Call((T((6,), dtype='bfloat16', seed=6469, grad=True), T((6,), dtype='bfloat16', values='tiny', seed=4571, grad=True)), kwargs=(('x2', T((16,), dtype='int64', seed=1585)),), change='zero'),
    Call((T((6,), dtype='bfloat16', values='nan', seed=8847, grad=True), T((6,), dtype='bfloat16', values='nan', seed=5392, grad=True)), kwargs=(('x2', T((16,), dtype='int64', values='nan', seed=1208)),)),
    Call((T((4,), dtype='bfloat16', values='zeros', seed=7641, grad=True), T((4,), dtype='bfloat16', values='zeros', seed=9207, grad=True)), kwargs=(('x2', T((16,), dtype='int64', values='zeros', seed=8359)),), change='copy'),
    Call((T((4,), dtype='bfloat16', values='huge', seed=4151, grad=True),), kwargs=(('x2', T((16,), dtype='int64', values='huge', seed=3147)), ('x1', T((4,), dtype='bfloat16', seed=2463, grad=True))), change='load'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
