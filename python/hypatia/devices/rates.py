"""What a device can do, as torch's own kernels reach it: bytes, products, vector operations, launches.

Measured once, in some tenths of a second, and kept on disk. What a step has to move and to multiply, over the
rates of large copies and products, is the least time that it can take; ``prediction.py`` says what
it will take.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import platform

import torch

from .. import store
from . import calibration

KIND = "rates"
"""Under which the store keeps them."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes, multiplications with additions, vector operations in a second; and seconds of small things."""

    bandwidth: float
    """Of a large copy."""
    products: dict[str, float]
    """By the element type of the factors."""
    by_size: list[list[float]]
    """Bytes that a copy moves, and how many it moves in a second: small ones stay in caches."""
    products_by_size: dict[str, list[list[float]]]
    """Multiplications of a product, and how many of them it makes in a second, likewise."""
    vector: float
    """Vector operations, as the op table counts them, on numbers that lie in a cache."""
    launch: float
    """Seconds of one more small kernel after others."""
    host: float
    """Seconds that a call of a small op takes the host."""
    parallel: bool
    """Whether a kernel moves and computes at once, and has a thread for each element, as on a GPU."""
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
        return moved / _at(self.by_size, max(moved, within), self.bandwidth)

    def multiplying(self, multiplications: float, dtype: str) -> float:
        """Seconds of a product of a size by torch."""
        known = self.products_by_size.get(dtype) or self.products_by_size.get("f32", [])
        return multiplications / _at(known, multiplications, self.rate(dtype))


def _at(known: list[list[float]], size: float, large: float) -> float:
    """A rate between those of the next smaller and the next larger size."""
    at = bisect.bisect_left([s for s, _ in known], size)
    if not known or at == len(known):
        return large
    if at == 0:
        return known[0][1]
    (low, before), (high, behind) = known[at - 1 : at + 1]
    share = math.log(size / low) / math.log(high / low)
    return float(before ** (1.0 - share) * behind**share)


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


def measured(device: torch.device) -> Rates:
    """Those of a device, measured now."""
    return Rates(**calibration.measured(device))


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
