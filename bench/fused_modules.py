"""Correctness of the fused modules: results and gradients against float64, beside eager's own errors.

    .venv/bin/python bench/fused_modules.py [--device cpu] [--json FILE|-]

Every module of hypatia.nn, in fp32, bf16 and fp16, with and without bias, on odd sizes, empty batches and
inputs without a batch: results, first gradients, and second ones where the dtype allows to judge them.
A module falls short when an error is more than twice eager's and a few roundings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diagnostic import Diagnostic, add_device_options, parser, prepare
from torch import nn

from hypatia.nn import FusedLinearGELU, FusedLinearReLU, FusedLinearSiLU, FusedMLP
from hypatia.tools.bench import DTYPES
from hypatia.verifier.gradients import cotangents
from hypatia.verifier.verify import compared

SHAPES = [(7, 13), (1, 13), (13,), (0, 13), (2, 3, 13), (2, 0, 13), (33, 13)]
"""Sizes that no vector or tile divides, empty ones, and one without a batch."""

FEATURES, HIDDEN, RESULTS = 13, 17, 5


@dataclass(frozen=True)
class Pair:
    """A fused module and the plain layers that it stands for."""

    name: str
    fused: Callable[[bool], nn.Module]
    plain: Callable[[bool], nn.Module]


def _layer(name: str, fused: Callable[..., nn.Module], act: Callable[[], nn.Module], **kwargs: str) -> Pair:
    return Pair(
        name,
        lambda bias: fused(FEATURES, RESULTS, bias, **kwargs),
        lambda bias: nn.Sequential(nn.Linear(FEATURES, RESULTS, bias), act()),
    )


def _mlp(activation: str, act: Callable[[], nn.Module]) -> Pair:
    def plain(bias: bool) -> nn.Module:
        first, second = nn.Linear(FEATURES, HIDDEN, bias), nn.Linear(HIDDEN, HIDDEN, bias)
        return nn.Sequential(first, act(), second, act(), nn.Linear(HIDDEN, RESULTS, bias))

    sizes = (FEATURES, HIDDEN, HIDDEN, RESULTS)
    return Pair(
        f"FusedMLP {activation}", lambda bias: FusedMLP(*sizes, activation=activation, bias=bias), plain
    )


def _tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


PAIRS = [
    _layer("FusedLinearReLU", FusedLinearReLU, nn.ReLU),
    _layer("FusedLinearGELU", FusedLinearGELU, nn.GELU),
    _layer("FusedLinearGELU tanh", FusedLinearGELU, _tanh_gelu, approximate="tanh"),
    _layer("FusedLinearSiLU", FusedLinearSiLU, nn.SiLU),
    _mlp("relu", nn.ReLU),
    _mlp("gelu", nn.GELU),
    _mlp("gelu_tanh", _tanh_gelu),
    _mlp("silu", nn.SiLU),
    _mlp("sigmoid", nn.Sigmoid),
    _mlp("tanh", nn.Tanh),
]


def derivatives(module: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor]]:
    """The result, the gradients, and the gradients of the sum of their squares."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *module.parameters()]
    y = module(x)
    first = torch.autograd.grad(y, leaves, cotangents([y]), create_graph=True)
    squares = sum((g * g).sum() for g in first)
    second: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if isinstance(squares, torch.Tensor) and squares.requires_grad:
        second = torch.autograd.grad(squares, leaves, allow_unused=True)
    return [
        [y],
        list(first),
        [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, second, strict=True)],
    ]


def examine(diagnostic: Diagnostic, pair: Pair, dtype: str, device: str) -> None:
    """One module in one dtype, over all shapes, with and without bias."""
    orders = ("result", "gradient", "second gradient")
    worst = dict.fromkeys(orders, (0.0, 0.0))
    failures: list[str] = []
    for bias in (True, False):
        for shape in SHAPES:
            plain, fused = _twins(pair, bias, dtype, device)
            x = torch.randn(shape).to(device, DTYPES[dtype])
            exact = derivatives(plain.double(), x.double())
            plain.to(DTYPES[dtype])
            ours, theirs = derivatives(fused, x), derivatives(plain, x)
            for order, a, b, e in zip(orders, ours, theirs, exact, strict=True):
                found = compared(a, b, e)
                both = zip(worst[order], (found.candidate, found.reference), strict=True)
                error, own = (max([known, *(e.ulps for e in errors)]) for known, errors in both)
                worst[order] = (error, own)
                if not found:
                    where = f"{list(shape)}{'' if bias else ' without bias'}"
                    failures.append(f"{order} of {where}: {found.reason}")
    cells = (text for order in orders for text in (f"{worst[order][0]:.1f}", f"{worst[order][1]:.1f}"))
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    diagnostic.add(
        pair.name,
        dtype,
        str(2 * len(SHAPES)),
        *cells,
        short=failures[0] + more if failures else "",
        module=pair.name,
        dtype=dtype,
        ulps={order: {"fused": worst[order][0], "eager": worst[order][1]} for order in orders},
        failures=failures,
    )


def _twins(pair: Pair, bias: bool, dtype: str, device: str) -> tuple[nn.Module, nn.Module]:
    """The plain layers and the fused module with the same weights."""
    plain, fused = pair.plain(bias).to(device, DTYPES[dtype]), pair.fused(bias).to(device, DTYPES[dtype])
    with torch.no_grad():
        for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
            mine.copy_(other)
    return plain, fused


def main() -> int:
    """All modules in all dtypes; the exit code."""
    made = parser(__doc__)
    add_device_options(made)
    arguments = made.parse_args()
    columns = (
        "module",
        "dtype",
        ">shapes",
        ">result",
        ">eager's",
        ">gradient",
        ">eager's",
        ">second",
        ">eager's",
    )
    diagnostic = Diagnostic("Fused modules: largest errors to float64, in roundings", columns, arguments)
    device = prepare(arguments, diagnostic)
    for pair in PAIRS:
        for dtype in DTYPES:
            examine(diagnostic, pair, dtype, device)
    return diagnostic.finish()


if __name__ == "__main__":
    sys.exit(main())
