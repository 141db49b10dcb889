"""One compiled call of a model: the plan or graph for one kind of arguments."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from .._torch import pytree, use_lazy_graph_module
from ..capture.layout import overlaps
from ..capture.model_state import ChangesItselfError, Parts
from ..capture.op_facts import changed_inputs, effects_of
from ..capture.records import value_of
from ..capture.size_ranges import Ranges
from ..compiler import pipeline
from ..compiler.report import GraphReport
from ..devices.table import random_devices
from ..errors import UnsupportedError
from ..execute import choose
from ..execute.changes import RandomState, State
from ..execute.native import NativeGraph
from ..execute.recording import Recordings, why_not
from ..options import Options
from ..verifier.first_call import device_of
from ..verifier.same_layout import has_same_layout
from .call_key import Signature, kinds_check, shared_memory
from .flat_model import FlatModel
from .optimize import Optimized, optimized
from .same_as_model import changed_tensors, computes_the_same, kept_buffers
from .structure_code import BuildResult, Take, taker

log = logging.getLogger(__name__)


_Native = Callable[[tuple[object, ...]], Sequence[object] | None]
"""Results of flat inputs; none if it is not for these."""


class CompiledCall:
    """The model compiled for one kind of inputs."""

    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        leaves: Sequence[object],
        options: Mapping[str, object],
        dims: Mapping[int, Set[int]] | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        self.model = model
        self.report: GraphReport | None = None
        self.plain = signature.plain
        """The arguments are tensors, by place."""
        self.single = False
        """The model returns one tensor."""
        self.native: _Native | None = None
        self.take: Take = lambda args, kwargs: None
        self.build_result: BuildResult
        self.open: Ranges = {}
        """The least and greatest value of sizes and numbers that are left open, by input and dimension."""
        self.changes_itself = False
        """The model changes its attributes when it is called: those that fill a cache do so once."""
        self.filled = False
        """It has done so since: what it keeps may be there now."""
        self.by_torch = False
        """Calls are torch.compile's: numbers of it are others every time, or it cannot be exported."""
        self.later: choose.LaterTiming | None = None
        """Whether torch.compile is faster than the model is seen at later calls."""
        self.effects = False
        """A call changes lists, dictionaries or objects that it is given."""
        self.closed = False
        """What differs from another call could not be left open."""
        self.signature = signature
        self._checks: list[Callable[[Sequence[object]], bool]] = []
        self._recordings: Recordings | None = None
        self._later: choose.LaterTiming | None = None
        self._contender: NativeGraph | None = None
        """A plan that lost by little, and may run later."""
        self._known_layouts: list[object] | None = None
        """How the model's own results lie in memory, if that is known."""
        self._run: Callable[..., object] = model
        self._parts = Parts(model)
        self.watch = self._parts.watch
        if why := self._parts.why_not(compiled=compiled):
            log.info("the model runs as it is: it %s", why)
            return
        self._compile(leaves, options, dims)

    def _compile(
        self, leaves: Sequence[object], options: Mapping[str, object], dims: Mapping[int, Set[int]] | None
    ) -> None:
        signature = self.signature
        opened = [i for i in dims or () if not signature.is_tensor(i)]
        self._places = [i for i in range(len(leaves)) if signature.is_tensor(i) or i in opened]
        self._flat = FlatModel(self.model, signature, opened)
        inputs = tuple([leaves[i] for i in self._places])
        try:
            # Most graphs never run: where the plan does, nobody needs their Python code.
            with torch.no_grad(), use_lazy_graph_module(True):
                found = optimized(self._flat, inputs, None, options, self._dynamic(dims), native=True)
        except ChangesItselfError as reason:
            log.info("the model runs as it is: %s", reason)
            self.changes_itself = True
            return
        except UnsupportedError:
            log.info("the model runs as it is: it cannot be exported", exc_info=True)
            return
        except Exception:
            log.info("the model runs by torch.compile: it cannot be exported", exc_info=True)
            self.by_torch = True
            return
        if dims and set(opened) - {self._places[i] for i, d in found.ranges if d is None}:
            # A number that was to be open is part of the graph.
            return
        if found.report is not None:
            try:
                self._keep(found, found.report, inputs, options, opened=bool(dims))
            except Exception:
                if pipeline.raise_errors:
                    raise
                # Shapes or strides of the model's tensors are not those of its fake tensors.
                log.warning("the model runs as it is: what was compiled of it fails", exc_info=True)
                self._give_up(found.report, "what was compiled fails")

    def _dynamic(self, dims: Mapping[int, Set[int]] | None) -> tuple[object, ...] | None:
        """Sizes and numbers that are left open, as torch.export wants to be told."""
        if not dims:
            return None
        auto = torch.export.Dim.AUTO
        return tuple(
            auto
            if i in dims and not self.signature.is_tensor(i)
            else dict.fromkeys(dims.get(i, ()), auto) or None
            for i in self._places
        )

    def _keep(
        self,
        found: Optimized,
        report: GraphReport,
        inputs: tuple[object, ...],
        options: Mapping[str, object],
        *,
        opened: bool,
    ) -> None:
        """Keeps the fastest form of what was compiled, or the model where none can stand for it."""
        changed = changed_inputs(found.original)
        if changed and self.signature.shared:
            log.info("the model runs as it is: it changes inputs, and some share memory")
            return
        if any(isinstance(v := value_of(n), torch.Tensor) and overlaps(v) for n in changed):
            # The model may change a part that does not; a graph writes the whole.
            log.info("the model runs as it is: it changes an input whose elements share memory")
            return
        timed = not effects_of(found.original)
        checked = Options.parse(options).checksum_mode != "off"
        if checked and timed:
            lies = computes_the_same(found.original, self._flat, inputs, found.returned)
            if lies is None:
                log.warning("the model runs as it is: what was captured of it computes something else")
                return
            self._known_layouts = lies or None
        self.report = report
        if opened:
            self.open = found.ranges
        outline = self._flat.hypatia_outline()
        numbers = [i for i in self._places if not self.signature.is_tensor(i)]
        self.single, self.effects = outline.single, bool(outline.effects)
        self.take = taker(self.signature.spec, self.signature.kinds, numbers, outline.owned())
        self.build_result = outline.result_builder()
        if changed and len(inputs) > 1:
            # Those that share memory are another call.
            self._checks.append(lambda flat: not shared_memory(flat))
        read = range(len(inputs)) if found.graph is None else found.graph.binding.inputs
        unread = sorted({*range(len(inputs))} - {*read})
        if unread:
            self._checks.append(kinds_check(self.signature, self._places, unread, self.open))
        self._use(found, report, inputs, timed=timed)

    def _use(self, found: Optimized, report: GraphReport, inputs: tuple[object, ...], *, timed: bool) -> None:
        """Runs what was found, or the model where that is faster or its results have other strides."""
        gm = self._run = found.kept
        self._choose(found, report, inputs, timed=timed)
        if not effects_of(gm):
            self._check_layouts(found, report, inputs)
        if self._run is not self.model or self._later is not None:
            self._parts.count_on(found.reads)
            self.watch = self._parts.watch

    def _check_layouts(self, found: Optimized, report: GraphReport, inputs: tuple[object, ...]) -> None:
        """Keeps the model itself where results would have other strides: a user may write into them."""
        if self._run is self.model and self._contender is None:
            return
        changes = bool(changed_inputs(found.original))
        try:
            forms: list[Callable[..., object]] = [lambda *flat: self._flatly(flat)] * (
                self._run is not self.model
            )
            if (plan := self._contender) is not None:
                forms.append(lambda *flat: plan.run(flat))
            alike = all(
                has_same_layout(f, self._flat, inputs, {}, changes=changes, known=self._known_layouts)
                for f in forms
            )
        except Exception:
            log.info("the compiled model cannot be compared with the model", exc_info=True)
            alike = False
        if not alike:
            self._give_up(report, "results would have other strides")
            log.info("the model runs as it is: results would have other strides")

    def _give_up(self, report: GraphReport, why: str) -> None:
        """The model itself runs from now on."""
        self.native, self._run, self.open = None, self.model, {}
        self._later, self._contender, self._recordings = None, None, None
        self.report, report.kept, report.no_plan = report, "eager", why

    def _choose(
        self, found: Optimized, report: GraphReport, inputs: tuple[object, ...], *, timed: bool
    ) -> None:
        """Runs the fastest form of what was found from now on; its plan or graph where none can be timed."""
        model, kept, original, plan = self.model, found.kept, found.original, found.graph
        if plan is not None:
            plan.graph = lambda flat: kept(*flat)
            # Not the model itself: while another thread traces it, its weights are fake ones.
            plan.fallback = lambda flat: original(*flat)
            plan.ranges = self.open
        if timed:
            device, random = device_of(inputs), RandomState(random_devices(inputs))
            before = State(changed_tensors(original, inputs), device)
            # Not with the caller's own containers, which the model may change.
            eager = model if self.plain else lambda *flat: self._flat.as_called(flat)
            forms = {"graph": lambda: kept(*inputs), "eager": lambda: eager(*inputs)}
            record = functools.partial(self._recorded, found, device, inputs)
            tensors = all(isinstance(t, torch.Tensor) for t in inputs)
            with torch.no_grad(), kept_buffers(model, before):
                choice = choose.fastest(
                    forms,
                    device,
                    plan=plan,
                    args=inputs,
                    record=record if tensors else None,
                    counts=before.counts,
                )
            before.restore()
            random.restore()
            report.chose(choice)
            if choice.kept == "recording":
                assert self._recordings is not None
                # A recording asks for tensors of any size, a graph is for those that it was captured with.
                everything = range(len(inputs))
                self._checks.append(kinds_check(self.signature, self._places, everything, self.open))
                self.native = self._checked(self._recordings.direct)
            elif choice.kept == "eager":
                self._run = model
            elif choice.kept == "graph" and plan is not None:
                self._run = found.check()
            if plan is not None and choice.is_narrow and not self.open and self.native is None:
                self._time_again_later(plan, report, device)
        if plan is not None:
            report.memory = plan.binding.bytes
            plan.settled = True
            if plan.native:
                self.native, self._run = self._checked(plan.direct), original

    def _checked(self, native: _Native) -> _Native:
        """A plan for the calls that it is for, as far as it does not see that itself."""
        if not self._checks:
            return native
        return lambda flat: native(flat) if all(check(flat) for check in self._checks) else None

    def _recorded(
        self, found: Optimized, device: torch.device, inputs: tuple[object, ...], name: str
    ) -> Callable[[], object] | None:
        """A call of the graph, optimized or as it was captured, as a CUDA graph."""
        gm = found.original
        if name == "graph":
            # Of a graph that has a plan, only the plan was compared with eager.
            gm = found.kept if found.graph is None else found.check()
        if why := why_not(gm, device):
            log.info("the graph is not recorded as a CUDA graph: %s", why)
            return None
        self._recordings = Recordings(gm, lambda flat: pytree.tree_leaves(gm(*flat)), device)
        return self._recordings.try_on(inputs)

    def _time_again_later(self, plan: NativeGraph, report: GraphReport, device: torch.device) -> None:
        """Runs what was kept; the plan from then on where it turns out to be the faster one."""

        def ended(calls: int, seconds: dict[str, float], won: bool) -> None:
            report.chose_later(calls, seconds, won)
            plan.native = won
            self.native = self._checked(plan.direct) if won else None

        def planned(call: Sequence[Any]) -> object | None:
            taken = self.take(*call)
            results = None if taken is None else plan.run(taken[0])
            return (
                None if taken is None or results is None else self.build_result(taken[0], results, taken[1])
            )

        self._later = choose.LaterTiming(lambda call: self._kept(*call), planned, device, ended)
        self._contender = plan

    def outdated(self) -> bool:
        """Whether a part of the model is another one now, or has another dtype."""
        return not self._parts.hold()

    def accepts(self, signature: Signature, leaves: Sequence[object]) -> bool:
        """Whether these inputs are those of this entry but for what is left open."""
        opened = {(self._places[i], d): sizes for (i, d), sizes in self.open.items()}
        return bool(opened) and signature.is_within(self.signature, opened, leaves)

    def _flatly(self, inputs: tuple[object, ...]) -> Any:
        """The results of the plan or the graph."""
        results = None if self.native is None else self.native(inputs)
        return self._run(*inputs) if results is None else results

    def _kept(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        taken = None if self._run is self.model else self.take(args, kwargs)
        if taken is None:
            self.filled = self.changes_itself
            return self.model(*args, **kwargs)
        flat, owned = taken
        return self.build_result(flat, self._flatly(flat), owned)

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The results, as the model returns them."""
        with torch.no_grad():
            if self._later is not None and self.native is None:
                return self._later([args, kwargs])
            return self._kept(args, kwargs)
