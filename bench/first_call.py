"""The first call of a compiled MLP, timed in a process of its own; `compile.py` starts it.

torch and Dynamo are imported before the clock starts: every backend pays for these alike.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch._dynamo
from torch import fx

BACKENDS = ("eager", "nothing", "hypatia", "inductor")


def nothing() -> Any:
    """A backend that has AOTAutograd trace the graph and then runs it as it is."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(gm: fx.GraphModule, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compiler)


def first_call(backend: str, name: str, *, train: bool) -> dict[str, float]:
    """Seconds of the first call, what the backend imports included, and of the second."""
    from hypatia.tools.workloads import NINE_MLPS

    (shape,) = [s for s in NINE_MLPS if s.name == name]
    torch.manual_seed(0)
    model, (x,) = shape.build(), shape.inputs()
    model(x)

    def call() -> None:
        if train:
            compiled(x).sum().backward()
        else:
            with torch.no_grad():
                compiled(x)

    times = []
    start = time.perf_counter()
    compiled = torch.compile(model, backend=nothing() if backend == "nothing" else backend)
    for _ in range(2):
        call()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return {"first": times[0], "second": times[1]}


if __name__ == "__main__":
    _, backend, name, kind = sys.argv
    print(json.dumps(first_call(backend, name, train=kind == "training")))
