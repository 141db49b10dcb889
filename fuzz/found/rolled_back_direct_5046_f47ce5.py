"""rolled back, by hypatia.compile in inference.

Found by seed 5046: hypatia: the compiled inference graph is wrong; it runs without kernel 'native plan': mul_2 float64[1, 2, 4]: error 7.1e-15 to float64, eager's 0, allowed 4.7e-15; 7.1e-15 to eager
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
        self.w6 = nn.Parameter(T((4,), dtype='float64', seed=2880, scale=0.5).make())

    def forward(self, x3):
        v1 = x3 - 100.0
        v6 = v1 * v1
        v7 = v6.mean(-1)
        v25 = v7.topk(1, -3)[0]
        v26 = v25.mean(-1, keepdim=True)
        v28 = (v25 - v26) * torch.rsqrt(v26 + 1e-3) * self.w6
        return v28


ENTRY = Entry()

CALLS = [
    Call((T((2, 2, 4, 2), dtype='float64'),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
