"""Where the time of a call goes: steps beside predictions and limits, kernels of peers beside ours."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from .._torch import inductor_config
from ..execute.step_times import plan_calls
from ..frontend.direct import compile as hypatia_compile
from .bench import Measured
from .measure import wait
from .steps import Line, timed

PEERS = ("eager", "inductor")
"""What is profiled beside."""

OTHERS = "pointwise, copies and others"
_KINDS = (
    ("attention", re.compile(r"attention|flash|fmha|sdpa", re.IGNORECASE)),
    ("convolutions", re.compile(r"conv|cudnn|depthwise|dgrad|wgrad|fprop", re.IGNORECASE)),
    (
        "products",
        re.compile(
            r"gemm|gemv|nvjet|cutlass|cublas|addmm|bmm|\bmm\b|matmul|linear|products|few", re.IGNORECASE
        ),
    ),
    (
        "norms, softmax and sums",
        re.compile(r"norm|softmax|_red_|_per_|reduce|sum|mean|column|pool", re.IGNORECASE),
    ),
)
_CALLS = 5
_NO_KERNELS = ("## Call", "Torch-Compiled Region", "TorchDynamo", "Pregraph")
"""How the profiler names the host's own work between kernels."""


@dataclasses.dataclass
class Profile:
    """A workload: its steps, and microseconds by kind of work."""

    workload: str
    steps: list[Line] = dataclasses.field(default_factory=list)
    kinds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """For each backend, and what our steps were expected to take, and their limit."""
    top: dict[str, list[tuple[str, int, float]]] = dataclasses.field(default_factory=dict)
    """The longest kernels of peers: name, how many times, microseconds."""
    notes: list[str] = dataclasses.field(default_factory=list)

    def data(self) -> dict[str, object]:
        """All of it, for JSON."""
        return dataclasses.asdict(self)


def kind_of(name: str) -> str:
    """What a kernel, an op or a step does, by its name."""
    return next((kind for kind, words in _KINDS if words.search(name)), OTHERS)


def profile(
    workload: Measured,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: str = "cpu",
    peers: Sequence[str] = PEERS,
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Steps and kernels of a workload in inference; what fails leaves a note."""
    found = Profile(workload.name)
    built = workload.build(dtype, device)
    model, inputs, kwargs = built if len(built) > 2 else (*built, {})
    model.eval()
    with torch.no_grad():
        progress(f"{workload.name}: steps of the plan")
        _own(found, hypatia_compile(model), inputs, kwargs, repeats)
        for peer in peers:
            progress(f"{workload.name}: kernels of {peer}")
            try:
                compiled = torch.compile(model, dynamic=False) if peer == "inductor" else model
                times = _kernels(lambda call=compiled: call(*inputs, **kwargs), device)  # type: ignore[misc]
            except Exception as e:
                found.notes.append(f"{peer} was not profiled: {type(e).__name__}: {e}"[:200])
                continue
            found.kinds[peer] = _summed((kind_of(name), taken) for name, _, taken in times)
            found.top[peer] = times[:10]
    torch.compiler.reset()
    return found


def _own(
    found: Profile,
    compiled: Callable[..., object],
    inputs: Sequence[object],
    kwargs: dict[str, object],
    repeats: int,
) -> None:
    """The steps of all plans that a call runs."""
    for _ in range(2):
        compiled(*inputs, **kwargs)
    with plan_calls() as calls:
        compiled(*inputs, **kwargs)
    if not calls:
        found.notes.append("no plan runs: hypatia explain says why")
    found.steps, refused = timed(calls, repeats)
    if refused:
        found.notes.append("a plan could not be run step by step")
    for name, each in (("hypatia", "microseconds"), ("predicted", "predicted"), ("limit", "limit")):
        found.kinds[name] = _summed((kind_of(line.name), getattr(line, each)) for line in found.steps)


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum for each kind, in the order of kinds."""
    sums = dict.fromkeys((*(kind for kind, _ in _KINDS), OTHERS), 0.0)
    for kind, taken in pairs:
        sums[kind] += taken
    return sums


def _kernels(call: Callable[[], object], device: str) -> list[tuple[str, int, float]]:
    """Kernels of a call, or ops on a CPU: name, how many times, microseconds; the longest first."""
    gpu = torch.device(device).type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    # Inductor's own kernels on a CPU are seen only if they are compiled so.
    with inductor_config.patch({"cpp.enable_kernel_profile": not gpu}):
        for _ in range(3):
            call()
        wait(device)
        with torch.profiler.profile(activities=[activity]) as profiler:
            for _ in range(_CALLS):
                call()
            wait(device)
    events = list(profiler.key_averages())
    if gpu:
        events = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    times = [
        (e.key, e.count // _CALLS, (e.self_device_time_total if gpu else e.self_cpu_time_total) / _CALLS)
        for e in events
        if not e.key.startswith(_NO_KERNELS)
    ]
    return sorted((t for t in times if t[2] > 0), key=lambda t: -t[2])
