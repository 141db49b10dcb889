"""wrong, by hypatia.compile in inference.

A result that is a view of an input shared no memory with it.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0, x1):
        v0 = x1.squeeze()
        v13 = -0.1 - x0
        return (v0, v13,)


ENTRY = Entry()

CALLS = [
    Call((T((1, 1, 1), seed=5317), T((), seed=6070))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
