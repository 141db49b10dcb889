"""What the benchmarks share: the machine, graphs as `torch.compile` captures them, timing, gates."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from hypatia import _native
from hypatia.compiler import pipeline
from hypatia.compiler.report import GraphReport
from hypatia.frontend import dynamo
from hypatia.options import Options

ROOT = Path(__file__).parent.parent
# What is measured is the search, not reading it from disk.
os.environ["HYPATIA_CACHE"] = "off"


def machine() -> dict[str, Any]:
    """Versions and the machine, for the head of a report."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "hypatia": _native.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(load, 2),
        "built": _built(),
    }


def _built() -> str:
    """When the extension was built, and a warning when its sources are newer."""
    made = Path(_native.__file__).stat().st_mtime
    sources = [p.stat().st_mtime for p in ROOT.glob("crates/*/src/**/*.rs")]
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made))
    return stamp + (", OLDER THAN ITS SOURCES" if sources and max(sources) > made else "")


@dataclass(frozen=True)
class Graph:
    """An inference graph of AOTAutograd, and the names of its frozen weights."""

    module: fx.GraphModule
    weights: set[str]


def capture(model: nn.Module, inputs: Sequence[Any]) -> Graph:
    """The graph that `torch.compile` gives the backend under no_grad. The model itself is not run."""
    found: list[Graph] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        found.append(Graph(gm, dynamo._frozen(gm, Options(), "inference")))
        return _unrun(gm)

    torch._dynamo.reset()
    compiler = aot_autograd(fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True)
    with torch.no_grad():
        torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)(*inputs)
    (graph,) = found
    return graph


def _unrun(gm: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Stands in for the compiled graph: results of the right shape, nothing computed."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in output.args[0]]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def stages() -> Iterator[Counter[str]]:
    """Milliseconds spent in the stages of the pipeline while the context lasts."""
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start, used = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += 1e3 * (time.perf_counter() - start)
                spent[f"{name} cpu"] += 1e3 * (time.process_time() - used)

        return call

    with (
        mock.patch.object(pipeline, "capture", timed("capture", pipeline.capture)),
        mock.patch.object(_native, "optimize", timed("native", _native.optimize)),
        mock.patch.object(pipeline, "rebuild", timed("rebuild", pipeline.rebuild)),
    ):
        yield spent


CORE = ("saturate", "extract", "prove")
"""The stages inside the Rust core whose sum the targets are about."""

WHOLE = ("capture", "handover", "core", "rebuild", "rest")
"""The stages of a whole compilation: handover is JSON and typing on the way in, rest JSON on the way out."""


REPORTED = (
    *("target", "cost_before", "cost_after", "lower_bound", "gap", "method", "nodes", "classes", "limited"),
    *("steps", "rules", "opaque", "ops_before", "ops_after"),
)
"""What is kept of the compiler's own report."""


@dataclass
class Measurement:
    """What optimizing one graph took and did; times are medians in milliseconds."""

    name: str
    times: dict[str, float]
    core: float
    best: float
    first: float
    whole: float
    report: dict[str, Any]
    calls: tuple[int, int]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def saved(self) -> float:
        """By how many percent the cost fell."""
        return saved(self.report)

    @property
    def speedup(self) -> float:
        """By how many percent the cost model thinks that the result is faster, as TENSAT counts it."""
        return speedup(self.report)

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "core_ms": self.core,
            "core_best_ms": self.best,
            "core_first_ms": self.first,
            "whole_ms": self.whole,
            "calls": self.calls,
            "times_ms": self.times,
            "saved_percent": self.saved,
            "speedup_percent": self.speedup,
            **{key: self.report[key] for key in REPORTED},
            **self.extra,
        }


def saved(report: dict[str, Any]) -> float:
    """By how many percent the cost fell."""
    return 100 * (1 - report["cost_after"] / report["cost_before"]) if report["cost_before"] else 0.0


def speedup(report: dict[str, Any]) -> float:
    """The percentage by which the cost before exceeds the cost after."""
    return 100 * (report["cost_before"] / report["cost_after"] - 1) if report["cost_after"] else 0.0


def calls(graph: fx.Graph) -> int:
    """Calls that run each time: without those that pick a result, and with all folded weights as none."""
    picks = (operator.getitem, "folded_weights")
    return sum(n.op in ("call_function", "call_module") and n.target not in picks for n in graph.nodes)


def optimize_once(graph: Graph, options: Options) -> tuple[GraphReport, dict[str, float]]:
    """The report of one optimization, and milliseconds by stage; a graph that is left alone is an error."""
    gc.collect()
    with stages() as spent:
        start = time.perf_counter()
        request = pipeline.Request(options, "inference", frozenset(graph.weights))
        report = pipeline.compile_graph(graph.module, request).report
        whole = 1e3 * (time.perf_counter() - start)
    if not isinstance(report, GraphReport):
        raise RuntimeError("the graph was left as it is; see the log")
    times = {stage: report.data["times"][stage] for stage in CORE}
    core = sum(times.values())
    times |= {"capture": spent["capture"], "handover": spent["native"] - core, "core": core}
    times |= {"rebuild": spent["rebuild"], "whole": whole, "native cpu": spent["native cpu"]}
    times["rest"] = whole - spent["capture"] - spent["native"] - spent["rebuild"]
    return report, times


def measure(name: str, graph: Graph, options: Options, repeats: int) -> Measurement:
    """Optimizes a graph several times, after one time that is kept apart."""
    _, first = optimize_once(graph, options)
    runs = [optimize_once(graph, options) for _ in range(repeats)]
    times = {stage: statistics.median(t[stage] for _, t in runs) for stage in first}
    report = runs[-1][0]
    return Measurement(
        name,
        times,
        core=times["core"],
        best=min(t["core"] for _, t in runs),
        first=first["core"],
        whole=times["whole"],
        report=report.data,
        calls=(calls(report.before), calls(report.after)),
    )


@dataclass(frozen=True)
class Gate:
    """A target, and whether it is met."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """The value must reach the limit, not stay below it."""
    note: str = ""
    doubt: str = ""
    """Why the value is not to be relied on."""

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the limit; a value that is no number is on neither."""
        return self.value >= self.limit if self.at_least else self.value < self.limit

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "value": self.value,
            "limit": self.limit,
            "unit": self.unit,
            "at_least": self.at_least,
            "note": self.note,
            "doubt": self.doubt,
            "met": self.met,
        }
