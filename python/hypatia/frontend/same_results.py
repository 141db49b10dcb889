"""Whether a captured graph computes what its model does."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch import pytree
from ..capture.model_state import buffers_kept
from ..capture.op_facts import changed_inputs
from ..capture.records import path_of
from ..execute.agreement import agree
from ..execute.changes import State
from ..verifier.first_call import device_of
from ..verifier.reference import RandomState, devices_of
from .flat_model import FlatModel


def computes_the_same(captured: fx.GraphModule, model: FlatModel, inputs: Sequence[object]) -> bool:
    """Whether a captured graph computes what its model does: a run on fake tensors may take another way."""
    random = RandomState(devices_of(inputs))
    before = State(changed_tensors(captured, inputs), device_of(inputs))
    outline = model.hypatia_outline()
    results = []
    with torch.no_grad():
        for call in (captured, model):
            with changed_buffers_kept(model.hypatia_model, before):
                found = pytree.tree_leaves(call(*inputs))
                # Results may lie in what is changed.
                kept = [t.clone() if isinstance(t, torch.Tensor) and before.tensors else t for t in found]
                results.append([*kept, *(t.clone() for t in before.tensors)])
            before.restore()
            random.restore()
        return (
            model.hypatia_outline() == outline
            and len(results[0]) == len(results[1])
            and all(map(_agree, *results))
        )


def _agree(ours: Any, theirs: Any) -> bool:
    return agree(ours, theirs) if isinstance(ours, torch.Tensor) else bool(ours == theirs)


def changed_buffers_kept(model: nn.Module, changes: State) -> contextlib.AbstractContextManager[None]:
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
