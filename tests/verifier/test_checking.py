"""The check of a first call: right results pass, whatever their types and layouts are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import fx, nn

import hypatia
from hypatia.compiler.comparison import Comparison
from hypatia.compiler.pipeline import CompiledGraph, Request
from hypatia.execute.changes import RandomState
from hypatia.frontend import optimize
from hypatia.verifier import candidates, compare, first_call, judge
from hypatia.verifier.gradients import gradients_of


def _compared(function: Any, inputs: tuple[torch.Tensor, ...], change: Any) -> Comparison:
    gm = torch.export.export(_Wrapped(function), inputs).module()
    (output,) = gm.graph.find_nodes(op="output")
    nodes = list(output.args[0])
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    comparer = compare.Comparer(gm, values, RandomState([]), lambda: 1e9)
    results = [change(t) for t in function(*inputs)]
    return comparer.compare(dict(zip(nodes, results, strict=True)))


class _Wrapped(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("right", [True, False])
def test_booleans_that_rounding_decides(right: bool) -> None:
    """Values that are one rounding away from what they are compared with may fall on either side."""
    x = torch.full((64,), 0.1) if right else torch.linspace(-1, 1, 64)
    found = _compared(lambda x: ((x * 3) > 0.3,), (x,), torch.logical_not)
    assert found.ok is right


def test_fp32_that_is_returned_as_fp64_is_judged_as_fp32() -> None:
    x = torch.randn(64, 64)
    eps = torch.finfo(torch.float32).eps
    close = _compared(lambda x: ((x @ x).double(),), (x,), lambda t: t * (1 + eps))
    assert close.ok
    far = _compared(lambda x: ((x @ x).double(),), (x,), lambda t: t * (1 + 100 * eps))
    assert not far.ok


def test_fp64_all_the_way_is_judged_as_fp64() -> None:
    x = torch.randn(64, 64, dtype=torch.float64)
    assert not _compared(lambda x: (x @ x,), (x,), lambda t: t * (1 + 1e-9)).ok


def test_one_element_with_any_stride_has_a_checksum() -> None:
    x = torch.randn(4)
    for stride in (0, 1, 7):
        assert candidates.checksum(x.as_strided((1,), (stride,))) == candidates.checksum(x[:1])


def test_an_input_of_one_element_and_stride_zero_is_verified() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).relu() + 1

    graph = hypatia.optimize(Model(), torch.randn(1).as_strided((1,), (0,)))
    assert isinstance(graph, fx.GraphModule)
    assert graph.meta["hypatia"].check.status == "passed"


def test_eager_in_tf32_is_no_measure_of_closeness_to_eager() -> None:
    """A result as close to float64 as eager's passes, where eager multiplied with eleven bits."""
    exact = torch.randn(1000, dtype=torch.float64)
    eager, mine = ((exact + 1e-3 * torch.randn(1000)).float() for _ in range(2))
    assert not judge.judge("", mine, eager, exact).ok
    assert judge.judge("", mine, eager, exact, tf32=True).ok
    assert not judge.judge("", (exact + 1e-2 * torch.randn(1000)).float(), eager, exact, tf32=True).ok
    # In true fp32 eager is close to float64, and a result has to be close to eager.
    near = (exact + 3e-5 * torch.sign(exact)).float()
    assert not judge.judge("", near, exact.float(), exact, tf32=True).ok


def test_16_bit_results_with_several_times_eagers_error_are_wrong() -> None:
    exact = torch.randn(10_000, dtype=torch.float64)
    eager = exact.bfloat16()
    own = float((eager.double() - exact).abs().max())
    assert judge.judge("", (exact + 1.5 * own).bfloat16(), eager, exact).ok
    assert not judge.judge("", (exact + 6 * own).bfloat16(), eager, exact).ok


def test_a_tensor_in_place_of_a_number_is_of_the_wrong_kind() -> None:
    result = judge.judge("y", torch.ones(2), 3, None)
    assert not result.ok
    assert "instead of int" in result.type


@pytest.mark.parametrize(("roundings", "right"), [(1.5, True), (4.0, False)])
def test_a_variance_of_equal_numbers_has_the_square_of_a_rounding(roundings: float, right: bool) -> None:
    """It is zero in eager; where its mean is rounded otherwise, it is not quite."""
    x = torch.full((8,), 3.7)
    square = (roundings * torch.finfo(torch.float32).eps / 3.7) ** 2
    assert _compared(lambda x: (torch.var(1 / x),), (x,), lambda t: t + square).ok is right


def test_a_jump_is_not_taken_for_the_square_of_a_rounding() -> None:
    """The numbers are more than a rounding away from where the result jumps."""
    x = torch.full((8,), 1 + 3 * torch.finfo(torch.float32).eps)
    assert not _compared(lambda x: (torch.floor(x * 1.0) + x,), (x,), lambda t: t - 1).ok


def test_elements_that_depend_on_the_sign_of_a_zero_are_not_judged() -> None:
    """A product's zero may have a sign or not, in eager, too; all other elements are judged as before."""
    zero, one = torch.zeros(2), torch.ones(2, 2)
    x = torch.stack([zero, one[0]])

    def angles(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.atan2(torch.zeros_like(x), x @ y),)

    def turned(row: int) -> Any:
        return lambda t: torch.where(torch.arange(2)[:, None] == row, math.pi - t, t)

    assert _compared(angles, (x, one), turned(0)).ok
    assert not _compared(angles, (x, one), turned(1)).ok


