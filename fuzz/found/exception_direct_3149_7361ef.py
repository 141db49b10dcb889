"""exception, by hypatia.compile in training.

Found by seed 3149: RuntimeError: Expected a proper Tensor but got None (or an undefined Tensor in C++) for argument #0 'self'
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
        self.w0 = nn.Parameter(T((4,), seed=2162, scale=0.5).make())
        self.w1 = nn.Parameter(T((4, 1), seed=281, scale=0.5).make())
        self.w9 = nn.Parameter(T((1, 2), seed=1603, scale=0.5).make())

    def forward(self, x0, x1):
        v1 = F.linear(x1, self.w1, self.w0)
        v2 = v1.reshape(v1.shape[0], v1.shape[1], 2, 2).transpose(1, 2)
        v25 = torch.matmul(x0, self.w9)
        v26 = v25.movedim(0, -1)
        v27 = v25.detach()
        return (v26, v27, v2,)


ENTRY = Entry(training=True)

CALLS = [
    Call((T((1, 1, 1), seed=5981), T((1, 1, 1), seed=1431))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
