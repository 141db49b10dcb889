"""What a step of a plan will take on a device, by what it has to do and the device's measured rates.

A step starts, moves, computes, and begins anew where its operands have gaps. How much of each is told by the
plan; how long each takes was measured on the device (``rates.py``); how near the kernels of a kind come to
these rates is a row of :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .calibration import Rates


class Demand(NamedTuple):
    """What a step has to do."""

    kind: str
    """linear, region, rows and so on; torch for a call into torch."""
    name: str
    dtype: str
    moved: float
    """Bytes, each value once."""
    multiplications: float
    vector: float = 0.0
    """Vector operations, as the op table counts them."""
    results: float = 0.0
    """Elements that it writes."""
    runs: float = 0.0
    """Rows, and runs of elements that lie one after the other in operands with gaps."""
    apart: float = 0.0
    """Elements whose neighbours lie elsewhere."""
    constants: float = 0.0
    """Bytes of constants that it reads."""
    after_call: bool = False
    """Whether the step before is a call into torch."""
    call: str = ""
    """The kind of the call into torch, where its name does not tell."""


class Kind(NamedTuple):
    """How near the kernels of a kind of step come to the rates of torch's large ones."""

    start: float
    """Its start, in launches of a small kernel by torch: a plan needs no dispatcher on a CPU."""
    multiplying: float = 1.0
    """How many times as long it takes as what it does at these rates."""
    vector: float = 1.0
    moving: float = 1.0
    run: float = 0.0
    """What a row or a run takes, in vector operations: a loop begins anew."""
    apart: float = 0.0
    """What an element apart from its neighbours takes, likewise."""


KINDS = {
    "linear": Kind(0.2, 0.75, 1.0, 3.2, 270.0),
    "batch": Kind(0.5),
    "region": Kind(0.6, 1.0, 0.6, 2.8, 500.0, 12.0),
    "rows": Kind(0.4, moving=3.0, run=100.0, apart=12.0),
    "rows layernorm": Kind(0.05, vector=0.6, moving=4.0, run=800.0, apart=12.0),
    "rows rmsnorm": Kind(0.2, vector=1.2, moving=0.4, apart=12.0),
    "columns": Kind(0.5, run=100.0),
    "norm": Kind(0.5, run=300.0),
    "depthwise": Kind(0.5, run=100.0),
    "attention": Kind(0.5),
}
"""On a CPU, by the kind of a step, and by the first word of its name. Bytes that are moved take longer
than in a copy of the same numbers again and again, as they lie where the last step has left them. These
were found once, by `bench/cost.py` over the zoo of the tests; the rates that they are multiplied by are the
machine's. What has 0.5 and ones was not there on a CPU and was not looked at."""

AFTER_CALL = 0.5
"""What starts behind a call into torch takes so many launches more: that has used the caches."""

CALL_RUN = 6000.0
"""What a query of a head of torch's attention takes, in vector operations: its loops are for many of them."""

PARALLEL = {
    "linear": (0.9, 0.3),
    "columns": (0.55, 1.0),
    "depthwise": (0.45, 0.2),
}
"""On a GPU, by the kind of a step: how long its kernel takes to start, as a share of `launch`, and how many
times as long its work takes as torch's. A `launch` is measured with the gap between two kernels; a step is
its kernel alone. Found by `bench/cost.py` on an H200 over half of the zoo's models."""

PARALLEL_STEP = (0.4, 1.0)
"""Of all others."""

PARALLEL_CALLS = {
    "convolution": (0.4, 1.0),
    "attention": (0.8, 1.5),
    "lookup": (0.25, 1.0),
    "index": (0.45, 0.5),
    "product": (0.4, 1.5),
}
"""The same of calls into torch, in what these take by themselves."""

PARALLEL_CALL = (0.35, 1.0)
"""Of all others."""

