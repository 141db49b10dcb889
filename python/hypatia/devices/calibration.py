"""Measures what a device can do, by small and large kernels of torch's, in some tenths of a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import _torch
from . import table

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

Call = Callable[[], object]


class Probe(NamedTuple):
    """A call, and what it has to do."""

    call: Call
    moved: float
    multiplications: float = 0.0
    vector: float = 0.0


def measured(device: torch.device) -> dict[str, Any]:
    """The fields of the rates of a device."""
    large = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    with torch.no_grad():
        source, target = (torch.ones(large // 4, device=device) for _ in range(2))
        bandwidth, copies = _copies(source, target, device)
        most = _GPU_ROWS if device.type == "cuda" else _CPU_ROWS
        by_size = {name: _multiplied(dtype, most, device) for name, dtype in DTYPES.items()}
        launch, host = _launched(device)
        found = {
            "bandwidth": bandwidth,
            "products": {name: max(rate for _, rate in each) for name, each in by_size.items()},
            "by_size": copies,
            "products_by_size": by_size,
            "vector": _vector(source, target, launch, device),
            "launch": launch,
            "host": host,
            "parallel": device.type != "cpu",
        }
        found["calls"] = _calls(found, device)
    return found


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


def _calls(found: dict[str, Any], device: torch.device) -> dict[str, list[float]]:
    """Of each kind of torch's ops: seconds of a small one, and how far a large one is from these rates."""
    pairs = _probes(device)
    # By turns, so that each finds caches as others leave them; large ones leave nothing of the small.
    small, large = (_by_turns([pair[at].call for pair in pairs.values()], device) for at in range(2))
    calls = {}
    for kind, probes, less, more in zip(pairs, pairs.values(), small, large, strict=True):
        ideal = [_ideal(found, probe) for probe in probes]
        calls[kind] = [less, max((more - less) / (ideal[1] - ideal[0]), 1.0)]
    return calls


def _by_turns(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Seconds of each of some calls, the least of several rounds."""
    rounds = [[_in_row(call, device, 1) for call in calls] for _ in range(_TRIES)]
    return [min(each) for each in zip(*rounds, strict=True)]


def _ideal(found: dict[str, Any], probe: Probe) -> float:
    """Seconds of what a probe does at the rates that were found."""
    moving = probe.moved / max(rate for _, rate in found["by_size"])
    return moving + probe.multiplications / found["products"]["f32"] + probe.vector / found["vector"]


def _probes(device: torch.device) -> dict[str, tuple[Probe, Probe]]:
    """A small and a large op of each kind; a GPU's large ones are larger."""
    big = 1 if device.type == "cpu" else 8

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    def convolution(channels: int, side: int, packed: bool) -> Probe:
        x = tensor(4, channels, side, side).contiguous(memory_format=torch.channels_last)
        w, b = tensor(channels, channels, 3, 3), tensor(channels)
        terms, moved = 9.0 * channels * x.numel(), 4.0 * (2 * x.numel() + w.numel())
        how = ([1, 1], [1, 1], [1, 1], 1)
        if not packed or device.type != "cpu" or not hasattr(_torch.onednn, "_convolution_pointwise"):
            return Probe(lambda: torch.conv2d(x, w, b, padding=1), moved, terms)
        kernel = _torch.onednn._reorder_convolution_weight(w, *how)
        call = _torch.onednn._convolution_pointwise.default
        return Probe(lambda: call(x, kernel, b, *how, "none", [], ""), moved, terms)

    def attention(length: int, width: int) -> Probe:
        q = tensor(2, 4, length, width)
        scores = 8.0 * length * length
        call = lambda: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
        return Probe(call, 16.0 * q.numel(), 2 * scores * width, 8 * scores)

    def product(rows: int) -> Probe:
        a = tensor(4, rows, rows)
        return Probe(lambda: torch.bmm(a, a), 12.0 * a.numel(), 4.0 * rows**3)

    def of(call: Callable[[torch.Tensor], object], *shape: int, written: float = 1.0) -> Probe:
        x = tensor(*shape)
        return Probe(lambda: call(x), 4.0 * (1.0 + written) * x.numel())

    def lookup(rows: int) -> Probe:
        weight, at = tensor(1024, 64), torch.arange(rows, device=device) % 1024
        return Probe(lambda: torch.embedding(weight, at), 8.0 * 64 * rows)

    def indexed(rows: int) -> Probe:
        x, at = tensor(1024, 64), torch.arange(rows, device=device) % 1024
        return Probe(lambda: x[at], 8.0 * 64 * rows)

    def mean(x: torch.Tensor) -> object:
        return x.mean((1, 2))

    def norm(x: torch.Tensor) -> object:
        return torch.group_norm(x, 4)

    def pool(x: torch.Tensor) -> object:
        return torch.max_pool2d(x, 2)

    def images(call: Callable[[torch.Tensor], object], *shape: int, written: float) -> Probe:
        x = tensor(*shape).contiguous(memory_format=torch.channels_last)
        return Probe(lambda: call(x), 4.0 * (1.0 + written) * x.numel())

    def roll(x: torch.Tensor) -> object:
        return x.roll(1, 1)

    def other(x: torch.Tensor) -> object:
        return x.cumsum(1)

    side = 16 * big
    return {
        "convolution": (convolution(8, 4, packed=False), convolution(32, side, packed=False)),
        "packed convolution": (convolution(8, 4, packed=True), convolution(32, side, packed=True)),
        "attention": (attention(8, 8), attention(128 * big, 32)),
        "product": (product(8), product(64 * big)),
        "reduction": (of(mean, 4, 2, 2, 16, written=0.0), of(mean, 4, 2 * side, 2 * side, 64, written=0.0)),
        "norm": (of(norm, 2, 16, 2, 2), of(norm, 2, 64, 2 * side, 2 * side)),
        "pool": (images(pool, 2, 8, 4, 4, written=0.25), images(pool, 2, 32, side, side, written=0.25)),
        "lookup": (lookup(4), lookup(1024 * big * big)),
        "index": (indexed(4), indexed(1024 * big * big)),
        "copy": (of(roll, 4, 16), of(roll, 1024, 64 * big * big)),
        "other": (of(other, 4, 16), of(other, 1024, 64 * big * big)),
    }


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
