"""exception, by hypatia.compile in training.

Found by seed 1392: RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.
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
        self.w13 = nn.Parameter(T((1, 1), seed=7632, scale=0.5).make())

    def forward(self, x2):
        v32 = x2 @ self.w13
        v33 = v32.transpose(-3, -2)
        v34 = v33.detach()
        return [v34, v33]


ENTRY = Entry(training=True)

CALLS = [
    Call((T((3, 2, 3, 1)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
