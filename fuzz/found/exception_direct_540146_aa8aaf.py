"""exception, by hypatia.compile in inference.

Found by seed 540146: RuntimeError: unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please clone() the tensor before performing the operation.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v5 = x0[1:]
        v6 = v5.masked_fill_(v5 > 0.5, 0.0)
        return v6


ENTRY = Entry()

CALLS = [
    Call((T((2,), layout='expanded', seed=7298),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
