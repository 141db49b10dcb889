"""hang, by hypatia.compile in inference.

Found by seed 5107: no answer within 60 s
"""

from torch import nn

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


class Model(nn.Module):
    def forward(self, x0):
        v0 = 0 * x0
        v1 = v0 * 1e-05
        v2 = v1 / 1e-05
        return v2


ENTRY = Entry(options=(("ilp_deadline_ms", 0),), form="clock", random_costs=248145413)

CALLS = [
    Call((T((2, 3, 5), seed=3951),)),
    Call((T((2, 3, 5), values="inf", seed=2230),), change="zero"),
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