CALL_KINDS = {
    "convolution": (1.2, 1.0),
    "packed convolution": (0.75, 1.0),
    "attention": (0.75, 1.0),
    "norm": (1.6, 0.2),
    "pool": (1.25, 0.8),
    "product": (1.5, 2.0),
    "reduction": (0.7, 0.2),
    "lookup": (1.0, 1.0),
    "copy": (1.2, 1.0),
    "other": (1.0, 1.0),
}
"""How many times as long a call from a plan takes to start as from Python, and to do its work as a large one,
on a CPU; found as :data:`KINDS` were."""

CALLS = (
    ("convolution", ("conv",)),
    ("attention", ("attention",)),
    ("norm", ("norm",)),
    ("pool", ("pool", "upsample", "interpolate")),
    ("product", ("mm.", "mm_", "bmm", "matmul", "linear", "dot")),
    ("reduction", ("mean", "amax", "amin", "argm", "softmax", "var", "std")),
    ("index", ("index.", "index_put", "gather", "scatter.", "scatter_add", "take")),
    ("lookup", ("embedding", "index_select")),
    ("copy", ("roll", "cat.", "pad", "slice_scatter", "select_scatter", "flip", "repeat")),
)
"""Words in the names of torch's ops, and the kind of op that is measured for them."""


def predicted(step: Demand, rates: Rates, within: float = 0.0) -> float:
    """Seconds that a step takes, in a plan that uses so many bytes of memory in turn."""
    if step.kind == "torch":
        return _call(step, rates, within)
    moving = _moving(step, rates, within)
    vector = step.vector / rates.vector
    if rates.parallel:
        computing = rates.multiplying(step.multiplications, step.dtype) + vector
        kernel, work = PARALLEL.get(step.kind, PARALLEL_STEP)
        return kernel * rates.launch + work * max(computing, moving)
    word = step.name.split(" ", 1)[0]
    kind = KINDS.get(f"{step.kind} {word}") or KINDS[step.kind]
    start = kind.start + (AFTER_CALL if step.after_call else 0.0)
    anew = (kind.run * step.runs + kind.apart * step.apart) / rates.vector
    products = kind.multiplying * step.multiplications / rates.rate(step.dtype)
    return start * rates.launch + products + kind.vector * vector + kind.moving * moving + anew


def _call(step: Demand, rates: Rates, within: float) -> float:
    kind = step.call or call_kind(step.name)
    small, factor = rates.calls[kind]
    computing = step.multiplications / rates.rate(step.dtype) + step.vector / rates.vector
    moving = _moving(step, rates, within)
    if rates.parallel:
        kernel, work = PARALLEL_CALLS.get(kind, PARALLEL_CALL)
        return kernel * small + work * factor * max(computing, moving)
    start, work = CALL_KINDS.get(kind, (1.0, 1.0))
    queries = CALL_RUN * step.runs / rates.vector if step.vector else 0.0
    return start * small + work * factor * (computing + moving) + queries


def call_kind(name: str) -> str:
    """The kind of a call into torch."""
    op = name.removeprefix("aten.")
    return next((kind for kind, words in CALLS if any(word in op for word in words)), "other")


def _moving(step: Demand, rates: Rates, within: float) -> float:
    """Constants come from where the whole plan's lie; what a step before has written, from nearer."""
    constants = min(step.constants, step.moved)
    return rates.moving(constants, within) + rates.moving(step.moved - constants)


HOST = 3.0
"""Calls of a small op that a call of a plan takes the host, beside its steps."""

APART = (1.5, 0.5)
"""On a GPU: the same, with the wait for the result; and the gap between two kernels, as a share of `launch`.
Found as :data:`PARALLEL` was."""


def predicted_call(steps: Sequence[float], rates: Rates, overlaps: bool) -> float:
    """Seconds of a call of a plan whose steps take so long; whether the host works meanwhile."""
    if not overlaps:
        return HOST * rates.host + sum(steps)
    host, between = APART
    return host * rates.host + sum(steps) + between * rates.launch * len(steps)
