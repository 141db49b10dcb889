"""The first call of a compiled graph: it is checked, and what is wrong is rolled back.

Only the kernel or rule that is to blame is taken out, and the whole graph if there is none. Later calls
cost nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from . import pipeline
from .checking import Comparer, Comparison, memory_allowed
from .culprit import Part, broken_steps, smallest
from .errors import PrecisionWarning, VerificationWarning
from .report import Check, GraphReport, Removed
from .yardstick import RandomState, changed_inputs, devices_of

log = logging.getLogger(__name__)

TRIALS = 40
"""Compilations that the search for a culprit may take."""

ROUNDS = 4
"""Proofs that are searched for a wrong rule, one after the other."""

Recompile = Callable[[frozenset[Part]], tuple[fx.GraphModule, GraphReport | None]]
Forward = Callable[[list[Any]], Any]


@dataclasses.dataclass
class Form:
    """A form of the graph and how to run it."""

    gm: fx.GraphModule
    forward: Forward


@dataclasses.dataclass
class Attempt:
    """A compiled form that was run once: what it returned, and how that compares with eager."""

    results: Any
    comparison: Comparison | None
    failure: str
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether the run may be kept."""
        return not self.failure and self.comparison is not None and self.comparison.ok

    @property
    def precise(self) -> bool:
        """Whether float64 has nothing against the results, whatever eager has."""
        return self.comparison is not None and all(r.error <= r.allowed for r in self.comparison.results)

    def __str__(self) -> str:
        worst = self.comparison.worst if self.comparison is not None else None
        return self.failure or (str(worst) if worst is not None else "no difference")