def test_wide_whole_numbers_that_depend_on_the_sign_of_a_zero() -> None:
    """Torch has few kernels for them, and none that fills some places."""
    zero, one = torch.zeros(2), torch.ones(2, 2)
    x = torch.stack([zero, one[0]])

    def turns(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.atan2(torch.zeros_like(x), x @ y).long().view(torch.uint64),)

    def turned(row: int) -> Any:
        rows = torch.arange(2)[:, None] == row
        return lambda t: torch.where(rows, 3 - t.view(torch.int64), t.view(torch.int64)).view(torch.uint64)

    assert _compared(turns, (x, one), turned(0)).ok
    assert not _compared(turns, (x, one), turned(1)).ok


def test_seeds_that_nobody_draws_from_are_not_judged() -> None:
    """Attention on a GPU returns them without dropout, too, as memory that it never wrote."""
    library = torch.library.Library("planted", "FRAGMENT")
    library.define(
        "attention(Tensor x, float dropout_p=0.0) -> (Tensor output, Tensor philox_seed, Tensor other)",
        tags=[torch.Tag.nondeterministic_seeded],
    )

    def attention(x: torch.Tensor, dropout_p: float = 0.0) -> Any:
        return x * 2, torch.zeros(4, device=x.device), torch.zeros(4, device=x.device)

    for key in ("CPU", "Meta"):
        library.impl("attention", attention, key)

    def compared(dropout: float, place: int) -> Comparison:
        def other(t: torch.Tensor) -> torch.Tensor:
            return next(left) + t

        left = iter([1 if i == place else 0 for i in range(3)])
        return _compared(lambda x: torch.ops.planted.attention(x, dropout), (torch.randn(3),), other)

    assert compared(0.0, 1).ok
    assert not compared(0.0, 0).ok
    assert not compared(0.0, 2).ok
    assert not compared(0.5, 1).ok
    library._destroy()


def _gradient_judged(function: Any, ours: Any, x: torch.Tensor) -> bool:
    gm = torch.export.export(_Wrapped(function), (x,)).module()
    (node,) = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    comparer = compare.Comparer(gm, {node: x}, RandomState([]), lambda: 1e9)
    comparison = Comparison()
    comparer.compare_gradients(gradients_of({output.args[0][0]: ours(x)[0]}, [x]), comparison)
    return comparison.ok


def test_a_gradient_that_half_a_rounding_moves_may_differ_from_eager() -> None:
    """Eager's own is no better, and float64 moves as far when results of ops do."""
    x = torch.linspace(1.1, 1.9, 64).requires_grad_()

    def waves(*factors: float) -> Any:
        return lambda x: (torch.sin(math.prod(factors, start=x)) * 1e-6,)

    assert _gradient_judged(waves(1e6), waves(1e3, 1e3), x)
    assert not _gradient_judged(waves(1e6), waves(1e6 + 10), x)


def test_a_gradient_at_a_tie_is_eagers() -> None:
    """There the gradient jumps when a result moves; eager's choice is exact, and so it is asked for."""
    x = torch.linspace(1.1, 1.9, 64).requires_grad_()
    assert not _gradient_judged(lambda x: ((x * 3 - 3 * x).relu() + x,), lambda x: (4 * x,), x)


def test_a_gradient_in_float64_may_differ_as_far_as_roundings_move_it() -> None:
    """Nothing is wider than float64. What roundings do not move is wrong from 64 roundings on."""
    x = torch.linspace(1.1, 1.9, 64, dtype=torch.float64).requires_grad_()

    def waves(*factors: float, scale: float = 1.0) -> Any:
        def function(x: torch.Tensor) -> tuple[torch.Tensor]:
            for factor in factors:
                x = x * factor
            return (torch.sin(x) * scale,)

        return function

    assert _gradient_judged(waves(2e4), waves(1e2, 2e2), x)
    assert not _gradient_judged(waves(2e4), waves(2e4, scale=1 + 1e-9), x)
    assert not _gradient_judged(waves(3.0), waves(3.0, scale=1 + 1e-13), x)


class Cancelling(nn.Module):
    """Eager loses most digits of a product: whatever rounds otherwise is far from it, and as good."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("large", torch.tensor(1e8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))) * 1e4 + self.large - self.large.clone()


@pytest.mark.parametrize(
    ("needed", "runs"),
    [(1, "runs without rule 'scale-linear-bias'"), (4, "runs without kernel 'native plan'")],
)
def test_where_eagers_own_digits_are_chance_little_is_tried(
    monkeypatch: pytest.MonkeyPatch, needed: int, runs: str
) -> None:
    """As many parts have to be left out at once; finding four of them takes eight trials."""
    torch.manual_seed(0)
    model, x = Cancelling().eval(), torch.randn(4096, 16)
    tried, usual = [], optimize.compile_graph

    def noted(gm: torch.fx.GraphModule, request: Request) -> CompiledGraph:
        tried.append(request.without)
        enough = len(request.without) >= needed
        return usual(gm, request if enough else dataclasses.replace(request, without=frozenset()))

    monkeypatch.setattr(optimize, "compile_graph", noted)
    monkeypatch.setattr(first_call, "FEW_TRIALS", 6)
    with torch.no_grad(), pytest.warns(hypatia.PrecisionWarning, match=runs):
        found = hypatia.compile(model)(x)
    assert torch.equal(found, model(x))
    assert len(tried) <= 1 + 6
