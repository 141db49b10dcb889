"""The cost model of the search: one that ships with the compiler, or the numbers that were measured here."""

from __future__ import annotations

import json

import torch

from .. import _native, store
from . import table
from .calibration import Rates
from .rates import rates

Target = str | dict[str, str | float]
"""A name, or the numbers of one: rates in a microsecond, and microseconds."""

_DIGITS = 2
"""Significant digits of measured numbers: what a machine varies by changes few programs."""
_TYPICAL = 16e6
"""Bytes of a tensor whose rate of moving stands for all."""


def target(device: torch.device, costs: str) -> Target:
    """What the search counts with. Measured numbers are those on disk, so that all processes use the same."""
    name = table.of(device).target(device)
    return measured(name, rates(device)) if costs == "measured" and store.enabled() else name


def measured(name: str, found: Rates) -> Target:
    """A target that ships, with a device's own numbers in place of its; what views cost was not measured."""
    numbers: dict[str, str | float] = json.loads(_native.target_numbers(name))
    short = max(found.products.get("bf16", 0.0), found.products.get("f16", 0.0)) or found.rate("f32")
    own = {
        "vector": found.vector / 1e6,
        # A multiplication and an addition are two operations.
        "matrix32": 2.0 * found.rate("f32") / 1e6,
        "matrix16": 2.0 * short / 1e6,
        "bandwidth": _TYPICAL / found.moving(_TYPICAL) / 1e6,
        "launch": 1e6 * found.launch,
    }
    rounded = {key: float(f"{value:.{_DIGITS}g}") for key, value in own.items()}
    return numbers | rounded | {"name": f"{name}, measured"}
