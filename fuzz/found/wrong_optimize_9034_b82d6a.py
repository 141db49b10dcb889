"""wrong, by hypatia.optimize in training.

Found by seed 9034: result 1 has requires_grad False, eager's True
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0, x1):
        v3 = x1.max()
        v4 = torch.cat([x0, x1], 0).narrow(0, 0, 1)
        return [v3, v4]


ENTRY = Entry(name='optimize', training=True)

CALLS = [
    Call((T((1,), seed=7307), T((1,), seed=6775, grad=True))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
