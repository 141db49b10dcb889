"""How long each step of a plan takes, beside what it has to move and to multiply."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch

from ..devices import table
from ..devices.prediction import Demand, predicted
from ..devices.rates import rates
from .described import Described, described
from .native import NativeGraph
from .recorded_plan import Recorded

Call = tuple[NativeGraph, Sequence[object]]
"""A graph, and the arguments of a call of it."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step of a plan."""

    name: str
    sizes: str
    """What it reads and writes: `f32[8, 64] f32[16, 64] -> f32[8, 16]`."""
    moved: int
    multiplications: float
    seconds: float
    least: float
    """Seconds that moving these bytes, or these multiplications, take at the device's rates."""
    bound_by: str
    """What takes that long: bytes or products."""
    predicted: float
    """Seconds that it is expected to take."""
    demand: Demand
    """What that is made of."""


_lock = threading.Lock()
_collectors: list[tuple[int, list[Call]]] = []
"""Threads whose calls are collected, and where. Plans are watched while there are some."""


@contextlib.contextmanager
def plan_calls() -> Iterator[list[Call]]:
    """Collects the plans that this thread runs, with their arguments, while it is entered."""
    collector: tuple[int, list[Call]] = (threading.get_ident(), [])
    with _lock:
        if not _collectors:
            NativeGraph.run = _noted  # type: ignore[method-assign]
        _collectors.append(collector)
    try:
        yield collector[1]
    finally:
        with _lock:
            _collectors[:] = [c for c in _collectors if c is not collector]
            if not _collectors:
                NativeGraph.run = _run  # type: ignore[method-assign]


_run = NativeGraph.run


def _noted(self: NativeGraph, args: Sequence[object]) -> Sequence[object] | None:
    given = list(args)
    results = _run(self, args)
    if results is not None:
        thread = threading.get_ident()
        for _, calls in [c for c in _collectors if c[0] == thread]:
            calls.append((self, given))
    return results


def step_times(native: NativeGraph, args: Sequence[object], repeats: int = 9) -> list[StepTime] | None:
    """The steps of the plan for these arguments; none if it has no plan for them, or is of a training step.

    The plan runs some times, on copies of what it changes.
    """
    binding = native.binding
    sizes = native.sizes(args)
    known = None if sizes is None else binding.known(args, sizes)
    if sizes is None or known is None:
        return None
    bound = known[0].bound if isinstance(known[0], Recorded) else known[0]
    symbols = native.planner.symbols
    about = described(native.planner.at({s: n for (s, _, _), n in zip(symbols, sizes, strict=True)}))
    given = binding.given(args)
    for i in binding.changes:
        given[i] = given[i].clone()
    device = torch.device(binding.device)
    with torch.no_grad():
        seconds = table.of(device).step_times(bound, binding.lead(), given, len(about["steps"]), repeats)
    if seconds is None:
        return None
    rate = rates(device)
    demands = demanded(about)
    within = sum(demand.moved for demand in demands)
    found: list[StepTime] = []
    for demand, text, taken in zip(demands, about["sizes"], seconds, strict=True):
        name, dtype, moved, multiplications = demand.name, demand.dtype, demand.moved, demand.multiplications
        least = rate.seconds(moved, multiplications, dtype)
        by = "bytes" if least == rate.seconds(moved, 0.0, dtype) else "products"
        will = predicted(demand, rate, within)
        found.append(StepTime(name, text, int(moved), multiplications, taken, least, by, will, demand))
    return found


def demanded(about: Described) -> list[Demand]:
    """What each step of a plan has to do."""
    kinds, calls = about["kinds"], iter(about["calls"])
    told = kinds.count("torch") == len(about["calls"])
    rows = zip(
        kinds,
        about["steps"],
        about["sizes"],
        about["moved"],
        about["multiplications"],
        about["demands"],
        [False, *(kind == "torch" for kind in kinds)],
        strict=False,
    )
    found = []
    for kind, name, sizes, moved, multiplications, more, after in rows:
        packed = told and kind == "torch" and next(calls)["onednn"] is not None
        call = "packed convolution" if packed else ""
        dtype = sizes.split("[", 1)[0]
        vector, results, runs, apart, constants = more
        about_it = (kind, name, dtype, moved, multiplications, vector, results, runs, apart, constants)
        found.append(Demand(*about_it, after_call=after, call=call))
    return found
