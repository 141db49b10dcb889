"""Training steps on a GPU: hypatia.compile beside eager, eager recorded as one graph, Inductor and XLA.

    python3 tests_gpu/training.py [--only WORD...] [--without BACKEND...] [--json FILE]

Times are microseconds of a step with many queued and one wait at the end, the least of several blocks taken
in turns. Gradients are thrown away before each step. Every gradient is compared with float64 beside eager's.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import DTYPES, SMALL, block, cases, first, options, written
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import hypatia
from hypatia.devices import cuda
from hypatia.tools.workloads import MLPShape

MODELS = ("bert-base-b16",)
Step = Callable[[], Any]


def stepping(model: nn.Module, call: Callable[..., Any], inputs: Any, g: torch.Tensor) -> Step:
    """A step of training without an optimizer."""
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        first(call(*inputs)).backward(g)

    step.gradients = lambda: [p.grad for p in parameters]  # type: ignore[attr-defined]
    return step


def recorded(model: nn.Module, inputs: Any, g: torch.Tensor) -> Step:
    """Both passes of eager in one CUDA graph; gradients stay in its memory."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    kept, kept_g = [t.clone() for t in inputs], g.clone()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            first(model(*kept)).backward(kept_g)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        first(model(*kept)).backward(kept_g)

    def step() -> None:
        for place, value in zip((*kept, kept_g), (*inputs, g), strict=True):
            place.copy_(value)
        graph.replay()

    step.gradients = lambda: [p.grad for p in parameters]  # type: ignore[attr-defined]
    return step


def inductor(mode: str | None) -> Callable[..., Step]:
    """Inductor in one of its modes."""

    def make(model: nn.Module, inputs: Any, g: torch.Tensor) -> Step:
        torch._dynamo.reset()
        model = copy.deepcopy(model)
        compiled = torch.compile(model, mode=mode)

        def call(*given: torch.Tensor) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*given)

        return stepping(model, compiled if mode is None else call, inputs, g)

    return make


def xla(shape: MLPShape | None) -> Callable[..., Step]:
    """``jax.vjp`` of an MLP under ``jit``, on tensors shared by DLPack."""

    def make(model: nn.Module, inputs: Any, g: torch.Tensor) -> Step:
        import jax
        import jax.numpy as jnp

        if shape is None:
            raise ValueError("MLPs only")
        precision = "highest" if g.dtype == torch.float32 else None
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        weights = [(jnp.from_dlpack(m.weight.detach()), jnp.from_dlpack(m.bias.detach())) for m in layers]

        def forward(weights: Any, x: Any) -> Any:
            for i, (w, b) in enumerate(weights):
                x = jnp.matmul(x, w.T, precision=precision) + b
                x = jax.nn.relu(x) if i + 1 < len(weights) else x
            return x

        @jax.jit
        def both(weights: Any, x: Any, g: Any) -> Any:
            y, pull = jax.vjp(lambda w: forward(w, x), weights)
            return y, pull(g)[0]

        x, tangent = jnp.from_dlpack(inputs[0]), jnp.from_dlpack(g)
        last: list[Any] = []

        def step(*_: Any) -> Any:
            last[:] = [both(weights, x, tangent)]
            return last[0]

        step.wait = jax.block_until_ready  # type: ignore[attr-defined]
        step.gradients = lambda: [  # type: ignore[attr-defined]
            torch.from_dlpack(t) for pair in last[0][1] for t in pair
        ]
        return step

    return make


def compiled(model: nn.Module, inputs: Any, g: torch.Tensor) -> Step:
    """hypatia.compile."""
    model = copy.deepcopy(model)
    call = hypatia.compile(model)
    step = stepping(model, call, inputs, g)
    step.call = call  # type: ignore[attr-defined]
    return step


def as_one(model: nn.Module, inputs: Any, g: torch.Tensor) -> Step:
    """hypatia.compile, both passes by ``step``."""
    model = copy.deepcopy(model)
    call = hypatia.compile(model)
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        call.step(*inputs, gradient=g)

    step.gradients = lambda: [p.grad for p in parameters]  # type: ignore[attr-defined]
    return step


