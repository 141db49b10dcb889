"""rolled back, by torch.compile in inference.

Found by seed 532722: hypatia: the compiled inference graph is wrong; it runs without rule 'hardsigmoid-of-clamp' (on float64[2, 2, 2] on cuda:0 it is off by 2.3e-08: (div (clamp (add arg0_1:f64[2,2,2] 3.0) 0.0 6.0) 6.0) = (hardsigmoid arg0_1:f64[2,2,2])): mul float64[2, 2, 2] on cuda:0: error 3.5e-08 to float64, [...]
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x4):
        v4 = x4 * ((x4 + 3.0).clamp(0.0, 6.0) / 6.0)
        return v4


ENTRY = Entry(name='torch')

CALLS = [
    Call((T((2, 2, 2), dtype='float64'),)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
