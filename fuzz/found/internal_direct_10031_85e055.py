"""internal, by hypatia.compile in inference.

Found by seed 10031: inference graph left as it is after an internal error: UnboundLocalError: cannot access local variable 'mul' where it is not associated with a value
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v3 = x0.to(torch.int64)
        v4 = v3.to(torch.bfloat16)
        v6 = torch.cat([v4, v4], 0)
        v31 = v6 + v6
        v32 = F.rms_norm(v31, v31.shape[-1:])
        return v32


ENTRY = Entry()

CALLS = [
    Call((T((1,), seed=4380),)),
    Call((T((2,), seed=9558),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
