"""Numbers on a GPU: constants beside 16-bit tensors, integers, zeros at bounds, as eager has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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


def _assert_same(f: Callable[[torch.Tensor], torch.Tensor], ordinary: torch.Tensor, x: torch.Tensor) -> None:
    """A later call has eager's bits, but for what kind of NaN is where."""
    with torch.no_grad(), winning("plan"):
        compiled = hypatia.compile(Model(f), ordinary.cuda())
        result, eager = compiled(x.cuda()), f(x.cuda())
    assert result.dtype == eager.dtype
    if not eager.dtype.is_floating_point:
        assert torch.equal(result, eager)
        return
    alike = (result == eager) & (result.signbit() == eager.signbit()) | result.isnan() & eager.isnan()
    assert bool(alike.all()), (x.cuda()[~alike], result[~alike], eager[~alike])


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


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_beside_16_bit_tensors_are_rounded_as_eager_rounds_them(
    dtype: torch.dtype, name: str
) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    _assert_same(WITH_NUMBERS[name], torch.randn(len(x)).to(dtype), x)


def test_integers_beyond_f64_are_exact() -> None:
    x = torch.tensor([2**53, 2**53 + 1, 2**53 + 2, -(2**63), 2**63 - 1] * 8)
    _assert_same(lambda x: x * 1 == 2**53 + 1, torch.arange(len(x)), x)


@pytest.mark.parametrize("to", WHOLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_out_of_range_become_eagers_integers(dtype: torch.dtype, to: torch.dtype) -> None:
    edges = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64) for d in (-1.0, 0.0, 1.0, 256.0)]
    x = torch.tensor([*edges, *(-e for e in edges), INF, -INF, NAN, 0.5, -0.5]).to(dtype)
    _assert_same(lambda x: (x * 1.0).to(to), torch.rand(len(x)).to(dtype), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_zeros_at_bounds_are_eagers(dtype: torch.dtype) -> None:
    x = torch.tensor([-0.0, 0.0, -1.0, 6.0, 7.0, NAN, INF, -INF] * 8).to(dtype)
    for f in (F.relu6, F.relu, lambda x: x.clamp(-0.0, 0.0)):
        _assert_same(lambda x, f=f: f(x * 1.0), torch.randn(len(x)).to(dtype), x)
