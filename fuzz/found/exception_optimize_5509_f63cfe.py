"""exception, by hypatia.optimize in inference.

Found by seed 5509: RuntimeError: The expanded size of the tensor (3) must match the existing size (2) at non-singleton dimension 1. Target sizes: [3, 3, 2, 1, 1]. Tensor sizes: [2, 2, 1, 1]
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v1 = torch.take_along_dim(x0, x0.argsort(2), 2)
        v14 = v1.expand(3, *v1.shape)
        return v14


ENTRY = Entry(name='optimize', dynamic=True)

CALLS = [
    Call((T((3, 2, 1, 1), seed=3363),)),
    Call((T((2, 2, 1, 1), seed=1637),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
