"""Whole models on a GPU: hypatia.compile beside eager, eager under a CUDA graph, Inductor and XLA.

    python3 tests_gpu/models.py [--only WORD...] [--autotune] [--json FILE]

Times are microseconds of a call with many calls queued and one wait at the end, the least of several blocks
taken in turns. Every result is compared with float64 beside eager's own error.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import hypatia
from hypatia.devices import cuda
from hypatia.tools.workloads import NINE_MLPS, WORKLOADS, MLPShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL = ("tiny", "small", "medium")
MODELS = ("bert-base", "bert-base-b16", "gpt2", "llama-decode", "llama-b8")
Call = Callable[..., Any]


def first(result: Any) -> torch.Tensor:
    """The tensor that is compared."""
    return result if isinstance(result, torch.Tensor) else first(result[0])


def recorded(model: nn.Module, *inputs: torch.Tensor) -> Call:
    """Eager under a CUDA graph: copy in, replay, clone out."""
    kept = [t.clone() for t in inputs]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(*kept)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result = first(model(*kept))

    def run(*given: torch.Tensor) -> torch.Tensor:
        for place, value in zip(kept, given, strict=True):
            place.copy_(value)
        graph.replay()
        return result.clone()

    return run


def inductor(mode: str | None) -> Callable[..., Call]:
    """Inductor in one of its modes."""

    def make(model: nn.Module, *inputs: torch.Tensor) -> Call:
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(model), mode=mode)
        for _ in range(3):
            compiled(*inputs)
        if mode is None:
            return compiled

        def run(*given: torch.Tensor) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return first(compiled(*given)).clone()

        return run

    return make


def xla(shape: MLPShape | None) -> Callable[..., Call]:
    """``jax.jit`` of an MLP, on tensors shared by DLPack."""

    def make(model: nn.Module, *inputs: torch.Tensor) -> Call:
        import jax
        import jax.numpy as jnp

        if shape is None:
            raise ValueError("MLPs only")
        precision = "highest" if inputs[0].dtype == torch.float32 else None
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        weights = [(jnp.from_dlpack(m.weight.detach()), jnp.from_dlpack(m.bias.detach())) for m in layers]

        @jax.jit
        def forward(x: Any, weights: Any) -> Any:
            for i, (w, b) in enumerate(weights):
                x = jnp.matmul(x, w.T, precision=precision) + b
                x = jax.nn.relu(x) if i + 1 < len(weights) else x
            return x

        x = jnp.from_dlpack(inputs[0])

        def run(*_: torch.Tensor) -> Any:
            return forward(x, weights)

        run.wait = lambda r: r.block_until_ready()  # type: ignore[attr-defined]
        run.tensor = lambda r: torch.from_dlpack(r)  # type: ignore[attr-defined]
        return run

    return make


def block(call: Call, inputs: tuple[torch.Tensor, ...], count: int) -> float:
    """Microseconds of a call, many queued."""
    result = None
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        result = call(*inputs)
    if hasattr(call, "wait"):
        call.wait(result)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / count


def measured(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], makers: dict[str, Callable[..., Call]]
) -> dict[str, Any]:
    """Time, compile time and error of each backend."""
    wide = copy.deepcopy(model).double()
    exact = first(wide(*[x.double() if x.is_floating_point() else x for x in inputs]))
    del wide
    cells: dict[str, Any] = {}
    calls: dict[str, Call] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            call = make(model, *inputs)
            result = call(*inputs)
            torch.cuda.synchronize()
            taken = time.perf_counter() - start
            result = call.tensor(result) if hasattr(call, "tensor") else first(result)
            error = ((result.double() - exact).abs().max() / exact.abs().max()).item()
            cells[name] = {"compile_s": taken, "error": error}
            for _ in range(10):
                call(*inputs)
            calls[name] = call
        except Exception as reason:
            cells[name] = {"reason": f"{type(reason).__name__}: {reason}"[:200]}
    once = block(calls["eager"], inputs, 3)
    count = max(3, min(200, int(40_000 / once)))
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(7):
        for name, call in calls.items():
            blocks[name].append(block(call, inputs, count))
    for name, taken in blocks.items():
        cells[name]["us"] = min(taken)
        cells[name]["median_us"] = statistics.median(taken)
    return cells


def options(description: str | None, dtypes: list[str], file: str) -> argparse.ArgumentParser:
    """What benchmarks of models are asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names have one of these words")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=dtypes)
    parser.add_argument("--without", nargs="+", default=[], help="backends to leave out")
    parser.add_argument("--json", type=Path, default=Path("bench/out", file))
    return parser


