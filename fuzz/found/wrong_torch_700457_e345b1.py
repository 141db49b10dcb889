"""wrong, by torch.compile in training.

Found by seed 700457: gradient of input 2: 1 of 36 values are wrong, at [1, 1, 3]: 359.576385, eager 0, float64 0
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
        self.w0 = nn.Parameter(T((16,), seed=9263, scale=0.5).make())
        self.w1 = nn.Parameter(T((16, 4), seed=8799, scale=0.5).make())
        self.w2 = nn.Parameter(T((16, 4), seed=599, scale=0.5).make())
        self.w3 = nn.Parameter(T((16,), seed=7337, scale=0.5).make())
        self.w4 = nn.Parameter(T((4, 16), seed=8100, scale=0.5).make())
        self.w5 = nn.Parameter(T((4,), seed=58, scale=0.5).make())
        self.w6 = self.w4

    def forward(self, x0, x1, x2):
        v0 = 100.0 / x2
        v1 = x2[:3, 0, 0::3]
        v2 = F.linear(v0, self.w1, self.w0)
        v3 = v2.reshape(v2.shape[0], v2.shape[1], 2, 8).transpose(1, 2)
        v4 = F.linear(v0, self.w2, self.w0)
        v5 = v4.reshape(v4.shape[0], v4.shape[1], 2, 8).transpose(1, 2)
        v6 = torch.einsum('...k,kn->...n', v0, self.w4)
        v7 = v6 + self.w3
        v8 = v7.reshape(v7.shape[0], v7.shape[1], 2, 8).transpose(1, 2)
        v9 = v3 @ v5.transpose(-2, -1) / 8
        v10 = v9.softmax(-1)
        v11 = torch.matmul(v10, v8)
        v12 = v11.transpose(1, 2).reshape(v11.shape[0], v11.shape[2], -1)
        v13 = torch.matmul(v12, self.w6.t())
        v14 = v13 + self.w5
        return {"r0": v14, "r1": v1}


ENTRY = Entry(name='torch', training=True, options=(('freeze', False), ('ilp_deadline_ms', 0)))

CALLS = [
    Call((T((3, 3, 4), seed=9043, grad=True), T((4,), seed=3499, grad=True), T((3, 3, 4), seed=894, grad=True))),
    Call((T((3, 3, 4), seed=4326, grad=True), T((4,), seed=9730, grad=True), T((3, 3, 4), seed=7129, grad=True)), change='load'),
    Call((T((3, 3, 4), values='nan', seed=785, grad=True), T((4,), values='nan', seed=8073, grad=True)), kwargs=(('x2', T((3, 3, 4), values='nan', seed=517, grad=True)),)),
    Call((), kwargs=(('x0', T((3, 3, 4), values='ties', seed=458, grad=True)), ('x1', T((4,), values='ties', seed=1637, grad=True)), ('x2', T((3, 3, 4), values='ties', seed=8465, grad=True)))),
    Call((T((3, 3, 4), values='tiny', seed=6652, grad=True), T((4,), values='tiny', seed=2636, grad=True), T((3, 3, 4), values='tiny', seed=5468, grad=True))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
