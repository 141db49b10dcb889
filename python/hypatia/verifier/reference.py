"""The original graph, run node by node in its own precision or in float64.

Results come one at a time, as soon as they are final, and values are dropped after their last use:
comparing a graph takes the memory of its live values, not of all of its results at once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload, pytree
from ..capture.constant_values import ancestors
from ..capture.op_facts import changed_inputs, changes, changes_inputs, draws, is_torchs, name_of
from ..capture.records import module_of, value_of
from ..execute.changes import RandomState
from ..timeline import EAGER, WIDE, stage
from .dice import Dice
from .judge import eps_of, is_float
from .wide_weights import WEIGHT_PLACES, can_stay, widened_call

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_EXACT_NAMES = """
    relu neg abs sign floor ceil round trunc amax amin max min maximum minimum clamp clamp_min clamp_max where
    cat stack index gather embedding clone _to_copy copy_ copy fill full zeros_like ones_like full_like
    constant_pad_nd flip roll repeat masked_fill scatter slice_scatter select_scatter sort topk index_select
    tril triu index_put argmax argmin max_pool2d_with_indices detach lift_fresh_copy arange scalar_tensor
"""
_EXACT = frozenset(_EXACT_NAMES.split())
"""Ops that round nothing: their results are among their operands, or whole numbers."""

_SUM_NAMES = """
    sum mean mm bmm addmm baddbmm linear matmul convolution conv1d conv2d conv3d mv dot addmv einsum cumsum
    native_layer_norm native_group_norm layer_norm group_norm scaled_dot_product_attention
"""
_SUMS = frozenset(_SUM_NAMES.split())
"""Ops that add: whether a zero of theirs has a sign depends on where the kernel begins, in eager, too."""

_AS_WRITTEN = {torch.ops.aten.view.dtype, torch.ops.aten.nextafter.default}
"""Ops that mean something else in another precision."""


@dataclasses.dataclass
class _Step:
    node: fx.Node
    function: Callable[..., object]
    drops: list[fx.Node]
    is_result: bool
    random: bool
    as_written: bool


class Script:
    """A graph prepared for running: the steps that its wanted results need, and when values can go."""

    def __init__(self, gm: fx.GraphModule, wanted: set[fx.Node] | None = None) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        results = _nodes_in(output.args)
        self.gm = gm
        self.results = [n for n in results if wanted is None or n in wanted]
        self.inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        self.changed = changed_inputs(gm)
        self.changed_wanted = [n for n in self.changed if wanted is None or n in wanted]
        self.narrowed: set[str] = set()
        self.steps = self._steps(set(self.results))

    def _steps(self, results: set[fx.Node]) -> list[_Step]:
        keep = [n for n in self.gm.graph.nodes if _is_random(n) or changes_inputs(n)]
        needed = ancestors([*results, *keep])
        calls = [n for n in self.gm.graph.nodes if n in needed and n.op.startswith("call_")]
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(calls):
            last.update(dict.fromkeys(node.all_input_nodes, i))
            last.setdefault(node, i)
        drops: dict[int, list[fx.Node]] = {}
        for node, i in last.items():
            drops.setdefault(i, []).append(node)
        changed = set(self.changed)
        return [
            _Step(
                node=n,
                function=self.gm.get_submodule(n.target) if n.op == "call_module" else _function(n),
                drops=[d for d in drops.get(i, []) if d not in changed],
                is_result=n in results,
                random=_is_random(n),
                as_written=_is_random(n) or n.target in _AS_WRITTEN or not _is_plain(n),
            )
            for i, n in enumerate(calls)
        ]


class Stream:
    """One run of a script, in the graph's own precision or wide. Iterating gives (node, value)."""

    def __init__(
        self,
        script: Script,
        inputs: dict[fx.Node, object],
        random: RandomState,
        *,
        wide: bool = False,
        nudge: bool = False,
        nudge_inputs: bool = True,
        roundings: float = 0.5,
        seed: int = 0,
        signs: int | None = None,
    ) -> None:
        """With ``signs``, zeros that sums return are all negative, all positive or either, by lot."""
        self.script = script
        self.signs = signs
        self.wide = wide
        self.nudge = nudge
        self.nudge_inputs = nudge_inputs
        self.roundings = roundings
        self.random = random.copy()
        self.env: dict[fx.Node, Any] = dict(inputs)
        self.narrow = {n for n in inputs if wide}
        """Values in their own precision, which are widened when they are read."""
        self._dice = Dice(seed)
        for node in script.changed:
            self.env[node] = pytree.tree_map(cloned, self._read(node))

    def __iter__(self) -> Iterator[tuple[fx.Node, Any]]:
        written = {_storage(self.env[n]) for n in self.script.changed} - {None}
        env = self.env
        late = [n for n in self.script.results if n in env]
        kept = set(late)
        for step in self.script.steps:
            with stage(WIDE if self.wide else EAGER):
                value = self._run(step)
            env[step.node] = value
            if step.is_result:
                if written and _storage(value) in written:
                    late.append(step.node)
                    kept.add(step.node)
                else:
                    yield step.node, value
            del value
            for node in step.drops:
                if node not in kept:
                    env.pop(node, None)
        for node in dict.fromkeys([*late, *self.script.changed_wanted]):
            yield node, self._read(node)
        env.clear()

    def _read(self, node: fx.Node) -> Any:
        """A value, widened when it is first read."""
        value = self.env[node]
        if node in self.narrow:
            value = self.env[node] = pytree.tree_map(self._widened, value)
            self.narrow.discard(node)
        return value

    def _run(self, step: _Step) -> object:
        if step.random:
            self.random.restore()
        try:
            if self.wide and not step.as_written:
                value = self._run_wide(step)
                value = self._signed(step.node, value) if self.signs is not None else value
                return self._moved(step.node, value) if self.nudge else value
            if self.wide:
                return self._run_narrow(step)
            args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), self.env.__getitem__)
            return step.function(*args, **kwargs)
        finally:
            if step.random:
                self.random.save()

    def _stays_narrow(self, step: _Step) -> bool:
        """Whether a step makes a view of weights that need not be widened yet."""
        read = step.node.all_input_nodes
        return (
            getattr(step.node.target, "is_view", False)
            and len(read) == 1
            and read[0] in self.narrow
            and not step.is_result
        )

    def _weight_of(self, step: _Step) -> fx.Node | None:
        """The weight of a step that is widened block by block, if it is still in its own precision."""
        place = WEIGHT_PLACES.get(step.node.target)
        weight = None if place is None else step.node.args[place]
        return weight if isinstance(weight, fx.Node) and weight in self.narrow else None

    def _run_wide(self, step: _Step) -> object:
        # Weights that are nudged, or have gradients, are the same ones for all who read them.
        if not (self.nudge or torch.is_grad_enabled()):
            if self._stays_narrow(step):
                self.narrow.add(step.node)
                args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), self.env.__getitem__)
                return step.function(*args, **kwargs)
            weight = self._weight_of(step)
            if weight is not None:
                args = fx.node.map_arg(
                    step.node.args, lambda n: self.env[n] if n is weight else self._read(n)
                )
                if not step.node.kwargs and can_stay(step.function, self.env[weight], args):
                    return widened_call(step.function, args)
        args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), self._read)
        if isinstance(step.function, fx.GraphModule):
            return self._run_inside(Script(step.function), args)
        args = tuple(_wide_dtype(a) for a in args)
        kwargs = {k: _wide_dtype(v) for k, v in kwargs.items()}
        try:
            return step.function(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise
            return self._run_narrow(step)

    def _signed(self, node: fx.Node, value: object) -> object:
        """A sum's zeros with other signs."""
        if (
            name_of(node.target) not in _SUMS
            or not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
        ):
            return value
        negative = torch.full_like(value, self.signs == 0, dtype=torch.bool)
        if self.signs is not None and self.signs > 1:
            negative = self._dice.like(value) < 0.5
        signs = torch.where(negative, -1.0, 1.0).to(value)
        return torch.where(value == 0, value.copysign(signs), value)

    def _moved(self, node: fx.Node, value: Any) -> object:
        """A result moved by roundings of the dtype that the graph has it in, if the op rounds."""
        target, recorded = node.target, value_of(node)
        if not isinstance(target, OpOverload) or not isinstance(recorded, torch.Tensor):
            return value
        if target.is_view or changes(target):
            return value
        if not recorded.is_floating_point() or name_of(target) in _EXACT:
            return value
        return value + value * self._shares(value, recorded.dtype)

    def _shares(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """By what share numbers are moved: at most by so many roundings."""
        return self._dice.like(value).sub_(0.5).mul_(2 * self.roundings * torch.finfo(dtype).eps)

    def _run_inside(self, script: Script, args: tuple[object, ...]) -> object:
        """A graph that is called as one."""
        inputs = dict(zip(script.inputs, args, strict=True))
        values = dict(Stream(script, inputs, self.random, wide=True))
        (output,) = script.gm.graph.find_nodes(op="output")
        return fx.node.map_arg(output.args[0], values.__getitem__)

    def _run_narrow(self, step: _Step) -> object:
        """In the precision that the graph was written in; the result counts as exact."""
        if not step.random:
            self.script.narrowed.add(str(step.node.target))

        def narrow(node: fx.Node) -> Any:
            value, recorded = self._read(node), value_of(node)
            return value if recorded is None else pytree.tree_map(_narrowed, value, recorded)

        args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), narrow)
        return pytree.tree_map(_widened, step.function(*args, **kwargs))

    def _widened(self, value: object) -> object:
        wide = _widened(value)
        if self.nudge and self.nudge_inputs and isinstance(value, torch.Tensor) and value.is_floating_point():
            wide = wide + wide * self._shares(wide, value.dtype)
        return wide


