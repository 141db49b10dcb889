"""Measures what a device can do, by small and large kernels of torch's, in some tenths of a second."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import torch

from . import probes, table
from .probes import Call, Probe

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Element types whose products are measured, by the names that plans use."""

_TRIES, _LONG = 5, 0.01
"""How often something is done, and the seconds from which on it is done once, and nothing larger."""

_CPU_BYTES, _GPU_BYTES = 32 << 20, 512 << 20
_CPU_ROWS, _GPU_ROWS, _FIRST_ROWS = 1024, 4096, 64
"""Of the factors of products, which grow up to these: some processors have no products of 16 bits."""

_COPIES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes that smaller copies move."""

_TANH, _EXP = 12.0, 10.0
"""Vector operations of an element, as the op table counts them."""

_SMALL = 32
"""Elements of a small kernel."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes, multiplications with additions, vector operations in a second; and seconds of small things."""

    bandwidth: float
    """Of a large copy."""
    products: dict[str, float]
    """By the element type of the factors."""
    by_size: list[list[float]]
    """Bytes that a copy moves, and how many it moves in a second: small ones stay in caches."""
    products_by_size: dict[str, list[list[float]]]
    """Multiplications of a product, and how many of them it makes in a second, likewise."""
    vector: float
    """Vector operations, as the op table counts them, on numbers that lie in a cache."""
    launch: float
    """Seconds of one more small kernel after others."""
    host: float
    """Seconds that a call of a small op takes the host."""
    parallel: bool
    """Whether a kernel moves and computes at once, and has a thread for each element, as on a GPU."""
    calls: dict[str, list[float]]
    """Of torch's ops of a kind: seconds of a small one, and how many times as long a large one takes as what
    it moves, multiplies and computes does at these rates."""

    def seconds(self, moved: float, multiplications: float, dtype: str) -> float:
        """The least time of a step: moving and multiplying overlap."""
        return max(moved / self.bandwidth, multiplications / self.rate(dtype))

    def rate(self, dtype: str) -> float:
        """Multiplications of a type; what was not measured counts as fp32."""
        return self.products.get(dtype) or self.products["f32"]

    def moving(self, moved: float, within: float = 0.0) -> float:
        """Seconds that moving so many bytes takes, of memory of which so many are used in turn."""
        return moved / _at(self.by_size, max(moved, within), self.bandwidth)

    def multiplying(self, multiplications: float, dtype: str) -> float:
        """Seconds of a product of a size by torch."""
        known = self.products_by_size.get(dtype) or self.products_by_size.get("f32", [])
        return multiplications / _at(known, multiplications, self.rate(dtype))


def _at(known: list[list[float]], size: float, large: float) -> float:
    """A rate between those of the next smaller and the next larger size."""
    at = bisect.bisect_left([s for s, _ in known], size)
    if not known or at == len(known):
        return large
    if at == 0:
        return known[0][1]
    (low, before), (high, behind) = known[at - 1 : at + 1]
    share = math.log(size / low) / math.log(high / low)
    return float(before ** (1.0 - share) * behind**share)


