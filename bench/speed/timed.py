"""Sections that compare times: the MLPs, linear layers, pointwise chains, models, rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hypatia
from hypatia.tools.bench import DTYPES
from hypatia.tools.workloads import Workload

from . import inductor, peers
from .cases import Case
from .run import OURS, PEERS, Run

COLD = ("tiny_b64", "medium4")
"""MLPs that are also compiled in fresh processes."""


def mlp(run: Run) -> None:
    """The nine MLPs, batch as given and batch 1, on every backend; and compilers in fresh processes."""
    _warm(run)
    _compare(run, "mlp", ("eager", OURS, "hypatia", *PEERS))
    run.sections["mlp"]["cold"] = [
        {
            "case": case.name,
            "dtype": case.dtype,
            "seconds": {name: run.cold(name, case) for name in run.backends(OURS, *inductor.NAMES)},
        }
        for case in run.cases("mlp")
        if case.name in COLD
    ]


def _warm(run: Run) -> None:
    """Compiles something small, so that no compile time has imports in it."""
    small = Workload("small", lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()), ((4, 16),), "")
    run.measure(Case("mlp", "small", small), (OURS, "hypatia", *peers.NEEDS), rounds=0)


def linear(run: Run) -> None:
    """One linear layer beside torch's function."""
    _compare(run, "linear", ("eager", OURS), {"eager": _function})


def pointwise(run: Run) -> None:
    """Pointwise chains and norms over four million floats."""
    _compare(run, "pointwise", ("eager", OURS, "inductor"))


def models(run: Run) -> None:
    """Transformers."""
    _compare(run, "models", ("eager", OURS, "inductor"))


def rewrites(run: Run) -> None:
    """Programs that become smaller ones: operations before and after, and the time."""
    cells: list[dict[str, Any]] = []
    run.open("rewrites")["cells"] = cells
    for case in run.cases("rewrites"):
        before, after = flops(case)
        facts = {"flops_before": before, "flops_counted": after, "note": case.workload.note}
        cells += [{**cell, **facts} for cell in run.measure(case, ("eager", OURS, "inductor"))]


def _compare(run: Run, section: str, backends: Sequence[str], makers: dict[str, Any] | None = None) -> None:
    cells: list[dict[str, Any]] = []
    run.open(section)["cells"] = cells
    for case in run.cases(section):
        cells += run.measure(case, backends, makers)
    if run.workshop.start_seconds is not None:
        run.sections[section]["inductor_start_seconds"] = run.workshop.start_seconds


def _function(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The layer without what calling a module costs."""
    weight, bias = model.weight, model.bias
    return lambda x: F.linear(x, weight, bias)


def flops(case: Case) -> tuple[int, int]:
    """Operations of matrix products and convolutions, in the model and in the optimized graph."""
    model, inputs = case.workload.build(DTYPES[case.dtype])
    with torch.no_grad():
        graph = hypatia.optimize(model, *inputs)
        # Weights are folded at the first call.
        graph(*inputs)
        return _counted(model, inputs), _counted(graph, inputs)


def _counted(call: Any, inputs: Sequence[torch.Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*inputs)
    return counter.get_total_flops()
