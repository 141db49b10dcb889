"""Which form of a call runs: the fastest one. Every entry asks here, with its forms in order of preference.

The forms of a graph are its plan, a recording (a CUDA graph of torch's ops), torch's ops on the optimized
graph, and eager: the graph as it was captured. A training step has forms of its own, and eager.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch
from .._torch import pytree
from ..devices import table
from ..timeline import FORMS, stage
from . import timing
from .changes import Counts
from .native import NativeGraph
from .timing import CallTimes, Forms, Times

log = logging.getLogger(__name__)

CLOSE = 1.03
"""A form that takes so many times as long as another is as good as equal."""

BUSY = 2.0
"""The device takes less than so many times as long for torch's ops as a busy host."""

COPIES = 1 << 25
"""Bytes of copies of weights from which on a plan has to be faster, not only as fast."""

SPLIT = {"bf16x6"}
"""Kinds of linear layers on tiles, of which a core has one set for both its threads."""

PLAINER = 256 << 20
"""Bytes of packed weights up to which a second plan without such layers is tried."""

AHEAD = 1.3
"""How many times as fast as the others a plan is to be for that not to be tried: the plainer plan's products
take about as long as torch's."""

PAUSES, PATIENCE = (0.02, 0.1), 0.3
"""Seconds after which a plan that lost is timed again; once, and beside the winner alone, if timing took so
long."""

SECONDS = 0.05
"""How long forms are timed."""

NARROW = 1.15
"""A plan that takes so many times as long as what was kept is timed again at later calls."""

LATER, LAPS = (64, 1024), 8
"""At which calls, and how many of them for each form."""

Record = Callable[[str], Callable[[], object] | None]
"""Makes a recording of one of the forms, and returns a call of it; none if it cannot be recorded."""


NO_COUNTS = Counts()
"""Of calls that change none."""


class Choice(NamedTuple):
    """The form that was kept, and what was measured."""

    kept: str
    times: Times

    @property
    def is_narrow(self) -> bool:
        """Whether the plan lost by little."""
        taken = self.times.taken
        lost = self.kept != "plan" and "plan" in taken
        return lost and taken["plan"] <= NARROW * taken.get(self.kept, 0.0)


@stage(FORMS)
def fastest(
    forms: Forms,
    device: torch.device,
    *,
    plan: NativeGraph | None = None,
    args: Sequence[object] = (),
    record: Record | None = None,
    counts: Counts = NO_COUNTS,
) -> Choice:
    """Times forms, which are in order of preference, and the plan of these arguments; the one to keep.

    A plan that does not run is not kept, and has no time. A recording is made where the host is what calls
    wait for. Each call finds the ``counts`` as they were.
    """
    forms = {name: counts.before(form) for name, form in forms.items()}
    if plan is not None:
        plan.native = True
        counts.restore()
        # Packing weights is not part of a call.
        if plan.run(args) is not None and plan.native:
            forms = {"plan": counts.before(_calling(plan, args)), **forms}
        else:
            why = plan.binding.refusal or "it is not for these arguments"
            log.info("the native plan does not run: %s", why)
    copies = 0 if plan is None else plan.binding.bytes[1]
    times = _timed_with_retries(forms, copies, device)
    if plan is not None and "plan" in times.taken:
        _try_plainer(plan, args, times.taken, device, counts)
    if record is not None:
        times = _with_recording(times, record, device, counts)
    kept = decide(times.taken, copies)
    if plan is not None:
        plan.native = kept == "plan"
        plan.lost = not plan.native and "plan" in times.taken
    return Choice(kept, times)


def decide(taken: Mapping[str, float], copies: int = 0) -> str:
    """The first form that is about as fast as the fastest of the others.

    Of equals the plan is kept: its results lie in memory that is used again, not in fresh pages. But much
    memory for copies of weights has to pay.
    """
    for name, seconds in taken.items():
        is_plan = name.endswith("plan")
        limit = 1 / CLOSE if is_plan and copies >= COPIES else CLOSE
        others = (t for n, t in taken.items() if n != name and not (is_plan and n.endswith("plan")))
        if seconds <= limit * min(others, default=math.inf):
            return name
    return min(taken, key=taken.__getitem__)


def with_backward(call: Callable[[], object], wanted: Iterable[torch.Tensor]) -> Callable[[], None]:
    """A training step: both passes, for those of the tensors that have gradients.

    The backward pass begins at single numbers, if there are some: a model that returns a loss beside other
    results is trained by the loss. Compiled passes take gradients of the others all the same, eager does not.
    """
    leaves = [t for t in wanted if t.requires_grad]

    def step() -> None:
        results = [t for t in pytree.tree_leaves(call()) if isinstance(t, torch.Tensor) and t.requires_grad]
        results = [t for t in results if not t.dim()] or results
        if results:
            torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)

    return step


