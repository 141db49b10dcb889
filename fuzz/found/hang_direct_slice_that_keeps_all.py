"""hang, by hypatia.compile in inference.

The search did not end: a slice with a step that keeps all is the value itself, so slices of slices had no end.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x2):
        v4 = x2[0::3]
        return v4


ENTRY = Entry()

CALLS = [
    Call((T((1,)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
