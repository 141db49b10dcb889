"""Keeps calls in one piece on their way through AOTAutograd: attention, and images that are resized.

AOTAutograd takes ``scaled_dot_product_attention`` apart by the kernel that torch would choose for fake
tensors; where that is none, it becomes two products and a softmax in fp32. Of ``interpolate`` it makes reads
by index, up to sixteen of them. In inference ops of our own stand for them until the graph is made, and
torch's kernels run.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import fx
from torch.nn import functional as F

from .._torch import FakeTensor, OpOverload, pytree
from .records import value_of

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
_RESIZED = {
    ("nearest", 3): aten.upsample_nearest1d.vec,
    ("nearest", 4): aten.upsample_nearest2d.vec,
    ("nearest", 5): aten.upsample_nearest3d.vec,
    ("nearest-exact", 3): aten._upsample_nearest_exact1d.vec,
    ("nearest-exact", 4): aten._upsample_nearest_exact2d.vec,
    ("nearest-exact", 5): aten._upsample_nearest_exact3d.vec,
    ("linear", 3): aten.upsample_linear1d.vec,
    ("bilinear", 4): aten.upsample_bilinear2d.vec,
    ("trilinear", 5): aten.upsample_trilinear3d.vec,
    ("bicubic", 4): aten.upsample_bicubic2d.vec,
}
"""By mode, and how many dimensions there are."""

_SCOPES = ("set_grad_enabled", "inference_mode", "autocast", "sdpa", "sdp_")
"""Parts of the names of calls that say how those after them are to run."""

_shown: dict[OpOverload, OpOverload] = {}
"""Torch's op for each stand-in."""

_kept: list[torch.library.Library] = []
"""An op lives as long as its library."""


@functools.cache
def _stand_in(op: OpOverload) -> OpOverload:
    library = torch.library.Library("hypatia", "FRAGMENT")
    name = str(op._schema).partition("(")[0].removeprefix("aten::")
    own = "whole_" + name.replace(".", "_")
    library.define(own + str(op._schema).removeprefix(f"aten::{name}"))
    library.impl(own, op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hypatia::{own}", op, lib=library)
    _kept.append(library)
    made: OpOverload = getattr(torch.ops.hypatia, own).default
    _shown[made] = op
    return made


def hide(gm: fx.GraphModule) -> None:
    """Puts stand-ins into a graph of Dynamo's, in place, if no gradient is asked for."""
    if torch.is_grad_enabled() or has_scopes(gm):
        return
    for node in filter(_is_known, gm.graph.nodes):
        if not all(type(value_of(n)) is FakeTensor for n in node.all_input_nodes):
            continue
        if node.target is F.interpolate:
            _hide_resizing(node)
        elif _argument(node, "dropout_p", 0.0) == 0.0:
            node.target = _stand_in(_ATTENTION)


def has_scopes(gm: fx.GraphModule) -> bool:
    """Whether calls of a graph run otherwise than by their arguments alone, as under autocast."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return True
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and not _is_known(n)]
    return any(scope in getattr(n.target, "__name__", "") for n in calls for scope in _SCOPES)


def show(gm: fx.GraphModule) -> None:
    """Puts torch's ops back into a graph of AOTAutograd's, in place."""
    hidden = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _shown]
    for node in hidden:
        node.target = _shown[node.target]
    if hidden:
        gm.recompile()


def _is_known(node: fx.Node) -> bool:
    return node.target in (F.interpolate, F.scaled_dot_product_attention)


def _argument(node: fx.Node, name: str, default: object) -> object:
    """What a call of attention is given."""
    names = [a.name for a in _ATTENTION._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name, default)


def _hide_resizing(node: fx.Node) -> None:
    """The op that ``interpolate`` calls, by a stand-in; sizes that are left open are not served."""
    given = inspect.signature(F.interpolate).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    x, size, scales, mode, corners, again, smooth = given.arguments.values()
    rank = value_of(node.all_input_nodes[0]).dim()
    op = _RESIZED.get((mode, rank))
    numbers = [n for n in pytree.tree_leaves((size, scales)) if n is not None]
    plain = all(type(n) in (int, float) for n in numbers) and len(node.all_input_nodes) == 1
    if op is None or not plain or again or smooth or (size is None) == (scales is None):
        return
    places = rank - 2
    if size is not None:
        size = list(size) if isinstance(size, (list, tuple)) else [size] * places
    if scales is not None:
        scales = [float(s) for s in (scales if isinstance(scales, (list, tuple)) else [scales] * places)]
    aligned = () if mode.startswith("nearest") else (bool(corners),)
    node.target = _stand_in(op)
    node.args, node.kwargs = (x, size, *aligned, scales), {}
