"""wrong, by torch.compile in inference.

Found by seed 580688: a norm over one number overflows, on a GPU
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
        self.w0 = nn.Parameter(T((8,), dtype='bfloat16', seed=5397, scale=0.5).make())
        self.w1 = nn.Parameter(T((4, 8, 1, 1), dtype='bfloat16', seed=7618, scale=0.5).make())
        self.w2 = nn.Parameter(T((8, 4, 1, 1), dtype='bfloat16', seed=6940, scale=0.5).make())
        self.w4 = nn.Parameter(T((4, 8, 1, 1), dtype='bfloat16', seed=5912, scale=0.5).make())
        self.w5 = nn.Parameter(T((8, 4, 1, 1), dtype='bfloat16', seed=43, scale=0.5).make())
        self.w8 = nn.Parameter(T((1,), dtype='bfloat16', seed=8375, scale=0.5).make())
        self.w11 = nn.Parameter(T((4, 8, 1, 1), dtype='bfloat16', seed=2975, scale=0.5).make())
        self.w15 = self.w8
        self.w16 = self.w11
        self.w17 = self.w2
        self.w27 = nn.Parameter(T((8, 8, 3, 3), dtype='bfloat16', seed=5802, scale=0.5).make())
        self.w28 = nn.Parameter(T((8, 8, 1, 1), dtype='bfloat16', seed=6500, scale=0.5).make())
        self.w29 = nn.Parameter(T((8,), dtype='bfloat16', seed=197, scale=0.5).make())

    def forward(self, x0):
        v0 = F.normalize(x0, dim=-4)
        v1 = v0 * self.w0[:, None, None]
        v2 = F.avg_pool2d(v1, 3, stride=2, padding=1)
        v3 = F.adaptive_avg_pool2d(v2, 1)
        v4 = F.conv2d(v3, self.w1)
        v5 = F.conv2d(torch.relu(v4), self.w2)
        v6 = v2 * torch.sigmoid(v5)
        v10 = v6.mean((2, 3), keepdim=True)
        v11 = F.conv2d(v10, self.w4)
        v12 = F.conv2d(torch.relu(v11), self.w5)
        v14 = v3.clone()
        v15 = v14.add_(1.0)
        v19 = v6.mean((2, 3), keepdim=True)
        v27 = v14 * torch.rsqrt(v14.pow(2).mean(-1, keepdim=True) + 1e-5) * self.w15
        v28 = F.adaptive_avg_pool2d(v27, 1)
        v29 = F.conv2d(v28, self.w16)
        v30 = F.conv2d(torch.relu(v29), self.w17)
        v31 = v27 * torch.sigmoid(v30)
        v36 = F.silu(v10)
        v39 = F.gelu(x0)
        v40 = torch.div(v19, v39.abs() + 0.5, rounding_mode='floor')
        v43 = torch.remainder(v14, v12.abs() + 0.5)
        v44 = v43.chunk(2, 1)[0] * v43.chunk(2, 1)[1].sigmoid()
        v45 = F.conv2d(v31, self.w27, padding=1)
        v46 = F.relu6(v45)
        v47 = F.conv2d(v46, self.w28, self.w29, padding=(1, 0))
        v48 = v47 - v31
        v49 = v48.unflatten(1, (2, -1)).sum(1)
        v50 = v1.sum(-3) / 1
        return [v50, v44, v36, v49, v40, v50]


ENTRY = Entry(name='torch', options=(('verify', 'off'), ('ilp_deadline_ms', 0)), random_costs=427520496)

CALLS = [
    Call((T((1, 8, 6, 4), dtype='bfloat16', layout='channels last', seed=7209),)),
    Call((T((11, 8, 6, 4), dtype='bfloat16', layout='steps', seed=9461),), change='copy'),
    Call((T((1, 8, 6, 4), dtype='bfloat16', values='nan', layout='channels last', seed=5073),), change='copy'),
    Call((T((1, 8, 6, 4), dtype='bfloat16', values='huge', layout='channels last', seed=9650),)),
    Call((T((11, 8, 6, 4), dtype='bfloat16', values='inf', layout='channels last', seed=5374),)),
    Call((), kwargs=(('x0', T((1, 8, 6, 4), dtype='bfloat16', layout='channels last', seed=272)),), change='load'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
