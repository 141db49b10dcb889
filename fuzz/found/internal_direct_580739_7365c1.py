"""internal, by hypatia.compile in inference.

Found by seed 580739: a view of what follows a convolution, on a GPU
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
        self.w0 = nn.Parameter(T((4, 3, 1, 1), seed=401, scale=0.5).make())
        self.w1 = nn.Parameter(T((3, 4, 1, 1), seed=7241, scale=0.5).make())
        self.w2 = nn.Parameter(T((3, 3, 3, 3), seed=1122, scale=0.5).make())
        self.w11 = nn.Parameter(T((4, 3, 1, 1), seed=4145, scale=0.5).make())
        self.w12 = nn.Parameter(T((3, 4, 1, 1), seed=8877, scale=0.5).make())

    def forward(self, x0, x1, x2, x3):
        v0 = torch.maximum(x0, x0)
        v1 = F.adaptive_avg_pool2d(v0, 1)
        v2 = F.conv2d(v1, self.w0)
        v3 = F.conv2d(torch.relu(v2), self.w1)
        v4 = v0 * torch.sigmoid(v3)
        v5 = F.conv2d(v4, self.w2, padding=1)
        v12 = x1.mul_(2).add_(1)
        v16 = F.adaptive_avg_pool2d(v5, 1)
        v17 = F.conv2d(v16, self.w11)
        v18 = F.conv2d(torch.relu(v17), self.w12)
        v19 = v5 * torch.sigmoid(v18)
        v20 = v19.detach().flatten(0, -2)[-1:]
        v21 = x3.index_add_(0, x2, v20)
        v22 = x2.add_(1)
        v24 = v1.contiguous()
        return (v24, v21,)


ENTRY = Entry(options=(('ilp_deadline_ms', 0),), form='graph', examples=False)

CALLS = [
    Call((T((2, 3, 8, 4), layout='channels last', seed=7626),), kwargs=(('x3', T((8, 4), seed=3791)), ('x2', T((1,), dtype='int64', values='below 3', seed=8795)), ('x1', T((1,), dtype='int32', values='below 3', seed=3690)))),
    Call((T((11, 3, 8, 4), layout='channels last', seed=3886),), kwargs=(('x3', T((8, 4), values='ties', seed=5089)), ('x2', T((1,), dtype='int64', values='below 3', seed=5046)), ('x1', T((1,), dtype='int32', values='below 3', seed=6646))), change='replace'),
    Call((T((2, 3, 8, 4), seed=2818),), kwargs=(('x3', T((8, 4), seed=2951)), ('x2', T((1,), dtype='int64', values='below 3', seed=3541)), ('x1', T((1,), dtype='int32', values='below 3', seed=8547))), change='copy'),
    Call((T((2, 3, 8, 4), values='huge', seed=8526),), kwargs=(('x3', T((8, 4), values='huge', seed=8478)), ('x2', T((1,), dtype='int64', values='below 3', seed=304)), ('x1', T((1,), dtype='int32', values='below 3', seed=5484)))),
    Call((T((1, 3, 8, 4), seed=3391), T((1,), dtype='int32', values='below 3', layout='steps', seed=8937)), kwargs=(('x2', T((1,), dtype='int64', values='below 3', layout='steps', seed=6937)), ('x3', T((8, 4), layout='steps', seed=6537))), change='load'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
