"""How long the kernels of each step of a plan take on a GPU, as torch's profiler sees them."""

from __future__ import annotations

import bisect
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

from .. import _native

_MARK = "hypatia step "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class Event(TypedDict, total=False):
    """What the trace says of something that happened."""

    cat: str
    name: str
    ts: float
    dur: float
    args: dict[str, int]


def step_times(
    bound: _native.BoundCudaPlan, stream: int, inputs: Sequence[torch.Tensor], count: int, repeats: int
) -> list[float] | None:
    """Seconds of each of so many steps, the median of several calls; none if the plan does not run."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    if not bound.run_told(stream, lambda _: None, *inputs):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(repeats):
                if not _told(bound, stream, inputs):
                    return None
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return by_step(events, count)


def _told(bound: _native.BoundCudaPlan, stream: int, inputs: Sequence[torch.Tensor]) -> bool:
    """One call, with a range of the profiler's around the launches of each step."""
    mark: torch.profiler.record_function | None = None

    def begin(step: int | None) -> None:
        nonlocal mark
        if mark is not None:
            mark.__exit__(None, None, None)
        mark = None if step is None else torch.profiler.record_function(f"{_MARK}{step}")
        if mark is not None:
            mark.__enter__()

    try:
        return bound.run_told(stream, begin, *inputs)
    finally:
        begin(None)


def by_step(events: Sequence[Event], count: int) -> list[float]:
    """Seconds of each step: what its ranges launched, of a trace as Chrome reads it."""
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(_MARK)))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_MARK)
    )
    starts = [start for start, _, _ in marks]
    launched: dict[int, int] = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            at = bisect.bisect_right(starts, event["ts"]) - 1
            if at >= 0 and event["ts"] <= marks[at][1]:
                launched[event["args"]["correlation"]] = at
    taken = [0.0] * len(marks)
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            mark = launched.get(event["args"].get("correlation", -1))
            if mark is not None:
                taken[mark] += 1e-6 * event["dur"]
    of_step: list[list[float]] = [[] for _ in range(count)]
    for (_, _, step), seconds in zip(marks, taken, strict=True):
        of_step[step].append(seconds)
    return [statistics.median(each) if each else 0.0 for each in of_step]
