"""rolled back, by hypatia.optimize in training.

Results returned in another order than they were computed in: weights of the gradients were drawn in two orders.
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
        self.w1 = nn.Parameter(T((1,), seed=4571, scale=0.5).make())
        self.w2 = nn.Parameter(T((1, 1), seed=2242, scale=0.5).make())

    def forward(self, x1, x2):
        v6 = F.linear(x1, self.w2, self.w1)
        v7 = v6.reshape(v6.shape[0], v6.shape[1], 1, 1).transpose(1, 2)
        v14 = torch.matmul(v7, x2)
        return (v14, v7,)


ENTRY = Entry(name='optimize', training=True)

CALLS = [
    Call((T((1, 1, 1), seed=7417), T((1, 1, 1, 1)))),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
