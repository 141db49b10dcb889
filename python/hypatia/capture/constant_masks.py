"""Masks of attention that depend on no input: computed once, and left out where they say nothing.

Models make masks of ``arange`` and comparisons at every call. One that hides nothing keeps torch from its
fast kernels, and so does one that hides what comes later, which has a flag. Torch's own ops compute the mask
here, and its values decide, so nothing is guessed. A mask with open sizes, or made of weights, stays.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch import (
    OpOverload,
    TorchDispatchMode,
    detect_fake_mode,
    disable_current_modes,
    make_graph_module,
    pytree,
)
from .op_facts import changes, draws, name_of
from .records import value_of

PASS = "constant masks"
"""The name under which a compilation can do without."""

_MOST_BYTES = 64 * 2**20
"""Masks and what they are made of are not computed if they take more than this."""

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MASKS = ("attn_mask", "attn_bias")


class _Attention(NamedTuple):
    """A call of attention that reads a mask."""

    node: fx.Node
    name: str
    """What the mask is called."""
    mask: fx.Node
    query: torch.Tensor
    key: torch.Tensor


def simplified(gm: fx.GraphModule, *, lying_alike: bool = True) -> list[str]:
    """Takes constant masks that are not needed out of a graph, in place; says what was done.

    With ``lying_alike`` what attention returns lies in memory as before, whichever kernel computes it.
    """
    found = [a for n in gm.graph.nodes if (a := _attention(n)) is not None]
    if not found:
        return []
    done: Counter[str] = Counter()
    values: dict[fx.Node, torch.Tensor | None] = {}
    changed, functional = _changed(gm.graph), _is_functional(gm.graph)
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for call in found:
            if call.mask not in values:
                needed = _ancestors([call.mask])
                steady = not needed & changed and all(_is_steady(n, functional) for n in needed)
                values[call.mask] = _computed(call.mask, needed) if steady else None
            value = values[call.mask]
            form = "" if value is None else _form(value, call)
            if form and _leave_out(call, causal=form == _CAUSAL, lying_alike=lying_alike):
                done[form] += 1
    if done:
        _drop_unread(gm.graph, [call.mask for call in found])
    return [f"constant mask of {n} attention calls: {form}" for form, n in done.items()]


def without_masks(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """The same with a copy of the graph, whose nodes have the names and values of the original's."""
    if not any(_attention(n) is not None for n in gm.graph.nodes):
        return gm, []
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node]._rename(node.name)
    graph.set_codegen(gm.graph._codegen)
    copy = make_graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    # When the graph is rebuilt, results get the strides that values have here.
    done = simplified(copy, lying_alike=False)
    return (copy, done) if done else (gm, [])


_ALL = "hides nothing, dropped"
_CAUSAL = "hides what comes later, the causal flag instead"


def _form(mask: torch.Tensor, call: _Attention) -> str:
    """What a mask says that attention can do without it."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    whole = (*call.query.shape[:-1], keys)
    if mask.dim() > len(whole) or torch.broadcast_shapes(mask.shape, whole) != whole:
        return ""
    for d, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:
            mask = mask.narrow(d, 0, 1)
    seen = mask
    if mask.dtype != torch.bool:
        seen = mask == 0
        # Finite numbers only make an entry small, and nobody knows how large the others are.
        if not bool((seen | (mask == -torch.inf)).all()):
            return ""
    if bool(seen.all()):
        return _ALL
    # Torch aligns the flag with the first query and the first key, which not all kernels do.
    if rows == keys and mask.shape[-2:] == (rows, keys):
        lower = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril()
        if bool((seen == lower).all()):
            return _CAUSAL
    return ""


def _attention(node: fx.Node) -> _Attention | None:
    """A call of attention that has a mask which may be left out, no flag, and drops nothing at random."""
    if node.op != "call_function":
        return None
    if node.target is torch.nn.functional.scaled_dot_product_attention:
        names: tuple[str, ...] = _SDPA
    elif isinstance(node.target, OpOverload) and "scaled_dot_product" in name_of(node.target):
        schema = node.target._schema.arguments
        optional = [a for a in schema if a.name in _MASKS and str(a.type) == "Optional[Tensor]"]
        if not optional or not any(a.name == "is_causal" for a in schema):
            return None
        names = tuple(a.name for a in schema)
    else:
        return None
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("dropout_p", 0.0) != 0.0 or given.get("is_causal", False) is not False:
        return None
    name = next(n for n in _MASKS if n in names)
    read = [given.get(n) for n in (name, "query", "key")]
    nodes = [n for n in read if isinstance(n, fx.Node) and _is_closed(value_of(n))]
    if len(nodes) != len(read):
        return None
    return _Attention(node, name, nodes[0], value_of(nodes[1]), value_of(nodes[2]))


def _leave_out(call: _Attention, *, causal: bool, lying_alike: bool) -> bool:
    """Calls attention without its mask, if what it returns can lie in memory as before."""
    node, value = call.node, value_of(call.node)
    args, kwargs = node.args, node.kwargs
    _set(node, call.name, None)
    if causal:
        _set(node, "is_causal", True)
    if not lying_alike:
        return True
    if _strides(node) == value.stride():
        return True
    # Kernels write heads before rows, or rows before heads.
    turned = value.dim() == 4 and value.transpose(1, 2).is_contiguous()
    if not turned and not value.is_contiguous():
        node.args, node.kwargs = args, kwargs
        return False
    methods = ["transpose", "contiguous", "transpose"] if turned else ["contiguous"]
    added: list[fx.Node] = []
    for method in methods:
        last = added[-1] if added else node
        with node.graph.inserting_after(last):
            rest = (1, 2) if method == "transpose" else ()
            added.append(node.graph.call_method(method, (last, *rest)))
        added[-1].meta = dict(node.meta)
    node.replace_all_uses_with(added[-1], delete_user_cb=lambda user: user is not added[0])
    return True


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    """The strides of what a call returns, if torch can tell."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    if mode is None:
        return None
    try:
        with mode:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None
    return result.stride() if isinstance(result, torch.Tensor) else None


