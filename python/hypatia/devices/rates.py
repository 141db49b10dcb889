"""What a device can do, as torch's own kernels reach it: bytes, products, vector operations, launches.

Measured once, in about a tenth of a second, and kept on disk. What a step has to move and to multiply, over
the rates of large copies and products, is the least time that it can take; ``prediction.py`` says what it will
take.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import platform

import torch

from .. import store

KIND = "rates"
"""Under which the store keeps them."""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Element types whose products are measured, by the names that plans use."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes, multiplications with additions, and vector operations in a second; and seconds of small things."""

    bandwidth: float
    """Of a large copy."""
    products: dict[str, float]
    """By the element type of the factors."""
    by_size: list[list[float]]
    """Bytes that a copy moves, and how many it moves in a second: small ones stay in caches."""
    vector: float
    """Vector operations, as the op table counts them, on numbers that lie in a cache."""
    launch: float
    """Seconds of one more small kernel after others."""
    host: float
    """Seconds that a call of a small op takes the host."""
    run: float
    """Seconds that each run of elements takes that does not follow the one before."""
    apart: float
    """Seconds for each element whose neighbours lie elsewhere."""
    calls: dict[str, list[float]]
    """Of torch's ops of a kind: seconds of a small one, and how many times as long a large one takes as what
    it moves, multiplies and computes does at these rates."""

    def seconds(self, moved: float, multiplications: float, dtype: str) -> float:
        """The least time of a step: moving and multiplying overlap."""
        return max(moved / self.bandwidth, multiplications / self.rate(dtype))

    def rate(self, dtype: str) -> float:
        """Multiplications of a type; what was not measured counts as fp32."""
        return self.products.get(dtype) or self.products["f32"]

    def moving(self, moved: float, within: float = 0.0) -> float:
        """Seconds that moving so many bytes takes, of memory of which so many are used in turn."""
        sizes = [size for size, _ in self.by_size]
        size = max(moved, within)
        at = bisect.bisect_left(sizes, size)
        if not sizes or at == len(sizes):
            return moved / (self.by_size[-1][1] if sizes else self.bandwidth)
        if at == 0:
            return moved / self.by_size[0][1]
        (low, slow), (high, fast) = self.by_size[at - 1 : at + 1]
        share = math.log(size / low) / math.log(high / low)
        return moved / (slow ** (1.0 - share) * fast**share)


_known: dict[str, Rates] = {}
"""Of this process, whether or not there is a folder to keep them in."""


def rates(device: torch.device) -> Rates:
    """Those of a device, measured now or before."""
    key = f"{_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    if (found := _known.get(key) or _kept(key)) is None:
        fresh = measured(device)
        # Another process may have been faster: all are to use the same numbers.
        if (found := _kept(key)) is None:
            found = fresh
            store.put(KIND, key, json.dumps(dataclasses.asdict(found)).encode())
    return _known.setdefault(key, found)


def measured(device: torch.device) -> Rates:
    """Those of a device, measured now."""
    from . import calibration

    return Rates(**calibration.measured(device))


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
