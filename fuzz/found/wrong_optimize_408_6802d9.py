"""wrong, by hypatia.optimize in inference.

Found by seed 408: result 0: 1 of 1 values are wrong, at [0, 0]: 0.028577406, eager 0.0312093459, float64 0.0312093459
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
        self.register_buffer("b9", T((1,), seed=9810, scale=0.5).make())
        self.b10 = self.b9
        self.w11 = nn.Parameter(T((1,), seed=1613, scale=0.5).make())

    def forward(self, x1):
        v11 = self.b10.abs() + 0.5
        v12 = F.batch_norm(x1, self.b9, v11, self.w11, eps=1e-6)
        return v12


ENTRY = Entry(name='optimize')

CALLS = [
    Call((T((1, 1), seed=1309),)),
    Call((T((1, 1), seed=3688),), change='load'),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
