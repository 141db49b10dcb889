"""Tensors that depend on no input become attributes of the graph: positions, masks, tables of buckets.

What is made of them and of frozen weights, such as a bias that is looked up by distance, is a weight then
and is computed once, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from .._torch import OpOverload, disable_current_modes
from .constant_values import computed, constants_of, copied, drop_unread, is_closed
from .op_facts import changes, draws, name_of, says_types
from .records import value_of

aten = torch.ops.aten

PASS = "constants"
"""The name under which a compilation can do without."""

_MOST_BYTES = 64 * 2**20
"""What the constants of a graph may take."""

_VIEWS = ("reshape", "expand_as", "view_as")
"""Ops that may return a view, though their schemas do not say so."""


def with_constants(gm: fx.GraphModule, weights: Collection[str]) -> tuple[fx.GraphModule, list[str]]:
    """A copy of a graph whose constants are attributes, and the names of their nodes. What is made of them
    and of weights is there once."""
    if not _candidates(gm.graph):
        return gm, []
    gm = copied(gm)
    values = computed(_candidates(gm.graph))
    with disable_current_modes():
        for node, value in values.items():
            if value.dim() == 0:
                _write_out(node, value)
            elif value.numel() == 1:
                _write_out_place(node, value)
    left, held = _MOST_BYTES, dict[str, torch.Tensor]()
    for node, value in values.items():
        size = value.untyped_storage().nbytes()
        if all(says_types(n.target) for n in node.users):
            continue
        if size > left or value.stride() != value_of(node).stride() or _is_filled(value):
            continue
        same = next((name for name, known in held.items() if _is_same(value, known)), None)
        if same is not None:
            node.replace_all_uses_with(next(n for n in gm.graph.nodes if n.name == same))
            continue
        left -= size
        held[_held(gm, node, value)] = value
    for node in [n for n in gm.graph.nodes if n.name in held]:
        first = _range_start(held[node.name])
        if first is not None:
            _slice(node, first, len(held[node.name]))
    drop_unread(gm.graph, values)
    _share(gm.graph, {*weights, *held})
    return gm, list(held)


def apart_from_open_sizes(graph: fx.Graph, weights: frozenset[str]) -> frozenset[str]:
    """Weights but for those of which something is made with a size that is left open, such as positions after
    those of a cache: that is another one at every call."""
    made: dict[fx.Node, set[str]] = {}
    others: set[str] = set()
    for node in graph.nodes:
        if node.name in weights:
            made[node] = {node.name}
            continue
        sizes = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.SymInt)]
        tensors = [n for n in node.all_input_nodes if n not in sizes]
        if node.op != "call_function" or not tensors or not all(n in made for n in tensors):
            continue
        sources = set().union(*(made[n] for n in tensors))
        if sizes:
            others |= sources
        else:
            made[node] = sources
    return weights - others


_SWAPPED = {aten.add.Tensor: True, aten.mul.Tensor: True, aten.sub.Tensor: False, aten.div.Tensor: False}
"""Arithmetic that takes a number, and whether its operands may change places."""


def _write_out(node: fx.Node, value: torch.Tensor) -> None:
    """Arithmetic with a tensor of one number is arithmetic with that number.

    Without dimensions it has no say in the dtype among floats. Torch rounds it to that dtype, unless it comes
    from the CPU to a GPU.
    """
    if not value.is_floating_point() or not bool(torch.isfinite(value)):
        return
    for user in list(node.users):
        if user.target not in _SWAPPED or user.kwargs or len(user.args) != 2:
            continue
        left, right = user.args
        other = right if left is node and _SWAPPED[user.target] else left
        known = value_of(other) if isinstance(other, fx.Node) and other is not node else None
        if not isinstance(known, torch.Tensor) or not known.is_floating_point() or not known.dim():
            continue
        rounded = value.to(known.dtype) if value.device == known.device else value
        user.args = (other, float(rounded))


def _write_out_place(node: fx.Node, value: torch.Tensor) -> None:
    """The same for one place in a list, to which a count is added: the count becomes a list."""
    if value.dtype != torch.int64:
        return
    for user in list(node.users):
        if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
            continue
        other = user.args[1] if user.args[0] is node else user.args[0]
        if not isinstance(other, fx.Node) or other is node:
            continue
        known, result = value_of(other), value_of(user)
        closed = is_closed(known) and is_closed(result)
        if not closed or known.dtype != torch.int64 or known.numel() != result.numel():
            continue
        with user.graph.inserting_before(user):
            listed = user.graph.call_function(aten.reshape.default, (other, list(result.shape)))
        listed.meta["val"] = known.reshape(result.shape)
        user.args = (listed, int(value))


def _range_start(value: torch.Tensor) -> int | None:
    """The first of places that follow each other; none for any other value."""
    if value.dim() != 1 or value.dtype not in (torch.int64, torch.int32) or not len(value):
        return None
    with disable_current_modes():
        first = int(value[0])
        same = torch.arange(first, first + len(value), dtype=value.dtype, device=value.device)
        return first if first >= 0 and torch.equal(value, same) else None


def _slice(places: fx.Node, first: int, count: int) -> None:
    """Elements that are picked one after the other are a part, and its copy."""
    for node in list(places.users):
        source = node.args[0]
        if node.target is not aten.index_select.default or not isinstance(source, fx.Node):
            continue
        size = value_of(source).shape[node.args[1]]
        if type(size) is not int or first + count > size:
            continue
        with node.graph.inserting_before(node):
            part = node.graph.call_function(aten.slice.Tensor, (source, node.args[1], first, first + count))
            copy = node.graph.call_function(
                aten.clone.default, (part,), {"memory_format": torch.contiguous_format}
            )
        part.meta["val"] = value_of(source).narrow(node.args[1], first, count)
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        node.graph.erase_node(node)


def _share(graph: fx.Graph, steady: set[str]) -> None:
    """Makes one of equal calls that read only what stays the same: every layer of a model may make its mask
    of the same parts, and what is folded is kept in memory."""
    (output,) = graph.find_nodes(op="output")
    returned = {base for n in output.all_input_nodes for base in _bases(n)}
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        reads = node.all_input_nodes
        pure = isinstance(node.target, OpOverload) and not changes(node.target) and not draws(node.target)
        if not pure or not reads or any(n.name not in steady for n in reads) or node in returned:
            continue
        # Names of nodes are unique.
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is node:
            steady.add(node.name)
        else:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _held(gm: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> str:
    """Puts an attribute into the place of a node; returns the name of its node."""
    target = f"constant_{node.name}"
    while hasattr(gm, target):
        target += "_"
    gm.register_buffer(target, value, persistent=False)
    # Before all that may read it: equal constants share it.
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        held = node.graph.create_node("get_attr", target)
    held.meta = dict(node.meta)
    node.replace_all_uses_with(held)
    return held.name


def _candidates(graph: fx.Graph) -> list[fx.Node]:
    """Constants in memory of their own that other nodes read, and that are no results."""
    constants = constants_of(graph)
    (output,) = graph.find_nodes(op="output")
    returned = {base for n in output.all_input_nodes for base in _bases(n)}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in constants or node.op == "output" or says_types(node.target):
            continue
        for read in node.all_input_nodes:
            if read in constants:
                *_, base = _bases(read)
                if base not in returned and isinstance(value_of(base), torch.Tensor):
                    found[base] = None
    return list(found)


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and all that it is a view of."""
    yield node
    while node.op in ("call_function", "call_method") and _is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


def _is_view(target: object) -> bool:
    return isinstance(target, OpOverload) and (target.is_view or name_of(target) in _VIEWS)


def _is_same(value: torch.Tensor, known: torch.Tensor) -> bool:
    if (value.dtype, value.device, value.shape) != (known.dtype, known.device, known.shape):
        return False
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # Zeros of both signs count as equal.
        apart = value.dtype.is_floating_point and not torch.equal(value.signbit(), known.signbit())
        return value.stride() == known.stride() and not apart and torch.equal(value, known)


def _is_filled(value: torch.Tensor) -> bool:
    """Whether a tensor is one number many times: torch fills memory as fast as it could be read, and what
    a table has at one place should not be copied for all."""
    if value.numel() == 1 or value.dtype == torch.bool:
        return False
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        return value.numel() == 0 or bool((value == value.flatten()[0]).all())
