"""exception, by hypatia.optimize in training.

Found by seed 2254: RuntimeError: We found a fake tensor in the exported program constant's list. This typically means our tracing system encountered an op that we can't trace through. For the potential source, you can refer to following model attribute: lifted_tensor_0. Please file an issue on github.
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
        self.w0 = nn.Parameter(T((1, 1), seed=5893, scale=0.5).make())

    def forward(self, x2):
        v5 = F.linear(x2, self.w0)
        v6 = v5.transpose(0, -1)
        v8 = v6.copy_(v6)
        return v5


ENTRY = Entry(name='optimize', training=True)

CALLS = [
    Call((T((1,)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
