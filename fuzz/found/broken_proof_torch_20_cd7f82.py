"""broken proof, by torch.compile in inference.

Found by seed 20: the replay fails: cannot evaluate expand: size s84 is not known
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, batch):
        x0 = batch["x0"]
        x1 = batch["x1"]
        x2 = batch["x2"]
        v4 = x0 @ x0
        v5 = -(-v4)
        v8 = torch.reciprocal(v5 + 3.0)
        v10 = (2 * v8) @ (v8 * 0.5)
        v20 = v10[:1]
        v28 = (-v20) * (-v20)
        v30 = (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(v5 - v5.amax(-1, keepdim=True)))
        v31 = v30.tril()
        v33 = v31 @ v28
        v34 = torch.sqrt(v33.abs())
        return v34


ENTRY = Entry(name='torch', options=(('verify', 'off'), ('ilp_deadline_ms', 0)), examples=False)

CALLS = [
    Call(({'x0': T((2, 2, 4, 4), values='nan', layout='swapped', seed=5388), 'x1': T((4, 4), values='nan', seed=4353), 'x2': T((), layout='swapped', seed=6732)},), change='copy'),
    Call(({'x0': T((4, 2, 4, 4), values='mixed', seed=4463), 'x1': T((4, 4), seed=9070), 'x2': T((), values='mixed', seed=9343)},)),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
