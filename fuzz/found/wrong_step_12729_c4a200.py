"""wrong, by step() in training.

Found by seed 12729: gradient of w3: 1 of 3 values are wrong, at [1]: 5.25, eager 6.4375, float64 6.4375
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
        self.w3 = nn.Parameter(T((3,), seed=9821, scale=0.5).make())
        self.w4 = nn.Parameter(T((3, 1), seed=8742, scale=0.5).make())

    def forward(self, x3):
        v9 = F.linear(x3, self.w4, self.w3)
        v14 = v9.unfold(-1, 2, 1)
        return v14


ENTRY = Entry(name='step', training=True)

CALLS = [
    Call((T((1, 2, 3, 1)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
