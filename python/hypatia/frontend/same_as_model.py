"""Whether what was captured of a model computes what the model does."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence

import torch
from torch import fx, nn

from .._torch import pytree
from ..capture.model_state import buffers_kept
from ..capture.op_facts import changed_inputs, draws_at
from ..capture.records import path_of
from ..devices.table import random_devices
from ..execute.agreement import agree
from ..execute.changes import RandomState, State
from ..timeline import COMPARISON, stage
from ..verifier.first_call import device_of
from ..verifier.same_layout import layouts_of
from .flat_model import FlatModel


@stage(COMPARISON)
def computes_the_same(
    captured: fx.GraphModule,
    model: FlatModel,
    inputs: Sequence[object],
    returned: Sequence[object] | None = None,
) -> list[object] | None:
    """Whether a captured graph computes what its model does: a run on fake tensors may take another way.

    ``returned`` is what the graph returned on these inputs before; it is not run again then, if it changes
    nothing and draws no numbers. None if they differ, else how the model's results lie in memory; nothing of
    that is known where inputs or buffers change.
    """
    random = RandomState(random_devices(inputs))
    before = State(changed_tensors(captured, inputs), device_of(inputs))
    outline = model.hypatia_outline()
    results: list[list[object]] = []
    layouts: list[object] = []
    if before.tensors or any(map(_may_draw, captured.graph.nodes)):
        returned = None
    with torch.no_grad():
        if returned is not None:
            results.append(list(returned))
        for call in (captured, model) if returned is None else (model,):
            with kept_buffers(model.hypatia_model, before):
                found = pytree.tree_leaves(call(*inputs))
                if not before.tensors:
                    layouts = layouts_of(found, (inputs, {}), model)
                # Results may lie in what is changed.
                kept = [t.clone() if isinstance(t, torch.Tensor) and before.tensors else t for t in found]
                results.append([*kept, *(t.clone() for t in before.tensors)])
            before.restore()
            random.restore()
        same = (
            model.hypatia_outline() == outline
            and len(results[0]) == len(results[1])
            and all(map(_agree, *results))
        )
    return layouts if same else None


def _agree(ours: object, theirs: object) -> bool:
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and agree(ours, theirs)
    return bool(ours == theirs)


def _may_draw(node: fx.Node) -> bool:
    return draws_at(node) or node.op in ("call_module", "call_method")


def kept_buffers(model: nn.Module, changes: State) -> contextlib.AbstractContextManager[None]:
    """A model that changes buffers may do so by putting others in their place."""
    return buffers_kept(model) if changes.tensors else contextlib.nullcontext()


def changed_tensors(gm: fx.GraphModule, leaves: Sequence[object]) -> list[torch.Tensor]:
    """Inputs and buffers that a graph changes in place."""
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), leaves, strict=True))
    found = [
        operator.attrgetter(path_of(n))(gm) if n.op == "get_attr" else inputs.get(n)
        for n in changed_inputs(gm)
    ]
    return [t for t in found if isinstance(t, torch.Tensor)]
