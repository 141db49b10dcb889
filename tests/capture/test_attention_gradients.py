"""Gradients for cuDNN's attention lie as at the first call; no GPU is needed to see it in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hypatia._torch import FakeTensorMode
from hypatia.capture import attention_gradients
from hypatia.capture.attention_gradients import lay_as_before

SIZE = (2, 4, 12, 8)
BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_gradients, "_first", {})


def _lying(order: tuple[int, ...], size: tuple[int, ...] = SIZE) -> torch.Tensor:
    """A tensor whose dimensions lie so, from the outermost to the innermost one."""
    back = [order.index(d) for d in range(4)]
    return torch.empty([size[d] for d in order], dtype=torch.bfloat16).permute(back)


def _graph(
    gradient: torch.Tensor, result: torch.Tensor, causal: bool = False
) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    names = ("gradient", "query", "key", "value", "result")
    nodes = [graph.placeholder(name) for name in names]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node, value in zip(nodes, (gradient, result, result, result, result), strict=True):
            node.meta["val"] = mode.from_tensor(value)
    call = graph.call_function(BACKWARD, (*nodes, *[None] * 6, 12, 12, 0.0, causal))
    call.meta["val"] = nodes[1].meta["val"]
    graph.output(call)
    return fx.GraphModule({}, graph), call


def _strides(
    gradient: torch.Tensor, result: torch.Tensor, causal: bool = False
) -> tuple[tuple[int, ...], int]:
    """How the gradient lies that a call is given, and how many ops that took."""
    gm, call = _graph(gradient, result, causal)
    count = len(gm.graph.nodes)
    lay_as_before(gm)
    given = call.args[0]
    assert isinstance(given, fx.Node)
    assert given.meta["val"].shape == gradient.shape
    return given.meta["val"].stride(), len(gm.graph.nodes) - count


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
def test_gradients_lie_as_in_the_first_graph(first: tuple[int, ...], order: tuple[int, ...]) -> None:
    """torch keeps what cuDNN compiled, and does not look at how the next gradient lies."""
    result = _lying((0, 2, 1, 3))
    assert _strides(_lying(first), result) == (_lying(first).stride(), 0), "the first one is left as it is"
    assert _strides(_lying(order), result) == (_lying(first).stride(), 0 if order == first else 3)


def test_calls_that_torch_tells_apart_do_not_matter_to_each_other() -> None:
    gradients = [_lying(order) for order in ORDERS]
    results = [_lying((0, 2, 1, 3)), _lying((0, 1, 2, 3)), _lying((0, 2, 1, 3))]
    for gradient, result, causal in zip(gradients, results, (False, False, True), strict=True):
        assert _strides(gradient, result, causal) == (gradient.stride(), 0)


def test_gradients_of_sums_are_made_dense() -> None:
    """What repeats one element is copied."""
    result = _lying((0, 2, 1, 3))
    assert _strides(torch.empty(1, dtype=torch.bfloat16).expand(SIZE), result) == (result.stride(), 3)


def test_dimensions_of_one_element_do_not_matter() -> None:
    size = (2, 1, 12, 8)
    result = _lying((0, 2, 1, 3), size)
    assert _strides(_lying((0, 2, 1, 3), size), result)[1] == 0
    assert _strides(_lying((0, 1, 2, 3), size), result)[1] == 0
