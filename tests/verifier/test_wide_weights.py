"""Float64 results on weights that are widened block by block are those of weights that are widened first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from hypatia.verifier import wide_weights
from hypatia.verifier.reference import RandomState, Script, Stream

aten = torch.ops.aten
Written = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], fx.Node]

CALLS: dict[str, Written] = {
    "linear": lambda g, x, w, b: g.call_function(aten.linear.default, (x, w, b)),
    "linear without bias": lambda g, x, w, b: g.call_function(aten.linear.default, (x, w)),
    "addmm": lambda g, x, w, b: g.call_function(
        aten.addmm.default, (b, x, g.call_function(aten.t.default, (w,)))
    ),
    "mm": lambda g, x, w, b: g.call_function(aten.mm.default, (x, g.call_function(aten.t.default, (w,)))),
    "scaled addmm": lambda g, x, w, b: g.call_function(
        aten.addmm.default, (b, x, g.call_function(aten.t.default, (w,))), {"beta": 0.5}
    ),
}


def wide_result(graph: fx.Graph, values: list[torch.Tensor]) -> torch.Tensor:
    gm = fx.GraphModule(torch.nn.Module(), graph)
    inputs: dict[fx.Node, object] = dict(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True))
    with torch.no_grad():
        ((_, found),) = Stream(Script(gm), inputs, RandomState([]), wide=True)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 40), torch.randn(50, 40), torch.randn(50)]
    monkeypatch.setattr(wide_weights, "LARGE", 1)
    monkeypatch.setattr(wide_weights, "BLOCK", 40 * 7)
    graph = fx.Graph()
    x, w, b = (graph.placeholder(n) for n in ("x", "w", "b"))
    graph.output((CALLS[name](graph, x, w, b),))
    found = wide_result(graph, values)
    monkeypatch.setattr(wide_weights, "LARGE", 1 << 40)
    expected = wide_result(graph, values)
    assert found.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_weight_that_is_looked_up_and_multiplied_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_weights, "LARGE", 1)
    torch.manual_seed(0)
    weight = torch.randn(50, 40)
    graph = fx.Graph()
    w, i = (graph.placeholder(n) for n in ("w", "i"))
    rows = graph.call_function(aten.embedding.default, (w, i))
    graph.output((graph.call_function(aten.linear.default, (rows, w)),))
    found = wide_result(graph, [weight, torch.tensor([3, 7])])
    torch.testing.assert_close(found, weight.double()[[3, 7]] @ weight.double().t(), rtol=1e-13, atol=1e-13)


def test_a_view_of_a_weight_that_is_a_result_is_wide() -> None:
    graph = fx.Graph()
    w = graph.placeholder("w")
    graph.output((graph.call_function(aten.t.default, (w,)),))
    assert wide_result(graph, [torch.randn(4, 5)]).dtype == torch.float64
