"""Calls of torch's attention in the places of attention that is written.

A mask whose values are known, and in which every row sees something, becomes the causal flag or entries that
are seen. Anything else is added to the scores as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import TorchDispatchMode, detect_fake_mode, disable_current_modes
from . import whole_calls
from .attention_factors import UnplacedError, grouped, is_cast, regained
from .attention_scores import HIDDEN, added_to, bounded
from .call_parts import Parts, UnknownError
from .constant_masks import attention_form
from .constant_values import computed, constants_of, copied, drop_unread
from .graph_writer import Writer
from .op_facts import name_of
from .records import value_of
from .written_attention import Attention, found_in, may_have_some

aten = torch.ops.aten

PASS = "written attention"
"""The name under which a compilation can do without."""

_EVERY = [0, 1]
"""Groups of axes that query, key and value have all of: batches and heads."""


def as_calls(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[str], list[str]]:
    """A copy of a graph that calls attention, names of the masks that it has as attributes, what was done."""
    if not may_have_some(gm.graph):
        return gm, [], []
    copy = copied(gm)
    constants = constants_of(copy.graph)
    found = found_in(copy.graph, constants)
    values = computed({c.tensor: None for w in found for c in w.scores.limits if c.tensor in constants})
    held: dict[fx.Node, torch.Tensor] = {}
    known: dict[str, fx.Node] = {}
    done = [w.result for w in found if _call(w, values, held, known) is not None]
    if not done:
        return gm, [], []
    drop_unread(copy.graph, done)
    return copy, [n.name for n in held], [_said(len(done))]


def trained(gm: fx.GraphModule) -> list[str]:
    """Calls attention in a graph that AOTAutograd is to differentiate, in place, if torch has a kernel whose
    gradients are wanted; says what was done."""
    if not any(_may_be_shares(n) for n in gm.graph.nodes) or whole_calls.has_scopes(gm):
        return []
    try:
        parts = Parts(gm)
    except UnknownError:
        return []
    constants = constants_of(parts.graph)
    # On a GPU gradients of torch's kernels were wrong (torch 2.11 on an H200): in fp32 for large scores, in
    # bf16 those of queries and keys for some layouts and masks.
    found = [w for w in found_in(parts.graph, constants) if not value_of(w.query.node).is_cuda]
    values = computed({c.tensor: None for w in found for c in w.scores.limits if c.tensor in constants})
    done: list[fx.Node] = []
    known: dict[str, fx.Node] = {}
    for written in found:
        call = parts.calls[written.result]
        out = parts.results.get(call)
        made = None if out is None else _call(written, values, None, known, parts.is_trained)
        if out is None or made is None:
            continue
        try:
            parts.replace(call, made if out is written.result else out)
            done.append(call)
        except UnknownError:
            continue
    drop_unread(gm.graph, done)
    return [_said(len(done))] if done else []


def _may_be_shares(node: fx.Node) -> bool:
    """Whether the name of a call says that it is part of a softmax."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and ("softmax" in name or name.startswith("exp"))


def _said(count: int) -> str:
    return f"attention written as products: {count} calls of torch's attention"


def _call(
    written: Attention,
    values: dict[fx.Node, torch.Tensor],
    held: dict[fx.Node, torch.Tensor] | None,
    known: dict[str, fx.Node],
    is_trained: Callable[[fx.Node], bool] | None = None,
) -> fx.Node | None:
    """Puts a call into the place of attention, if that can be written. It may read new attributes if they can
    be ``held``; if a value ``is_trained`` at all, torch's kernel makes gradients."""
    before = _Trial(written.result, known)
    try:
        mask, causal = _mask(written, values, held, before)
        *both, rows, keys, inner, outer = written.groups
        operands = [
            grouped(before, f.node, value_of(f.node).shape, f.layout, groups, _EVERY)
            for f, groups in (
                (written.query, [*both, rows, inner]),
                (written.key, [*both, keys, inner]),
                (written.value, [*both, keys, outer]),
            )
        ]
        if is_trained is not None and not _is_fused(written, operands, mask, causal, is_trained):
            raise _UnknownError
        call = before(
            aten.scaled_dot_product_attention.default,
            *operands,
            mask,
            0.0,
            causal,
            scale=written.scale,
        )
        result = written.result
        made = regained(before, call, [*both, rows, outer], written.layout, value_of(result).shape)
    except (UnplacedError, _UnknownError):
        before.undo()
        return None
    made.meta = {**result.meta, "val": value_of(made)}
    result.replace_all_uses_with(made)
    return made