def _set(node: fx.Node, name: str, value: bool | None) -> None:
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else _SDPA
    place = names.index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _is_closed(value: object) -> bool:
    """Whether a value is a tensor whose sizes are all known."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride()))


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _changed(graph: fx.Graph) -> set[fx.Node]:
    """What ops that change tensors may change: all that these are made of, since they may be views."""
    return _ancestors([read for n in graph.nodes if changes(n.target) for read in n.all_input_nodes])


def _is_functional(graph: fx.Graph) -> bool:
    """Whether schemas say of every call whether it changes tensors, as in graphs of AOTAutograd's."""
    targets = [n.target for n in graph.nodes if n.op in ("call_function", "call_method", "call_module")]
    return all(isinstance(t, OpOverload) or t is operator.getitem for t in targets)


class _Pure(TorchDispatchMode):
    """Lets only calls through that always return the same."""

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call."""
        if not isinstance(func, OpOverload) or changes(func) or draws(func) or "empty" in name_of(func):
            raise _VaryingError
        return func(*args, **(kwargs or {}))


class _VaryingError(Exception):
    """A value is not the same in every call."""


def _computed(mask: fx.Node, needed: set[fx.Node]) -> torch.Tensor | None:
    """The value of a mask, if torch can tell."""
    values: dict[fx.Node, Any] = {}
    try:
        with _Pure():
            for node in mask.graph.nodes:
                if node in needed:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    function = getattr(args[0], node.target) if node.op == "call_method" else node.target
                    values[node] = function(*(args[1:] if node.op == "call_method" else args), **kwargs)
    # Whatever torch does not like here, the mask stays as it is.
    except Exception:
        return None
    value, known = values[mask], value_of(mask)
    if type(value) is not torch.Tensor or value.device != known.device:
        return None
    return value if (value.shape, value.dtype) == (known.shape, known.dtype) else None


def _is_steady(node: fx.Node, functional: bool) -> bool:
    """Whether a node is a call, not an input or a weight, with values of a known, small size that nobody
    changes later: in graphs of Dynamo's, fake tensors count their changes."""
    if node.op not in ("call_function", "call_method"):
        return False

    def fits(value: object) -> bool:
        if not isinstance(value, torch.Tensor):
            return type(value) in (int, float, bool)
        unchanged = functional or (not value.is_inference() and value._version == 0)
        return unchanged and _is_closed(value) and value.untyped_storage().nbytes() <= _MOST_BYTES

    values = pytree.tree_leaves(value_of(node))
    return bool(values) and all(map(fits, values))


def _drop_unread(graph: fx.Graph, masks: list[fx.Node]) -> None:
    """Takes masks out that nothing reads any more, with what they were made of."""
    needed = _ancestors(masks)
    for node in reversed(graph.nodes):
        if node in needed and not node.users and node.op in ("call_function", "call_method"):
            graph.erase_node(node)
