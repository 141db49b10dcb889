"""`hypatia.compile` keeps calls apart that differ in anything that a model can see of its arguments."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hypatia

Pair = namedtuple("Pair", ["x", "mul"])


class Kind(enum.Enum):
    ADD = "add"
    MUL = "mul"


class Open(nn.Module):
    """Takes anything, and shows in its result what it was given, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = self.first.weight.sum()
        count = 0

        def add(value: Any, factor: float) -> None:
            nonlocal total, count
            count += 1
            if isinstance(value, torch.Tensor):
                total = total + (self.first(value) * (factor + count)).sum() + self.second(value).relu().sum()
            elif isinstance(value, dict):
                for key, item in value.items():
                    add(item, factor * (len(key) + 1.5))
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item, factor * (3.0 if isinstance(value, list) else 5.0))
            elif isinstance(value, bool):
                total = total + (100.0 if value else 200.0)
            elif isinstance(value, int):
                total = total + 1000.0 * value
            elif isinstance(value, float):
                total = total * (1.0 if str(value).startswith("-") else 0.5)
            elif isinstance(value, torch.dtype):
                total = total + (7.0 if value is torch.float64 else 11.0)
            elif isinstance(value, Kind):
                total = total + (13.0 if value is Kind.ADD else 17.0)

        for value in args:
            add(value, 1.0)
        for key, value in kwargs.items():
            add(value, 0.25 * len(key))
        return total


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4) for _ in range(3))


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


x, y, z = tensors()
SEQUENCES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "order of a dict": [call({"x": x, "mul": y}), call({"mul": y, "x": x}), call({"x": x, "mul": y})],
    "names of a dict": [call({"x": x, "mul": y}), call({"x": x, "longer": y})],
    "keyword, then position": [call(x, scale=y), call(x, y), call(x, scale=y)],
    "position, then keyword": [call(x, y), call(x, bias=y), call(x, y)],
    "another keyword": [call(x, bias=y), call(x, longer=y), call(x, bias=y)],
    "order of keywords": [call(bias=x, longer=y), call(longer=x, bias=y)],
    "tensor, then dict": [call(x), call({"x": x}), call([x]), call((x,)), call(x)],
    "where a list ends": [call([x, y], z), call(x, [y, z]), call([x, y, z]), call([x, y], z)],
    "list and tuple": [call([x, y]), call((x, y)), call(Pair(x, y)), call(OrderedDict(x=x, mul=y))],
    "one, true and 1.0": [call(x, 1), call(x, True), call(x, 1.0), call(x, 1)],
    "signs of zero": [call(x, 0.0), call(x, -0.0), call(x, 0.0)],
    "none or nothing": [call(x), call(x, None), call(None, x), call(x)],
    "dtypes": [call(x, torch.float64), call(x, torch.float32), call(x, torch.float64)],
    "members of an enum": [call(x, Kind.ADD), call(x, Kind.MUL), call(x, Kind.ADD)],
    "more tensors": [call(x), call(x, y), call(x, y, z), call(x)],
}


def check(sequence: list[tuple[tuple[Any, ...], dict[str, Any]]], run: Callable[..., Any]) -> None:
    model = Open()
    compiled = hypatia.compile(model)
    for args, kwargs in sequence * 2:
        run(model, compiled, args, kwargs)


@pytest.mark.parametrize("name", SEQUENCES)
def test_structures_are_kept_apart_in_inference(name: str) -> None:
    def run(model: nn.Module, compiled: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))

    check(SEQUENCES[name], run)


@pytest.mark.parametrize("name", SEQUENCES)
def test_structures_are_kept_apart_in_training(name: str) -> None:
    def run(model: nn.Module, compiled: Any, args: Any, kwargs: Any) -> None:
        expected = model(*args, **kwargs)
        expected.backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        result = compiled(*args, **kwargs)
        result.backward()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
        model.zero_grad()

    check(SEQUENCES[name], run)


@pytest.mark.parametrize("name", SEQUENCES)
def test_graphs_that_are_kept_do_not_serve_other_structures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only where eager was kept as the fastest form."""
    monkeypatch.setattr(
        "hypatia.execute.timing.instead", lambda forms: {n: float(n == "eager") for n in forms}
    )
    test_structures_are_kept_apart_in_inference(name)


def test_an_object_that_torch_does_not_know_is_given_to_the_model() -> None:
    class Settings:
        def __init__(self, factor: float) -> None:
            self.factor = factor

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, settings: Settings) -> torch.Tensor:
            return x * settings.factor

    compiled = hypatia.compile(Model())
    for factor in (2.0, 3.0):
        assert torch.equal(compiled(x, Settings(factor)), x * factor)
        w = x.clone().requires_grad_()
        compiled(w, Settings(factor)).sum().backward()
        assert torch.equal(w.grad, torch.full_like(x, factor))


def test_inputs_that_share_memory_are_changed_as_in_eager() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1.0)
            return x * y

    model = Model()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for shared in (False, True, False, True):
            a, b = torch.ones(2, 4), torch.full((2, 4), 3.0)
            c, d = a.clone(), b.clone()
            assert torch.equal(compiled(a, a if shared else b), model(c, c if shared else d))
            assert torch.equal(a, c)


def test_inputs_of_no_dimensions_at_a_second_size() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * scale

    model = Model()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for rows in (2, 3, 5, 2):
            args = (torch.randn(rows, 4), torch.tensor(2.0))
            torch.testing.assert_close(compiled(*args), model(*args))


def test_inputs_of_other_kinds_after_sizes_were_left_open() -> None:
    """The plan that ran last is not for them, and does not stumble over them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> torch.Tensor:
            return self.layer(x["x"] if isinstance(x, dict) else x).relu()

    model = Model()
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for rows in (3, 5, 7):
            compiled(torch.randn(rows, 4))
        for value in (torch.randn(4), torch.randn(2, 3, 4), {"x": torch.randn(6, 4)}, torch.randn(9, 4)):
            torch.testing.assert_close(compiled(value), model(value))


def test_a_plan_that_cannot_be_made_at_other_sizes_leaves_the_call_to_its_own_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for rows in (3, 5, 7):
            compiled(torch.randn(rows, 4))

        def refused(*_: Any) -> Any:
            raise hypatia.HypatiaError("no native plan: sizes that are not known")

        monkeypatch.setattr("hypatia.execute.plans.Planner.at", refused)
        for shape in ((11, 4), (2, 4), (1, 4), (2, 3, 4), (3, 4), (7, 4)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("verify", ["strict", "off"])
def test_results_at_a_second_size_have_their_own_shape(verify: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
    compiled = hypatia.compile(model, verify=verify)
    with torch.no_grad():
        for rows in (3, 4, 5, 6, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))


ASKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view or a copy": lambda x: (x.reshape(-1), x * 2),
    "contiguous or not": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "a stride as a number": lambda x: x * x.stride(0),
}


@pytest.mark.parametrize("name", ASKING)
def test_models_that_ask_for_strides_are_compiled_for_them(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return ASKING[name](x)

    model, plain = Model(), torch.randn(6, 4)
    compiled = hypatia.compile(model)
    turned = torch.randn(4, 6).t()
    with torch.no_grad():
        for x in (plain, turned, plain, turned):
            torch.testing.assert_close(compiled(x), model(x))
