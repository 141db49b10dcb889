"""exception, by hypatia.compile in training.

Found by seed 830316: RuntimeError: more than one element of the written-to tensor refers to a single memory location
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
        self.w0 = nn.Parameter(T((2,), seed=1090, scale=0.5).make())
        self.w1 = nn.Parameter(T((2, 5), seed=7238, scale=0.5).make())
        self.w2 = nn.Parameter(T((5, 5), seed=368, scale=0.5).make())
        self.w3 = nn.Parameter(T((5,), seed=642, scale=0.5).make())
        self.w4 = nn.Parameter(T((32,), dtype='bfloat16', seed=4428, scale=0.5).make())
        self.w5 = nn.Parameter(T((32, 2), dtype='bfloat16', seed=6356, scale=0.5).make())
        self.w6 = nn.Parameter(T((16, 32), dtype='bfloat16', seed=9293, scale=0.5).make())
        self.w7 = nn.Parameter(T((16, 8), dtype='bfloat16', seed=5624, scale=0.5).make())
        self.w8 = nn.Parameter(T((12,), seed=9188, scale=0.5).make())
        self.w9 = nn.Parameter(T((2, 12), seed=1857, scale=0.5).make())
        self.w10 = nn.Parameter(T((4, 2), seed=6713, scale=0.5).make())

    def forward(self, a, b=()):
        x0, x1, = [*(a if isinstance(a, (list, tuple)) else [a]), *(b if isinstance(b, (list, tuple)) else [b])]
        v0 = x0 * x1
        v2 = F.linear(v0, self.w1, self.w0)
        v3 = torch.fmin(v2, v2)
        v4 = v3.to(torch.bfloat16)
        v6 = torch.bmm(v0.mT, v0)
        v7 = v6 + 0.5
        v8 = v7 ** 2.0
        v9 = F.linear(v7, self.w2, self.w3)
        v10 = v9[..., -1]
        v12 = F.linear(v4, self.w5, self.w4)
        v13 = F.linear(v12, self.w6)
        v14 = torch.einsum('...k,kn->...n', v13, self.w7)
        v15 = torch.bmm(v3.mT, v3)
        v16 = torch.fmin(v15, v15)
        v17 = v15 @ self.w9
        v18 = v17 + self.w8
        v19 = v18.split(4, -1)[0]
        v20 = v18.split(4, -1)[1]
        v21 = v18.split(4, -1)[2]
        v22 = v19.reshape(v19.shape[0], v19.shape[1], 2, 2).transpose(1, 2)
        v23 = v20.reshape(v20.shape[0], v20.shape[1], 2, 2).transpose(1, 2)
        v24 = v21.reshape(v21.shape[0], v21.shape[1], 2, 2).transpose(1, 2)
        v25 = v22 @ v23.transpose(-2, -1) * 0.7071067811865476
        v26 = v25.softmax(-1)
        v27 = torch.matmul(v26, v24)
        v28 = v27.transpose(1, 2).reshape(v27.shape[0], v27.shape[2], -1)
        v29 = torch.einsum('...k,kn->...n', v28, self.w10)
        v30 = v29 + self.w0
        v31 = v15 + v30
        v32 = v31.unsqueeze(0)
        return {"r0": v31, "r1": v10, "r2": v8, "r3": v14, "r4": v16, "r5": v32}


ENTRY = Entry(training=True, options=(('ilp_deadline_ms', 0),), random_costs=401632126, examples=False)

CALLS = [
    Call((T((3, 4, 5), seed=139), [0.5])),
    Call((T((3, 4, 5), values='mixed', layout='expanded', seed=3173), [0.5]), change='load'),
    Call((T((3, 4, 5), seed=2847), [-0.25]), change='add'),
    Call((T((3, 4, 5), values='mixed', seed=4984), [-0.25])),
    Call((T((3, 4, 5), seed=397), [0.5])),
    Call((T((3, 4, 5), seed=2821), [-0.25])),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
