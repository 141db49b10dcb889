"""Calls of torch's attention in the places of attention that is written.

A mask whose values are known, and in which every row sees something, becomes the causal flag or entries that
are seen. Anything else is added to the scores as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import detect_fake_mode, disable_current_modes
from .attention_factors import UnplacedError, grouped, is_cast, regained
from .attention_scores import HIDDEN, added_to, bounded
from .constant_masks import attention_form
from .constant_values import computed, constants_of, copied, drop_unread
from .graph_writer import Writer
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
    done = [w.result for w in found if _call(w, values, held)]
    if not done:
        return gm, [], []
    drop_unread(copy.graph, done)
    named = [n.name for n in held]
    return copy, named, [f"attention written as products: {len(done)} calls of torch's attention"]


def _call(written: Attention, values: dict[fx.Node, torch.Tensor], held: dict[fx.Node, torch.Tensor]) -> bool:
    """Puts a call into the place of attention, if that can be written."""
    before = _Trial(written.result)
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
        return False
    made.meta = {**result.meta, "val": value_of(made)}
    result.replace_all_uses_with(made)
    return True


class _UnknownError(Exception):
    """A mask would be rounded."""


class _Trial(Writer):
    """Adds calls that can be taken out again."""

    def __init__(self, before: fx.Node) -> None:
        super().__init__(before.graph, before)
        self._added: list[fx.Node] = []

    def __call__(self, op: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """The call of an op."""
        self._added.append(super().__call__(op, *args, **kwargs))
        return self._added[-1]

    def undo(self) -> None:
        """Takes out what was added."""
        for node in reversed(self._added):
            self.graph.erase_node(node)


def _mask(
    written: Attention,
    values: dict[fx.Node, torch.Tensor],
    held: dict[fx.Node, torch.Tensor],
    write: _Trial,
) -> tuple[fx.Node | None, bool]:
    """The mask of a call, and its causal flag."""
    scores, groups, dtype = written.scores, written.groups[:4], value_of(written.query.node).dtype
    limits = scores.limits
    if not limits:
        return None, False
    if all(c.tensor in values for c in limits) and all(isinstance(n, int) for n in written.sizes):
        return _known(written, values, held, write)
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


def _known(
    written: Attention,
    values: dict[fx.Node, torch.Tensor],
    held: dict[fx.Node, torch.Tensor],
    write: _Trial,
) -> tuple[fx.Node | None, bool]:
    """The same of a mask whose values are known."""
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
        sees = bool(seen.any(-1).all())
        mask = seen if hides and sees else bounded(run, total, scores, dtype)
        if not hides and not _is_kept(total, dtype):
            raise _UnknownError
        for dim in (0, 1):
            first = mask.narrow(dim, 0, 1)
            mask = first if bool(((mask == first) | (mask.isnan() & first.isnan())).all()) else mask
        sizes = [n for n in written.sizes if isinstance(n, int)]
        rows = torch.empty(sizes[0], sizes[1], sizes[2], 1, device="meta")
        columns = rows.new_empty(sizes[0], sizes[1], sizes[3], 1)
        form = attention_form(mask, rows, columns) if mask.dtype == torch.bool else None
        if form is not None:
            return None, form
        same = next((n for n, v in held.items() if v.dtype == mask.dtype and v.equal(mask)), None)
    return same or _attribute(write, mask.contiguous(), held), False


def _is_kept(bias: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether no number of a bias is rounded in a precision, but for those that hide."""
    with disable_current_modes(), torch.no_grad():
        return bool(((bias.to(dtype).to(bias.dtype) == bias) | (bias <= HIDDEN) | bias.isnan()).all())


def _attribute(write: _Trial, value: torch.Tensor, held: dict[fx.Node, torch.Tensor]) -> fx.Node:
    graph = write.graph
    module = graph.owning_module
    assert module is not None
    target = f"seen_{write.before.name}_{len(held)}"
    module.register_buffer(target, value, persistent=False)
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target)
    mode = detect_fake_mode([value_of(write.before)])
    node.meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
    held[node] = value
    return node
