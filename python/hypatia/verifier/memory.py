"""How much memory a comparison takes, and how much it may take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..devices import table
from .reference import Script


def wide_bytes(script: Script) -> float:
    """Bytes that the live values of a script take in float64, at most, beside eager's own."""
    live: dict[fx.Node, float] = {}
    peak = 0.0
    for step in script.steps:
        for node in (step.node, *step.node.all_input_nodes):
            live.setdefault(node, _bytes(node))
        peak = max(peak, sum(live.values()))
        for node in step.drops:
            live.pop(node, None)
    return peak


def _bytes(node: fx.Node) -> float:
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    total = 0.0
    for value in values:
        if isinstance(value, torch.Tensor) and not value._is_view():
            size = 1.0
            for n in value.shape:
                size *= n if isinstance(n, int) else (n.node.hint or 1)
            wide = value.is_floating_point() or value.is_complex()
            total += size * (value.element_size() + (8 if wide else 0))
    return total


def memory_allowed(values: Iterable[object], share: float = 0.5) -> float:
    """Bytes that a check may take: a share of what is free where the values are."""
    for device in (v.device for v in values if isinstance(v, torch.Tensor)):
        free = table.of(device).free_memory(device)
        if free is not None:
            return share * free
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return share * 1024 * float(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 8 * 2.0**30
