"""One set of inputs, on which forms of a graph are run and compared with the original."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import disable_current_modes, pytree
from ..capture.op_facts import changed_inputs
from ..capture.records import path_of
from ..compiler.comparison import Comparison
from ..compiler.pipeline import CompiledGraph
from ..compiler.report import Check, Removed
from ..devices.table import random_devices
from ..execute.changes import Counts, RandomState
from ..timeline import CALL, stage
from .compare import Comparer, References
from .gradients import gradients_of
from .judge import TO_EAGER
from .memory import memory_allowed
from .reference import cloned

log = logging.getLogger(__name__)

Forward = Callable[[list[object]], object]


@dataclasses.dataclass
class Form:
    """A form of the graph and how to run it."""

    compiled: CompiledGraph
    forward: Forward


@dataclasses.dataclass
class Attempt:
    """A compiled form that was run once: what it returned, and how that compares with eager."""

    results: object
    comparison: Comparison | None
    failure: str
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether the run may be kept."""
        return not self.failure and self.comparison is not None and self.comparison.ok

    @property
    def precise(self) -> bool:
        """Whether float64 has nothing against the results that it has not against eager's; an infinite
        error is an overflow that float64 does not have."""
        if self.comparison is None:
            return False
        bounds = (
            (r, r.eager_error if r.eager_error == float("inf") else 0.0) for r in self.comparison.results
        )
        return all(r.error <= max(r.allowed, own) for r, own in bounds)

    @property
    def is_chance(self) -> bool:
        """Whether eager has every result that fails further from float64 than a result may be from eager: any
        other order of roundings may fail, and nothing is wrong."""
        if self.comparison is None or not self.precise:
            return False
        failing = [r for r in self.comparison.results if not r.ok]
        limits = [(r.eager_error, TO_EAGER * max(1.0, r.scale)) for r in failing]
        return bool(limits) and all(limit < own < float("inf") for own, limit in limits)

    def __str__(self) -> str:
        worst = self.comparison.worst if self.comparison is not None else None
        return self.failure or (str(worst) if worst is not None else "no difference")


class CheckedCall:
    """One set of inputs, on which forms of a graph are run and compared."""

    def __init__(
        self,
        original: fx.GraphModule,
        inputs: list[object],
        *,
        strict: bool,
        training: bool,
        references: References | None = None,
    ) -> None:
        placeholders = original.graph.find_nodes(op="placeholder")
        self.original = original
        self.inputs = inputs
        self.strict = strict
        self.training = training
        self.changed = changed_inputs(original)
        self.first = Attempt(None, None, "")
        values = dict(zip(placeholders, inputs, strict=True))
        self.attributes = {n: _attribute(original, n) for n in original.graph.find_nodes(op="get_attr")}
        values.update(self.attributes)
        self.before = {n: pytree.tree_map(cloned, values[n]) for n in self.changed}
        self.order = placeholders
        self.random = RandomState(random_devices(inputs))
        self.after = self.random.copy()
        (output,) = original.graph.find_nodes(op="output")
        self.results = pytree.tree_leaves(output.args[0], is_leaf=lambda a: isinstance(a, fx.Node))
        values.update(self.before)
        self.comparer = Comparer(original, values, self.random, lambda: memory_allowed(inputs), references)
        self.sums: dict[fx.Node, int] | None = None
        self.runs = 0
        self.seconds = 0.0

    def run(self, form: Form) -> Attempt:
        """Runs a form of the graph, on copies of what it changes, and compares."""
        fault = misbound(self.original, form.compiled.optimized) if self.strict else ""
        attempt = Attempt(None, None, fault) if fault else self._run(form.forward)
        if not self.runs:
            self.first = attempt
        self.runs += 1
        return attempt

    def _run(self, forward: Forward) -> Attempt:
        copies = {n: pytree.tree_map(cloned, v) for n, v in self.before.items()}
        args = [copies.get(n, v) for n, v in zip(self.order, self.inputs, strict=True)]
        if self.strict and self.sums is None:
            with quietly():
                self.sums = self._checksums()
        self.random.restore()
        start = time.perf_counter()
        mine: list[torch.Tensor | None] = []
        try:
            with stage(CALL):
                results = forward(args)
            results = self._held(results)
            if self.training:
                # Now, before buffers that autograd remembers are put back.
                mine = gradients_of(self._by_node(results), self.comparer.leaves.values())
        except Exception as error:
            return Attempt(None, None, f"{type(error).__name__}: {error}", error)
        finally:
            self._put_back(copies)
        if not self.runs:
            _synchronize(self.random.devices)
            self.seconds = time.perf_counter() - start
        self.after.save()
        try:
            with quietly():
                written = self._written()
                if written:
                    return Attempt(results, None, f"{written} was changed by the compiled graph")
                return Attempt(results, self._compare(results, copies, mine), "")
        except (torch.OutOfMemoryError, MemoryError) as error:
            return self._unchecked(results, error)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            return self._unchecked(results, error)
        finally:
            self.after.restore()

    def _held(self, results: object) -> object:
        """Results whose values stay when buffers are put back: copies of those that lie in them."""
        changed = {
            buffer.untyped_storage().data_ptr()
            for node, buffer in self.attributes.items()
            if node in self.before and isinstance(buffer, torch.Tensor) and buffer.layout is torch.strided
        }
        if not changed:
            return results

        def held(value: object) -> object:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                return value
            return value.clone() if value.untyped_storage().data_ptr() in changed else value

        return pytree.tree_map(held, results)

    def _put_back(self, copies: dict[fx.Node, object]) -> None:
        """Buffers that are attributes are changed in place by a run: their new values are results, and
        the old ones come back."""
        for node, buffer in self.attributes.items():
            if node in self.before and isinstance(buffer, torch.Tensor):
                with quietly():
                    copies[node] = buffer.clone()
                    buffer.copy_(self.before[node])

    @property
    def counts(self) -> Counts:
        """The counts among what the graph changes."""
        values = self._values()
        return Counts([values[n] for n in self.before], list(self.before.values()))

    def _values(self) -> dict[fx.Node, object]:
        return {**dict(zip(self.order, self.inputs, strict=True)), **self.attributes}

    def undo(self) -> None:
        """Makes what the graph changes, and random numbers, as they were before anything ran."""
        values = self._values()
        for node, before in self.before.items():
            tensor = values[node]
            if isinstance(tensor, torch.Tensor):
                with disable_current_modes(), torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(before)
        self.random.restore()

    def _unchecked(self, results: object, error: BaseException) -> Attempt:
        log.warning("not verified: out of memory (%s)", error)
        return Attempt(results, Comparison(notes=["not verified: out of memory"]), "")

    def _by_node(self, results: object) -> dict[fx.Node, object]:
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        return {n: v for n, v in zip(self.results, flat, strict=True) if isinstance(n, fx.Node)}

    def _compare(
        self, results: object, copies: dict[fx.Node, object], mine: list[torch.Tensor | None]
    ) -> Comparison:
        comparison = self.comparer.compare({**self._by_node(results), **copies})
        if self.training:
            self.comparer.compare_gradients(mine, comparison)
        return comparison

    def eager_fails(self) -> bool:
        """Whether the original raises an error on these inputs too."""
        copies = {n: pytree.tree_map(cloned, v) for n, v in self.before.items()}
        values = [copies.get(n, v) for n, v in zip(self.order, self.inputs, strict=True)]
        self.random.restore()
        try:
            fx.Interpreter(self.original).run(*values, enable_io_processing=False)
        except Exception:
            return True
        return False

    def _checksums(self) -> dict[fx.Node, int]:
        """Sums over the bits of every input and parameter that the graph must not change."""
        values = (*zip(self.order, self.inputs, strict=True), *self.attributes.items())
        kept = (p for p in values if p[0] not in self.before)
        found = {n: _sum_of_bits(v) for n, v in kept if isinstance(v, torch.Tensor)}
        # All of a device at once: each by itself would wait for it.
        numbers: dict[fx.Node, int] = {}
        for device in {t.device for t in found.values()}:
            here = [n for n, t in found.items() if t.device == device]
            numbers.update(zip(here, torch.stack([found[n] for n in here]).tolist(), strict=True))
        return numbers

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


