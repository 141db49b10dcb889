"""Which form of a graph runs: its plan, torch's ops on the optimized graph, or eager. The fastest does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from .native import NativeGraph
from .timing import in_turns

log = logging.getLogger(__name__)

CLOSE = 1.03
"""A form that takes so many times as long as another is as good as equal."""

COPIES = 1 << 25
"""Bytes of copies of weights from which on a plan has to be faster, not only as fast."""

SPLIT = {"bf16x6"}
"""Kinds of linear layers on tiles, of which a core has one set for both its threads."""

PLAINER = 256 << 20
"""Bytes of packed weights up to which a second plan without such layers is tried."""

PAUSES = (0.02, 0.1)
"""Seconds after which a plan that lost is timed again."""

SECONDS = 0.05
"""How long forms are timed."""

Forms = Mapping[str, Callable[[], object]]


def timed(forms: Forms, *, gpu: bool) -> dict[str, float]:
    """Seconds of a call in each form."""
    return in_turns(forms, SECONDS, gpu=gpu)


def keep_fastest(
    native: NativeGraph, args: Sequence[object], eager: Callable[[], object] | None = None
) -> dict[str, float]:
    """Times the plan, the graph and what eager does in turn, keeps the fastest; seconds of each.

    A plan that does not run on these arguments is not kept, and has no time.
    """
    forms: dict[str, Callable[[], object]] = {}
    other = None
    gpu = native.binding.device.type == "cuda"
    native.native = True
    # Packing weights is not part of a call.
    if native.run(args) is not None and native.native:
        forms["plan"] = lambda: native(list(args))
        other = _plainer(native, args)
    if other is not None:
        forms["plainer plan"] = lambda: other(list(args))
    if eager is not None:
        forms["eager"] = eager
    forms["graph"] = lambda: native.graph(list(args))
    if "plan" not in forms:
        log.info(
            "the native plan does not run: %s", native.binding.refusal or "it is not for these arguments"
        )
        native.native = False
        return timed(forms, gpu=gpu) if eager is not None else {}
    # Of equals the plan is kept: its results lie in memory that is used again, not in fresh pages. But
    # much memory for copies of weights has to pay.
    limit = CLOSE if native.binding.bytes[1] < COPIES else 1 / CLOSE
    best = _patiently(forms, limit, gpu=gpu)
    if other is not None and best["plainer plan"] < best["plan"]:
        native.binding.take(other.binding)
        best["plan"] = best["plainer plan"]
    best.pop("plainer plan", None)
    native.native = best["plan"] <= limit * _others(best)
    return best


def _patiently(forms: Forms, limit: float, *, gpu: bool) -> dict[str, float]:
    """Seconds of each form; a plan that would be dropped is timed again, for it is dropped for good, and what
    disturbs one measurement may spare the next."""
    best = timed(forms, gpu=gpu)
    for pause in PAUSES:
        if min(taken for name, taken in best.items() if name.endswith("plan")) <= limit * _others(best):
            break
        time.sleep(pause)
        again = timed(forms, gpu=gpu)
        best = {name: min(taken, again.get(name, taken)) for name, taken in best.items()}
    return best


def _others(times: Mapping[str, float]) -> float:
    return min((taken for name, taken in times.items() if not name.endswith("plan")), default=math.inf)


def _plainer(native: NativeGraph, args: Sequence[object]) -> NativeGraph | None:
    """The same without kernels whose speed depends on what else runs on a core, if it has some."""
    if not SPLIT & set(native.binding.kinds) or native.binding.bytes[1] > PLAINER:
        return None
    other = NativeGraph(native.gm, native.planner, native.graph, sorted(SPLIT))
    other.fallback = native.fallback
    other(list(args))
    other.binding.leave()
    return other if other.binding.bound else None
