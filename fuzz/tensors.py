"""Tensors described by what they are like: shape, dtype, values, memory layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")

VALUES = ("normal", "ties", "zeros", "nan", "inf", "huge", "tiny", "mixed")
"""Kinds of values: ordinary ones, few different ones, and the odd ones among ordinary ones. Integers can also
be "below 3": from zero on, less than three."""

LAYOUTS = ("dense", "swapped", "steps", "offset", "expanded")
"""Memory layouts: with the last dimensions swapped, every other element, at an odd address, all rows one."""

CHANNELS_LAST = "channels last"
"""The layout that images can have besides."""


@dataclasses.dataclass(frozen=True)
class T:
    """A tensor to be made; its values follow from the seed."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    values: str = "normal"
    layout: str = "dense"
    seed: int = 0
    grad: bool = False
    scale: float = 1.0

    def __repr__(self) -> str:
        fields = [f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        return ", ".join([f"T({self.shape}", *[f"{f.name}={getattr(self, f.name)!r}" for f in fields]]) + ")"

    def make(self, device: str = "cpu") -> torch.Tensor:
        """The tensor itself."""
        dice = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        made = _arranged(self.layout, _values(self, dtype, dice).to(dtype), device)
        return made.requires_grad_(self.grad and dtype.is_floating_point)


def _values(spec: T, dtype: torch.dtype, dice: torch.Generator) -> torch.Tensor:
    shape = spec.shape
    if dtype is torch.bool:
        drawn = torch.rand(shape, generator=dice) < 0.5
        return torch.zeros(shape, dtype=torch.bool) if spec.values == "zeros" else drawn
    if not dtype.is_floating_point:
        return _whole(spec, dtype, dice)
    plain = torch.randn(shape, generator=dice, dtype=torch.float64) * spec.scale
    about = torch.finfo(dtype)
    if spec.values == "zeros":
        return plain * 0
    if spec.values == "ties":
        return torch.randint(-2, 3, shape, generator=dice).double() / 2
    odd = torch.rand(shape, generator=dice, dtype=torch.float64)
    sign = torch.where(torch.rand(shape, generator=dice) < 0.5, -1.0, 1.0).double()
    huge = sign * about.max * (0.05 + 0.95 * torch.rand(shape, generator=dice, dtype=torch.float64))
    tiny = plain * about.smallest_normal / 8
    kinds = {"nan": [math.nan], "inf": [sign * math.inf], "huge": [huge], "tiny": [tiny]}
    kinds["mixed"] = [math.nan, sign * math.inf, huge, tiny, sign * 0.0]
    chosen = kinds.get(spec.values, [])
    share = {"tiny": 0.8, "mixed": 0.1}.get(spec.values, 0.2)
    for i, other in enumerate(chosen):
        at = (odd >= i * share) & (odd < (i + 1) * share)
        plain = torch.where(at, torch.as_tensor(other, dtype=torch.float64), plain)
    return plain


def _whole(spec: T, dtype: torch.dtype, dice: torch.Generator) -> torch.Tensor:
    if spec.values.startswith("below "):
        return torch.randint(0, int(spec.values.removeprefix("below ")), spec.shape, generator=dice)
    about = torch.iinfo(dtype)
    low = 0 if about.min == 0 else -4
    drawn = torch.randint(low, 5, spec.shape, generator=dice)
    if spec.values == "zeros":
        return drawn * 0
    if spec.values in ("normal", "ties"):
        return drawn
    limits = torch.tensor([about.min, about.max, about.max - 1, 0, 1, about.max // 2 + 1])
    which = torch.randint(0, len(limits), spec.shape, generator=dice)
    rare = torch.rand(spec.shape, generator=dice) < 0.3
    return torch.where(rare, limits[which], drawn)


def _arranged(layout: str, dense: torch.Tensor, device: str) -> torch.Tensor:
    dense = dense.to(device)
    shape = dense.shape
    if layout == CHANNELS_LAST and dense.dim() == 4:
        return dense.contiguous(memory_format=torch.channels_last)
    if layout == "swapped" and dense.dim() >= 2:
        return dense.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "steps" and dense.dim() >= 1:
        wide = dense.new_zeros((*shape[:-1], 2 * shape[-1]))
        wide[..., ::2] = dense
        return wide[..., ::2]
    if layout == "offset":
        flat = dense.new_zeros(dense.numel() + 1)
        flat[1:] = dense.reshape(-1)
        return flat[1:].view(shape)
    if layout == "expanded" and dense.dim() >= 1 and shape[0] > 0:
        return dense[:1].clone().expand(shape)
    return dense


def twin(value: Any, *, wide: bool = False) -> Any:
    """A copy of nested arguments: the same layouts, and tensors that share memory still do."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            dtype = torch.float64 if wide and leaf.is_floating_point() else leaf.dtype
            with torch.no_grad():
                key = leaf.untyped_storage().data_ptr()
                if key not in storages:
                    whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
                    whole = whole.set_(leaf.untyped_storage())
                    storages[key] = whole.clone().to(dtype).untyped_storage()
                copy = torch.empty(0, dtype=dtype, device=leaf.device)
                copy = copy.set_(storages[key], leaf.storage_offset(), leaf.shape, leaf.stride())
            made[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return pytree.tree_map(copied, value)
