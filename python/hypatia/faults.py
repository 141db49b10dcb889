"""Faults to plant, so that tests can see them being found. Nothing here is used otherwise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import fx

from . import _native, kernels

planted_rules: list[str] = []
"""Names of the wrong rules that compilations use now."""

random_costs: int | None = None
"""The seed by which compilations draw an equal program now, if they do not look for the fastest."""


@contextlib.contextmanager
def wrong_rule(name: str = "planted-relu-lost") -> Iterator[str]:
    """Compilations inside use a wrong rule: planted-relu-lost, planted-bias-lost or planted-scale-lost."""
    planted_rules.append(name)
    try:
        yield name
    finally:
        planted_rules.remove(name)


@contextlib.contextmanager
def any_equal(seed: int) -> Iterator[None]:
    """Compilations inside take any equal program instead of the fastest: prices are drawn by lot.

    No fault by itself, but it brings rules to light that hardly ever win.
    """
    global random_costs
    before, random_costs = random_costs, seed
    try:
        yield
    finally:
        random_costs = before


def wrong_kernel(op: str | None = None, factor: float = 1.01) -> contextlib.AbstractContextManager[str]:
    """Compilations inside compute a fused op (none given: every one) by a kernel that is off by a factor."""

    def run(body: fx.GraphModule, *operands: torch.Tensor) -> torch.Tensor:
        return body(*operands) * factor

    return _planted("planted-wrong-kernel", op, run)


def failing_kernel(op: str | None = None) -> contextlib.AbstractContextManager[str]:
    """Compilations inside compute a fused op by a kernel that raises an error."""

    def run(body: fx.GraphModule, *operands: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted failure of a kernel")

    return _planted("planted-failing-kernel", op, run)


def scribbling_kernel(op: str | None = None) -> contextlib.AbstractContextManager[str]:
    """Compilations inside compute a fused op rightly, and then write into its first operand."""

    def run(body: fx.GraphModule, *operands: torch.Tensor) -> torch.Tensor:
        result = body(*operands)
        operands[0].data.view(-1)[:1] += 1
        return result

    return _planted("planted-scribbling-kernel", op, run)


@contextlib.contextmanager
def wrong_cuda_text(old: str, new: str) -> Iterator[None]:
    """CUDA kernels that are loaded inside have one piece of text in place of another."""
    _native.cuda.plant((old, new))
    try:
        yield
    finally:
        _native.cuda.plant(None)


@contextlib.contextmanager
def _planted(name: str, op: str | None, run: Callable[..., torch.Tensor]) -> Iterator[str]:
    kernel = kernels.Kernel(
        name,
        lambda asked, _: op is None or asked == op,
        lambda body: functools.partial(run, body),
    )
    kernels.add(kernel)
    try:
        yield name
    finally:
        kernels.remove(kernel)
