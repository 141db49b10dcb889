"""Which of two programs of a graph is kept, where measuring has to say: with attention as a call of torch's,
or as the products that the model writes. Short rows of many heads are often faster as products."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..capture import attention_calls
from ..capture.op_facts import changed_inputs, effects_of
from ..compiler.pipeline import CompiledGraph, Part
from ..devices import table
from ..devices.table import random_devices
from ..execute import timing
from ..execute.changes import RandomState
from ..execute.choose import CLOSE, PLAINER, SECONDS
from ..execute.native import NativeGraph

log = logging.getLogger(__name__)

PART: Part = ("pass", attention_calls.PASS)
"""What one of them is made without."""

NAMES = ("plan", "plainer plan")
"""What the plans are called where they are timed."""


def faster(
    found: CompiledGraph,
    again: Callable[[frozenset[Part]], CompiledGraph],
    plan_of: Callable[[CompiledGraph], NativeGraph],
    args: list[object],
) -> tuple[CompiledGraph, frozenset[Part]]:
    """The program whose plan is the faster one for these arguments, and what it is made without.

    Nothing is compiled again where there is no choice: no written attention, a device that does not ask, a
    call that changes something, or large copies of weights.
    """
    report, without = found.report, frozenset((PART,))
    device = next((t.device for t in args if isinstance(t, torch.Tensor)), torch.device("cpu"))
    if report is None or attention_calls.PASS not in report.passes or found.planner is None:
        return found, frozenset()
    changes = effects_of(found.captured) or changed_inputs(found.captured)
    if changes or not table.of(device).compares_programs:
        return found, frozenset()
    random = RandomState(random_devices(args))
    plan = plan_of(found)
    if plan.run(args) is None or plan.binding.bytes[1] > PLAINER:
        plan.binding.leave()
        random.restore()
        return found, frozenset()
    other = again(without)
    taken = _taken({NAMES[0]: plan} | ({NAMES[1]: plan_of(other)} if other.planner else {}), args, device)
    random.restore()
    if len(taken) < len(NAMES):
        return found, frozenset()
    call, products = (1e6 * taken[name] for name in NAMES)
    times = f"attention: {call:.0f} us as torch's call, {products:.0f} us as products"
    log.info("%s", times)
    if CLOSE * products >= call or other.report is None:
        report.masks.append(times)
        return found, frozenset()
    other.report.masks.append(times)
    return other, without


def _taken(plans: dict[str, NativeGraph], args: list[object], device: torch.device) -> dict[str, float]:
    """Seconds of a call by each plan that runs."""
    running = {name: plan for name, plan in plans.items() if plan.run(args) is not None}
    taken = timing.timed(
        {name: lambda plan=plan: plan.run(args) for name, plan in running.items()},  # type: ignore[misc]
        SECONDS,
        device,
    ).taken
    for plan in plans.values():
        plan.binding.leave()
    return taken