def _is_fused(
    written: Attention,
    operands: Sequence[fx.Node],
    mask: fx.Node | None,
    causal: bool,
    is_trained: Callable[[fx.Node], bool],
) -> bool:
    """Whether torch has a kernel for both passes of a call, and gradients are those of products."""
    if value_of(operands[1]).shape[-2] == 1:
        # Of one key, queries and keys have no gradient: a difference of equal numbers, and of rounded ones in
        # torch's kernels. An optimizer that divides by its size makes steps of that.
        return False
    learns = any(is_trained(c.tensor) for c in written.scores.limits if c.tensor is not None)
    given = [value_of(n).detach().requires_grad_() for n in operands]
    added = None if mask is None else value_of(mask).detach()
    if added is not None and added.is_floating_point():
        added.requires_grad_(learns)
    with torch.enable_grad(), _Ops() as ops:
        aten.scaled_dot_product_attention.default(*given, added, 0.0, causal, scale=written.scale)
    return not any("softmax" in name for name in ops.called)


class _Ops(TorchDispatchMode):
    """Notes the ops that are called, as autograd sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op."""
        self.called.append(name_of(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


class _UnknownError(Exception):
    """A mask would be rounded."""


class _Trial(Writer):
    """Adds calls that can be taken out again. One that a layer before has made is not made anew."""

    def __init__(self, before: fx.Node, known: dict[str, fx.Node]) -> None:
        super().__init__(before.graph, before)
        self._known = known
        self._added: dict[str, fx.Node] = {}

    def __call__(self, op: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """The call of an op."""
        key = f"{op}{args}{kwargs}"
        if key not in self._known:
            self._known[key] = self._added[key] = super().__call__(op, *args, **kwargs)
        return self._known[key]

    def undo(self) -> None:
        """Takes out what was added."""
        for key, node in reversed(self._added.items()):
            self.graph.erase_node(node)
            del self._known[key]


def _mask(
    written: Attention,
    values: dict[fx.Node, torch.Tensor],
    held: dict[fx.Node, torch.Tensor] | None,
    write: _Trial,
) -> tuple[fx.Node | None, bool]:
    """The mask of a call, and its causal flag."""
    scores, groups, dtype = written.scores, written.groups[:4], value_of(written.query.node).dtype
    limits = scores.limits
    if not limits:
        return None, False
    if all(c.tensor in values for c in limits) and all(isinstance(n, int) for n in written.sizes):
        mask = _known(written, values)
        if isinstance(mask, bool):
            return None, mask
        if held is not None:
            return _attribute(write, mask, held), False
    for change in limits:
        known = None if change.tensor is None else values.get(change.tensor)
        exact = _is_narrow(change.tensor, dtype) if known is None else _is_kept(known, dtype)
        if not change.fills and value_of(change.node).dtype != dtype and not exact:
            raise _UnknownError
    total = added_to(write, lambda node: node, scores, groups)
    assert total is not None
    return bounded(write, total, scores, dtype), False


def _is_narrow(node: fx.Node | None, dtype: torch.dtype) -> bool:
    """Whether a tensor has numbers of a precision, though it may be wider."""
    while node is not None and is_cast(node):
        node = node.all_input_nodes[0]
    return node is not None and value_of(node).dtype in (dtype, torch.bool)


def _known(written: Attention, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor | bool:
    """A mask whose values are known; the causal flag, if that is enough."""
    scores, groups = written.scores, written.groups[:4]
    query, dtype = value_of(written.query.node), value_of(written.query.node).dtype

    def run(op: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        return op(*args, **kwargs)

    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        if any(values[c.tensor].device != query.device for c in scores.limits if c.tensor is not None):
            raise _UnknownError
        total = added_to(run, lambda node: values[node], scores, groups)
        assert total is not None
        seen = total == 0
        hides = bool((seen | (total <= HIDDEN)).all())
        if not hides and not _is_kept(total, dtype):
            raise _UnknownError
        sees = hides and bool(seen.any(-1).all())
        mask: torch.Tensor = seen if sees else bounded(run, total, scores, dtype)
        for dim in (0, 1):
            first = mask.narrow(dim, 0, 1)
            mask = first if bool(((mask == first) | (mask.isnan() & first.isnan())).all()) else mask
        batches, heads, rows, keys = (n for n in written.sizes[:4] if isinstance(n, int))
        like = torch.empty(batches, heads, rows, 1, device="meta")
        other = like.new_empty(batches, heads, keys, 1)
        form = attention_form(mask, like, other) if mask.dtype == torch.bool else None
        return mask.contiguous() if form is None else form


def _is_kept(bias: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether no number of a bias is rounded in a precision, but for those that hide."""
    with disable_current_modes(), torch.no_grad():
        return bool(((bias.to(dtype).to(bias.dtype) == bias) | (bias <= HIDDEN) | bias.isnan()).all())


def _attribute(write: _Trial, value: torch.Tensor, held: dict[fx.Node, torch.Tensor]) -> fx.Node:
    with disable_current_modes():
        same = [n for n, v in held.items() if v.dtype == value.dtype and v.equal(value)]
    if same:
        return same[0]
    graph, module = write.graph, write.graph.owning_module
    assert module is not None
    target = f"seen_{write.before.name}_{len(held)}"
    module.register_buffer(target, value, persistent=False)
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target)
    mode = detect_fake_mode([value_of(write.before)])
    node.meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
    held[node] = value
    return node
