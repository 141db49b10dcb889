"""What signs of zeros and roundings do to results is asked once, for however many programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from hypatia.execute.changes import RandomState
from hypatia.verifier import steadiness
from hypatia.verifier.steadiness import Steadiness


def graph() -> tuple[fx.GraphModule, dict[fx.Node, object], dict[fx.Node, object]]:
    """``1 / (x @ x)`` and ``x + x``, the inputs, and the results in float64."""
    made = fx.Graph()
    x = made.placeholder("x")
    zero = made.call_function(torch.ops.aten.mm.default, (x, x))
    over = made.call_function(torch.ops.aten.reciprocal.default, (zero,))
    twice = made.call_function(torch.ops.aten.add.Tensor, (x, x))
    value = torch.diag(torch.arange(1.0, 4.0))
    for node, result in ((x, value), (zero, value @ value), (over, 1 / (value @ value)), (twice, 2 * value)):
        node.meta["val"] = result
    made.output((over, twice))
    wide = value.double()
    exact = {over: 1 / (wide @ wide), twice: 2 * wide}
    return fx.GraphModule({}, made), {x: value}, exact


def test_questions_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []

    class Counted(steadiness.Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            runs.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(steadiness, "Stream", Counted)
    ask = steadiness.depend_on_signs
    monkeypatch.setattr(steadiness, "depend_on_signs", lambda *a: runs.append("signs") or ask(*a))
    gm, inputs, exact = graph()
    over, twice = exact
    steady = Steadiness(gm, inputs, RandomState([]))
    for _ in range(3):
        flags = steady.signs(exact)
        assert set(flags) == {over}, "what is one over a zero"
        assert flags[over].sum() == 6
        shifts = steady.shifts(exact, 0.5, 0)
    assert 0 < shifts[twice] < 1e-5
    assert len(runs) == 2
    steady.shifts({twice: exact[twice]}, 0.5, 1)
    assert len(runs) == 3, "another run is another question"
