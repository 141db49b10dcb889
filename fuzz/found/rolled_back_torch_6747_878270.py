"""rolled back, by torch.compile in inference.

Found by seed 6747: hypatia: the native plan is wrong at the sizes (2,) and is not used any more
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v0 = 0.7 / x0
        v1 = v0 * 3
        v2 = torch.frac(v1)
        v4 = v2 ** 2
        v8 = v4.clamp(-0.5, 0.7)
        return v8


ENTRY = Entry(name='torch')

CALLS = [
    Call((T((4, 2, 4, 4), seed=9379),)),
    Call((T((3, 2, 4, 4), seed=9247),)),
    Call((T((2, 2, 4, 4), seed=9500),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
