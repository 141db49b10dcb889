"""Unusual arguments and results: compiled calls give what eager gives, and leave behind what eager leaves."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outcomes import Call, assert_like_eager, grad_modes, mlp
from support import BACKEND, assert_as_close_as_eager, fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


class Mixed(nn.Module):
    """Takes whatever Python passes around."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(
        self,
        x: torch.Tensor,
        times: int = 2,
        scale: float = 0.5,
        name: str = "relu",
        mask: torch.Tensor | None = None,
        flip: bool = False,
    ) -> torch.Tensor:
        y = getattr(F, name)(self.inner(x)) * scale
        for _ in range(times):
            y = y + y.flip(-1) if flip else y + 1
        return y if mask is None else y.masked_fill(mask, 0.0)


@pytest.mark.parametrize(
    "values", [(3, 2.5, "gelu", None, True), (0, float("inf"), "relu", None, False), (1, -0.0, "silu")]
)
@grad_modes
def test_arguments_that_are_no_tensors(values: tuple[Any, ...], grad: bool) -> None:
    """Numbers, strings and None reach no placeholder, or one without a tensor: capture must take both."""
    with torch.set_grad_enabled(grad):
        assert_like_eager(lambda: Call(Mixed(), (torch.randn(3, 8), *values)), backward=grad, optimize=grad)


def test_numbers_that_change_become_symbols() -> None:
    """The second int and float are symbolic inputs, which are no tensors to check or to fold."""

    def scaled(x: torch.Tensor, n: int, s: float) -> torch.Tensor:
        return torch.relu(x[:n] * s) + n

    x = torch.randn(9, 4)
    compiled = torch.compile(scaled, backend=BACKEND)
    for n, s in ((2, 0.5), (3, 0.25), (5, 3.0), (0, -1.0), (9, float("inf"))):
        assert_as_close_as_eager(compiled(x, n, s), scaled(x, n, s))


@grad_modes
def test_keyword_arguments(grad: bool) -> None:
    """Keywords in another order than the signature's must not be bound to the wrong placeholder."""

    def case() -> Call:
        mask = torch.rand(3, 4) > 0.5
        return Call(Mixed(), (), {"mask": mask, "scale": 2.0, "x": torch.randn(3, 8)})

    with torch.set_grad_enabled(grad):
        assert_like_eager(case, backward=grad)
    # The order of the keywords is export's, so that optimize is given the signature's.
    assert_like_eager(
        lambda: Call(Mixed(), (torch.randn(3, 8),), {"mask": torch.ones(3, 4) > 0}), optimize=True
    )


class Pair(NamedTuple):
    """A result with names."""

    hidden: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Record:
    """A result that is no tree to torch."""

    logits: torch.Tensor
    aux: dict[str, Any]


class Nested(nn.Module):
    """Returns a tree with repeated, constant and missing leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"pair": Pair(x + 0, y), "list": [y, (y, None, 3)], "empty": {}, "sum": y.sum(), "text": "t"}


@grad_modes
def test_nested_results(grad: bool) -> None:
    """Results that are None, constants or given twice keep their places, and twice is one tensor twice."""
    with torch.set_grad_enabled(grad):
        found = assert_like_eager(lambda: Call(Nested(), (torch.randn(3, 8),)), backward=grad, optimize=True)
    tree = found.results[-1]
    assert tree["list"][0] is tree["list"][1][0]


def test_a_dataclass_as_result() -> None:
    """The parts of a user's own class come from the graph, the class from the user."""
    model, x = mlp(), torch.randn(3, 8)

    def wrapped(x: torch.Tensor) -> Record:
        y = model(x)
        return Record(y, {"shape": y.shape, "largest": y.amax(-1)})

    with torch.no_grad():
        ours, theirs = torch.compile(wrapped, backend=BACKEND)(x), wrapped(x)
    assert type(ours) is Record
    assert_as_close_as_eager([ours.logits, ours.aux], [theirs.logits, theirs.aux])


@grad_modes
def test_an_input_on_another_device(grad: bool) -> None:
    """A `meta` input beside weights on the CPU is eager's error, and the next call is a good one."""
    with torch.set_grad_enabled(grad):
        assert_like_eager(lambda: Call(mlp(), (torch.randn(3, 8, device="meta"),)), graphs=False)
        model, x = mlp(), torch.randn(3, 8)
        compiled = torch.compile(model, backend=BACKEND)
        assert_as_close_as_eager(compiled(x), model(x))
        with pytest.raises(RuntimeError) as theirs:
            model(x.to("meta"))
        with pytest.raises(type(theirs.value)):
            compiled(x.to("meta"))
        assert_as_close_as_eager(compiled(x), model(x))


@grad_modes
def test_a_model_on_the_meta_device(grad: bool) -> None:
    """There are no values to check or to fold; shapes and dtypes are all."""
    with torch.set_grad_enabled(grad):
        found = assert_like_eager(
            lambda: Call(mlp().to("meta"), (torch.empty(3, 8, device="meta"),)), backward=grad, optimize=True
        )
    assert found.results[-1].is_meta


def test_a_dtype_that_changes_after_compiling() -> None:
    """`model.double()` swaps the data of parameters: folded weights of the old dtype must not be used."""
    model, x = mlp(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert_as_close_as_eager(compiled(x.to(dtype)), model(x.to(dtype)))


def test_an_input_of_another_dtype_later() -> None:
    """Weights stay float32: a bf16 input is eager's error, under autocast it is none."""
    model, x = mlp(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        assert_as_close_as_eager(compiled(x), model(x))
        with pytest.raises(RuntimeError) as theirs:
            model(x.bfloat16())
        with pytest.raises(type(theirs.value)):
            compiled(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert_as_close_as_eager(compiled(x.bfloat16()), model(x.bfloat16()))
        assert_as_close_as_eager(compiled(x), model(x))


@pytest.mark.parametrize(
    ("frozen", "input_grad"),
    [((), True), ((0,), False), ((1, 3), True), ((0, 1, 2, 3), True), ((0, 1, 2, 3), False)],
)
def test_gradients_for_some(frozen: tuple[int, ...], input_grad: bool) -> None:
    """Exactly the gradients that eager gives exist: rules of training graphs hold for any subset."""

    def case() -> Call:
        model = mlp()
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i not in frozen)
        return Call(model, (torch.randn(3, 8, requires_grad=input_grad),))

    assert_like_eager(case, backward=True, optimize=True)
