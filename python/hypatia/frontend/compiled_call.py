"""One compiled call of a model: the plan or graph for one kind of arguments."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch import pytree, use_lazy_graph_module
from ..capture.model_state import Parts
from ..capture.trace import out_spec
from ..compiler.report import GraphReport
from ..execute import choose
from ..execute.agreement import agree
from ..execute.native import NativeGraph
from ..execute.recording import Recordings, why_not
from ..options import Options
from ..verifier.first_call import device_of, effects_of
from ..verifier.reference import RandomState, changed_inputs, devices_of
from ..verifier.same_layout import lies_alike
from .call_key import Signature, TensorKind
from .optimize import Optimized, optimized

log = logging.getLogger(__name__)


def computes_the_same(
    captured: fx.GraphModule, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    """Whether a captured graph computes what its model does: a run on fake tensors may take another way."""
    random = RandomState(devices_of(pytree.tree_leaves((args, kwargs))))
    results = []
    with torch.no_grad():
        for call in (captured, model):
            results.append(pytree.tree_leaves(call(*args, **kwargs)))
            random.restore()
        return len(results[0]) == len(results[1]) and all(
            agree(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            for a, b in zip(*results, strict=True)
        )


class CompiledCall:
    """The model compiled for one kind of inputs."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        signature: Signature,
        options: Mapping[str, object],
        dims: dict[int, set[int]] | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        self.model = model
        self.report: GraphReport | None = None
        self.positional = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        self.single = False
        self.native: Callable[[tuple[object, ...]], Sequence[object] | None] | None = None
        self.open: dict[tuple[int, int], tuple[int, int]] = {}
        """The least and greatest value of sizes that are left open, by input and dimension."""
        self._recordings: Recordings | None = None
        self._signature = signature
        self._run: Callable[..., object] = model
        self._parts = Parts(model)
        self.watch = self._parts.watch
        if self._parts.hooked or not compiled:
            why = "has hooks" if compiled else "changes too often"
            log.info("the model runs as it is: it %s", why)
            return
        dynamic = None
        if dims and self.positional:
            auto = torch.export.Dim.AUTO
            dynamic = tuple(dict.fromkeys(dims.get(i, ()), auto) or None for i in range(len(args)))
        try:
            # Most graphs never run: where the plan does, nobody needs their Python code.
            with torch.no_grad(), use_lazy_graph_module(True):
                found = optimized(model, args, kwargs, options, dynamic, native=self.positional)
        except Exception:
            log.info("the model runs as it is: it cannot be exported", exc_info=True)
            return
        if found.report is not None:
            self._keep(found, found.report, args, kwargs, options, opened=dynamic is not None)

    def _keep(
        self,
        found: Optimized,
        report: GraphReport,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        options: Mapping[str, object],
        *,
        opened: bool,
    ) -> None:
        """Keeps the fastest form of what was compiled, or the model where none can stand for it."""
        model = self.model
        changed = changed_inputs(found.original)
        if changed and self._signature.shared:
            log.info("the model runs as it is: it changes inputs, and some share memory")
            return
        timed = not changed and not effects_of(found.original)
        checked = Options.parse(options).checksum_mode != "off"
        if checked and timed and not computes_the_same(found.original, model, args, kwargs):
            log.warning("the model runs as it is: what was captured of it computes something else")
            return
        self.report = report
        if found.graph is None and not report.no_plan:
            report.kept = "graph"
            report.no_plan = "arguments of the call are given by keyword or are no tensors"
            log.info("no native plan: %s", report.no_plan)
        if opened:
            self.open = found.ranges
        self._use(found, report, args, kwargs, timed=timed)

    def _use(
        self,
        found: Optimized,
        report: GraphReport,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        timed: bool,
    ) -> None:
        """Runs what was found from now on, or the model where that is faster or its results lie otherwise."""
        gm = self._run = found.kept
        self._spec = out_spec(gm)
        self._choose(found, report, args, kwargs, timed=timed)
        if not effects_of(gm):
            self._check_lying(found, report, args, kwargs)
        if self._run is not self.model:
            self._parts.count_on(found.reads)
            self.watch = self._parts.watch

    def _check_lying(
        self, found: Optimized, report: GraphReport, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Keeps the model itself where results would lie otherwise: a user may write into them."""
        model = self.model
        if self._run is model:
            return
        changes = bool(changed_inputs(found.original))
        try:
            alike = lies_alike(lambda *a, **k: self(a, k), model, args, kwargs, changes=changes)
        except Exception:
            log.info("the compiled model cannot be compared with the model", exc_info=True)
            alike = False
        if not alike:
            self.native, self._run, self.open = None, model, {}
            report.kept, report.no_plan = "eager", "results would lie otherwise in memory"
            log.info("the model runs as it is: results would lie otherwise in memory")

    def _choose(
        self,
        found: Optimized,
        report: GraphReport,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        timed: bool,
    ) -> None:
        """Runs the fastest form of what was found from now on; its plan or graph where none can be timed."""
        model, kept, original, plan = self.model, found.kept, found.original, found.graph
        if plan is not None:
            self.single = self._spec.is_leaf()
            plan.graph = lambda flat: kept(*flat)
            # Not the model itself: while another thread traces it, its weights are fake ones.
            plan.fallback = lambda flat: original(*flat)
            plan.ranges = {(i, d): sizes for (i, d), sizes in self.open.items()}
        if timed:
            leaves = pytree.tree_leaves((args, kwargs))
            device, random = device_of(leaves), RandomState(devices_of(leaves))
            forms = {"graph": lambda: kept(*args, **kwargs), "eager": lambda: model(*args, **kwargs)}
            record = functools.partial(self._recorded, found, device, args)
            with torch.no_grad():
                choice = choose.fastest(
                    forms, device, plan=plan, args=args, record=record if self.positional else None
                )
            random.restore()
            report.chose(choice)
            if choice.kept == "recording":
                assert self._recordings is not None
                self.single, self.native = self._spec.is_leaf(), self._recordings.direct
            elif choice.kept == "eager":
                self._run = model
            elif choice.kept == "graph" and plan is not None:
                self._run = found.check()
            if plan is not None and choice.is_narrow and not self.open and self.native is None:
                self._run = self._rematch(self._run, plan, report, device)
        if plan is not None:
            report.memory = plan.binding.bytes
            plan.settled = True
            if plan.native:
                self.native, self._run = plan.direct, original

    def _recorded(
        self, found: Optimized, device: torch.device, args: tuple[object, ...], name: str
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
        return self._recordings.try_on(args)

    def _rematch(
        self, kept: Callable[..., object], plan: NativeGraph, report: GraphReport, device: torch.device
    ) -> Callable[..., object]:
        """Runs what was kept; the plan from then on where it turns out to be the faster one."""

        def ended(calls: int, seconds: dict[str, float], won: bool) -> None:
            report.chose_later(calls, seconds, won)
            plan.native = won
            self.native = plan.direct if won else None

        def planned(args: Sequence[Any]) -> object | None:
            results = plan.run(args)
            return None if results is None else results[0] if self.single else self.structured(results)

        rematch = choose.Rematch(lambda args: kept(*args), planned, device, ended)
        return lambda *args: rematch(list(args))

    def outdated(self) -> bool:
        """Whether a part of the model is another one now, or has another dtype."""
        return not self._parts.hold()

    def differing(self, signature: Signature) -> dict[int, set[int]]:
        """Dimensions in which tensors differ from those of this entry, if they differ in nothing else."""
        if self.open or not self.positional or not self._is_alike(signature):
            return {}
        found: dict[int, set[int]] = {}
        for i, (new, known) in enumerate(zip(signature.kinds, self._signature.kinds, strict=True)):
            if min(new.shape, default=2) < 2:
                return {}
            dims = {d for d, size in enumerate(new.shape) if size != known.shape[d]}
            if dims:
                found[i] = dims
        return found

    def _is_alike(self, signature: Signature) -> bool:
        """Whether another call has the same structure and tensors that differ in sizes and strides alone."""
        known = self._signature
        return (signature.spec, signature.shared) == (known.spec, known.shared) and all(
            isinstance(a, TensorKind)
            and isinstance(b, TensorKind)
            and (a.type, len(a.shape), a.dtype, a.device) == (b.type, len(b.shape), b.dtype, b.device)
            for a, b in zip(signature.kinds, known.kinds, strict=True)
        )

    def accepts(self, signature: Signature, leaves: list[Any]) -> bool:
        """Whether these inputs are those of this entry but for sizes that are left open."""
        if not self._is_alike(signature) or not all(t.is_contiguous() for t in leaves):
            return False
        for i, known in enumerate(self._signature.kinds):
            for d, size in enumerate(leaves[i].shape):
                least, greatest = self.open.get((i, d), (known.shape[d], known.shape[d]))
                if not least <= size <= greatest:
                    return False
        return True

    def structured(self, results: Sequence[object]) -> object:
        """Flat results in the form that the model returns."""
        return pytree.tree_unflatten(list(results), self._spec)

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The results, as the model returns them."""
        with torch.no_grad():
            if self.native is not None and not kwargs:
                results = self.native(args)
                if results is not None:
                    return results[0] if self.single else self.structured(results)
            return self._run(*args, **kwargs)
