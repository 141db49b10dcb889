"""internal, by torch.compile in inference.

Found by seed 590137: inference graph left as it is after an internal error: AssertionError: Please convert all Tensors to FakeTensors first or instantiate FakeTensorMode with 'allow_non_fake_inputs'. Found in aten._local_scalar_dense.default(tensor(True, size=()))
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x1):
        v17 = x1 @ x1.transpose(-2, -1) / 1
        v18 = v17.masked_fill(torch.ones(v17.shape[-2:], device=v17.device).tril() == 0, float('-inf'))
        v19 = v18.softmax(-1)
        v20 = torch.matmul(v19, x1)
        return v20


ENTRY = Entry(name='torch')

CALLS = [
    Call((T((1, 2, 2, 1)),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
