"""The gradient that cuDNN's attention is given lies in memory as at its first call.

torch keeps what cuDNN compiled for a call by the sizes and strides of query, key and value, but not by those
of the gradient. So a call whose gradient lies otherwise than that of an earlier one gives wrong gradients
(torch 2.11). Among graphs that are compiled here the first one decides, and lies as in eager.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from .graph_writer import Writer
from .records import value_of

_aten = torch.ops.aten
_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
_GRADIENT, _RESULT = 0, 4
"""Which of its arguments they are."""
_FACTORS, _BIAS, _REST = (1, 2, 3), 8, slice(13, 15)
"""What torch knows a call by: query, key and value, a bias, dropout and whether it is causal."""

_Order = tuple[int, ...]

_first: dict[Hashable, _Order] = {}
"""How the gradient lay that was first compiled for a call."""


def lay_as_before(gm: fx.GraphModule) -> None:
    """Copies gradients that lie otherwise than those of an earlier graph, in a backward graph, in place."""
    done = False
    for node in gm.graph.find_nodes(op="call_function", target=_BACKWARD):
        gradient, result = (node.args[i] for i in (_GRADIENT, _RESULT))
        if not isinstance(gradient, fx.Node) or not isinstance(result, fx.Node):
            continue
        own = _order(value_of(gradient))
        # Elements that lie apart are laid as the result by torch, too.
        wanted, key = own or _order(value_of(result)), _key(node)
        if wanted is None or key is None:
            continue
        wanted = _first.setdefault(key, wanted)
        if wanted == own:
            continue
        write = Writer(gm.graph, node)
        turned = write(_aten.permute.default, gradient, list(wanted))
        copy = write(_aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = [wanted.index(d) for d in range(len(wanted))]
        node.update_arg(_GRADIENT, write(_aten.permute.default, copy, back))
        done = True
    if done:
        gm.recompile()


def _key(call: fx.Node) -> Hashable:
    """What torch knows a call by; none if sizes are open."""
    operands = [call.args[i] for i in _FACTORS]
    bias = call.args[_BIAS] if len(call.args) > _BIAS else None
    values = [value_of(n) for n in (*operands, bias) if isinstance(n, fx.Node)]
    if any(type(n) is not int for v in values for n in (*v.shape, *v.stride())):
        return None
    kinds = tuple((tuple(v.shape), v.stride(), v.dtype, v.device) for v in values)
    return (kinds, call.args[_REST])


def _order(value: torch.Tensor) -> _Order | None:
    """Dimensions from the outermost to the innermost one; none if that is not known or elements lie apart."""
    if any(type(n) is not int for n in (*value.shape, *value.stride())):
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (value.shape[d] > 1, -strides[d])))
    return order if value.permute(order).is_contiguous() else None
