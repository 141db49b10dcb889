"""Backends measured side by side on one workload: time, compile time, and the error to float64 beside."""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils import _pytree as pytree

from .compiling import compile as hypatia_compile
from .gradients import WithGradients, cotangents, differentiable
from .verification import FACTOR, ULPS, Errors
from .workloads import Workload

BACKENDS = (
    *("eager", "eager-graph", "aot-eager", "inductor", "inductor-max-autotune", "inductor-freezing"),
    *("hypatia", "hypatia-direct"),
)
"""What can be measured; ``eager-graph`` is eager under a CUDA graph, ``aot-eager`` a call through
torch.compile that changes nothing, ``hypatia-direct`` a call through hypatia.compile."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SAMPLE_SECONDS = 0.02
"""A sample is as many calls as take this long, one at least."""


NOISY = 1.5
"""Samples that differ by more were disturbed by something else."""


class NotMeasured(Exception):  # noqa: N818 (no error: the reason why a cell stays empty)
    """Why a backend was left out."""


@dataclasses.dataclass
class Cell:
    """One workload on one backend."""

    workload: str
    backend: str
    microseconds: float | None = None
    ratio: float | None = None
    compile_seconds: float | None = None
    error: float | None = None
    correct: bool | None = None
    reason: str = ""
    samples: list[float] = dataclasses.field(default_factory=list)

    @property
    def spread(self) -> float:
        """The longest sample over the shortest."""
        return max(self.samples) / min(self.samples) if self.samples else 1.0

    @property
    def noise(self) -> str:
        """A warning when the samples differ too much for their median to mean anything."""
        return f"noisy: samples differ by {self.spread:.1f}x" if self.spread > NOISY else ""

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**dataclasses.asdict(self), "spread": self.spread, "noise": self.noise}


Call = Callable[[], Any]


def bench(
    workload: Workload,
    backends: Sequence[str] = ("eager", "hypatia"),
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    training: bool = False,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """One cell for each backend, measured in turns; a backend that fails leaves a reason.

    Ratios are eager's time over the backend's: eager is measured even if it was not asked for.
    """
    names = ["eager", *(b for b in backends if b != "eager")]
    cells = {name: Cell(workload.name, name) for name in names}
    torch._dynamo.reset()
    try:
        model, inputs = workload.build(dtype, device)
        model.train(training)
        exact = _results(copy.deepcopy(model).double(), [x.double() for x in inputs], training)
    except Exception as e:
        for cell in cells.values():
            cell.reason = _reason(e)
        return [cells[name] for name in backends]
    calls: dict[str, Call] = {}
    own: list[Errors] = []
    for name in names:
        progress(f"{workload.name}: {name}, first call")
        try:
            calls[name] = _prepared(name, cells[name], model, inputs, training, exact, own)
        except Exception as e:
            cells[name].reason = _reason(e)
    for round_number in range(repeats):
        for name, sample in _round(calls, cells, device):
            progress(f"{workload.name}: {name}, round {round_number + 1} of {repeats}")
            cells[name].samples.append(sample)
    for cell in cells.values():
        if cell.samples:
            cell.microseconds = 1e6 * statistics.median(cell.samples)
            eager = cells["eager"].microseconds
            cell.ratio = eager / cell.microseconds if eager else None
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    return [cells[name] for name in backends]


def _prepared(
    name: str,
    cell: Cell,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    training: bool,
    exact: list[torch.Tensor],
    own: list[Errors],
) -> Call:
    """The call to be timed, compiled and compared with float64; eager comes first and leaves its errors."""
    start = time.perf_counter()
    compiled = _compiled(name, model, inputs, training)
    call = _step(compiled, model, inputs) if training else functools.partial(_infer, compiled, inputs)
    call()
    _wait(inputs[0].device)
    cell.compile_seconds = time.perf_counter() - start if name != "eager" else None
    errors = [
        Errors.of(result, e)
        for result, e in zip(_results(model, inputs, training, compiled), exact, strict=True)
    ]
    if name == "eager":
        own[:] = errors
    cell.error = max((e.max_relative for e in errors), default=0.0)
    cell.correct = all(e.ulps <= FACTOR * o.ulps + ULPS for e, o in zip(errors, own, strict=True))
    return call


def _compiled(
    name: str, model: nn.Module, inputs: Sequence[torch.Tensor], training: bool
) -> Callable[..., Any]:
    if name == "eager":
        return model
    if name == "eager-graph":
        if inputs[0].device.type != "cuda":
            raise NotMeasured("a CUDA graph needs a GPU")
        if training:
            raise NotMeasured("eager under a CUDA graph is measured in inference only")
        return _graphed(model, inputs)
    if name == "hypatia-direct":
        return hypatia_compile(model, *inputs)
    if name == "inductor-freezing":
        options = {"freezing": True, "max_autotune": True}
        return torch.compile(model, backend="inductor", options=options, dynamic=False)
    if name == "inductor-max-autotune":
        return torch.compile(model, backend="inductor", mode="max-autotune", dynamic=False)
    if name in ("aot-eager", "inductor", "hypatia"):
        return torch.compile(model, backend=name.replace("-", "_"), dynamic=False)
    raise NotMeasured(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")


def _graphed(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Eager as one CUDA graph: inputs are copied in, results are cloned out, as a caller would have to."""
    still = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(*still)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = model(*still)

    def replay(*given: torch.Tensor) -> Any:
        for place, x in zip(still, given, strict=True):
            place.copy_(x)
        graph.replay()
        return pytree.tree_map(torch.clone, results)

    return replay


@torch.no_grad()
def _infer(compiled: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    return compiled(*inputs)


def _step(compiled: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]) -> Call:
    """Forward and backward; gradients are dropped before, as optimizers do."""
    starts: list[torch.Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        outputs = differentiable(compiled(*inputs))
        starts[:] = starts or cotangents(outputs)
        torch.autograd.backward(outputs, starts)

    return step


def _results(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    training: bool,
    compiled: Callable[..., Any] | None = None,
) -> list[torch.Tensor]:
    call = compiled or model
    with torch.no_grad():
        results = WithGradients(model, call)(*inputs) if training else call(*inputs)
    return [t.detach().clone() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def _round(calls: dict[str, Call], cells: dict[str, Cell], device: str) -> Iterator[tuple[str, float]]:
    """One sample of every backend; one that fails is out from then on."""
    for name, call in list(calls.items()):
        try:
            yield name, seconds_per_call(call, device)
        except Exception as e:
            cells[name].reason = _reason(e)
            del calls[name]


def seconds_per_call(call: Call, device: str | torch.device = "cpu") -> float:
    """One sample: on a CPU the median of its calls, on a GPU the mean over calls that are queued."""
    if torch.device(device).type == "cuda":
        return _queued(call)
    times: list[float] = []
    start = now = time.perf_counter()
    while not times or now - start < SAMPLE_SECONDS:
        call()
        before, now = now, time.perf_counter()
        times.append(now - before)
    return statistics.median(times)


def _queued(call: Call) -> float:
    """Seconds of a call when the next one does not wait for it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(1, int(SAMPLE_SECONDS / (time.perf_counter() - start)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / count


def compare(calls: dict[str, Call], device: str | torch.device = "cpu", repeats: int = 7) -> dict[str, float]:
    """Median seconds of each call, measured in turns so that all see the same state of the machine."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(seconds_per_call(call, device))
    return {name: statistics.median(times) for name, times in samples.items()}


def _wait(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _reason(e: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(e, NotMeasured) else f"{type(e).__name__}: {text}" if text else type(e).__name__
