"""Whether passes that AOTAutograd made are a whole training step, which runs without its wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from .. import _torch
from ..capture.records import value_of
from .dynamo_pass import Pass
from .train_dynamo import Step


def step_of(primals: Sequence[torch.Tensor], steady: Sequence[int], passes: Sequence[Pass]) -> Step | None:
    """The step that these passes make, if nothing has to be done around them.

    ``primals`` are what the forward graph takes; those at the places ``steady`` are parameters and buffers.
    """
    kinds = [p.kind for p in passes]
    if sorted(kinds) != ["backward", "forward"] or not all(isinstance(t, torch.Tensor) for t in primals):
        return None
    forward, backward = (passes[kinds.index(k)] for k in ("forward", "backward"))
    about = forward.metadata
    given = forward.graph.find_nodes(op="placeholder")
    if about is None or not _is_plain(about) or len(given) != len(primals):
        return None
    parameters = [primals[i] for i in steady]
    # Weights may be tied, but nothing else may be given twice.
    tied = {id(t) for t in parameters}
    if len(tied | {id(t) for t in primals}) != len(tied) + len(primals) - len(parameters):
        return None
    changed = _changed(about, parameters, steady)
    if changed is None:
        return None
    for node, tensor in zip(given, primals, strict=True):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            return None
    (output,) = forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    results, kept = about.output_info, returned[about.num_outputs :]
    if not all(isinstance(value_of(n), torch.Tensor) for n in returned if isinstance(n, fx.Node)):
        return None
    if not all(isinstance(n, fx.Node) for n in returned) or len(set(returned[: about.num_outputs])) < len(
        results
    ):
        return None
    if any(given[steady[i]] in kept for i in changed):
        # A backward pass would find other values there after a second forward pass.
        return None
    wanted = sum(r.requires_grad for r in results)
    taken = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    if taken[: len(kept)] != [n.name for n in kept] or len(taken) != len(kept) + wanted:
        return None
    (gradients,) = backward.graph.find_nodes(op="output")
    if len(gradients.args[0]) != len(given):
        return None
    return Step(parameters, forward, backward, results, changed, steady)


def _is_plain(about: _torch.ViewAndMutationMeta) -> bool:
    """Whether no input changes but in the graph, no result is a view, and nothing but tensors is kept."""
    none = (
        "num_mutated_inp_runtime_indices",
        "num_outputs_aliased",
        "num_intermediate_bases",
        "num_symints_saved_for_bw",
        "num_outputs_rng_offset",
    )
    if any(getattr(about, name, None) != 0 for name in none):
        return False
    gone = ("num_backward_tokens", "num_graphsafe_rng_states", "num_opaque_objects_saved_for_bw")
    return not any(getattr(about, name, 0) for name in gone) and not about.tokens


def _changed(
    about: _torch.ViewAndMutationMeta, parameters: Sequence[torch.Tensor], steady: Sequence[int]
) -> list[int] | None:
    """Buffers that the forward graph changes, as places among the parameters; none if it changes anything
    that is an input, has gradients or is there twice."""
    places = [i for i, info in enumerate(about.input_info) if info.mutates_data or info.mutates_metadata]
    if not {*places} <= {*steady} or any(about.input_info[i].mutates_metadata for i in places):
        return None
    found = [i for i, place in enumerate(steady) if place in places]
    times = Counter(id(t) for t in parameters)
    alone = all(times[id(parameters[i])] == 1 and not parameters[i].requires_grad for i in found)
    return found if alone else None


def lifted(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Parameters and buffers in the order in which AOTAutograd lifts them."""
    named = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    return [t for _, t in named]
