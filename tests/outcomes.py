"""What became of calling a model: results, errors and everything that a call may leave behind.

A case is run by eager and compiled, each from the same seed on arguments made anew, and the two outcomes must
be alike: a compiler that draws a random number more or changes a buffer twice is caught as surely as one
that computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import hypatia
from support import BACKEND, PEER, assert_as_close_as_eager, compile_count, fresh_dynamo, tensors

grad_modes = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


def mlp() -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@dataclasses.dataclass
class Call:
    """A function or model and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


Case = Callable[[], Call]


@dataclasses.dataclass
class Outcome:
    """What some calls of one case gave and left behind."""

    results: list[Any]
    error: Exception | None
    state: dict[str, Any]
    random: torch.Tensor
    graphs: int


def outcome(
    case: Case, backend: str | None, *, calls: int = 2, backward: bool = False, **options: Any
) -> Outcome:
    """Runs a case; the backend "optimize" is `hypatia.optimize`, and none is eager."""
    fresh_dynamo()
    torch.manual_seed(0)
    call = case()
    function = call.function
    before = compile_count()
    if backend == "optimize":
        function = hypatia.optimize(function, *call.args, kwargs=call.kwargs)
    elif backend is not None:
        function = torch.compile(function, backend=backend, **options)
    results, error = [], None
    try:
        for _ in range(calls):
            results.append(function(*call.args, **call.kwargs))
            if backward:
                _backward(results[-1])
    except Exception as raised:
        error = raised
    return Outcome(results, error, _state(call), torch.get_rng_state(), compile_count() - before)


def assert_like_eager(
    case: Case, *, calls: int = 2, backward: bool = False, optimize: bool = False, graphs: bool = True
) -> Outcome:
    """Asserts that compiled and eager runs of a case are alike; gives the compiled one.

    ``optimize`` tries `hypatia.optimize` too. ``graphs`` says whether the backend sees the case at all.
    """
    eager = outcome(case, None, calls=calls, backward=backward)
    if optimize:
        assert_alike(outcome(case, "optimize", calls=calls, backward=backward), eager)
    compiled = outcome(case, BACKEND, calls=calls, backward=backward)
    assert (compiled.graphs > 0) == graphs, f"{compiled.graphs} graphs were compiled"
    if eager.error is not None:
        assert compiled.error is not None, f"eager raises {eager.error!r}"
        if str(compiled.error) != str(eager.error):
            # Dynamo words some errors its own way, whatever the backend.
            eager = outcome(case, PEER, calls=calls, backward=backward)
    assert_alike(compiled, eager)
    return compiled


def assert_alike(ours: Outcome, theirs: Outcome) -> None:
    """Asserts that two outcomes have the same results, errors, side effects and random state."""
    if theirs.error is None and ours.error is not None:
        raise ours.error
    assert type(ours.error) is type(theirs.error), f"{ours.error!r}, eager gives {theirs.error!r}"
    assert _first_line(ours.error) == _first_line(theirs.error)
    assert pytree.tree_structure(ours.results) == pytree.tree_structure(theirs.results)
    _assert_alike(ours.results, theirs.results, "output")
    assert ours.state.keys() == theirs.state.keys()
    for name, value in theirs.state.items():
        _assert_alike(ours.state[name], value, name)
    assert torch.equal(ours.random, theirs.random), "other random numbers were drawn"


def _assert_alike(ours: Any, theirs: Any, label: str) -> None:
    on_meta = any(t.is_meta for t in tensors(theirs))
    assert_as_close_as_eager(ours, theirs, label=label, values=not on_meta)


def _first_line(error: Exception | None) -> str:
    return str(error).strip().split("\n")[0]


def _backward(result: Any) -> None:
    floats = [t for t in tensors(result) if t.requires_grad]
    total = sum((t.abs() if t.is_complex() else t).square().sum().to(torch.float64) for t in floats)
    if isinstance(total, torch.Tensor):
        total.backward()


def _state(call: Call) -> dict[str, Any]:
    """Arguments, parameters and buffers as they are now, with the gradients they got."""
    state: dict[str, Any] = {f"argument {i}": t for i, t in enumerate(tensors((call.args, call.kwargs)))}
    if isinstance(call.function, nn.Module):
        state |= dict(call.function.named_parameters()) | dict(call.function.named_buffers())
    gradients = {f"gradient of {name}": value.grad for name, value in state.items() if value.is_leaf}
    return state | gradients
