"""wrong, by hypatia.optimize in inference.

Found by seed 82281: result 0 has shape (1, 1), eager's (2, 1)
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
        self.w0 = nn.Parameter(T((2,), seed=5471, scale=0.5).make())
        self.w1 = nn.Parameter(T((1, 2), seed=8198, scale=0.5).make())

    def forward(self, x0):
        v1 = torch.addmm(self.w0, x0, self.w1)
        v7 = v1[1::2, 1:9999]
        v23 = torch.stack(v7.unbind(0), 0)
        return v23


ENTRY = Entry(name='optimize', dynamic=True)

CALLS = [
    Call((T((2, 1), seed=493),)),
    Call((T((4, 1), seed=3285),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