def cases(
    arguments: argparse.Namespace, models: Sequence[str]
) -> Iterator[tuple[str, str, Any, MLPShape | None]]:
    """What is to be measured: dtype, name, workload, and the sizes if it is one of the nine MLPs."""
    known: list[tuple[str, Any, MLPShape | None]] = [(s.name, s.workload(), s) for s in NINE_MLPS]
    known += [(name, WORKLOADS[name], None) for name in models]
    for dtype in arguments.dtype:
        for name, workload, shape in known:
            if not arguments.only or any(word in name for word in arguments.only):
                yield dtype, name, workload, shape


def written(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes what was measured so far, and frees what the last case needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1))
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    """All of them; the exit code."""
    parser = options(__doc__, list(DTYPES), "gpu.json")
    parser.add_argument("--autotune", action="store_true", help="Inductor's max-autotune too: minutes")
    arguments = parser.parse_args()
    if reason := cuda.available():
        print(f"no GPU benchmark: {reason}")
        return 0
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for dtype, name, workload, shape in cases(arguments, MODELS):
        if shape is None and dtype == "fp32":
            continue
        makers: dict[str, Callable[..., Call]] = {
            "eager": lambda model, *_: model,
            "eager graph": recorded,
            "inductor": inductor(None),
            "reduce-overhead": inductor("reduce-overhead"),
            "xla": xla(shape),
            "hypatia": hypatia.compile,
        }
        if arguments.autotune:
            makers["max-autotune"] = inductor("max-autotune")
        makers = {k: v for k, v in makers.items() if k not in arguments.without}
        model, inputs = workload.build(DTYPES[dtype], "cuda")
        with torch.no_grad():
            cells = measured(model, inputs, makers)
        rows.append({"case": name, "dtype": dtype, "cells": cells})
        print(line(rows[-1]), flush=True)
        del model, inputs
        written(rows, arguments.json)
    summary(rows)
    return int(any(not right(row) for row in rows))


def ratio(row: dict[str, Any]) -> float:
    """How many times as fast as the best peer."""
    ours = row["cells"]["hypatia"].get("us", float("inf"))
    return min(c["us"] for n, c in row["cells"].items() if n != "hypatia" and "us" in c) / ours


def right(row: dict[str, Any]) -> bool:
    """Whether the error is eager's, but for roundings."""
    cells = row["cells"]
    step = 2.0**-8 if row["dtype"] == "bf16" else 2.0**-22
    return cells["hypatia"].get("error", float("inf")) <= 2 * cells["eager"]["error"] + step


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = row["cells"]
    times = " | ".join(f"{c['us']:.1f}" if "us" in c else "-" for c in cells.values())
    ours = cells["hypatia"]
    errors = f"{ours.get('error', float('nan')):.1e} / {cells['eager']['error']:.1e}"
    head = f"| {row['case']} {row['dtype']} | {times} | {ratio(row):.2f}x | {ours.get('compile_s', 0):.2f} | "
    failed = "; ".join(f"{n}: {c['reason']}" for n, c in cells.items() if "reason" in c and n != "xla")
    return head + errors + " |" + (f"  {failed}" if failed else "")


def summary(rows: list[dict[str, Any]]) -> None:
    """Geometric means over the best peer."""
    for dtype in DTYPES:
        for label, chosen in (
            ("tiny to medium", [r for r in rows if r["case"].startswith(SMALL)]),
            ("large and xlarge", [r for r in rows if r["case"].startswith(("large", "xlarge"))]),
        ):
            ratios = [ratio(r) for r in chosen if r["dtype"] == dtype]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                print(f"{label}, {dtype}: {mean:.2f}x over the best peer, least {min(ratios):.2f}x")


if __name__ == "__main__":
    sys.exit(main())
