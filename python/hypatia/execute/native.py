"""Graphs that run as one call into Rust: steps over planned buffers, weights packed once.

What a plan cannot do, or inputs that it was not made for, run on the FX graph instead.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import _native, store
from ..capture.records import value_of
from ..errors import VerificationWarning
from ..timeline import BINDING, stage
from . import torch_calls
from .cuda_graph import Recorded
from .folding import folded_bytes, watch
from .outputs import Finish
from .plans import CLOSE, Planner
from .timing import in_few_turns, in_turns
from .weight_changes import are_steady

log = logging.getLogger(__name__)

# For plans with calls into torch: two pools of threads would fight, since torch's spin after every op.
_native.borrow_threads(str(torch_calls.LIBTORCH))

# Asked at every call, of which a small plan has few: names of modules take as long to look up.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled

COPIES = 1 << 25
"""Bytes of copies of weights from which on a plan has to be faster, not only as fast."""

KEPT = 64
"""Sets of sizes for which a graph keeps a plan."""

SPLIT = {"bf16x6"}
"""Kinds of linear layers on tiles, of which a core has one set for both its threads."""

PLAINER = 256 << 20
"""Bytes of packed weights up to which a second plan without such layers is tried."""

PAUSES = (0.02, 0.1)
"""Seconds after which a plan that lost is timed again."""


class NativeGraph:
    """Runs a graph by its native plan, on arguments in the order of the placeholders."""

    def __init__(self, gm: fx.GraphModule, planner: Planner, graph: Callable[[list[Any]], Any]) -> None:
        self.gm = gm
        self.graph = graph
        """The same by torch's ops."""
        self.fallback = graph
        """What runs where the plan does not."""
        self.planner = planner
        described = self._describe(self.planner.at(self.planner.hints))
        names = planner.names
        nodes = {n.name: n for n in gm.graph.nodes}
        position = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.steps: list[str] = described["steps"]
        self.calls = len(described["calls"])
        self.inputs = [position[nodes[names[i]]] for i in described["inputs"]]
        self._node = {i: nodes[name] for i, name in names.items() if name in nodes}
        sources = {n for i in described["constants"] for n in _sources(self._node[i])}
        self.weights = sorted(position[n] for n in sources if n in position)
        self.arity = len(position)
        self.takes_all = self.inputs == list(range(self.arity))
        self.attributes = sorted({n.target for n in sources if n.op == "get_attr"})
        self.device = self.planner.device
        self._finish = Finish(gm, described, self.planner.plain)
        """Makes results of a training step."""
        self._only: Any = None
        """The plan of a training step, which has no constants and no other sizes."""
        self.keeps: dict[int, int] = {}
        """Results beside which the mask of a ReLU can be kept, and the plan's outputs that they are."""
        if self.planner.saved:
            self.keeps = {p: o for o in described["keeps"] for p in self._finish.places(o)}
        self.masks = {self.inputs[i]: i for i in described["masks"]}
        """Arguments that mask a gradient where a ReLU was, and the plan's inputs that they are."""
        self.lead: Callable[[], int] = torch.get_num_threads
        """What a plan is given first: the number of threads, or the stream."""
        self._tf32: bool | None = None
        if self.device.type == "cuda":
            self.lead = functools.partial(torch._C._cuda_getCurrentRawStream, self.device.index or 0)
        self._without: list[str] = []
        """Kinds of linear layers that are not used."""
        self._weights: list[int] = []
        self._alive: list[Any] = []
        self._memory: list[torch.Tensor] = []
        self._bound: dict[tuple[int, ...], tuple[Any, Finish]] = {}
        """Plans by sizes, with what makes results of what they return."""
        self.refusal = ""
        """Why the plan did not run when it was asked last, as far as that is known."""
        self.ranges: dict[tuple[int, int | None], tuple[int, int]] = {}
        """The least and greatest value of sizes, where the graph holds for some only."""
        self._slower: set[tuple[int, ...]] = set()
        self.native = True
        self.settled = False
        """The first call is checked under modes of AOTAutograd's own; after it, modes are a user's."""

    @staticmethod
    def _describe(plan: _native.NativePlan) -> dict[str, Any]:
        return json.loads(plan.describe())

    def __call__(self, args: list[Any]) -> Any:
        """The results, as the graph returns them. A dispatch mode that counts or logs ops sees torch's."""
        if self.native and not (self.settled and torch._C._len_torch_dispatch_stack()):
            results = self.run(args)
            if results is not None:
                args.clear()
                return results
        return self.fallback(args)

    def direct(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """The results of the plan, for a caller outside of any capture; none if torch's ops are to run."""
        if not self.native or _dispatch_modes() or _any_autocast():
            return None
        return self.run(args)

    def run(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """The results of the plan; none if it is not for these arguments."""
        if len(args) != self.arity:
            return None
        inputs = args if self.takes_all else [args[i] for i in self.inputs]
        try:
            if self._only is not None and self._tf32 in (None, torch._C._get_cublas_allow_tf32()):
                return self.finished(self._only(self.lead(), *inputs))
            sizes = ()
            if self.planner.symbols:
                sizes = self._sizes(args)
                if sizes is None:
                    return None
            if self._tf32 is not None and self._tf32 != torch._C._get_cublas_allow_tf32():
                self.forget()
            known = self._bound.get(sizes)
            alike = not self.weights or [id(args[i]) for i in self.weights] == self._weights
            if known is not None and alike and not self.planner.saved:
                bound, finish = known
                outputs = bound(self.lead(), *inputs)
                if outputs is not None:
                    return finish.results(outputs, inputs)
                if bound.current():
                    return None
                self._bound.clear()
            if sizes in self._slower or not self._within(sizes):
                return None
            others = bool(self._bound)
            known = self._bind(args, sizes)
            if known is None:
                return None
            bound, finish = known
            if self._only is not None:
                return self.finished(self._only(self.lead(), *inputs))
            outputs = bound(self.lead(), *inputs)
            if outputs is None:
                self.refusal = bound.refusal(*inputs)
                return None
            results = finish.results(outputs, inputs)
            return self._settle_sizes(args, sizes, results) if sizes and others else results
        except _native.HypatiaError as error:
            return self._failed(error, args)

    def finished(self, returned: Any) -> Any:
        """The results of a training step, of what its plan returned."""
        return None if returned is None else self._finish.seen(returned)

    def _sizes(self, args: Sequence[Any]) -> tuple[int, ...] | None:
        """The values of the symbols; none if the arguments are of another form."""
        try:
            return tuple([args[p] if d is None else args[p].shape[d] for _, p, d in self.planner.symbols])
        except (AttributeError, IndexError):
            return None

    def _within(self, sizes: tuple[int, ...]) -> bool:
        for (_, position, dim), size in zip(self.planner.symbols, sizes, strict=True):
            least, greatest = self.ranges.get((position, dim), (0, size))
            if not least <= size <= greatest:
                return False
        return True

    def _settle_sizes(
        self, args: Sequence[Any], sizes: tuple[int, ...], results: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """The first call at other sizes than those that were verified: torch's ops are asked too."""
        expected = pytree.tree_leaves(self.fallback(list(args)))
        pairs = [p for p in zip(results, expected, strict=True) if isinstance(p[0], torch.Tensor)]
        apart = max(starmap(distance, pairs), default=0.0)
        if 1 < apart < math.inf:
            # A difference of numbers that are nearly equal has the roundings of those.
            sizes_of = [a.detach().abs().amax().item() for a in args if is_float(a) and a.numel()]
            least = NEARLY * max(sizes_of, default=0.0)
            apart = max((distance(a, b, least) for a, b in pairs), default=0.0)
        if 1 < apart < math.inf:
            # Nor is it wrong where torch's own results jump when the inputs are moved by a rounding.
            moved = pytree.tree_leaves(self.fallback([_moved(a) for a in args]))
            kept = [m for m, r in zip(moved, results, strict=True) if isinstance(r, torch.Tensor)]
            own = [distance(m, b) for m, (_, b) in zip(kept, pairs, strict=True)]
            apart = 0.0 if apart <= 4 * max(own, default=0.0) else apart
        if apart > 1:
            self.native = False
            warnings.warn(
                VerificationWarning(
                    f"hypatia: the native plan is wrong at the sizes {sizes} and is not used any more"
                ),
                stacklevel=2,
            )
            return tuple(expected)
        forms = {"plan": lambda: self.run(args), "graph": lambda: self.fallback(list(args))}
        taken = in_few_turns(forms, (1, 1), 0.0)
        if taken["plan"] > 1.2 * taken["graph"]:
            self._slower.add(sizes)
            self._bound.pop(sizes, None)
        return results

    def _failed(self, error: Exception, args: Sequence[Any]) -> Any:
        """A step failed: torch's ops do the same and say why, or do better. The plan is for these arguments,
        or no step would have run, and so is the fallback."""
        try:
            results = pytree.tree_leaves(self.fallback(list(args)))
        except Exception as reason:
            if hasattr(reason, "add_note"):
                reason.add_note(f"hypatia: {error}")
            raise
        # Before the first call is over, that is no surprise.
        level = logging.WARNING if self.settled else logging.INFO
        log.log(level, "the native plan is not used any more: %s", error)
        self.native = False
        return results

    @stage(BINDING)
    def _bind(self, args: Sequence[Any], sizes: tuple[int, ...]) -> tuple[Any, Finish] | None:
        """The plan bound to the weights as they are now; none if changes could go unnoticed."""
        weights = [args[i] for i in self.weights]
        attributes = [operator.attrgetter(name)(self.gm) for name in self.attributes]
        if not are_steady((*weights, *attributes)):
            self.refusal = "changes of its weights could go unnoticed"
            return None
        ids = [id(w) for w in weights]
        if ids != self._weights or not all(b.current() for b, _ in self._bound.values()):
            # Nothing of other weights is shared, even if these lie where those lay.
            self._bound.clear()
        try:
            known = self._newly_bound(args, sizes, weights, attributes)
        except _native.HypatiaError as e:
            log.info("the native plan is not used: %s", e)
            self.refusal = str(e)
            self.native = False
            return None
        if known is None:
            return None
        while len(self._bound) >= KEPT:
            self._bound.pop(next(iter(self._bound)))
        self._bound[sizes] = known
        if self.planner.saved:
            self._only = known[0] if self.device.type == "cuda" else _arranging(*known)
        # The plan knows whether the objects with these numbers are still the same. Their memory is kept until
        # they are gone or others are in their place: so long no other memory can lie at the same address.
        self._weights = ids
        self._memory = [w.detach() for w in (*weights, *attributes)]
        self._alive = watch(self, (*weights, *attributes))
        return known

    def _newly_bound(
        self,
        args: Sequence[Any],
        sizes: tuple[int, ...],
        weights: list[torch.Tensor],
        attributes: list[torch.Tensor],
    ) -> tuple[Any, Finish] | None:
        values = dict(zip(self.gm.graph.find_nodes(op="placeholder"), args, strict=True))
        plan = self.planner.at({s: n for (s, _, _), n in zip(self.planner.symbols, sizes, strict=True)})
        described = self._describe(plan)
        nodes = [self._node[i] for i in described["constants"]]
        with torch.inference_mode(False), torch.no_grad():
            constants = [_value(self.gm, n, values).detach().resolve_neg().contiguous() for n in nodes]
            if any(c.dtype != value_of(n).dtype for c, n in zip(constants, nodes, strict=True)):
                self.refusal = "the model was converted since it was compiled"
                return None
            _open_tuning(store.tuning_folder())
            made = self.planner.calls(described["calls"])
            bound = self._bound_plan(plan, constants, [*weights, *attributes], made, self.planner.most)
            if self.device.type == "cuda" and not bound.is_native() and not self.planner.saved:
                bound = self._recorded(bound, tuple(args[i] for i in self.inputs))
        return bound, Finish(self.gm, described, self.planner.plain)

    def bound_to(self, plan: _native.NativePlan, more: int = 0) -> Any:
        """Another plan of the graph, without constants; so many last outputs follow the results."""
        described = self._describe(plan)
        made = self.planner.calls(described["calls"])
        return self._bound_plan(plan, [], [], made, self.planner.most, more)

    def _bound_plan(
        self,
        plan: _native.NativePlan,
        constants: list[torch.Tensor],
        watched: list[torch.Tensor],
        made: list[Any],
        most: int | None,
        more: int = 0,
    ) -> Any:
        libtorch = str(torch_calls.LIBTORCH)
        room = None if most is None else max(0, most - folded_bytes(self.gm))
        like, _ = next(reversed(self._bound.values()), (None, None))
        if self.device.type == "cuda":
            self._tf32 = torch._C._get_cublas_allow_tf32()
            returns = None
            if self.planner.saved:
                outputs = plan.outputs()
                returns = [*self._finish.returns, *range(outputs - more, outputs)]
            return _native.BoundCudaPlan(
                plan,
                constants,
                watched,
                made,
                libtorch,
                self.device.index or 0,
                self.lead(),
                self._tf32,
                returns,
                self.planner.split,
                room,
                like.bound if isinstance(like, Recorded) else like,
            )
        threads = torch.get_num_threads()
        return plan.bind(constants, watched, made, libtorch, threads, room, self._without, like)

    def _recorded(self, bound: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return bound
        try:
            return Recorded(bound, self.device.index or 0, inputs)
        except RuntimeError as e:
            log.info("the plan is not recorded as a CUDA graph: %s", e)
            return bound

    def forget(self) -> None:
        """Drops the plans: a weight is gone."""
        self._only = None
        self._bound.clear()
        self._memory.clear()

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of values in between and of packed weights, over all sizes that are kept."""
        both = [bound.bytes() for bound, _ in self._bound.values()]
        return max((a for a, _ in both), default=0), max((p for _, p in both), default=0)

    @property
    def kinds(self) -> list[str]:
        """How each linear layer is computed."""
        return next(iter(self._bound.values()))[0].kinds() if self._bound else []

    def choose(
        self, args: Sequence[Any], eager: Callable[[], Any] | None = None, seconds: float = 0.05
    ) -> dict[str, float]:
        """Times the plan, the graph and what eager does in turn, keeps the fastest; seconds of each.

        A plan that does not run on these arguments is not kept, and has no time.
        """
        forms: dict[str, Callable[[], Any]] = {}
        other = None
        self.native = True
        # Packing weights is not part of a call.
        if self._runs(args):
            forms["plan"] = lambda: self(list(args))
            other = self._plainer(args)
        if other is not None:
            forms["plainer plan"] = lambda: other(list(args))
        if eager is not None:
            forms["eager"] = eager
        forms["graph"] = lambda: self.graph(list(args))
        if "plan" not in forms:
            log.info("the native plan does not run: %s", self.refusal or "it is not for these arguments")
            self.native = False
            return self._timed(forms, seconds) if eager is not None else {}
        # Of equals the plan is kept: its results lie in memory that is used again, not in fresh pages. But
        # much memory for copies of weights has to pay.
        limit = CLOSE if self.bytes[1] < COPIES else 1 / CLOSE
        best = self._timed(forms, seconds)
        for pause in PAUSES:
            plans = [best[name] for name in ("plan", "plainer plan") if name in best]
            others = [taken for name, taken in best.items() if not name.endswith("plan")]
            if min(plans) <= limit * min(others, default=math.inf):
                break
            # A plan that is dropped is dropped for good; what disturbs one measurement may spare the next.
            time.sleep(pause)
            again = self._timed(forms, seconds)
            best = {name: min(taken, again.get(name, taken)) for name, taken in best.items()}
        if other is not None and best["plainer plan"] < best["plan"]:
            self._without, self._bound = other._without, other._bound
            best["plan"] = best["plainer plan"]
        best.pop("plainer plan", None)
        others = [taken for name, taken in best.items() if name != "plan"]
        self.native = best["plan"] <= limit * min(others, default=math.inf)
        return best

    def _runs(self, args: Sequence[Any]) -> bool:
        results = self.run(args)
        return results is not None and self.native

    def _timed(self, forms: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
        return in_turns(forms, seconds, gpu=self.device.type == "cuda")

    def _plainer(self, args: Sequence[Any]) -> NativeGraph | None:
        """The same without kernels whose speed depends on what else runs on a core, if it has some."""
        if not SPLIT & set(self.kinds) or self.bytes[1] > PLAINER:
            return None
        other = NativeGraph(self.gm, self.planner, self.graph)
        other.fallback = self.fallback
        other._without = sorted(SPLIT)
        other(list(args))
        other._alive = []
        return other if other._bound else None


def _arranging(bound: Any, finish: Finish) -> Callable[..., Any]:
    """A plan that returns its outputs, as one that returns what results are made of."""

    def run(lead: int, *inputs: torch.Tensor) -> list[Any] | None:
        outputs = bound(lead, *inputs)
        return None if outputs is None else finish.arranged(outputs, inputs)

    return run


@functools.cache
def _open_tuning(folder: Path | None) -> None:
    _native.tuning_folder(folder)


def _moved(value: Any) -> Any:
    """A tensor moved by up to a rounding, always the same way."""
    if not is_float(value):
        return value
    dice = torch.Generator().manual_seed(0)
    share = torch.rand(value.shape, generator=dice).mul_(2).sub_(1).to(value)
    return value * (1 + share * torch.finfo(value.dtype).eps)


NEARLY = 1e-3
"""Results that are smaller than this share of the inputs are judged by the inputs' roundings as well."""


def is_float(value: Any) -> bool:
    """Whether a value is a tensor of real numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def distance(ours: torch.Tensor, theirs: torch.Tensor, least: float = 0.0) -> float:
    """How far results are apart, in units of what roundings in another order explain."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    if not ours.numel():
        return 0.0
    a, b = ours.double(), theirs.double()
    odd = ~torch.isfinite(b)
    if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
        return math.inf
    scale = b[~odd].abs().max().item() if (~odd).any() else 1.0
    apart = (a - b)[~odd].abs().max().item() if (~odd).any() else 0.0
    return apart / (max(scale, least, 1e-30) * 64 * torch.finfo(ours.dtype).eps)


def _sources(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack.extend(at.all_input_nodes)
    return found


def _value(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node that is made of weights only."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(gm)
        else:
            for operand in node.all_input_nodes:
                _value(gm, operand, values)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            function = gm.get_submodule(node.target) if node.op == "call_module" else node.target
            values[node] = function(*args, **kwargs)
    return values[node]
