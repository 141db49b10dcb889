"""Plans of a graph, bound to its weights as they are now: one for each set of sizes."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import _native, store
from ..capture.constant_values import ancestors
from ..capture.records import function_of, path_of, value_of
from ..devices import table
from ..devices.bound import Plan, Recordable, Request
from . import torch_calls
from .cuda_graph import Room
from .described import Described, described
from .folding import folded_bytes
from .outputs import PlanResults
from .plans import Planner, cudnn_settings
from .recorded_plan import Recorded
from .weight_changes import are_steady
from .weights_in_use import Bound, Weights

log = logging.getLogger(__name__)

# For plans with calls into torch: two pools of threads would fight, since torch's spin after every op.
_native.borrow_threads(str(torch_calls.LIBTORCH))

KEPT = 64
"""Sets of sizes for which a graph keeps a plan."""
LAYERS = 128
"""Sets of weights for which it keeps plans: equal layers of a model may call one graph in turns."""


class Binding:
    """Binds the plans of a graph to its weights, and again when these change."""

    def __init__(self, gm: fx.GraphModule, planner: Planner, without: Sequence[str] = ()) -> None:
        self.gm = gm
        self.planner = planner
        self.device = planner.device
        self.refusal = ""
        """Why nothing was bound when it was asked last, as far as that is known."""
        self.only: Callable[..., object] | None = None
        """The plan of a training step, which has no constants and no other sizes."""
        self._without = list(without)
        """Kinds of linear layers that are not used."""
        self.now = Weights()
        """The weights of the last call."""
        self._others: dict[tuple[int, ...], Weights] = {}
        """Those of calls before, by the numbers of the tensors."""
        self._tf32: bool | None = None
        self._turned = 0
        """Bytes of weights that were copied to lie in another order."""
        self._cudnn: tuple[bool, ...] | None = None
        """The settings of convolutions, if plans have some."""
        self._room = Room(self.device.index or 0)
        self._describe(described(planner.at(planner.hints)))
        self._place = table.of(self.device)
        self.lead = self._place.lead(self.device)
        """What a plan is given first: the number of threads, or the stream."""

    def _describe(self, about: Described) -> None:
        names = self.planner.names
        nodes = {n.name: n for n in self.gm.graph.nodes}
        position = {n: i for i, n in enumerate(self.gm.graph.find_nodes(op="placeholder"))}
        self._node = {i: nodes[name] for i, name in names.items() if name in nodes}
        sources = ancestors(self._node[i] for i in about["constants"])
        self.steps = about["steps"]
        self.calls = len(about["calls"])
        self.arity = len(position)
        inputs = [nodes[names[i]] for i in about["inputs"]]
        self._parts = [path_of(n) for n in inputs if n.op == "get_attr"]
        position |= {n: len(position) + i for i, n in enumerate(n for n in inputs if n.op == "get_attr")}
        self.inputs = [position[n] for n in inputs]
        """Which arguments the plan takes; tensors that are part of the graph follow the arguments."""
        self.weights = sorted(position[n] for n in sources if n.op == "placeholder")
        self.attributes = sorted({path_of(n) for n in sources if n.op == "get_attr"})
        # Numbers on the CPU, beside tensors on a GPU.
        self._numbers = [i for i, n in enumerate(inputs) if value_of(n).device != self.device]
        self.takes_all = self.inputs == list(range(self.arity)) and not self._numbers
        """The plan takes the arguments as they are."""
        self.changes = about["changes"]
        """Which of the plan's inputs it changes in place."""
        self.plan_results = PlanResults(self.gm, about, self.planner.plain)
        """Makes results of a training step."""
        self.keeps: dict[int, int] = {}
        """Results beside which the mask of a ReLU can be kept, and the plan's outputs that they are."""
        if self.planner.saved:
            self.keeps = {p: o for o in about["keeps"] for p in self.plan_results.places(o)}
        self.masks = {self.inputs[i]: i for i in about["masks"]}
        """Arguments that mask a gradient where a ReLU was, and the plan's inputs that they are."""

    def given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """What the plan takes, of the arguments of the graph."""
        if self._parts:
            args = [*args, *(operator.attrgetter(name)(self.gm) for name in self._parts)]
        given = [args[i] for i in self.inputs]
        for i in self._numbers:
            given[i] = given[i].to(self.device)
        return given

    @property
    def bound(self) -> dict[tuple[int, ...], Bound]:
        """Plans by sizes, for the weights of the last call."""
        return self.now.bound

    def is_current(self) -> bool:
        """Whether the plans were bound under the settings of now."""
        if self._cudnn is not None and self._cudnn != cudnn_settings():
            return False
        return self._tf32 is None or self._tf32 == self._place.allows_tf32()

    def known(self, args: Sequence[object], sizes: tuple[int, ...]) -> Bound | None:
        """The plan for these sizes, if it is bound to these weights."""
        if self.planner.saved:
            return None
        if self.weights:
            ids = [id(args[i]) for i in self.weights]
            if ids != self.now.ids and not self._turn_to(ids):
                return None
        return self.now.bound.get(sizes)

    def _turn_to(self, ids: list[int]) -> bool:
        """Whether plans are bound to the weights with these numbers, which are now those of the call."""
        found = self._others.pop(tuple(ids), None)
        if found is None:
            return False
        if self.now.bound:
            self._others[tuple(self.now.ids)] = self.now
        self.now = found
        return True

    def bind(self, args: Sequence[Any], sizes: tuple[int, ...]) -> Bound | None:
        """The plan bound to the weights as they are now; none if changes could go unnoticed.

        Raises:
            HypatiaError: there is no plan for these sizes.
        """
        weights = [args[i] for i in self.weights]
        attributes = [operator.attrgetter(name)(self.gm) for name in self.attributes]
        ids = [id(w) for w in weights]
        if ids != self.now.ids and self.now.bound and not self._turn_to(ids):
            self._others = {k: w for k, w in self._others.items() if w.bound}
            while len(self._others) >= LAYERS:
                self._others.pop(next(iter(self._others)))
            self._others[tuple(self.now.ids)] = self.now
            self.now = Weights()
        now = self.now
        if now.bound and sizes in now.gone:
            # Sizes come in turns, more of them than plans are kept for: each call would bind one again.
            self.refusal = "it is called with more sizes in turn than plans are kept for"
            return None
        if not are_steady((*weights, *attributes)):
            self.refusal = "changes of its weights could go unnoticed"
            return None
        if not all(b.current() for b, _ in now.bound.values()):
            # Nothing of other weights is shared, even if these lie where those lay.
            now.forget()
        known = self._newly_bound(args, sizes, [*weights, *attributes])
        if known is None:
            return None
        while len(now.bound) >= KEPT:
            oldest = next(iter(now.bound))
            now.gone.add(oldest)
            now.bound.pop(oldest)
        now.bound[sizes] = known
        if self.takes_all and not (
            self.planner.symbols or self.planner.saved or self.weights or self.changes
        ):
            now.only = known
        if self.planner.saved:
            self.only = known[0] if self._place.arranges_results else _arranging(*known)
        now.hold(ids, (*weights, *attributes))
        return known

    def _newly_bound(
        self, args: Sequence[object], sizes: tuple[int, ...], watched: list[torch.Tensor]
    ) -> Bound | None:
        values = dict(zip(self.gm.graph.find_nodes(op="placeholder"), args, strict=True))
        plan = self.planner.at({s: n for (s, _, _), n in zip(self.planner.symbols, sizes, strict=True)})
        about = described(plan)
        nodes = [self._node[i] for i in about["constants"]]
        with torch.inference_mode(False), torch.no_grad():
            constants = self._constants(nodes, about["orders"], values)
            if any(c.dtype != value_of(n).dtype for c, n in zip(constants, nodes, strict=True)):
                self.refusal = "the model was converted since it was compiled"
                return None
            _open_tuning(store.tuning_folder())
            bound = self._bound_plan(plan, about, constants, watched)
            plan_results = PlanResults(self.gm, about, self.planner.plain)
            recordable = None if self.planner.saved else self._place.recordable(bound)
            if recordable is not None:
                bound = self._recorded(recordable, tuple(self.given(args)), plan_results, about["changes"])
        return bound, plan_results

    def _constants(
        self, nodes: Sequence[fx.Node], orders: Sequence[Sequence[int] | None], values: dict[fx.Node, object]
    ) -> list[torch.Tensor]:
        """What a plan packs or reads, of weights: the same tensors at all sizes."""
        known = self.now.constants
        if not self.now.bound:
            known.clear()
        made: list[torch.Tensor] = []
        self._turned = 0
        for node, order in zip(nodes, orders, strict=True):
            key = node, None if order is None else tuple(order)
            constant = known.get(key)
            if constant is None:
                value = _value(self.gm, node, values).detach()
                value = value if order is None else _laid(value, order)
                constant = value.resolve_conj().resolve_neg().contiguous().to(self.device)
                if self.planner.symbols:
                    known[key] = constant
            if order and constant.data_ptr() != _value(self.gm, node, values).data_ptr():
                self._turned += constant.nbytes
            made.append(constant)
        return made

    def bound_to(self, plan: _native.NativePlan, more: int = 0) -> Plan:
        """Another plan of the graph, without constants; so many last outputs follow the results."""
        return self._bound_plan(plan, described(plan), [], [], more)

    def _bound_plan(
        self,
        plan: _native.NativePlan,
        about: Described,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        more: int = 0,
    ) -> Plan:
        made = self.planner.calls(about["calls"])
        if self.planner.asks_cudnn(about["calls"]):
            self._cudnn = cudnn_settings()
        most = self.planner.most
        room = None if most is None else max(0, most - folded_bytes(self.gm) - self._turned)
        like, _ = next(reversed(self.bound.values()), (None, None))
        self._tf32 = self._place.allows_tf32()
        returns = None
        if self.planner.saved:
            outputs = plan.outputs()
            returns = [*self.plan_results.returns, *range(outputs - more, outputs)]
        request = Request(
            plan=plan,
            constants=constants,
            watched=watched,
            calls=made,
            libtorch=str(torch_calls.LIBTORCH),
            device=self.device,
            lead=self.lead(),
            returns=returns,
            split=self.planner.split,
            most=room,
            without=self._without,
            like=like.bound if isinstance(like, Recorded) else like,
        )
        return self._place.bind(request)

    def _recorded(
        self,
        bound: Recordable,
        inputs: tuple[torch.Tensor, ...],
        plan_results: PlanResults,
        changes: Sequence[int],
    ) -> Plan:
        if self._place.is_recording():
            return bound
        return Recorded(bound, self.device, inputs, self._room, changes, plan_results.results)

    def why_not(self, inputs: Sequence[torch.Tensor]) -> str:
        """Why the plan that was bound last does not run on these inputs."""
        bound, _ = next(reversed(self.bound.values()), (None, None))
        return "" if bound is None else bound.refusal(*inputs)

    def forget(self) -> None:
        """Drops all plans: a setting is another one."""
        self.only = None
        self.now.forget()
        self._others.clear()

    def take(self, other: Binding) -> None:
        """Takes the plans of another binding of the same graph."""
        self._without = other._without
        self.now.bound, self.now.constants = other.now.bound, other.now.constants
        self.now.only = other.now.only

    def leave(self) -> None:
        """Stops watching the weights: somebody else takes the plans, or they go."""
        self.now.leave()

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of values in between and of packed weights, over all sizes and weights that are kept."""
        sets = [w for w in (self.now, *self._others.values()) if w.bound]
        both = [[bound.bytes() for bound, _ in w.bound.values()] for w in sets]
        values = max((a for each in both for a, _ in each), default=0)
        return values, sum(max(p for _, p in each) for each in both) + self._turned * len(sets)

    @property
    def kinds(self) -> list[str]:
        """How each linear layer is computed."""
        return next(iter(self.bound.values()))[0].kinds() if self.bound else []


def _arranging(bound: Plan, plan_results: PlanResults) -> Callable[..., object]:
    """A plan that returns its outputs, as one that returns what results are made of."""

    def run(lead: int, *inputs: torch.Tensor) -> list[object] | None:
        outputs = bound(lead, *inputs)
        return None if outputs is None else plan_results.arranged(outputs, inputs)

    return run


@functools.cache
def _open_tuning(folder: Path | None) -> None:
    _native.tuning_folder(folder)


def _laid(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor with its dimensions in an order; along others it repeats, and has its first elements."""
    others = [d for d in range(value.dim()) if d not in order]
    first = value.permute([*others, *order])
    return first[(0,) * len(others)]


def _value(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node that is made of weights only."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(path_of(node))(gm)
        else:
            for operand in node.all_input_nodes:
                _value(gm, operand, values)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            run = gm.get_submodule(path_of(node)) if node.op == "call_module" else function_of(node)
            values[node] = run(*args, **kwargs)
    return values[node]
