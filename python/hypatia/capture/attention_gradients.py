"""The gradient that cuDNN's attention is given lies in memory as its result does.

With another layout, gradients of queries and keys were wrong (torch 2.11 on an H200).
"""

from __future__ import annotations

import torch
from torch import fx

from .graph_writer import Writer
from .records import value_of

_aten = torch.ops.aten
_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
_GRADIENT, _RESULT = 0, 4
"""Which of its arguments they are."""


def lay_alike(gm: fx.GraphModule) -> None:
    """Copies gradients that lie otherwise, in a backward graph, in place."""
    done = False
    for node in gm.graph.find_nodes(op="call_function", target=_BACKWARD):
        gradient, result = (node.args[i] for i in (_GRADIENT, _RESULT))
        if not isinstance(gradient, fx.Node) or not isinstance(result, fx.Node):
            continue
        order = _order(value_of(result))
        if order is None or _order(value_of(gradient)) == order:
            continue
        write = Writer(gm.graph, node)
        turned = write(_aten.permute.default, gradient, order)
        copy = write(_aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = [order.index(d) for d in range(len(order))]
        node.update_arg(_GRADIENT, write(_aten.permute.default, copy, back))
        done = True
    if done:
        gm.recompile()


def _order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from the outermost to the innermost one; none if that is not known or elements lie apart."""
    if any(type(n) is not int for n in (*value.shape, *value.stride())):
        return None
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (value.shape[d] > 1, -strides[d]))
    return order if value.permute(order).is_contiguous() else None
