"""Kernels that compute a fused op in place of the ops that define it. A kernel is one entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx, nn


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute fused ops.

    ``accepts`` is asked with the op's name and its operands (without data); ``make`` is given the
    graph that defines the op and returns what is called instead.
    """

    name: str
    accepts: Callable[[str, Sequence[object]], bool]
    make: Callable[[fx.GraphModule], Callable[..., torch.Tensor]]


_table: list[Kernel] = []


def add(kernel: Kernel) -> None:
    """Enters a kernel; later ones are asked first."""
    _table.insert(0, kernel)


def remove(kernel: Kernel) -> None:
    """Takes a kernel out."""
    _table.remove(kernel)


def names() -> list[str]:
    """Names of all kernels."""
    return [kernel.name for kernel in _table]


def find(op: str, operands: Sequence[object], without: Collection[str] = ()) -> Kernel | None:
    """The kernel that serves an op."""
    for kernel in _table:
        if kernel.name not in without and kernel.accepts(op, operands):
            return kernel
    return None


class FusedCall(nn.Module):
    """A fused op that a kernel computes; ``body`` is its definition."""

    def __init__(self, body: fx.GraphModule, kernel: Kernel) -> None:
        super().__init__()
        self.body = body
        self.kernel = kernel
        self.run = kernel.make(body)

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        """The op's value."""
        return self.run(*operands)

    def extra_repr(self) -> str:
        """The kernel's name."""
        return f"kernel={self.kernel.name}"