def measured(model: nn.Module, inputs: Any, makers: dict[str, Callable[..., Step]]) -> dict[str, Any]:
    """Time, compile time and error of each backend."""
    with torch.no_grad():
        g = torch.randn_like(first(model(*inputs)))
    wide = copy.deepcopy(model).double()
    first(wide(*[x.double() if x.is_floating_point() else x for x in inputs])).backward(g.double())
    exact = [p.grad for p in wide.parameters()]
    scale = max(t.norm().item() for t in exact)
    cells: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            step = make(model, inputs, g)
            step()
            torch.cuda.synchronize()
            taken = time.perf_counter() - start
            for _ in range(10):
                step()
            pairs = zip(step.gradients(), exact, strict=True)
            # Some gradients are zero but for roundings, as those of the biases of keys.
            errors = [((a.double() - b).norm() / b.norm().clamp_min(1e-3 * scale)).item() for a, b in pairs]
            cells[name] = {"compile_s": taken, "error": max(errors)}
            steps[name] = step
            if hasattr(step, "call"):
                steps_made = [t.step for t in step.call._trainings.values() if t.step is not None]
                cells[name]["forms_us"] = [{f: 1e6 * s for f, s in made.times.items()} for made in steps_made]
        except Exception as reason:
            cells[name] = {"reason": f"{type(reason).__name__}: {reason}"[:300]}
    once = block(steps["eager"], (), 3)
    count = max(3, min(100, int(60_000 / once)))
    blocks: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(7):
        for name, step in steps.items():
            blocks[name].append(block(step, (), count))
    for name, taken in blocks.items():
        cells[name]["us"] = min(taken)
        cells[name]["median_us"] = statistics.median(taken)
    return cells


OURS = ("hypatia", "hypatia step")


def over(row: dict[str, Any], names: Any, form: str = OURS[0]) -> float:
    """How many times as fast as the fastest of these."""
    cells = row["cells"]
    ours = cells.get(form, {}).get("us", float("inf"))
    return min(cells[n]["us"] for n in names if "us" in cells.get(n, {})) / ours


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = row["cells"]
    peers = [n for n in cells if n not in OURS]
    times = " | ".join(f"{c['us']:.1f}" if "us" in c else "-" for c in cells.values())
    ours = cells["hypatia"]
    text = f"| {row['case']} {row['dtype']} | {times} | "
    for form in OURS:
        text += f"{over(row, ['eager'], form):.2f}x | {over(row, peers, form):.2f}x | "
    text += f"{ours.get('compile_s', 0):.2f} | {ours.get('error', float('nan')):.1e} "
    text += f"({cells['eager']['error']:.1e}) |"
    failed = "; ".join(f"{n}: {c['reason']}" for n, c in cells.items() if "reason" in c)
    return text + (f"  {failed}" if failed else "")


def main() -> int:
    """All of them; the exit code."""
    arguments = options(__doc__, ["bf16"], "gpu-training.json").parse_args()
    if reason := cuda.available():
        print(f"no GPU benchmark: {reason}")
        return 0
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for dtype, name, workload, shape in cases(arguments, MODELS):
        makers: dict[str, Callable[..., Step]] = {
            "eager": lambda model, inputs, g: stepping(model, model, inputs, g),
            "eager graph": recorded,
            "inductor": inductor(None),
            "reduce-overhead": inductor("reduce-overhead"),
            "xla": xla(shape),
            "hypatia": compiled,
            "hypatia step": as_one,
        }
        makers = {k: v for k, v in makers.items() if k not in arguments.without}
        model, inputs = workload.build(DTYPES[dtype], "cuda")
        model.train().requires_grad_()
        rows.append({"case": name, "dtype": dtype, "cells": measured(model, inputs, makers)})
        print(line(rows[-1]), flush=True)
        del model, inputs
        written(rows, arguments.json)
    for label, chosen in (
        ("tiny to medium", [r for r in rows if r["case"].startswith(SMALL)]),
        ("large and xlarge", [r for r in rows if r["case"].startswith(("large", "xlarge"))]),
    ):
        peers = [n for n in makers if n not in OURS]
        for form in OURS:
            for what, names in (("eager", ["eager"]), ("the best peer", peers)):
                ratios = [over(r, names, form) for r in chosen]
                if ratios and min(ratios) > 0:
                    mean = statistics.geometric_mean(ratios)
                    print(f"{form}, {label}: {mean:.2f}x over {what}, least {min(ratios):.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
