"""exception, by hypatia.compile in training.

Found by seed 820008: RuntimeError: view size is not compatible with input tensor's size and stride
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
        self.register_buffer("b0", T((1,), dtype='int64', values='below 3', seed=2914).make())
        self.w1 = nn.Parameter(T((5, 1), seed=5112, scale=0.5).make())
        self.w2 = nn.Parameter(T((3, 3), seed=4649, scale=0.5).make())
        self.w3 = nn.Parameter(T((3,), seed=4221, scale=0.5).make())
        self.w4 = nn.Parameter(T((16,), seed=2179, scale=0.5).make())
        self.w5 = nn.Parameter(T((16, 3), seed=5253, scale=0.5).make())
        self.w6 = nn.Parameter(T((3, 16), seed=9402, scale=0.5).make())
        self.w7 = self.w4
        self.w8 = nn.Parameter(T((16, 3), seed=6831, scale=0.5).make())
        self.w9 = nn.Parameter(T((3,), seed=9332, scale=0.5).make())
        self.w10 = nn.Parameter(T((3, 16), seed=9956, scale=0.5).make())
        self.w17 = nn.Parameter(T((3, 4), seed=7548, scale=0.5).make())
        self.w18 = nn.Parameter(T((3, 4), seed=2807, scale=0.5).make())
        self.w19 = nn.Parameter(T((3, 4), seed=9796, scale=0.5).make())
        self.w20 = nn.Parameter(T((3,), seed=1383, scale=0.5).make())
        self.w21 = self.w19

    def forward(self, x0):
        v0 = self.b0.add_(1)
        v1 = x0 + self.b0
        v2 = torch.matmul(v1, self.w1)
        v3 = v2.mT
        v4 = v3.transpose(-1, -2) @ v3
        v5 = F.rms_norm(v4, v4.shape[-1:])
        v6 = F.linear(v5, self.w2, self.w3)
        v10 = F.linear(v4, self.w5, self.w4)
        v11 = v10.reshape(v10.shape[0], v10.shape[1], 4, 4).transpose(1, 2)
        v12 = torch.einsum('...k,kn->...n', v4, self.w6)
        v13 = v12.reshape(v12.shape[0], v12.shape[1], 4, 4).transpose(1, 2)
        v14 = F.linear(v4, self.w8, self.w7)
        v15 = v14.reshape(v14.shape[0], v14.shape[1], 4, 4).transpose(1, 2)
        v16 = v11 @ v13.transpose(-2, -1) * 0.5
        v17 = F.softmax(v16, dim=-1)
        v18 = torch.matmul(v17, v15)
        v19 = v18.transpose(1, 2).reshape(v18.shape[0], v18.shape[2], -1)
        v20 = F.linear(v19, self.w10, self.w9)
        v21 = torch.abs(v19)
        v22 = torch.abs(v21)
        v23 = v22 ** 3
        v25 = v23.mT
        v35 = torch.einsum('...k,kn->...n', v25, self.w17)
        v36 = v35.reshape(v35.shape[0], v35.shape[1], 2, 2).transpose(1, 2)
        v37 = v25 @ self.w18
        v38 = v37.reshape(v37.shape[0], v37.shape[1], 2, 2).transpose(1, 2)
        v39 = v25 @ self.w19
        v40 = v39.reshape(v39.shape[0], v39.shape[1], 2, 2).transpose(1, 2)
        v41 = F.scaled_dot_product_attention(v36, v38, v40, is_causal=True)
        v42 = v41.transpose(1, 2).reshape(v41.shape[0], v41.shape[2], -1)
        v43 = torch.matmul(v42, self.w21.t())
        v44 = v43 + self.w20
        v45 = v25 + v44
        return [v45, v20, v6]


ENTRY = Entry(training=True, options=(('ilp_deadline_ms', 0),), form='clock')

CALLS = [
    Call((T((5, 3, 5), seed=8231, grad=True),)),
    Call((T((2, 3, 5), seed=767, grad=True),), change='add'),
    Call((), kwargs=(('x0', T((1, 3, 5), seed=3321, grad=True)),)),
    Call((T((5, 3, 5), values='inf', seed=2629, grad=True),), change='load'),
    Call((T((6, 3, 5), seed=6000, grad=True),), change='replace'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
