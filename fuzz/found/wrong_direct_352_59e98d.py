"""wrong, by hypatia.compile in inference.

Found by seed 352: result 0 shares no memory with buffer b6, eager's shares memory
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
        self.register_buffer("b6", T((1,), seed=4310, scale=0.5).make())

    def forward(self, x1):
        v17 = self.b6.lerp_(x1.detach().reshape(-1, x1.shape[-1]).amax(0), 0.25)
        v18 = v17.unsqueeze(0)
        return v18


ENTRY = Entry()

CALLS = [
    Call((T((1, 1, 1)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
