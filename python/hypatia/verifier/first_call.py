"""The first call of a compiled graph: it is checked, and what is wrong is rolled back.

Only the kernel or rule that is to blame is taken out, and the whole graph if there is none. Later calls
cost nothing.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from .. import _torch
from .._torch import FakeTensor
from ..capture.op_facts import effects_of
from ..compiler import pipeline
from ..compiler.pipeline import CompiledGraph, Part
from ..compiler.report import Check, GraphReport, Removed
from ..devices import table
from ..errors import PrecisionWarning, VerificationWarning
from ..execute import choose, recording
from ..execute.native import NativeGraph
from ..execute.plans import TF32
from ..locks import COMPILING
from ..timeline import COMPARISON, stage
from .blame import broken_steps, smallest
from .candidates import Attempt, CheckedCall, Form, Forward, quietly
from .compare import References

log = logging.getLogger(__name__)

TRIALS = 40
"""Compilations that the search for a wrong rule or kernel may take."""

FEW_TRIALS = 8
"""The same where eager's own digits are chance: any other order of roundings may fail, and nothing is
wrong. So steps of the proof are not computed: each of them holds but for roundings."""

ROUNDS = 4
"""Proofs that are searched for a wrong rule, one after the other."""

Recompile = Callable[[frozenset[Part]], CompiledGraph]
"""Compiles a graph again, without these parts."""


class Guard:
    """Runs a compiled graph; the first call decides which form of it is kept."""

    def __init__(
        self,
        compiled: CompiledGraph,
        report: GraphReport,
        mode: str,
        recompile: Recompile,
        runnable: Callable[[CompiledGraph], Forward],
        *,
        training: bool = False,
        references: References | None = None,
        weights: Collection[int] = (),
    ) -> None:
        """``weights`` are the arguments that lie where they lie from call to call."""
        self.weights = weights
        self.references = references
        self.original = compiled.captured
        self.report = report
        self.mode = mode
        self.recompile = recompile
        self.runnable = runnable
        self.training = training
        self.compiled = self._form(compiled)
        self._current = self.compiled.forward
        """What runs where nothing can be checked."""
        self.kept = compiled
        self.forward: Forward = self.first_call
        self.settled = False
        effects = effects_of(compiled.captured)
        if effects:
            note = f"cannot be run more than once: it calls {', '.join(effects)}"
            self.settle(self.compiled, Check(mode, "not checked", 0, [], [], [note], 0.0))

    def first_call(self, args: list[object]) -> object:
        """Runs the graph and checks what it returns; other threads wait for the verdict."""
        if _checkable(args):
            with COMPILING:
                if not self.settled:
                    inputs = list(args)
                    args.clear()
                    return self._first_call(inputs)
        return self._current(args)

    def examine(self, inputs: list[object]) -> CompiledGraph:
        """Checks the graph on inputs without calling it for good; the form that is kept."""
        with COMPILING:
            if not self.settled and _checkable(inputs):
                self._first_call(list(inputs), call=False)
        return self.kept

    def settle(self, form: Form, check: Check) -> None:
        """Keeps one form for all later calls."""
        self.report.check = check
        if form.compiled.planner is None:
            self.report.no_plan = self.report.no_plan or "the compiled graph was rolled back"
            if self.report.kept == "plan":
                self.report.kept = "eager" if form.compiled.optimized is self.original else "graph"
        self.kept = form.compiled
        self.forward = self._current = form.forward
        self.settled = True
        if isinstance(form.forward, NativeGraph):
            form.forward.settled = True
        # What only the check needed can go.
        del self.original, self.recompile, self.compiled, self.references

    @stage(COMPARISON)
    def _first_call(self, inputs: list[object], *, call: bool = True) -> object:
        start = time.perf_counter()
        checked = CheckedCall(
            self.original,
            inputs,
            strict=self.mode == "strict",
            training=self.training,
            references=self.references,
        )
        try:
            form, removed, attempt = self._decide(checked)
        except BaseException as error:
            checked.random.restore()
            if pipeline.raise_errors or not isinstance(error, Exception):
                raise
            log.warning("%s graph could not be verified", self.report.kind, exc_info=True)
            form = self._as_captured() if self.mode == "strict" else self.compiled
            removed, attempt = [], Attempt(None, None, f"not verified: {error}")
            failed = True
        else:
            failed = False
        if attempt.error is not None:
            # The user's own error: eager raises it too, and says it in its own words.
            checked.random.restore()
            return self._as_captured().forward(inputs) if call else None
        seconds = time.perf_counter() - start - checked.seconds
        if call and not failed:
            try:
                form = self._fastest(checked, form)
            finally:
                checked.undo()
        self.settle(form, checked.summary(self.mode, removed, attempt, seconds))
        if not failed and (removed or not attempt.ok):
            self._warn(removed, checked.first)
        if not call or checked.changed or attempt.results is None:
            # Checked on copies of what the graph changes: now the call itself.
            checked.random.restore()
            return form.forward(inputs) if call else None
        checked.after.restore()
        return attempt.results

    def _fastest(self, checked: CheckedCall, form: Form) -> Form:
        """The fastest form of the graph that is right."""
        plan = form.forward if isinstance(form.forward, NativeGraph) else None
        if form.compiled.report is None or not checked.inputs:
            return form
        ways = {"graph": form, "eager": self._as_captured()}
        if plan is not None:
            ways = {"graph": Form(form.compiled, plan.graph), "eager": Form(form.compiled, plan.fallback)}
        device = device_of(checked.inputs)
        forms = {name: functools.partial(_called, way.forward, checked.inputs) for name, way in ways.items()}
        recorded: dict[str, Forward] = {}

        def record(name: str) -> Callable[[], object] | None:
            # Of a graph that has a plan, only the plan was compared with eager.
            if name == "graph" and plan is not None and not checked.run(ways[name]).ok:
                name = "eager"
            gm = form.compiled.optimized if name == "graph" else self.original
            if self.report.kind != "inference" or recording.why_not(gm, device):
                return None
            made = recording.Recordings(gm, ways[name].forward, device, self.weights)
            recorded["recording"] = made
            return made.try_on(checked.inputs)

        with quietly():
            choice = choose.fastest(
                forms, device, plan=plan, args=checked.inputs, record=record, counts=checked.counts
            )
        if plan is not None:
            plan.settled = True
            self.report.memory = plan.binding.bytes
            if choice.kept == "graph" and not checked.run(ways["graph"]).ok:
                # Only the plan was compared with eager.
                choice = choice._replace(kept="eager")
        self.report.chose(choice)
        if choice.kept == "plan":
            return form
        kept = ways.get(choice.kept) or Form(form.compiled, recorded[choice.kept])
        if plan is None:
            return kept
        plan.fallback = kept.forward
        if choice.is_narrow and self.report.kind == "inference" and not plan.planner.symbols:
            return Form(form.compiled, self._time_again_later(plan, device))
        return form

    def _time_again_later(self, plan: NativeGraph, device: torch.device) -> Forward:
        """Runs what was kept; the plan from then on where it turns out to be the faster one."""

        def ended(calls: int, seconds: dict[str, float], won: bool) -> None:
            self.report.chose_later(calls, seconds, won)
            if won:
                plan.native = True
                self.forward = self._current = plan

        return choose.LaterTiming(plan.fallback, plan.run, device, ended)

    def _form(self, compiled: CompiledGraph) -> Form:
        """A form of the graph; where its plan does not run, the original does, since that is right."""
        forward = self.runnable(compiled)
        if isinstance(forward, NativeGraph):
            original = CompiledGraph(self.original, self.original)
            forward.fallback = _when_called(functools.partial(self.runnable, original))
        return Form(compiled, forward)

    def _as_captured(self) -> Form:
        original = CompiledGraph(self.original, self.original)
        return Form(original, self.runnable(original))

    def _decide(self, checked: CheckedCall) -> tuple[Form, list[Removed], Attempt]:
        attempt = checked.run(self.compiled)
        if attempt.ok or (attempt.error is not None and checked.eager_fails()):
            return self.compiled, [], attempt
        log.info("%s graph: %s", self.report.kind, attempt)
        if self.mode != "strict" and attempt.error is None:
            return self.compiled, [], attempt
        return self._rolled_back(checked, is_chance=attempt.is_chance)

    def _rolled_back(self, checked: CheckedCall, *, is_chance: bool) -> tuple[Form, list[Removed], Attempt]:
        most = FEW_TRIALS if is_chance else TRIALS
        tried: dict[frozenset[Part], tuple[Form, GraphReport, Attempt]] = {}

        def works(without: frozenset[Part]) -> bool:
            if without not in tried:
                if len(tried) >= most:
                    return False
                candidate = self.recompile(without)
                if candidate.report is None:
                    return False
                form = self._form(candidate)
                tried[without] = (form, candidate.report, checked.run(form))
            return tried[without][2].ok

        removed = (
            self._halved([p for p in self.report.parts if p[0] == "kernel"], works)
            or ([] if is_chance else self._from_proof(checked, works, tried))
            or self._halved(self.report.parts, works)
        )
        if removed:
            form, _, attempt = tried[frozenset((r.kind, r.name) for r in removed)]
            return form, removed, attempt
        form = self._as_captured()
        removed = [Removed("graph", self.report.kind, "no rule or kernel is to blame alone")]
        return form, removed, checked.run(form)

    def _halved(self, parts: Sequence[Part], works: Callable[[frozenset[Part]], bool]) -> list[Removed]:
        """The smallest set of these parts without which the graph is right."""
        if not parts or not works(frozenset(parts)):
            return []
        wrong = smallest(parts, works)
        if not works(frozenset(wrong)):
            return []
        return [Removed(kind, name, self.report.law(kind, name)) for kind, name in wrong]

    def _from_proof(
        self,
        checked: CheckedCall,
        works: Callable[[frozenset[Part]], bool],
        tried: Mapping[frozenset[Part], tuple[Form, GraphReport, Attempt]],
    ) -> list[Removed]:
        """The rules of the steps that do not hold on these inputs; leaving one out may bring in another."""
        removed: dict[Part, Removed] = {}
        report = self.report
        inputs = {n.name: v for n, v in checked.comparer.inputs.items()}
        for _ in range(ROUNDS):
            before = len(removed)
            try:
                with quietly():
                    for step in broken_steps(self.original, report, inputs, checked.random):
                        removed.setdefault(("rule", step.rule), Removed("rule", step.rule, str(step)))
            except Exception:
                if pipeline.raise_errors:
                    raise
                log.debug("the proof cannot be computed", exc_info=True)
            if len(removed) == before:
                return []
            if works(frozenset(removed)):
                return list(removed.values())
            if frozenset(removed) not in tried:
                return []
            report = tried[frozenset(removed)][1]
        return []

    def _warn(self, removed: Sequence[Removed], first: Attempt) -> None:
        if [r.name for r in removed] == [TF32]:
            # torch's settings allow it; that eager's kernels did not use it is chance.
            log.info("%s graph: convolutions do not use TF32, as eager's here: %s", self.report.kind, first)
            return
        names = ", ".join(f"{r.kind} '{r.name}'" + (f" ({r.message})" if r.message else "") for r in removed)
        what = f"runs without {names}" if names else "was kept (mode 'soft')"
        if removed and removed[0].kind == "graph":
            what = "runs as it was captured"
        if first.precise:
            category: type[VerificationWarning | PrecisionWarning] = PrecisionWarning
            fault = "is as close to float64 as eager but not to eager"
        else:
            category, fault = VerificationWarning, "is wrong"
        warnings.warn(
            category(f"hypatia: the compiled {self.report.kind} graph {fault}; it {what}: {first}"),
            stacklevel=2,
        )


def _when_called(make: Callable[[], Forward]) -> Forward:
    made = functools.cache(make)
    return lambda args: made()(args)


def _called(forward: Forward, inputs: Sequence[object]) -> object:
    return forward(list(inputs))


def device_of(values: Sequence[object]) -> torch.device:
    """The device that computes with these values."""
    devices = [v.device for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _checkable(args: Sequence[object]) -> bool:
    """Whether these are real values that can be computed with more than once."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if any(isinstance(t, FakeTensor) or t.is_meta or _torch.is_functional_tensor(t) for t in tensors):
        return False
    if any(table.of(device).is_recording() for device in {t.device for t in tensors}):
        return False
    # That flag is the process's: while another thread compiles, calls of this one are checked all the same.
    return not (torch.compiler.is_compiling() and _torch.dispatch_mode_count())
