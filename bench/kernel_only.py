"""The isolated kernel: Linear+ReLU as one fused module beside nn.Linear and nn.ReLU, error and time.

    .venv/bin/python bench/kernel_only.py [--dtype fp32|bf16|fp16] [--rows 0.125] [--json FILE|-]

A size falls short when its error to float64 is more than twice eager's and a few roundings, or when it is
slower than 0.9 times eager. Times are noisy, so a slow size is measured again before it counts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from diagnostic import Diagnostic, add_device_options, parser, prepare
from torch import nn

from hypatia.nn import FusedLinearReLU
from hypatia.tools.bench import DTYPES
from hypatia.tools.measure import compare
from hypatia.tools.workloads import KERNELS, Workload
from hypatia.verifier.verify import verify

LEAST_RATIO = 0.9
ATTEMPTS = 3


def examine(diagnostic: Diagnostic, workload: Workload, dtype: str, device: str, share: float) -> None:
    """One size: the fused module shares the parameters of the plain one."""
    model, (x,) = workload.build(DTYPES[dtype], device)
    rows = max(1, int(share * x.shape[0]))
    x = x[:rows].contiguous()
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    fused = FusedLinearReLU.from_linear(linear).eval()
    result = verify(model, fused, x)
    eager, ours = timed(model, fused, x, device)
    ratio = eager / ours
    flops = 2 * rows * linear.weight.numel()
    (error,), (own,) = result.candidate or [None], result.reference or [None]
    slow = f"slower: {ratio:.2f}x of eager, {LEAST_RATIO} is the least" if ratio < LEAST_RATIO else ""
    diagnostic.add(
        workload.name,
        f"{rows} x {linear.in_features} -> {linear.out_features}",
        *(f"{e.max_abs:.1e}" if e else "-" for e in (error, own)),
        *(f"{1e6 * t:,.0f}" for t in (ours, eager)),
        f"{ratio:.2f}x",
        f"{flops / ours / 1e9:,.0f}",
        short="; ".join(s for s in (result.reason, slow) if s),
        workload=workload.name,
        rows=rows,
        error=error and error.max_abs,
        eager_error=own and own.max_abs,
        microseconds=1e6 * ours,
        eager_microseconds=1e6 * eager,
        ratio=ratio,
        gflops=flops / ours / 1e9,
    )


def timed(model: nn.Module, fused: nn.Module, x: torch.Tensor, device: str) -> tuple[float, float]:
    """Seconds of eager and of the fused module; the best of a few attempts for the fused one."""

    def call(module: nn.Module) -> Any:
        with torch.no_grad():
            return module(x)

    best = (0.0, 1.0)
    for _ in range(ATTEMPTS):
        times = compare({"eager": lambda: call(model), "fused": lambda: call(fused)}, device, repeats=5)
        best = max(best, (times["eager"], times["fused"]), key=lambda pair: pair[0] / pair[1])
        if best[0] / best[1] >= LEAST_RATIO:
            break
    return best


def main() -> int:
    """All sizes; the exit code."""
    made = parser(__doc__)
    add_device_options(made)
    made.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    made.add_argument(
        "--rows", type=float, help="share of the rows of the largest size (1 on a GPU, 0.125 on a CPU)"
    )
    arguments = made.parse_args()
    columns = ("size", "", ">error", ">eager's", ">us", ">eager us", ">over eager", ">GFLOP/s")
    diagnostic = Diagnostic(f"Linear+ReLU as one module, {arguments.dtype}", columns, arguments)
    device = prepare(arguments, diagnostic)
    share = arguments.rows or (0.125 if device == "cpu" else 1.0)
    for workload in KERNELS:
        with diagnostic.console.status(workload.name):
            largest = workload is KERNELS[-1]
            examine(diagnostic, workload, arguments.dtype, device, share if largest else 1.0)
    if share != 1.0:
        diagnostic.notes.append(f"the largest size with {share:g} of its rows (--rows 1: with all)")
    return diagnostic.finish()


if __name__ == "__main__":
    sys.exit(main())
