"""wrong, by hypatia.optimize in training.

Found by seed 533153: result 0 has requires_grad False, eager's True
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
        self.w0 = nn.Parameter(T((1,), seed=502, scale=0.5).make())

    def forward(self, x2):
        v0 = F.layer_norm(x2, (1,), self.w0, self.w0, 1e-6)
        v2 = v0.copy_(x2)
        return v2


ENTRY = Entry(name='optimize', training=True)

CALLS = [
    Call((T((2, 1, 1), seed=3412),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
