"""internal, by hypatia.compile in inference.

Found by seed 870: the native plan is not used any more: malformed graph: plan: step 0 (aten.squeeze.default): malformed graph: copying a result failed in torch
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
        self.w1 = nn.Parameter(T((1,), seed=5222, scale=0.5).make())
        self.w2 = nn.Parameter(T((2, 1), seed=6657, scale=0.5).make())

    def forward(self, x2, x3):
        v7 = x2.squeeze()
        v8 = torch.addmm(self.w1, x3, self.w2)
        v12 = v8[None]
        return [v7, v12]


ENTRY = Entry()

CALLS = [
    Call((T((2,), layout='expanded', seed=8734), T((2, 2)))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
