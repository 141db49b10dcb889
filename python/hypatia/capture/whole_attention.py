"""Keeps calls of attention in one piece on their way through AOTAutograd.

AOTAutograd takes ``scaled_dot_product_attention`` apart by the kernel that torch would choose for fake
tensors; where that is none, it becomes two products and a softmax in fp32. In inference an op of our own
stands for it until the graph is made, and torch chooses when it runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from .._torch import FakeTensor, OpOverload
from .records import value_of

_ATEN = torch.ops.aten.scaled_dot_product_attention.default
_SCOPES = ("set_grad_enabled", "inference_mode", "autocast", "sdpa", "sdp_")
"""Parts of the names of calls that say how those after them are to run."""


@functools.cache
def _stand_in() -> OpOverload:
    library = torch.library.Library("hypatia", "FRAGMENT")
    library.define("attention" + str(_ATEN._schema).removeprefix("aten::scaled_dot_product_attention"))
    library.impl("attention", _ATEN, "CompositeExplicitAutograd")
    torch.library.register_fake("hypatia::attention", _ATEN, lib=library)
    _kept.append(library)
    op: OpOverload = torch.ops.hypatia.attention.default
    return op


_kept: list[torch.library.Library] = []
"""An op lives as long as its library."""


def hide(gm: fx.GraphModule) -> None:
    """Puts the stand-in into a graph of Dynamo's, in place, if no gradient is asked for."""
    if torch.is_grad_enabled() or _casts_automatically():
        return
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    attention = [n for n in calls if n.target is torch.nn.functional.scaled_dot_product_attention]
    others = [getattr(n.target, "__name__", "") for n in calls if n not in attention]
    if any(scope in name for name in others for scope in _SCOPES):
        return
    for node in filter(_is_plain, attention):
        node.target = _stand_in()


def show(gm: fx.GraphModule) -> None:
    """Puts torch's op back into a graph of AOTAutograd's, in place."""
    hidden = [
        n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == "hypatia.attention.default"
    ]
    for node in hidden:
        node.target = _ATEN
    if hidden:
        gm.recompile()


def _casts_automatically() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _is_plain(node: fx.Node) -> bool:
    """Whether a call drops nothing at random, and all that it reads is an ordinary tensor."""
    given: dict[str, Any] = dict(zip((a.name for a in _ATEN._schema.arguments), node.args, strict=False))
    dropout = (given | node.kwargs).get("dropout_p", 0.0)
    values = [value_of(n) for n in node.all_input_nodes]
    return dropout == 0.0 and all(type(v) is FakeTensor for v in values)
