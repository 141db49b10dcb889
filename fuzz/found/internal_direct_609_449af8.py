"""internal, by hypatia.compile in inference.

Found by seed 609: the native plan is not used any more: malformed graph: plan: step 1 (aten.squeeze.default): malformed graph: copying a result failed in torch
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
        self.w2 = nn.Parameter(T((1,), seed=4488, scale=0.5).make())
        self.w3 = nn.Parameter(T((2, 1), seed=902, scale=0.5).make())

    def forward(self, x1):
        v9 = torch.addmm(self.w2, x1, self.w3)
        v30 = v9.expand(3, *v9.shape)
        v53 = v30.transpose(0, -1)
        v55 = v53.squeeze()
        return v55


ENTRY = Entry()

CALLS = [
    Call((T((1, 2)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
