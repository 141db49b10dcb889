"""wrong, by hypatia.compile in inference.

Found by seed 102: result 0 shares no memory with input 0, eager's shares memory
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x1):
        v0 = x1[0]
        v1 = v0.neg_()
        return v1


ENTRY = Entry()

CALLS = [
    Call((T((1, 1), seed=6730),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
