"""Tensors that are filled with a number which the graph asks another tensor for.

Detectors fill their anchors with strides: ``torch.full(size, stride.item())``. The number goes to Python and
back, for which a plan would have to stop, and a GPU with it. The same tensor is made of the number where it
is: cast, expanded and copied.
"""

from __future__ import annotations

import torch
from torch import fx

from .constant_values import copied
from .graph_writer import Writer
from .records import value_of

aten = torch.ops.aten

PASS = "fills"
"""The name under which a compilation can do without."""

ITEM, FULL = aten._local_scalar_dense.default, aten.full.default


def expanded(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph that fills by copies instead of such numbers; the graph itself if it has none."""
    if not any(_source(n) is not None for n in gm.graph.find_nodes(op="call_function", target=FULL)):
        return gm
    gm = copied(gm)
    for full in gm.graph.find_nodes(op="call_function", target=FULL):
        source, item, new = _source(full), full.args[1], value_of(full)
        if source is None:
            continue
        write = Writer(gm.graph, full)
        if value_of(source).dtype != new.dtype:
            source = write(aten._to_copy.default, source, dtype=new.dtype)
        one = write(aten.reshape.default, source, [])
        whole = write(aten.expand.default, one, full.args[0])
        made = write(aten.clone.default, whole, memory_format=torch.contiguous_format)
        full.replace_all_uses_with(made)
        gm.graph.erase_node(full)
        if not item.users:
            gm.graph.erase_node(item)
    gm.recompile()
    return gm


def _source(full: fx.Node) -> fx.Node | None:
    """The tensor whose only number a call fills with, where a cast is what the way through Python is."""
    item = full.args[1]
    if not isinstance(item, fx.Node) or item.target is not ITEM:
        return None
    (source,) = item.all_input_nodes
    value, new = value_of(source), value_of(full)
    tensors = isinstance(value, torch.Tensor) and isinstance(new, torch.Tensor)
    if not tensors or value.device != new.device or new.layout is not torch.strided:
        return None
    # A number that a narrower dtype does not have is an error in eager.
    floats = value.dtype.is_floating_point and new.dtype.is_floating_point
    wider = floats and torch.promote_types(value.dtype, new.dtype) == new.dtype
    return source if wider or value.dtype == new.dtype else None
