"""exception, by hypatia.compile in training.

Found by seed 3506: RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the [...]
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
        self.register_buffer("b0", T((1,), seed=4082, scale=0.5).make())

    def forward(self, x0, x1, x2):
        v2 = x1.unsqueeze(-1)
        v3 = v2 * torch.sigmoid(v2)
        v23 = self.b0.add_(v2)
        return v3


ENTRY = Entry(training=True)

CALLS = [
    Call((T((), seed=619),), kwargs=(('x2', T((1,), seed=6904)), ('x1', T((), seed=3825, grad=True)))),
    Call((T((), seed=4908),), kwargs=(('x2', T((1,), seed=2391)), ('x1', T((), seed=9166, grad=True)))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