def measured(device: torch.device) -> Rates:
    """Those of a device, measured now."""
    large = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    with torch.no_grad():
        source, target = (torch.ones(large // 4, device=device) for _ in range(2))
        bandwidth, copies = _copies(source, target, device)
        most = _GPU_ROWS if device.type == "cuda" else _CPU_ROWS
        by_size = {name: _multiplied(dtype, most, device) for name, dtype in DTYPES.items()}
        launch, host = _launched(device)
        found = Rates(
            bandwidth=bandwidth,
            products={name: max(rate for _, rate in each) for name, each in by_size.items()},
            by_size=copies,
            products_by_size=by_size,
            vector=_vector(source, target, launch, device),
            launch=launch,
            host=host,
            parallel=device.type != "cpu",
            calls={},
        )
        return dataclasses.replace(found, calls=_calls(found, device))


def _copies(
    source: torch.Tensor, target: torch.Tensor, device: torch.device
) -> tuple[float, list[list[float]]]:
    """Bytes in a second of a large copy, and of smaller ones without what starts them."""
    large = 2 * 4 * source.numel() / _least(lambda: target.copy_(source), device)
    found: list[list[float]] = []
    for size in _COPIES:
        a, b = source[: size // 8], target[: size // 8]
        rate = size / _in_row(lambda a=a, b=b: b.copy_(a), device)  # type: ignore[misc]
        # What starts a copy shows in small ones, not in caches.
        found = [[float(s), max(r, rate)] for s, r in found] + [[float(size), rate]]
    return large, [*found, [8.0 * source.numel(), large]]


def _multiplied(dtype: torch.dtype, most: int, device: torch.device) -> list[list[float]]:
    """Products as large as time allows: multiplications of each, and how many in a second."""
    rows, found = _FIRST_ROWS, list[list[float]]()
    while rows <= most:
        # Numbers, not zeros, which some devices multiply faster.
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        if not found:
            torch.mm(left, right)  # The first of a type prepares its kernel.
        seconds = _in_row(lambda a=left, b=right: torch.mm(a, b), device)  # type: ignore[misc]
        found.append([float(rows**3), rows**3 / seconds])
        if seconds > _LONG / 8:
            break
        rows *= 4
    return found


def _launched(device: torch.device) -> tuple[float, float]:
    """Seconds of one more small kernel, and of the host's part of a call."""
    x, y = torch.ones(_SMALL, device=device), torch.ones(_SMALL, device=device)

    def small() -> object:
        return torch.add(x, y, out=y)

    launch = _in_row(small, device)
    table.of(device).wait(device)
    calls = []
    for _ in range(4 * _TRIES):
        start = time.perf_counter()
        small()
        calls.append(time.perf_counter() - start)
    table.of(device).wait(device)
    return launch, statistics.median(calls)


def _vector(source: torch.Tensor, target: torch.Tensor, launch: float, device: torch.device) -> float:
    """Vector operations in a second, of functions of numbers in a cache; on a GPU of many numbers."""
    count = 1 << 15 if device.type == "cpu" else 1 << 22
    x, y = source[:count], target[:count]
    functions: list[tuple[float, Call]] = [
        (_TANH, lambda: torch.tanh(x, out=y)),
        (_EXP, lambda: torch.exp(x, out=y)),
    ]
    taken = sum(max(_in_row(call, device) - launch, 0.1 * launch) for _, call in functions)
    return count * sum(operations for operations, _ in functions) / taken


def _calls(found: Rates, device: torch.device) -> dict[str, list[float]]:
    """Of each kind of torch's ops: seconds of a small one, and how far a large one is from these rates."""
    pairs = probes.pairs(device)
    # By turns, so that each finds caches as others leave them; large ones leave nothing of the small.
    small, large = (_by_turns([pair[at].call for pair in pairs.values()], device) for at in range(2))
    calls = {}
    for (kind, pair), less, more in zip(pairs.items(), small, large, strict=True):
        ideal = [_ideal(found, probe) for probe in pair]
        calls[kind] = [less, max((more - less) / (ideal[1] - ideal[0]), 1.0)]
    return calls


def _by_turns(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Seconds of each of some calls, the least of several rounds."""
    rounds = [[_in_row(call, device, 1) for call in calls] for _ in range(_TRIES)]
    return [min(each) for each in zip(*rounds, strict=True)]


def _ideal(found: Rates, probe: Probe) -> float:
    """Seconds of what a probe does at the rates that were found."""
    moving = probe.moved / max(rate for _, rate in found.by_size)
    return moving + probe.multiplications / found.products["f32"] + probe.vector / found.vector


def _in_row(call: Call, device: torch.device, tries: int = _TRIES) -> float:
    """Seconds that the device takes for a call among others in a row."""
    if device.type == "cuda":
        return _recorded(call, device)
    best = float("inf")
    for at in range(tries):
        count = 4 if at and best < _LONG / 40 else 1
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
        if best > _LONG:
            break
    return best


def _recorded(call: Call, device: torch.device) -> float:
    """The same as a CUDA graph of several, which the host does not hold up."""
    count = 8
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return _least(graph.replay, device) / count


def _least(call: Call, device: torch.device) -> float:
    """Seconds of the fastest of some calls."""
    place, best = table.of(device), float("inf")
    for _ in range(_TRIES):
        place.wait(device)
        start = time.perf_counter()
        call()
        place.wait(device)
        best = min(best, time.perf_counter() - start)
        if best > _LONG:
            break
    return best
