"""What a step of a plan will take on a device, by what it has to do and the device's measured rates.

A step starts, moves, computes, and begins anew where its operands have gaps. How much of each is told by the plan;
how long each takes was measured on the device (``rates.py``); how near the kernels of a kind come to these rates
is a row of :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .rates import Rates


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


class Kind(NamedTuple):
    """How near the kernels of a kind of step come to the rates of torch's large kernels on a processor."""

    start: float
    """Launches of a small kernel that its start takes: those of a plan need no dispatcher."""
    multiplying: float = 1.0
    """Times as long as large products."""
    vector: float = 1.0
    moving: float = 1.0
    run: float = 0.0
    """Seconds of a row or of a run, as vector operations: what is begun anew."""
    apart: float = 0.0


KINDS = {
    "linear": Kind(0.25),
    "batch": Kind(0.5),
    "region": Kind(0.5, run=500.0, apart=10.0),
    "rows": Kind(0.1, vector=1.5, run=300.0, apart=10.0),
    "columns": Kind(0.5, run=100.0),
    "norm": Kind(0.5, run=300.0),
    "depthwise": Kind(0.5, run=100.0),
    "attention": Kind(0.5),
}

CALLS = (
    ("convolution", ("conv",)),
    ("attention", ("attention",)),
    ("norm", ("norm",)),
    ("pool", ("pool", "upsample", "interpolate")),
    ("product", ("mm.", "bmm", "matmul", "linear", "dot")),
    ("reduction", ("mean", "sum", "amax", "amin", "argm", "softmax", "max.dim", "min.dim", "var", "any", "all.")),
    ("lookup", ("embedding", "index", "gather", "scatter", "take")),
)
"""Words in the names of torch's ops, and the kind of op that is measured for them."""


def predicted(step: Demand, rates: Rates, within: float = 0.0) -> float:
    """Seconds that a step takes, in a plan that uses so many bytes of memory in turn."""
    if step.kind == "torch":
        return _call(step, rates, within)
    kind = KINDS[step.kind]
    return (
        kind.start * rates.launch
        + kind.multiplying * step.multiplications / rates.rate(step.dtype)
        + kind.vector * step.vector / rates.vector
        + kind.moving * _moving(step, rates, within)
        + (kind.run * step.runs + kind.apart * step.apart) / rates.vector
    )


def _call(step: Demand, rates: Rates, within: float) -> float:
    small, factor = rates.calls[call_kind(step.name)]
    computing = step.multiplications / rates.rate(step.dtype) + step.vector / rates.vector
    return small + factor * (computing + _moving(step, rates, within))


def call_kind(name: str) -> str:
    """The kind of a call into torch."""
    op = name.removeprefix("aten.")
    return next((kind for kind, words in CALLS if any(word in op for word in words)), "other")


def _moving(step: Demand, rates: Rates, within: float) -> float:
    """Constants come from where the whole plan's lie; what a step before has written, from nearer."""
    constants = min(step.constants, step.moved)
    return rates.moving(constants, within) + rates.moving(step.moved - constants)


HOST = 2.5
"""Calls of a small op that a call of a plan takes the host, beside its steps."""


def predicted_call(steps: Sequence[float], rates: Rates, overlaps: bool) -> float:
    """Seconds of a call of a plan whose steps take so long; whether the host works meanwhile."""
    host = HOST * rates.host
    return max(host, sum(steps)) if overlaps else host + sum(steps)