class Guard:
    """Runs a compiled graph; the first call decides which form of it is kept."""

    def __init__(
        self,
        original: fx.GraphModule,
        compiled: fx.GraphModule,
        report: GraphReport,
        mode: str,
        recompile: Recompile,
        runnable: Callable[[fx.GraphModule], Forward],
        *,
        training: bool = False,
    ) -> None:
        self.original = original
        self.report = report
        self.mode = mode
        self.recompile = recompile
        self.runnable = runnable
        self.training = training
        self.compiled = Form(compiled, runnable(compiled))
        self.kept = compiled
        self.forward: Forward = self.first_call
        self._lock = threading.RLock()
        self._settled = False

    def first_call(self, args: list[Any]) -> Any:
        """Runs the graph and checks what it returns; other threads wait for the verdict."""
        with self._lock:
            if self._settled:
                forward = self.forward
            elif not _checkable(args):
                forward = self.compiled.forward
            else:
                inputs = list(args)
                args.clear()
                return self._first_call(inputs)
        return forward(args)

    def settle(self, form: Form, check: Check) -> None:
        """Keeps one form for all later calls."""
        self.report.check = check
        self.kept = form.gm
        self.forward = form.forward
        self._settled = True
        # What only the check needed can go.
        del self.original, self.recompile, self.compiled

    def _first_call(self, inputs: list[Any]) -> Any:
        start = time.perf_counter()
        trial = _Trial(self.original, inputs, strict=self.mode == "strict", training=self.training)
        try:
            form, removed, attempt = self._decide(trial)
        except BaseException as error:
            trial.random.restore()
            if pipeline.raise_errors or not isinstance(error, Exception):
                raise
            log.warning("%s graph could not be verified", self.report.kind, exc_info=True)
            form = self._as_captured() if self.mode == "strict" else self.compiled
            removed, attempt = [], Attempt(None, None, f"not verified: {error}")
        if attempt.error is not None:
            # The user's own error: eager raises it too, and says it in its own words.
            trial.random.restore()
            return self.runnable(self.original)(inputs)
        seconds = time.perf_counter() - start - trial.seconds
        self.settle(form, trial.summary(self.mode, removed, attempt, seconds))
        if not attempt.ok or removed:
            self._warn(removed, trial.first)
        if trial.changed or attempt.results is None:
            # Checked on copies of what the graph changes: now the call itself.
            trial.random.restore()
            return form.forward(inputs)
        trial.after.restore()
        return attempt.results

    def _as_captured(self) -> Form:
        return Form(self.original, self.runnable(self.original))

    def _decide(self, trial: _Trial) -> tuple[Form, list[Removed], Attempt]:
        attempt = trial.run(self.compiled.forward)
        if attempt.ok or (attempt.error is not None and trial.eager_fails()):
            return self.compiled, [], attempt
        log.info("%s graph: %s", self.report.kind, attempt)
        if self.mode != "strict" and attempt.error is None:
            return self.compiled, [], attempt
        return self._rolled_back(trial)

    def _rolled_back(self, trial: _Trial) -> tuple[Form, list[Removed], Attempt]:
        tried: dict[frozenset[Part], tuple[Form, GraphReport, Attempt]] = {}

        def works(without: frozenset[Part]) -> bool:
            if without not in tried:
                if len(tried) >= TRIALS:
                    return False
                candidate, report = self.recompile(without)
                if report is None:
                    return False
                form = Form(candidate, self.runnable(candidate))
                tried[without] = (form, report, trial.run(form.forward))
            return tried[without][2].ok

        removed = (
            self._halved([p for p in self.report.parts if p[0] == "kernel"], works)
            or self._from_proof(trial, works, tried)
            or self._halved(self.report.parts, works)
        )
        if removed:
            form, _, attempt = tried[frozenset((r.kind, r.name) for r in removed)]
            return form, removed, attempt
        form = self._as_captured()
        removed = [Removed("graph", self.report.kind, "no rule or kernel is to blame alone")]
        return form, removed, trial.run(form.forward)

    def _halved(self, parts: Sequence[Part], works: Callable[[frozenset[Part]], bool]) -> list[Removed]:
        """The smallest set of these parts without which the graph is right."""
        if not parts or not works(frozenset(parts)):
            return []
        culprits = smallest(parts, works)
        if not works(frozenset(culprits)):
            return []
        return [Removed(kind, name, self.report.law(kind, name)) for kind, name in culprits]

    def _from_proof(
        self,
        trial: _Trial,
        works: Callable[[frozenset[Part]], bool],
        tried: Mapping[frozenset[Part], tuple[Form, GraphReport, Attempt]],
    ) -> list[Removed]:
        """The rules of the steps that do not hold on these inputs; leaving one out may bring in another."""
        removed: dict[Part, Removed] = {}
        report = self.report
        inputs = {n.name: v for n, v in trial.comparer.inputs.items()}
        for _ in range(ROUNDS):
            before = len(removed)
            try:
                with _quietly():
                    for step in broken_steps(self.original, report, inputs, trial.random):
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
        names = ", ".join(f"{r.kind} '{r.name}'" + (f" ({r.message})" if r.message else "") for r in removed)
        what = f"runs without {names}" if names else "was kept (mode 'soft')"
        if removed and removed[0].kind == "graph":
            what = "runs as it was captured"
        if first.precise:
            category = PrecisionWarning
            fault = "is as close to float64 as eager but further than 1e-5 from eager"
        else:
            category, fault = VerificationWarning, "is wrong"
        warnings.warn(
            category(f"hypatia: the compiled {self.report.kind} graph {fault}; it {what}: {first}"),
            stacklevel=2,
        )


