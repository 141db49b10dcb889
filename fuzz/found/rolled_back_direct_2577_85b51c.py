"""rolled back, by hypatia.compile in inference.

Found by seed 2577: hypatia: the compiled inference graph is wrong; it runs without rule 'linear-of-linear-bias' ((linear ?v ?q (linear ?w ?p ?x)) = (linear (mm ?v ?w) (linear ?v ?q ?p) ?x)): getitem_1 int64[16]: error 1 to float64, eager's 0, allowed 0; 1 to eager
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
        self.w0 = nn.Parameter(T((1,), dtype='float16', seed=4036, scale=0.5).make())
        self.w1 = nn.Parameter(T((1, 2), dtype='float16', seed=8126, scale=0.5).make())
        self.w2 = nn.Parameter(T((3,), dtype='float16', seed=4176, scale=0.5).make())
        self.w3 = nn.Parameter(T((3, 1), dtype='float16', seed=1336, scale=0.5).make())
        self.w4 = nn.Parameter(T((17,), dtype='float16', seed=6718, scale=0.5).make())
        self.w5 = nn.Parameter(T((3, 17), dtype='float16', seed=1896, scale=0.5).make())

    def forward(self, x0):
        v0 = F.linear(x0, self.w1, self.w0)
        v2 = F.linear(v0, self.w3, self.w2)
        v5 = v2 @ self.w5
        v6 = v5 + self.w4
        v10 = v6[0, :, 1:9999]
        v11 = v10.max(0)[1]
        return v11


ENTRY = Entry()

CALLS = [
    Call((T((2, 9, 2), dtype='float16', seed=5948),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
