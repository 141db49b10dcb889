"""Grows a program call by call. Each call is run at once, so that shapes and dtypes are known and what eager
refuses is left out."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .program import Names, Row, Weight, evaluated
from .tensors import FLOATS, T

LARGEST = 4096
"""Elements that a value may have."""

DEEPEST = 5
"""Dimensions that a value may have."""

Test = Callable[[torch.Tensor], bool]


def is_float(value: torch.Tensor) -> bool:
    """Whether a value has a floating-point dtype."""
    return value.is_floating_point()


class Builder:
    """A program that grows; ``values`` has what each name stands for."""

    def __init__(self, dice: random.Random, *, training: bool, dtype: str) -> None:
        self.dice = dice
        self.training = training
        self.dtype = dtype
        """The dtype that most values have."""
        self.values: dict[str, Any] = {}
        self.inputs: list[tuple[str, Any]] = []
        self.weights: list[Weight] = []
        self.rows: list[Row] = []
        self.open: list[tuple[str, int]] = []
        """Dimensions of inputs that later calls may change."""

    def chance(self, share: float) -> bool:
        """True in this share of the cases."""
        return self.dice.random() < share

    def one(self, *choices: Any) -> Any:
        """One of the choices."""
        return self.dice.choice(choices)

    def input(self, shape: tuple[int, ...], dtype: str | None = None, *, batch: bool = False) -> str:
        """A new input."""
        name = f"x{len(self.inputs)}"
        dtype = dtype or self.dtype
        grad = self.training and dtype in FLOATS and self.chance(0.5)
        spec = T(tuple(shape), dtype, seed=self.dice.randrange(10_000), grad=grad)
        self.inputs.append((name, spec))
        if batch and shape:
            self.open.append((name, 0))
        self.values[name] = spec.make()
        return name

    def weight(self, shape: tuple[int, ...], dtype: str | None = None, *, buffer: bool = False) -> str:
        """A parameter or buffer of this shape: sometimes one that is there already, or tied to one."""
        shape = tuple(shape)
        dtype = dtype or self.dtype
        kind = "buffer" if buffer else "parameter"
        alike = [
            w for w in self.weights if w.spec.shape == shape and w.spec.dtype == dtype and w.kind == kind
        ]
        if alike and self.chance(0.3):
            return self.dice.choice(alike).name
        name = f"{'b' if buffer else 'w'}{len(self.weights)}"
        tied = ""
        if alike and self.chance(0.2):
            tied = self.dice.choice(alike)
            tied = tied.tied or tied.name
        spec = T(shape, dtype, seed=self.dice.randrange(10_000), scale=0.5)
        self.weights.append(Weight(name, spec, kind, tied))
        made = self.values[tied] if tied else spec.make()
        grad = self.training and not buffer and made.is_floating_point()
        self.values[name] = made if tied else made.requires_grad_(grad)
        return name

    def emit(self, text: str, *uses: str | None, changes: bool = False) -> str | None:
        """A new row; None, and no row, if eager refuses or the value is not worth having."""
        if any(u is None for u in uses):
            return None
        used = [i for i in range(len(uses)) if f"{{{i}}}" in text]
        text = text.format(*[f"{{{used.index(i)}}}" if i in used else "" for i in range(len(uses))])
        row = Row(f"v{len(self.rows)}", text, tuple(uses[i] for i in used), changes)
        try:
            with torch.set_grad_enabled(self.training), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = evaluated(row, self.values)
        except Exception:
            return None
        if not _is_worth(value) and not changes:
            return None
        self.values[row.name] = value
        self.rows.append(row)
        return row.name

    def tensors(self, test: Test = lambda _: True) -> list[str]:
        """Names of the tensors that pass a test, oldest first; weights are left out."""
        names = [n for n, _ in self.inputs] + [r.name for r in self.rows]
        values = ((n, self.values[n]) for n in names)
        return [n for n, v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided and test(v)]

    def pick(self, test: Test = lambda _: True) -> str | None:
        """One of them, a late one more often than an early one."""
        names = self.tensors(test)
        if not names:
            return None
        at = int(len(names) * (1 - self.dice.random() ** 2.5))
        return names[min(at, len(names) - 1)]

    def floats(self, rank: int = 0) -> str | None:
        """A floating-point tensor of at least so many dimensions."""
        return self.pick(lambda v: is_float(v) and v.dim() >= rank)

    def like(self, name: str | None) -> str | None:
        """A tensor that an op can take beside this one: same dtype, shapes that fit."""
        if name is None:
            return None
        value = self.values[name]

        def fits(other: torch.Tensor) -> bool:
            if other.dtype != value.dtype:
                return False
            pairs = zip(reversed(other.shape), reversed(value.shape), strict=False)
            return all(a == b or a == 1 or b == 1 for a, b in pairs)

        return self.pick(fits)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.values[name].shape)

    def of(self, name: str) -> str:
        """The dtype of a value."""
        return str(self.values[name].dtype).removeprefix("torch.")

    def dim(self, name: str) -> int:
        """One of the dimensions of a value, counted from either end."""
        rank = self.values[name].dim()
        return self.dice.randrange(-rank, rank) if rank else 0

    def size(self) -> int:
        """A size for a new dimension."""
        return self.one(1, 2, 3, 4, 5, 7, 8, 8, 16, 17, 32)

    def names(self) -> Names:
        """Names of all rows."""
        return tuple(r.name for r in self.rows)


def _is_worth(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and len(value) <= 8 and all(map(_is_worth, value))
    if not isinstance(value, torch.Tensor):
        return False
    if value.numel() > LARGEST or value.dim() > DEEPEST or value.is_complex() or value.is_quantized:
        return False
    # Values that are mostly not finite hide what comes after.
    if value.is_floating_point() and value.numel():
        return float(value.detach().isfinite().sum()) >= 0.7 * value.numel()
    return True
