"""internal, by torch.compile in inference.

The graph could not be verified: a view as bytes needs a last stride of one.
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
        self.register_buffer("b0", T((1,), seed=423, scale=0.5).make())

    def forward(self, x1):
        v13 = self.b0.add_(x1.detach().sum())
        return x1


ENTRY = Entry(name='torch')

CALLS = [
    Call((T((1,), layout='steps', seed=8734),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