def _nodes_in(args: fx.node.Argument) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(args, lambda n: found.setdefault(n))
    return list(found)


def _function(node: fx.Node) -> Callable[..., object]:
    target = node.target
    return operator.methodcaller(target) if isinstance(target, str) else target


def _is_plain(node: fx.Node) -> bool:
    """Whether a call is made of torch's own ops, which mean the same in any precision."""
    if node.op == "call_module":
        return isinstance(module_of(node), fx.GraphModule)
    return node.op != "call_method" and is_torchs(node.target)


def _is_random(node: fx.Node) -> bool:
    """Whether a call may draw random numbers; what is not torch's own may."""
    if node.op == "call_function":
        return draws(node.target) or not is_torchs(node.target)
    return node.op.startswith("call_") and not _is_plain(node)


def _storage(value: object) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def cloned(value: object) -> object:
    """A copy of a tensor; other values as they are."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _widened(value: object) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


def _wide_dtype(argument: object) -> Any:
    return _WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _narrowed(value: object, recorded: object) -> object:
    if isinstance(value, torch.Tensor) and isinstance(recorded, torch.Tensor):
        return value.to(recorded.dtype)
    return value


def narrower(graph: fx.Graph, than: torch.dtype) -> set[fx.Node]:
    """Nodes that have fewer digits than a dtype, or depend on one that has."""
    limit = torch.finfo(than).eps
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = value_of(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(is_float(v) and eps_of(v) > limit for v in values) or not found.isdisjoint(
            node.all_input_nodes
        ):
            found.add(node)
            if changes_inputs(node):
                found.update(node.all_input_nodes[:1])
    return found