def misbound(original: fx.GraphModule, candidate: fx.GraphModule) -> str:
    """What is wrong with how the inputs and parameters of a graph are bound in another form of it."""
    theirs, ours = ([n.name for n in g.graph.find_nodes(op="placeholder")] for g in (original, candidate))
    if ours != theirs:
        return f"inputs are bound as {', '.join(ours)} instead of {', '.join(theirs)}"
    known = {n.target for n in original.graph.find_nodes(op="get_attr")}
    for node in candidate.graph.find_nodes(op="get_attr"):
        if node.target in known:
            here, there = _attribute(candidate, node), _attribute(original, node)
            if here is not there and isinstance(there, torch.Tensor) and checksum(here) != checksum(there):
                return f"{node.target} has other values than in the model"
    return ""


def checksum(value: torch.Tensor) -> int:
    """A sum over the bits of a tensor."""
    return int(_sum_of_bits(value))


def _sum_of_bits(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach()
    if plain.layout is not torch.strided or plain.is_quantized or not plain.numel():
        return torch.zeros((), dtype=torch.int64)
    if plain.nbytes % 8 == 0 and plain.is_contiguous() and plain.data_ptr() % 8 == 0 and not _lazy(plain):
        with contextlib.suppress(RuntimeError):
            return plain.view(-1).view(torch.int64).sum()
    data = plain.resolve_conj().resolve_neg().reshape(-1)
    # One element counts as contiguous with any stride.
    data = (data if data.stride(-1) == 1 else data.clone(memory_format=torch.contiguous_format)).view(
        torch.uint8
    )
    whole = data.numel() // 8 * 8
    rest = data[whole:].to(torch.int64).sum()
    return data[:whole].clone().view(torch.int64).sum() + rest if whole else rest


def _lazy(value: torch.Tensor) -> bool:
    return value.is_conj() or value.is_neg()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Runs ops without gradients and unseen by dispatch modes: torch's own check of a first call, and
    a user's counters."""
    with torch.no_grad(), disable_current_modes():
        yield


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).synchronize(device)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: object = gm
    for part in path_of(node).split("."):
        value = getattr(value, part)
    return value
