"""rolled back, by hypatia.compile in inference.

Found by seed 5761: hypatia: the compiled inference graph is wrong; it runs without rule 'exp-of-log-softmax' ((exp (log_softmax ?x ?d)) = (softmax ?x ?d)): b1 float64[2]: error 1.5e-08 to float64, eager's 0, allowed 1.9e-14; 1.5e-08 to eager
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
        self.register_buffer("b1", T((2,), dtype='float64', seed=5269, scale=0.5).make())

    def forward(self, x1):
        v1 = torch.exp(F.log_softmax(x1, -1))
        v15 = v1.to(torch.float64)
        v16 = self.b1.add_(v15.detach().sum())
        return v1


ENTRY = Entry()

CALLS = [
    Call((T((2,), seed=7789),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
