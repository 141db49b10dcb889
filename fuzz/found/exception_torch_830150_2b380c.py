"""exception, by torch.compile in inference.

Found by seed 830150: ValueError: a constant is no dense bfloat16[0, 4]
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
        self.w1 = nn.Parameter(T((4, 2), dtype='bfloat16', seed=4428, scale=0.5).make())
        self.w6 = nn.Parameter(T((2,), dtype='bfloat16', seed=1392, scale=0.5).make())
        self.w7 = nn.Parameter(T((2, 2), dtype='bfloat16', seed=5738, scale=0.5).make())
        self.w8 = nn.Parameter(T((2,), dtype='bfloat16', seed=9689, scale=0.5).make())

    def forward(self, x0, x1):
        v4 = torch.einsum('...k,kn->...n', x1, self.w1)
        v13 = v4.to(torch.float16)
        v14 = v13.to(torch.bfloat16)
        v15 = F.linear(v14, self.w7, self.w6)
        v16 = torch.where(v15 > 0, v15, torch.exp(v15) - 1)
        v17 = v4[0::3, 1:, :, 1:-1]
        v18 = v4.mean(-1, keepdim=True)
        v19 = (v4 - v18).pow(2).mean(-1, keepdim=True)
        v20 = (v4 - v18) / torch.sqrt(v19 + 1e-3) * self.w8
        return [v20, (v16, v17, None), {'n': 3}]


ENTRY = Entry(name='torch', options=(('verify', 'off'), ('ilp_deadline_ms', 0)), random_costs=419361037, examples=False)

CALLS = [
    Call((T((1, 2, 4, 4), dtype='bfloat16', seed=7951), T((1, 2, 4, 4), dtype='bfloat16', seed=2042))),
    Call((T((1, 2, 4, 4), dtype='bfloat16', seed=5997), T((1, 2, 4, 4), dtype='bfloat16', values='zeros', seed=4571))),
    Call((T((1, 2, 4, 4), dtype='bfloat16', values='zeros', seed=5056), T((1, 2, 4, 4), dtype='bfloat16', values='zeros', seed=749))),
    Call((T((3, 2, 4, 4), dtype='bfloat16', values='mixed', seed=7637), T((3, 2, 4, 4), dtype='bfloat16', seed=8083)), change='replace'),
    Call((T((1, 2, 4, 4), dtype='bfloat16', values='tiny', seed=7746), T((1, 2, 4, 4), dtype='bfloat16', values='tiny', seed=7315)), change='copy'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