class _Trial:
    """One set of inputs, on which forms of a graph are run and compared."""

    def __init__(self, original: fx.GraphModule, inputs: list[Any], *, strict: bool, training: bool) -> None:
        placeholders = original.graph.find_nodes(op="placeholder")
        self.original = original
        self.inputs = inputs
        self.strict = strict
        self.training = training
        self.changed = changed_inputs(original)
        self.first = Attempt(None, None, "")
        values = dict(zip(placeholders, inputs, strict=True))
        self.before = {n: pytree.tree_map(_copy, values[n]) for n in self.changed if n in values}
        self.order = placeholders
        self.random = RandomState(devices_of(inputs))
        self.after = self.random.copy()
        (output,) = original.graph.find_nodes(op="output")
        self.results = pytree.tree_leaves(output.args[0], is_leaf=lambda a: isinstance(a, fx.Node))
        values.update({n: _attribute(original, n) for n in original.graph.find_nodes(op="get_attr")})
        values.update(self.before)
        self.comparer = Comparer(original, values, self.random, lambda: memory_allowed(inputs))
        self.sums: dict[fx.Node, int] | None = None
        self.runs = 0
        self.seconds = 0.0

    def run(self, forward: Forward) -> Attempt:
        """Runs a form of the graph, on copies of what it changes, and compares."""
        attempt = self._run(forward)
        if not self.runs:
            self.first = attempt
        self.runs += 1
        return attempt

    def _run(self, forward: Forward) -> Attempt:
        copies = {n: pytree.tree_map(_copy, v) for n, v in self.before.items()}
        args = [copies.get(n, v) for n, v in zip(self.order, self.inputs, strict=True)]
        if self.strict and self.sums is None:
            with _quietly():
                self.sums = self._checksums()
        self.random.restore()
        start = time.perf_counter()
        try:
            results = forward(args)
        except Exception as error:
            return Attempt(None, None, f"{type(error).__name__}: {error}", error)
        if not self.runs:
            _synchronize(self.random.devices)
            self.seconds = time.perf_counter() - start
        self.after.save()
        try:
            with _quietly():
                written = self._written()
                if written:
                    return Attempt(results, None, f"{written} was changed by the compiled graph")
                return Attempt(results, self._compare(results, copies), "")
        except (torch.OutOfMemoryError, MemoryError) as error:
            return self._unchecked(results, error)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            return self._unchecked(results, error)
        finally:
            self.after.restore()

    def _unchecked(self, results: Any, error: BaseException) -> Attempt:
        log.warning("not verified: out of memory (%s)", error)
        return Attempt(results, Comparison(notes=["not verified: out of memory"]), "")

    def _compare(self, results: Any, copies: dict[fx.Node, Any]) -> Comparison:
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        values = {n: v for n, v in zip(self.results, flat, strict=True) if isinstance(n, fx.Node)}
        values.update(copies)
        comparison = self.comparer.compare(values)
        if self.training:
            self.comparer.compare_gradients(values, comparison)
        return comparison

    def eager_fails(self) -> bool:
        """Whether the original raises an error on these inputs too."""
        copies = {n: pytree.tree_map(_copy, v) for n, v in self.before.items()}
        values = [copies.get(n, v) for n, v in zip(self.order, self.inputs, strict=True)]
        self.random.restore()
        try:
            fx.Interpreter(self.original).run(*values, enable_io_processing=False)
        except Exception:
            return True
        return False

    def _checksums(self) -> dict[fx.Node, int]:
        """Sums over the bits of every input that the graph must not change."""
        kept = (p for p in zip(self.order, self.inputs, strict=True) if p[0] not in self.before)
        return {n: checksum(v) for n, v in kept if isinstance(v, torch.Tensor)}

    def _written(self) -> str:
        """The name of an input that was changed without leave."""
        if self.sums is None:
            return ""
        before, self.sums = self.sums, self._checksums()
        return next((n.name for n, s in before.items() if self.sums[n] != s), "")

    def summary(self, mode: str, removed: list[Removed], attempt: Attempt, seconds: float) -> Check:
        """What is reported."""
        comparison = attempt.comparison or Comparison()
        status = "rolled back" if removed else "passed" if attempt.ok else "kept"
        if attempt.comparison is None and not removed:
            status = "not checked"
        notes = list(comparison.notes)
        if removed:
            notes.append(f"before: {self.first}")
        if self.sums is not None and attempt.ok:
            notes.append(f"{len(self.sums)} inputs and parameters unchanged by checksum")
        return Check(mode, status, comparison.equal, comparison.results, removed, notes, seconds)


def checksum(value: torch.Tensor) -> int:
    """A sum over the bits of a tensor."""
    plain = value.detach()
    if plain.layout is not torch.strided or plain.is_quantized or not plain.numel():
        return 0
    data = plain.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = 0
    if whole and data.storage_offset() % 8 == 0:
        total = int(data[:whole].view(torch.int64).sum())
        data = data[whole:]
    return total + int(data.to(torch.int64).sum()) if data.numel() else total


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Runs ops without gradients and unseen by dispatch modes: torch's own check of a first call, and
    a user's counters."""
    with torch.no_grad(), _disable_current_modes():
        yield


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).synchronize(device)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for part in node.target.split("."):
        value = getattr(value, part)
    return value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _checkable(args: Sequence[Any]) -> bool:
    """Whether these are real values that can be computed with more than once."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if any(isinstance(t, FakeTensor) or t.is_meta or torch._is_functional_tensor(t) for t in tensors):
        return False
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return not torch.compiler.is_compiling()
