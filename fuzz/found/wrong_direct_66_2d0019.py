"""wrong, by hypatia.compile in inference.

Found by seed 66: result 0 has strides (8, 4, 1, 2), eager's (8, 4, 2, 1) for (2, 2, 2, 2)
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v0 = F.logsigmoid(x0)
        v1 = 100.0 + v0
        return v1


ENTRY = Entry()

CALLS = [
    Call((T((2, 2, 2, 2), layout='swapped', seed=109),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
