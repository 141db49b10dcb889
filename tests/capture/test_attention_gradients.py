"""Gradients for cuDNN's attention lie as its results do; no GPU is needed to see it in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hypatia._torch import FakeTensorMode
from hypatia.capture.attention_gradients import lay_alike

SIZE = (2, 4, 12, 8)
BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def _lying(order: tuple[int, ...], size: tuple[int, ...] = SIZE) -> torch.Tensor:
    """A tensor whose dimensions lie so, from the outermost to the innermost one."""
    back = [order.index(d) for d in range(4)]
    return torch.empty([size[d] for d in order], dtype=torch.bfloat16).permute(back)


def _graph(gradient: torch.Tensor, result: torch.Tensor) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    names = ("gradient", "query", "key", "value", "result")
    nodes = [graph.placeholder(name) for name in names]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node, value in zip(nodes, (gradient, result, result, result, result), strict=True):
            node.meta["val"] = mode.from_tensor(value)
    call = graph.call_function(BACKWARD, (*nodes, *[None] * 6, 12, 12, 0.0, False))
    call.meta["val"] = nodes[1].meta["val"]
    graph.output(call)
    return fx.GraphModule({}, graph), call


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_gradients_lie_as_results(order: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    gradient, result = _lying(order), _lying(wanted)
    gm, call = _graph(gradient, result)
    count = len(gm.graph.nodes)
    lay_alike(gm)
    given = call.args[0]
    assert isinstance(given, fx.Node)
    assert given.meta["val"].shape == SIZE
    assert given.meta["val"].stride() == result.stride()
    assert len(gm.graph.nodes) == count + (0 if order == wanted else 3)


def test_gradients_of_sums_are_made_dense() -> None:
    """What repeats one element is copied."""
    result = _lying((0, 2, 1, 3))
    gm, call = _graph(torch.empty(1, dtype=torch.bfloat16).expand(SIZE), result)
    lay_alike(gm)
    given = call.args[0]
    assert isinstance(given, fx.Node)
    assert given.meta["val"].stride() == result.stride()


def test_dimensions_of_one_element_do_not_matter() -> None:
    gm, _ = _graph(_lying((0, 1, 2, 3), (2, 1, 12, 8)), _lying((0, 2, 1, 3), (2, 1, 12, 8)))
    count = len(gm.graph.nodes)
    lay_alike(gm)
    assert len(gm.graph.nodes) == count
