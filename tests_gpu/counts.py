"""What a call costs on a GPU: kernels, bytes, time above the kernels, and compile time, beside eager's.

    python3 tests_gpu/counts.py [--only WORD...] [--dtype fp32] [--compile-only] [--json FILE]

Kernels are those that torch's profiler sees in one call, copies and fills included. Bytes are what ops or
steps read and write, every operand once. "Alone" is a call with nothing queued before it and a wait after it.
``--compile-only`` times nothing but compilations: run it twice with the same HYPATIA_CACHE_DIR, an empty one
first, for compile times without and with what was measured before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import MODELS, block
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import hypatia
from hypatia.devices import cuda
from hypatia.tools.workloads import NINE_MLPS, WORKLOADS


class Moved(TorchDispatchMode):
    """Bytes that ops read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an op."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [
                t
                for t in pytree.tree_leaves((args, kwargs, result))
                if isinstance(t, torch.Tensor) and t.is_cuda
            ]
            self.bytes += sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
        return result


def kernels(call: Callable[[], Any]) -> tuple[int, float]:
    """How many kernels a call launches, and microseconds of all of them."""
    counts, times = [], []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        found = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
        counts.append(len(found))
        times.append(sum(e.device_time_total for e in found))
    return statistics.median(counts), statistics.median(times)


def alone(call: Callable[[], Any], count: int) -> float:
    """Microseconds of a call with nothing queued before it, until its result is there."""
    taken = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken)


def moved(compiled: Any) -> int:
    """Bytes that the steps of a plan read and write."""
    (entry,) = {id(e): e for e in compiled._entries.values()}.values()
    graph = entry.native.__self__
    return sum(json.loads(graph.planner.at(graph.planner.hints).describe())["moved"])


def measured(model: Any, inputs: Any) -> dict[str, Any]:
    """All of it for a model."""
    start = time.perf_counter()
    compiled = hypatia.compile(model, *inputs)
    compiled(*inputs)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"compile_s": time.perf_counter() - start}
    for name, call in (("eager", lambda: model(*inputs)), ("hypatia", lambda: compiled(*inputs))):
        for _ in range(12):
            call()
        cell: dict[str, Any] = {"alone_us": alone(call, 50)}
        queued = [block(call, (), 50) for _ in range(7)]
        cell["queued_us"] = min(queued)
        # Under a profiler kernels of a graph are numbered one by one, so that this comes last.
        cell["kernels"], cell["kernel_us"] = kernels(call)
        row[name] = cell
    with Moved() as count:
        model(*inputs)
    row["eager"]["bytes"] = count.bytes
    row["hypatia"]["bytes"] = moved(compiled)
    return row


def main() -> int:
    """All of them; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names have one of these words")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("bench/out/gpu-counts.json"))
    arguments = parser.parse_args()
    if reason := cuda.available():
        print(f"no GPU benchmark: {reason}")
        return 0
    warnings.simplefilter("ignore")
    torch.empty(1, device="cuda")
    start = time.perf_counter()
    importlib.import_module("hypatia.frontend.direct")
    if arguments.compile_only:
        print(f"| imports, torch's own for the most part | {time.perf_counter() - start:.2f} |", flush=True)
    rows: list[dict[str, Any]] = []
    cases = [(s.name, s.workload()) for s in NINE_MLPS] + [(name, WORKLOADS[name]) for name in MODELS]
    for name, workload in cases:
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
        model, inputs = workload.build(dtype, "cuda")
        with torch.no_grad():
            model(*inputs)
            torch.cuda.synchronize()
            if arguments.compile_only:
                start = time.perf_counter()
                hypatia.compile(model, *inputs)(*inputs)
                torch.cuda.synchronize()
                print(f"| {name} | {time.perf_counter() - start:.2f} |", flush=True)
                continue
            row = {"case": name, **measured(model, inputs)}
        rows.append(row)
        e, h = row["eager"], row["hypatia"]
        print(
            f"| {name} {arguments.dtype} | {e['kernels']} → {h['kernels']} | {e['bytes'] / 2**20:.1f} → "
            f"{h['bytes'] / 2**20:.1f} | {e['kernel_us']:.1f} → {h['kernel_us']:.1f} | "
            f"{h['queued_us']:.1f} | {h['alone_us']:.1f} | {h['queued_us'] - h['kernel_us']:.1f} | "
            f"{h['alone_us'] - h['kernel_us']:.1f} | {row['compile_s']:.2f} |",
            flush=True,
        )
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1))
        del model, inputs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