class LaterTiming:
    """Calls in the form that was kept, and some later ones by the plan, which lost by little: what was
    measured beside a compilation may not be so any more. Calls are timed that are made anyway."""

    def __init__(
        self,
        kept: Callable[[list[Any]], object],
        plan: Callable[[Sequence[Any]], object | None],
        device: torch.device,
        ended: Callable[[int, dict[str, float], bool], None],
    ) -> None:
        """The plan returns none where it does not run. ``ended`` is told after how many calls what was
        measured, and whether the plan is to run from now on."""
        self._kept = kept
        self._plan = plan
        self._device = device
        self._ended = ended
        self._calls = 0
        self._call_times: dict[str, CallTimes] = {}

    def __call__(self, args: list[object]) -> object:
        """The results."""
        self._calls += 1
        begun = next((n for n in LATER if n <= self._calls < n + 2 * LAPS), None)
        if begun is None or is_observed(self._device) or _torch.any_autocast():
            self._call_times = {}
            return self._kept(args)
        at = self._calls - begun
        if at == 0:
            self._call_times = {name: CallTimes(self._device) for name in ("plan", "kept")}
        call_times = self._call_times
        if at < LAPS:
            results = call_times["plan"].time(lambda: self._plan(args)) if call_times else None
            if results is not None:
                return results
            # It does not run now, so that there is nothing to compare.
            self._call_times = {}
        elif call_times:
            results = call_times["kept"].time(lambda: self._kept(args))
            if at == 2 * LAPS - 1:
                self._end(call_times)
            return results
        return self._kept(args)

    def _end(self, call_times: Mapping[str, CallTimes]) -> None:
        self._call_times = {}
        seconds = {name: each.seconds() for name, each in call_times.items()}
        if timing.instead is not None:
            seconds = timing.instead(list(call_times))
        self._ended(self._calls, seconds, decide(seconds) == "plan")


def is_observed(device: torch.device) -> bool:
    """Whether somebody looks at the ops of this call: a mode, a recording, a compilation, a transform."""
    return bool(
        table.of(device).is_recording()
        or _torch.dispatch_mode_count()
        or _torch.functorch_active()
        or torch.compiler.is_compiling()
    )


def _calling(run: Callable[[list[object]], object], args: Sequence[object]) -> Callable[[], object]:
    return lambda: run(list(args))


def _with_recording(times: Times, record: Record, device: torch.device, counts: Counts) -> Times:
    """The same with the time of a recording, if that can be faster than all others: it takes what the device
    takes for the form that is recorded. So it can where torch's ops are fastest and their host is about as
    busy as the device: on a busier host, calls would wait for it."""
    devices = {name: times.apart[name][0] for name in ("graph", "eager") if name in times.apart}
    if not devices:
        return times
    name = min(devices, key=devices.__getitem__)
    best = min(times.taken, key=times.taken.__getitem__)
    is_busy = best in devices and BUSY * times.apart[best][1] > devices[name]
    if CLOSE * devices[name] >= times.taken[best] and not is_busy:
        return times
    counts.restore()
    call = record(name)
    if call is None:
        return times
    more = timing.timed({"recording": counts.before(call)}, SECONDS, device)
    plan = {n: t for n, t in times.taken.items() if n == "plan"}
    return Times({**plan, **more.taken, **times.taken}, {**times.apart, **more.apart})


def _timed_with_retries(forms: Forms, copies: int, device: torch.device) -> Times:
    """Times of the forms. A plan that would be dropped is timed again: what disturbs one measurement may
    spare the next."""
    start = time.perf_counter()
    times = timing.timed(forms, SECONDS, device)
    for pause in PAUSES if "plan" in forms else ():
        kept = decide(times.taken, copies)
        if kept.endswith("plan"):
            break
        is_long = time.perf_counter() - start > PATIENCE
        time.sleep(pause)
        both = {name: forms[name] for name in ("plan", kept)}
        again = timing.timed(both if is_long else forms, SECONDS, device)
        taken = {n: min(t, again.taken.get(n, t)) for n, t in times.taken.items()}
        apart = {n: min(t, again.apart.get(n, t), key=max) for n, t in times.apart.items()}
        times = Times(taken, apart)
        if is_long:
            break
    return times


def _try_plainer(
    plan: NativeGraph, args: Sequence[object], taken: dict[str, float], device: torch.device, counts: Counts
) -> None:
    """Takes the plainer plan where it is the faster one. It is packed and tried only where the plan is not
    far ahead of the other forms."""
    if AHEAD * taken["plan"] <= min((t for n, t in taken.items() if n != "plan"), default=0.0):
        return
    counts.restore()
    plainer = _plainer(plan, args)
    if plainer is None:
        return
    both = {
        name: counts.before(_calling(each, args))
        for name, each in (("plan", plan), ("plainer plan", plainer))
    }
    again = timing.timed(both, SECONDS, device).taken
    if again["plainer plan"] < again["plan"]:
        plan.binding.take(plainer.binding)
        taken["plan"] *= again["plainer plan"] / again["plan"]


def _plainer(native: NativeGraph, args: Sequence[object]) -> NativeGraph | None:
    """The same without kernels whose speed depends on what else runs on a core, if it has some."""
    if not SPLIT & set(native.binding.kinds) or native.binding.bytes[1] > PLAINER:
        return None
    other = NativeGraph(native.gm, native.planner, native.graph, sorted(SPLIT))
    other.fallback = native.fallback
    other(list(args))
    other.binding.leave()
    return other if other.binding.bound else None
