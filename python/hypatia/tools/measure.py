"""Seconds per call, of one call or of several in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..devices import table

SAMPLE_SECONDS = 0.02
"""A sample is as many calls as take this long, one at least."""

WARM = 0.1
"""Calls before them, for so large a share of that time, bring back what others pushed out of the caches."""

REST_SECONDS = 0.015
"""Before a sample: threads of the backend before it, which wait by spinning, have gone to sleep by then;
those of torch's ops spin for 6 to 11 ms."""

Call = Callable[[], object]


class Block(NamedTuple):
    """Calls made one after the other: seconds of the median one and of the shortest."""

    median: float
    least: float


def block(
    call: Call, device: str | torch.device = "cpu", clock: Callable[[], float] = time.perf_counter
) -> Block:
    """One sample: on a CPU the median of its calls, on a GPU the mean over calls that are queued.

    With ``time.process_time`` as clock, what others do on the same CPU does not count.
    """
    if torch.device(device).type == "cuda":
        mean = _queued(call)
        return Block(mean, mean)
    start = clock()
    call()
    first = clock() - start
    if first >= SAMPLE_SECONDS:
        return Block(first, first)
    while clock() - start < WARM * SAMPLE_SECONDS:
        call()
    times: list[float] = []
    start = now = clock()
    while not times or now - start < SAMPLE_SECONDS:
        call()
        before, now = now, clock()
        times.append(now - before)
    return Block(statistics.median(times), min(times))


def seconds_per_call(call: Call, device: str | torch.device = "cpu") -> float:
    """The median of one sample."""
    return block(call, device).median


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


def wait(device: str | torch.device) -> None:
    """Until the device has done what it was asked."""
    device = torch.device(device)
    table.of(device).wait(device)
