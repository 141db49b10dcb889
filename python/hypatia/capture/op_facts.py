"""What is known about an op without running it: whether it changes inputs, draws random numbers, makes views.

torch's schemas and tags say it. Nobody else asks them.
"""

from __future__ import annotations

import functools
import json
import operator
import re

import torch
from torch import fx

from .. import _native, _torch
from .._torch import OpOverload, pytree


def name_of(target: object) -> str:
    """The name of one of torch's own ops, without its overload; empty for anything else."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""


def changes(target: object) -> bool:
    """Whether a call changes one of its inputs."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def says_types(target: object) -> bool:
    """Whether a call is torch.export's assertion of a dtype, a device or sizes, which records say, too."""
    return name_of(target) == "_assert_tensor_metadata"


def draws(target: object) -> bool:
    """Whether an op carries the tag of those that draw random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def draws_at(node: fx.Node) -> bool:
    """Whether a call draws random numbers: attention without dropout does not, though its op may."""
    if node.op != "call_function" or not draws(node.target):
        return False
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    return bool((node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0)


_SEEDS = frozenset(("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"))
"""What attention calls the results that its dropout is drawn from, or that say what was drawn."""


def is_idle_seed(node: fx.Node) -> bool:
    """Whether a value is a seed that nobody draws from: without dropout, attention never writes it."""
    if node.target is not operator.getitem:
        return False
    call, place = node.args
    if not isinstance(call, fx.Node) or not isinstance(place, int) or not draws(call.target):
        return False
    names = [r.name for r in call.target._schema.returns]  # type: ignore[union-attr]
    return names[place] in _SEEDS and not draws_at(call)


def waits_for_values(target: object) -> bool:
    """Whether the host reads what an op computes: a number, or the size of its result."""
    tags = target.tags if isinstance(target, OpOverload) else ()
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@functools.lru_cache(4096)
def is_torchs(target: object) -> bool:
    """Whether a call is one of torch's own ops, or arithmetic of Python."""
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prims")
    return getattr(target, "__module__", "") in ("_operator", "math", "torch")


def changes_inputs(node: fx.Node) -> bool:
    """Whether a node changes one of its inputs."""
    return node.op == "call_function" and changes(node.target)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """What a call changes in place, by its op's schema."""
    if not changes_inputs(node):
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]
    return found


def changed_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Inputs that the graph changes in place."""
    return list(dict.fromkeys(changed for node in gm.graph.nodes for changed in changed_by(node)))


_WRITES_OVER = ("index_copy", "index_put", "index_fill")
"""Ops that return their first input with other values in some places, whatever was there before. Done twice,
that is the same."""


def in_place_form(node: fx.Node) -> OpOverload | None:
    """The op that writes into the first input what this call writes into a copy of it."""
    name = name_of(node.target)
    if name not in _WRITES_OVER or not isinstance(node.target, OpOverload):
        return None
    if name == "index_put" and (node.kwargs.get("accumulate") or any(node.args[3:])):
        return None
    if node.args[0] in pytree.arg_tree_leaves(*node.args[1:], **node.kwargs):
        return None
    overload = node.target._schema.overload_name or "default"
    found: OpOverload | None = getattr(getattr(torch.ops.aten, f"{name}_", None), overload, None)
    return found


@functools.lru_cache(1024)
def functional_form(op: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes into its first operand, as ``relu`` does for ``relu_``."""
    name, schema = name_of(op), op._schema
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    if not name.endswith("_") or sum(writes) != 1 or not writes[0] or draws(op):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    found: OpOverload | None = getattr(packet, schema.overload_name or "default", None)
    if found is None or [a.name for a in found._schema.arguments] != [a.name for a in schema.arguments]:
        return None
    return found if makes_new_memory(found) else None


def makes_new_memory(op: OpOverload) -> bool:
    """Whether an op neither changes its inputs nor returns views of them."""
    return not op._schema.is_mutable and not any(a.alias_info for a in op._schema.arguments)


def makes_views(op: OpOverload) -> bool:
    """Whether an op does nothing but return one or several views of its first input."""
    kinds = [str(r.type) for r in op._schema.returns]
    return op.is_view and not op._schema.is_mutable and kinds in (["Tensor"], ["List[Tensor]"])


@functools.lru_cache(1024)
def makes_a_view(op: OpOverload) -> bool:
    """Whether an op does nothing but return a view of its first input."""
    return makes_views(op) and len(op._schema.returns) == 1 and str(op._schema.returns[0].type) == "Tensor"


def is_composite(op: OpOverload) -> bool:
    """Whether torch puts an op together from others."""
    key = _torch.DispatchKey.CompositeImplicitAutograd
    return key in op.py_kernels or _torch.has_kernel_for(op.name(), key)


def is_structured(op: OpOverload) -> bool:
    """Whether torch makes the forms of an op from one kernel that writes into results it has checked."""
    return bool(_torch.has_kernel_for(op.name(), _torch.DispatchKey.CompositeExplicitAutogradNonFunctional))


_IGNORES_STRIDES = re.compile(
    r"(_?(log_)?softmax|_(log_)?softmax_backward_data|(im2col|col2im|avg_pool3d|gelu|narrow_copy)(_backward)?"
    r"|(reflection|replication)_pad[123]d(_backward)?)"
)


def ignores_strides(target: object) -> bool:
    """Whether torch's kernels of an op write into memory that is not contiguous as if it were, or lay it out
    anew."""
    return _IGNORES_STRIDES.fullmatch(name_of(target)) is not None


def stays_whole(op: OpOverload) -> bool:
    """Whether torch.export would leave a composite op as it is. Convolutions whose padding has a name do not
    stay: they are ones with numbers."""
    named = op._overloadname == "padding" or op._schema.name == "aten::_convolution_mode"
    return not named and _torch.is_preservable_composite(op)


_LOOPS = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "stft", "istft"))
"""Composites that are one call of a library's, or a long list of ops for each step in time."""


@functools.cache
def _calls_of_the_table() -> frozenset[str]:
    """Calls that the op table has, by name and overload."""
    return frozenset(call.partition("(")[0] for row in json.loads(_native.ops()) for call in row["torch"])


def is_best_whole(op: OpOverload) -> bool:
    """Whether a composite op stays as it is in a graph of ours: the op table knows it. Eager takes the others
    apart, too, and their parts join kernels."""
    if not stays_whole(op):
        return False
    if _torch.DispatchKey.CompositeImplicitAutograd in op.py_kernels:
        # Python's parts are not those that eager runs.
        return True
    name = name_of(op)
    return name in _LOOPS or f"{name}.{op._overloadname}" in _calls_of_the_table()


_OUTSIDE = ("_c10d_functional", "c10d", "_dtensor", "fsdp", "symm_mem")
"""Namespaces of ops that talk to other processes: ranks would wait for each other forever."""


def effects_of(gm: fx.GraphModule) -> list[str]:
    """Calls that other processes or the outside world would notice if they were made again."""
    return effects_in(gm.graph)


def effects_in(graph: fx.Graph) -> list[str]:
    """The same for a graph without its module."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            namespace = getattr(node.target, "namespace", "")
            if namespace in _OUTSIDE or node.target is torch.ops.higher_order.with_effects:
                found[str(node.target)] = None
    return list(found)
