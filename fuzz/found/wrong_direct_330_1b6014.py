"""wrong, by hypatia.compile in inference.

Found by seed 330: result 0 shares memory with input 0, eager's shares no memory
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x3):
        v0 = x3.to(torch.float64)
        v1 = v0.to(torch.bfloat16)
        v2 = v1.unbind(1)[0]
        return v2


ENTRY = Entry()

CALLS = [
    Call((T((1, 1, 1), dtype='bfloat16', seed=3735),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
