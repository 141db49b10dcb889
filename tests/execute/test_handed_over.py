"""Results of torch's calls inside plans: they stay where torch made them, unless that would be wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import no_fallback, planned
from torch import nn

from hypatia.execute import torch_calls
from plan_models import Mixed, _fresh, assert_right  # noqa: F401  (a fixture for this file too)

Between = Callable[[torch.Tensor], torch.Tensor]
Made = Callable[[torch.Tensor], Any]


@pytest.fixture(params=["dispatcher", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How torch is called."""
    if request.param == "python":
        monkeypatch.setattr(torch_calls, "LIBTORCH", Path("there is none"))
    return str(request.param)


def _negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _part(x: torch.Tensor) -> torch.Tensor:
    return x[1:-1]


def _turned(x: torch.Tensor) -> torch.Tensor:
    return (-x).t().contiguous().t()


def _odd(x: torch.Tensor) -> torch.Tensor:
    """At an address that is no multiple of 16."""
    return torch.cat([x.new_zeros(1), (-x).flatten()])[1:].view(x.shape)


def _twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = -x
    return y, y


OPS: dict[str, tuple[Made, Made, int]] = {
    "new": (_negated, torch.empty_like, 1),
    "itself": (_itself, torch.empty_like, 1),
    "part": (_part, lambda x: x.new_empty((x.shape[0] - 2, *x.shape[1:])), 1),
    "turned": (_turned, torch.empty_like, 1),
    "odd": (_odd, torch.empty_like, 1),
    "twice": (_twice, lambda x: (torch.empty_like(x), torch.empty_like(x)), 2),
}
"""Ops of torch's: what they return, what their fake tensors say, and how many results they have."""


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    library = torch.library.Library("handed_over", "DEF")
    for name, (run, fake, results) in OPS.items():
        library.define(f"{name}(Tensor x) -> {'Tensor' if results == 1 else '(Tensor, Tensor)'}")
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"handed_over::{name}", fake, lib=library)
    yield
    library._destroy()


def _op(name: str) -> Any:
    return getattr(torch.ops.handed_over, name).default


def _padded(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(y, (0, 0, 1, 1))


BETWEEN: dict[str, Between] = {
    "new": lambda x: _op("new")(x).exp() + x,
    "itself": lambda x: (_op("itself")(x.exp()) + 1).tanh() * x,
    "part": lambda x: _padded(_op("part")(x.exp())) + x,
    "turned": lambda x: _op("turned")(x).exp() + x,
    "odd": lambda x: _op("odd")(x).exp() + x,
    "twice": lambda x: _op("twice")(x)[0].exp() + _op("twice")(x)[1] * x,
}


@pytest.fixture
def _broken_schemas() -> Iterator[None]:
    """Torch lets ops return what their schema excludes; where the environment says `CI`, it does not."""
    name = "error_on_custom_op_aliasing"
    if not hasattr(torch._functorch.config, name):
        yield
        return
    with torch._functorch.config.patch({name: False}):
        yield


@pytest.mark.usefixtures("_broken_schemas")
@pytest.mark.parametrize("name", BETWEEN)
def test_results_of_all_kinds_are_right(name: str, way: str) -> None:
    """Also of ops that do not keep to their schema, or whose fake tensors lie otherwise."""
    model, x = Mixed(BETWEEN[name]), torch.randn(8, 16)
    with no_fallback():
        assert_right(planned(model, x), model, x)


def _last(x: torch.Tensor) -> torch.Tensor:
    """The first result is read last, when others were made, read and let go."""
    first = x.cummax(0).values
    y = x
    for _ in range(3):
        y = y.cummax(1).values.sort(0).values.exp().tanh()
    return first + y


def test_a_value_that_is_read_late_is_still_there(way: str) -> None:
    model, x = Mixed(_last), torch.randn(8, 16)
    with no_fallback():
        assert_right(planned(model, x), model, x)


class _Memory(bytearray):
    """Memory that tells when it is gone."""


def test_results_are_neither_copied_nor_kept(way: str) -> None:
    """While a later step runs, the memory that torch made is there; after the call it is not."""
    made: list[weakref.ref[_Memory]] = []
    seen: list[bool] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        memory = _Memory((-x).numpy().tobytes())
        made.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(made[-1]() is not None)
        return x.clone()

    ops = torch.ops.handed_over_once
    with torch.library._scoped_library("handed_over_once", "DEF") as library:
        for name, run in (("make", make), ("look", look)):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"handed_over_once::{name}", torch.empty_like, lib=library)

        def between(x: torch.Tensor) -> torch.Tensor:
            y = ops.make(x)
            return ops.look(y.exp()) + y

        model, x = Mixed(between), torch.randn(8, 16)
        with no_fallback():
            result = planned(model, x)
        # The last call was the plan's alone.
        assert seen[-1]
        assert_right(result, model, x)
    gc.collect()
    assert not any(ref() is not None for ref in made)


def test_generated_overloads_are_not_used() -> None:
    """They call the op and copy what it returns."""
    gradient, mask = torch_calls.Read(0), torch_calls.Read(1)
    made = torch_calls.call(torch.ops.aten.native_dropout_backward.default, (gradient, mask, 2.0), {})
    assert isinstance(made, str)
    assert '"out"' not in made
    assert '"out"' in str(torch_calls.call(torch.ops.aten.bmm.default, (gradient, mask), {}))


def test_functions_return_what_has_no_place() -> None:
    run = torch_calls._python(torch.ops.aten.cummax.default, (torch_calls.Read(0), 0), {}, None)
    x, place = torch.randn(4, 3), torch.empty(4, 3)
    values, indices = x.cummax(0)
    (handed,) = run([x], [place, None])
    assert torch.equal(place, values)
    assert torch.equal(handed, indices)
    assert run([x], [place, torch.empty(4, 3, dtype=torch.int64)]) == []
