"""Numbers on a GPU: constants beside 16-bit tensors, integers, zeros at bounds, as eager has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from forms import winning
from torch import nn
from torch.nn import functional as F

import hypatia

HALVES = (torch.bfloat16, torch.float16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INF, NAN = float("inf"), float("nan")


class Model(nn.Module):
    """A function as a model."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


def _assert_same(
    what: str, f: Callable[[torch.Tensor], torch.Tensor], ordinary: torch.Tensor, x: torch.Tensor
) -> None:
    """A later call has eager's bits, but for what kind of NaN is where; an error says of what it is."""
    with torch.no_grad(), winning("plan"):
        compiled = hypatia.compile(Model(f), ordinary.cuda())
        result, eager = compiled(x.cuda()), f(x.cuda())
    assert result.dtype == eager.dtype, what
    if not eager.dtype.is_floating_point:
        assert torch.equal(result, eager), (what, x.cuda()[result != eager])
        return
    alike = (result == eager) & (result.signbit() == eager.signbit()) | result.isnan() & eager.isnan()
    assert bool(alike.all()), (what, x.cuda()[~alike], result[~alike], eager[~alike])


WITH_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "where": lambda x: torch.where(x >= 0.7, x * 2, -x),
    "eq": lambda x: (x * 1.0) == 0.7,
    "lt": lambda x: (x * 1.0) < 1 / 3,
    "add": lambda x: (x + 0.7) + x,
    "sub": lambda x: (x - 1 / 3) + x,
    "mul": lambda x: (x * 0.7) + x,
    "div": lambda x: (x / 0.7) + x,
    "clamp": lambda x: (x * 1.0).clamp(-0.7, 0.7) + x,
}


def check_numbers_beside_16_bit_tensors() -> str:
    """They are rounded as eager rounds them."""
    for dtype, (name, f) in itertools.product(HALVES, WITH_NUMBERS.items()):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        _assert_same(f"{name} in {dtype}", f, torch.randn(len(x)).to(dtype), x)
    return f"{len(HALVES) * len(WITH_NUMBERS)} programs, all numbers of their types"


def check_integers_beyond_f64() -> None:
    """They are exact."""
    x = torch.tensor([2**53, 2**53 + 1, 2**53 + 2, -(2**63), 2**63 - 1] * 8)
    _assert_same("an equality", lambda x: x * 1 == 2**53 + 1, torch.arange(len(x)), x)


def check_floats_out_of_range() -> str:
    """They become eager's integers."""
    edges = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64) for d in (-1.0, 0.0, 1.0, 256.0)]
    given = [*edges, *(-e for e in edges), INF, -INF, NAN, 0.5, -0.5]
    kinds = [*itertools.product((torch.float32, torch.float64), WHOLE)]
    for dtype, to in kinds:
        x = torch.tensor(given).to(dtype)
        _assert_same(f"{dtype} to {to}", lambda x, to=to: (x * 1.0).to(to), torch.rand(len(x)).to(dtype), x)
    return f"{len(kinds)} casts"


def check_zeros_at_bounds() -> str:
    """They have eager's signs."""
    bounds = {"relu6": F.relu6, "relu": F.relu, "clamp": lambda x: x.clamp(-0.0, 0.0)}
    for dtype, (name, f) in itertools.product((torch.float32, torch.float64, *HALVES), bounds.items()):
        x = torch.tensor([-0.0, 0.0, -1.0, 6.0, 7.0, NAN, INF, -INF] * 8).to(dtype)
        _assert_same(f"{name} in {dtype}", lambda x, f=f: f(x * 1.0), torch.randn(len(x)).to(dtype), x)
    return "12 cases"
