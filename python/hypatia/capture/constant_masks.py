"""Masks of attention that depend on no input: computed once, and left out where they say nothing.

Models make masks of ``arange`` and comparisons at every call. One that hides nothing keeps torch from its
fast kernels, and so does one that hides what comes later, which has a flag. Torch's own ops compute the mask
here, and its values decide, so nothing is guessed. A mask with open sizes, or made of weights, stays.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import fx

from .._torch import OpOverload, detect_fake_mode, disable_current_modes, pytree
from .constant_values import computed, constants_of, copied, drop_unread, is_closed
from .op_facts import name_of
from .records import value_of

PASS = "constant masks"
"""The name under which a compilation can do without."""

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


def simplified(gm: fx.GraphModule, *, lying_alike: bool = True, dropout: bool = True) -> list[str]:
    """Takes constant masks that are not needed out of a graph, in place; says what was done.

    With ``lying_alike`` what attention returns lies in memory as before, whichever kernel computes it. Calls
    with ``dropout`` may drop other entries than before, since kernels differ in how they draw them.
    """
    found = [a for n in gm.graph.nodes if (a := _attention(n, dropout=dropout)) is not None]
    if not found:
        return []
    done: Counter[str] = Counter()
    constants = constants_of(gm.graph)
    values = computed(dict.fromkeys(call.mask for call in found if call.mask in constants))
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for call in found:
            value = values.get(call.mask)
            form = "" if value is None else _form(value, call.query, call.key)
            if form and _leave_out(call, causal=form == _CAUSAL, lying_alike=lying_alike):
                done[form] += 1
    if done:
        drop_unread(gm.graph, [call.mask for call in found])
    return [f"constant mask of {n} attention calls: {form}" for form, n in done.items()]


def without_masks(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """The same with a copy of the graph, whose nodes have the names and values of the original's."""
    if not any(_attention(n, dropout=False) is not None for n in gm.graph.nodes):
        return gm, []
    copy = copied(gm)
    # When the graph is rebuilt, results get the strides that values have here.
    done = simplified(copy, lying_alike=False, dropout=False)
    return (copy, done) if done else (gm, [])


_ALL = "hides nothing, dropped"
_CAUSAL = "hides what comes later, the causal flag instead"


def attention_form(seen: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool | None:
    """Whether the causal flag says what a mask says; none if neither the flag nor its absence does."""
    form = _form(seen, query, key)
    return form == _CAUSAL if form else None


def _form(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> str:
    """What a mask says that attention can do without it."""
    rows, keys = query.shape[-2], key.shape[-2]
    whole = (*query.shape[:-1], keys)
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


def _attention(node: fx.Node, *, dropout: bool) -> _Attention | None:
    """A call of attention that has a mask which may be left out, and no flag. Without ``dropout`` it drops
    nothing at random, either."""
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
    given: dict[str, object] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("is_causal", False) is not False or (given.get("dropout_p", 0.0) != 0.0 and not dropout):
        return None
    name = next(n for n in _MASKS if n in names)
    read = [given.get(n) for n in (name, "query", "key")]
    nodes = [n for n in read if isinstance(n, fx.Node) and is_closed(value_of(n))]
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
