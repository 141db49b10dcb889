"""exception, by hypatia.compile in inference.

IndexError: ([x, y], [z]) and (x, [y, z]) were one and the same call.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, a, b=()):
        x0, x1, x2, = [*(a if isinstance(a, (list, tuple)) else [a]), *(b if isinstance(b, (list, tuple)) else [b])]
        return x1


ENTRY = Entry()

CALLS = [
    Call(([T((1, 1, 1), seed=4729), T((1, 1, 1), seed=906)], [T((1, 1, 1), seed=9461)])),
    Call((T((1, 1, 1), seed=6608), [T((1, 1, 1), seed=506), T((1, 1, 1), seed=1338)])),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
