"""``python -m fuzz.nnsmith``: models that NNSmith makes, through both entries, beside eager and float64.

NNSmith solves for shapes and types, so its graphs have ops and sizes that ours do not draw. It is no
dependency: ``pip install -r requirements/nnsmith.txt``.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hypatia
from hypatia.verifier.judge import judge, same

Call = Callable[..., Any]


class Listed(nn.Module):
    """A model of NNSmith's, called by position."""

    def __init__(self, net: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Its results."""
        return list(self.net(**dict(zip(self.names, inputs, strict=True))))


def made(seed: int, nodes: int) -> tuple[Listed, list[torch.Tensor]]:
    """A model and its inputs, always the same for a seed."""
    import numpy as np
    from nnsmith.graph_gen import model_gen
    from nnsmith.materialize import Model
    from nnsmith.narrow_spec import auto_opset

    kind = Model.init("torch", backend_target="cpu")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    program = model_gen(
        opset=auto_opset(kind), method="symbolic-cinit", seed=seed, max_nodes=nodes, timeout_ms=10_000
    )
    net = kind.from_gir(program.make_concrete()).torch_model.eval()
    # Its own checks of numbers would break the graph.
    net.debug_numeric = lambda _: None
    inputs = net.get_random_inps()
    return Listed(net, list(inputs)).eval(), list(inputs.values())


def shown(model: Listed, inputs: list[torch.Tensor]) -> str:
    """What is wrong with either entry on a model; empty if nothing is."""
    entries: dict[str, Callable[[], Call]] = {
        "hypatia.compile": lambda: hypatia.compile(model),
        "torch.compile": lambda: torch.compile(model, backend="hypatia"),
    }
    eager = model(*inputs)
    wide = _wide(model, inputs)
    for name, make in entries.items():
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error", hypatia.VerificationWarning)
            try:
                call = make()
                found = [call(*inputs) for _ in range(3)][-1]
            except Exception as error:
                return f"{name}: {type(error).__name__}: {str(error)[:300]}"
        for i, (ours, theirs) in enumerate(zip(found, eager, strict=True)):
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                return f"{name}: result {i} is {ours.dtype}{list(ours.shape)}"
            exact = wide[i] if wide is not None and wide[i].shape == theirs.shape else None
            verdict = judge(f"result {i}", ours, theirs, exact)
            if not verdict.ok and not same(ours, theirs):
                return f"{name}: {verdict}"
    return ""


def _wide(model: Listed, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The results in float64; none where the model has ops that are not for it."""
    try:
        return list(
            copy.deepcopy(model).double()(*[t.double() if t.is_floating_point() else t for t in inputs])
        )
    except Exception:
        return None


def main() -> int:
    """What was found decides about the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.nnsmith", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one (0)")
    parser.add_argument("--count", type=int, default=200, help="how many models (200)")
    parser.add_argument("--nodes", type=int, default=12, help="ops of a model at most (12)")
    asked = parser.parse_args()
    try:
        import nnsmith  # noqa: F401
    except ImportError:
        print("NNSmith is missing: pip install -r requirements/nnsmith.txt", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(asked.seed, asked.seed + asked.count):
        try:
            with torch.no_grad():
                model, inputs = made(seed, asked.nodes)
                model(*inputs)
        except Exception:
            # It found no graph, or eager refuses the one that it found.
            counts["not made"] += 1
            continue
        with torch.no_grad():
            fault = shown(model, inputs)
        counts["wrong" if fault else "right"] += 1
        if fault:
            print(f"seed {seed}: {fault}", flush=True)
    told = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    print(f"{asked.count} models from seed {asked.seed} on in {time.perf_counter() - start:.0f} s: {told}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
