"""What a device can do, as torch's own kernels reach it: bytes, products, vector operations, launches.

Measured once, in some tenths of a second, and kept on disk. What a step has to move and to multiply, over the
rates of large copies and products, is the least time that it can take; ``prediction.py`` says what
it will take.
"""

from __future__ import annotations

import dataclasses
import json
import platform

import torch

from .. import store
from .calibration import Rates, measured

KIND = "rates"
"""Under which the store keeps them."""

_known: dict[str, Rates] = {}
"""Of this process, whether or not there is a folder to keep them in."""


def rates(device: torch.device) -> Rates:
    """Those of a device, measured now or before."""
    key = _key(device)
    if (found := _known.get(key) or _kept(key)) is None:
        fresh = measured(device)
        # Another process may have been faster: all are to use the same numbers.
        if (found := _kept(key)) is None:
            found = fresh
            store.put(KIND, key, json.dumps(dataclasses.asdict(found)).encode())
    return _known.setdefault(key, found)


def _key(device: torch.device) -> str:
    return f"{_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def _kept(key: str) -> Rates | None:
    """Those of an earlier process; of another form, as another version wrote them, they count as absent."""
    kept = store.get(KIND, key)
    if kept is None:
        return None
    try:
        found = json.loads(kept)
        if set(found) != {field.name for field in dataclasses.fields(Rates)}:
            raise ValueError("another form")
        return Rates(**found)
    except (ValueError, TypeError):
        store.drop(KIND, key)
        return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
