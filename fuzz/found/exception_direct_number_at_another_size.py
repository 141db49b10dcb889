"""exception, by hypatia.compile in inference.

ValueError: min() arg is an empty sequence, for a tensor without dimensions beside one of another size.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0, x1):
        v0 = x0 * x1
        return torch.relu(v0)


ENTRY = Entry()

CALLS = [
    Call((T((3, 4)), T((), seed=1))),
    Call((T((5, 4)), T((), seed=2))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
