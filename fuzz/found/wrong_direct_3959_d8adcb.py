"""wrong, by hypatia.compile in training.

Found by seed 3959: result 0 has strides (2, 1, 2), eager's (4, 2, 1) for (1, 2, 2)
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
        self.w3 = nn.Parameter(T((1, 2), seed=6590, scale=0.5).make())

    def forward(self, x0):
        v1 = x0.mT
        v9 = v1.nan_to_num()
        v11 = torch.einsum('...k,kn->...n', v9, self.w3)
        return v11


ENTRY = Entry(training=True)

CALLS = [
    Call((T((1, 1, 2), seed=4794),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
