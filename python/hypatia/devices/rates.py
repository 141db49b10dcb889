"""How fast a device moves bytes and multiplies, as torch's own kernels for large tensors reach it.

Measured once, in some hundredths of a second, and kept on disk. What a step has to move and to multiply, over
these rates, is the least time that it can take.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable

import torch

from .. import store
from . import table

KIND = "rates"
"""Under which the store keeps them."""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Element types whose products are measured, by the names that plans use."""

_TRIES, _LONG = 5, 0.01
"""How often something is done, and the seconds from which on it is done once, and nothing larger."""

_CPU_BYTES, _GPU_BYTES = 64 << 20, 512 << 20
_CPU_ROWS, _GPU_ROWS, _FIRST_ROWS = 1024, 4096, 64
"""Of the factors of products, which grow up to these: some processors have no products of 16 bits."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes, and multiplications with additions, in a second."""

    bandwidth: float
    products: dict[str, float]
    """By the element type of the factors."""

    def seconds(self, moved: float, multiplications: float, dtype: str) -> float:
        """The least time of a step: moving and multiplying overlap."""
        rate = self.products.get(dtype) or self.products["f32"]
        return max(moved / self.bandwidth, multiplications / rate)


_known: dict[str, Rates] = {}
"""Of this process, whether or not there is a folder to keep them in."""


def rates(device: torch.device) -> Rates:
    """Those of a device, measured now or before."""
    key = f"{_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    if (found := _known.get(key) or _kept(key)) is None:
        found = _measured(device)
        store.put(KIND, key, json.dumps(dataclasses.asdict(found)).encode())
    return _known.setdefault(key, found)


def _kept(key: str) -> Rates | None:
    """Those of an earlier process."""
    kept = store.get(KIND, key)
    if kept is None:
        return None
    try:
        return Rates(**json.loads(kept))
    except (ValueError, TypeError):
        store.drop(KIND, key)
        return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _measured(device: torch.device) -> Rates:
    on_host = device.type == "cpu"
    count = (_CPU_BYTES if on_host else _GPU_BYTES) // 4
    source, target = (torch.ones(count, device=device) for _ in range(2))
    copying = _least(lambda: target.copy_(source), device)
    most = _CPU_ROWS if on_host else _GPU_ROWS
    with torch.no_grad():
        products = {name: _multiplied(dtype, most, device) for name, dtype in DTYPES.items()}
    return Rates(2 * 4 * count / copying, products)


def _multiplied(dtype: torch.dtype, most: int, device: torch.device) -> float:
    """Multiplications in a second, of products as large as time allows."""
    rows, rate = _FIRST_ROWS, 0.0
    while rows <= most:
        # Numbers, not zeros, which some devices multiply faster.
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        seconds = _least(lambda a=left, b=right: torch.mm(a, b), device)  # type: ignore[misc]
        rate = max(rate, rows**3 / seconds)
        if seconds > _LONG:
            break
        rows *= 4
    return rate


def _least(call: Callable[[], object], device: torch.device) -> float:
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
