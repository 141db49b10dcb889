"""A model compiled for training, for one kind of inputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from .. import _torch
from .._torch import FakeTensorMode, TracingContext, tracing
from ..capture.layout import overlaps
from ..capture.model_state import Parts
from ..capture.op_facts import effects_of
from ..capture.records import value_of
from ..capture.size_ranges import Ranges, open_examples
from ..capture.trace import distinct, exported
from ..compiler.report import GraphReport
from ..devices import table
from ..errors import UnsupportedError
from ..execute import choose
from ..execute.changes import Counts, State
from ..options import Options
from ..verifier.first_call import device_of
from ..verifier.same_layout import has_same_layout
from .call_key import Signature, kind_in_training
from .dynamo import hypatia as backend
from .dynamo_pass import Pass
from .flat_model import FlatModel
from .rewritten import Rewritten
from .step_forms import let_go
from .step_of_passes import lifted, step_of
from .structure_code import BuildResult, Take, taker
from .train_dynamo import Step, laid_out

log = logging.getLogger(__name__)

TrainingKey = tuple[bool, Signature, tuple[bool, ...]]
"""What a model is compiled for: its mode, the arguments, and which of them have gradients."""


class CompiledTraining:
    """The model compiled for training: forward and backward graphs behind one autograd function."""

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
        self.signature = signature
        self.open: Ranges = {}
        """The least and greatest value of sizes that are left open, by leaf and dimension."""
        self.parts = Parts(model)
        self.reports: list[GraphReport] = []
        self.eager = False
        """The model trains faster as it is."""
        self.step: Step | None = None
        """Runs both graphs without what AOTAutograd does around them."""
        self.plain = signature.plain
        """The arguments are tensors, by place."""
        self.single = False
        """The model returns one tensor."""
        self.take: Take = lambda args, kwargs: None
        self.build_result: BuildResult
        self._run: Callable[..., Any] | None = None
        self._parameters = list(model.parameters())
        self._wanted = [p.requires_grad for p in self._parameters]
        self._flat = FlatModel(model, signature)
        inputs = distinct(model, tuple([t for t in leaves if isinstance(t, torch.Tensor)]))
        self._kinds = [kind_in_training(t) for t in inputs]
        self._as_it_is = False
        self._waiting: list[Pass] = []
        """Passes that are no step, which are compared with eager when they are verified."""
        self._changes: list[int] = []
        """Inputs that these change, by place, and buffers."""
        self._buffers: list[torch.Tensor] = []
        if why := self.parts.why_not(compiled=compiled):
            log.info("the model trains through torch.compile: it %s", why)
            return
        try:
            with _unseen():
                self._compile(inputs, options, self._dynamic(dims))
            outline = self._flat.hypatia_outline()
            self.single = outline.single
            self.take = taker(signature.spec, signature.kinds, (), outline.owned())
            self.build_result = outline.result_builder()
        except Exception:
            self._run, self.step = None, None
            log.info("the model trains through torch.compile: it cannot be exported", exc_info=True)

    def _dynamic(self, dims: Mapping[int, Set[int]] | None) -> tuple[object, ...] | None:
        """Sizes that are left open, as torch.export wants to be told."""
        if not dims:
            return None
        if not all(map(self.signature.is_tensor, dims)):
            raise UnsupportedError("numbers are not left open in training")
        auto = torch.export.Dim.AUTO
        return tuple(dict.fromkeys(dims.get(i, ()), auto) or None for i in self._places())

    def _places(self) -> list[int]:
        return [i for i in range(len(self.signature.kinds)) if self.signature.is_tensor(i)]

    def serves(self, signature: Signature, leaves: Sequence[object]) -> bool:
        """Whether a call is one of this compilation but for sizes that are left open."""
        return bool(self.open) and self.usable and signature.is_within(self.signature, self.open, leaves)

    def _compile(
        self,
        inputs: tuple[torch.Tensor, ...],
        options: Mapping[str, object],
        dynamic: tuple[object, ...] | None,
    ) -> None:
        passes: list[Pass] = []
        checks: list[Rewritten] = []
        flat = self._flat
        gm, _, wanted, reads, ranges = exported(flat, inputs, dynamic)
        self.parts.count_on(reads)
        if dynamic is None:
            mode, examples = FakeTensorMode(), list(inputs)
        else:
            mode, examples = open_examples(gm, ranges)
            self.open = {(self._places()[i], d): sizes for (i, d), sizes in ranges.items()}
        known = 0 if mode.shape_env is None else len(mode.shape_env.guards)
        # There AOTAutograd tells what it knows of inputs and results.
        with tracing(TracingContext(mode)):
            run = backend(gm, examples, options=options, reports=self.reports, passes=passes, checks=checks)
        if mode.shape_env is not None and len(mode.shape_env.guards) > known:
            raise UnsupportedError("the graphs hold for some sizes only")
        _check_gradients(passes, wanted)
        self._run = run
        weights = lifted(gm)
        self.step = step_of([*weights, *inputs], range(len(weights)), passes) if dynamic is None else None
        if self.step is not None and not self.step.random and not self.step.changed:
            self.step.again = lambda again: list(flat(*again))
        if self.step is not None and any(table.of(t.device).backward_in_threads for t in inputs):
            self.step.in_caller = Options.parse(options).backward_in_caller
        why = _why_not(gm, passes)
        if not all(check.agrees(inputs) for check in checks):
            why = "attention that was written anew is wrong"
        if not why and not effects_of(gm) and not self._lies_alike(inputs):
            why = "results would have other strides"
        if why:
            # By torch.compile the same would be wrong.
            log.info("the model trains as it is: %s", why)
            self._run, self.step, self._as_it_is = None, None, True
        elif self.step is None:
            changes = _changed(passes, len(weights) + len(inputs))
            if changes is not None:
                self._waiting = [p for p in passes if p.whole is None]
                self._buffers = [weights[i] for i in changes if i < len(weights)]
                self._changes = [i - len(weights) for i in changes if i >= len(weights)]

    def _lies_alike(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Whether results lie as the model's own do: the strides of fake tensors are not always right."""
        try:
            return has_same_layout(lambda *a: self(a), self._flat, inputs, {}, changes=True, training=True)
        except RuntimeError:
            log.info("AOTAutograd cannot make the results of the model", exc_info=True)
            return False

    @property
    def usable(self) -> bool:
        """Whether the model could be compiled here, or is known to train best as it is."""
        return self._run is not None or self._as_it_is

    def _settle(self, step: Step, leaves: Sequence[torch.Tensor]) -> None:
        """Keeps the fastest form of the step, or eager if that is faster than all of them."""
        before = step.state(device_of(leaves))
        with torch.random.fork_rng(table.random_devices(leaves)):
            forms = step.forms(leaves)
            if not forms:
                return
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
            calls = {name: functools.partial(step.by, passes, leaves) for name, passes in forms.items()}
            kept, (step.times, step.apart) = self._fastest(calls, leaves, before.counts)
        before.restore()
        step.keep(kept, forms)

    def _compare(self, run: Callable[..., object], leaves: Sequence[torch.Tensor]) -> None:
        """Keeps passes that are no step, or eager if that is faster."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        waiting, self._waiting = self._waiting, []
        before = State([*self._buffers, *(leaves[i] for i in self._changes)], device_of(leaves))
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
        try:
            with torch.random.fork_rng(table.random_devices(leaves)):
                self._fastest({"plain": lambda: run(*leaves)}, leaves, before.counts)
            if self.eager:
                let_go([p.latest() for p in waiting])
        finally:
            before.restore()

    def _fastest(
        self, forms: Mapping[str, Callable[[], object]], leaves: Sequence[torch.Tensor], counts: Counts
    ) -> choose.Choice:
        """Times training steps beside eager's, which is remembered if it is the fastest."""
        model = self.model if self.plain else self._flat
        wanted = (*self.model.parameters(), *leaves)
        eager = {"eager": lambda: model(*leaves)}
        first = table.of(device_of(leaves)).eager_wins_ties
        calls = {**eager, **forms} if first else {**forms, **eager}
        steps = {name: choose.with_backward(call, wanted) for name, call in calls.items()}
        choice = choose.fastest(steps, device_of(leaves), counts=counts)
        self.eager = choice.kept == "eager"
        for report in self.reports if self.eager else ():
            report.kept = "eager"
        return choice

    def is_direct(self) -> bool:
        """Whether both passes can run without autograd: there is one result, and nobody else listens."""
        step = self.step
        return (
            step is not None
            and step.settled
            and not self.eager
            and self.single
            and step.wanted == [0]
            and not _torch.functorch_active()
            and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters)
        )

    def both(
        self,
        inputs: tuple[torch.Tensor, ...],
        loss: Callable[[torch.Tensor], torch.Tensor] | None,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """Both passes; the loss, or the result."""
        step = self.step
        assert step is not None
        leaves = [*step.parameters, *inputs]
        with torch.no_grad():
            (result,), saved, besides = step.passes.forward(list(leaves))
        returned = result
        if loss is not None:
            with torch.enable_grad():
                returned = loss(result.requires_grad_())
            (gradient,) = torch.autograd.grad(returned, result)
            returned = returned.detach()
        else:
            assert gradient is not None
            if gradient.shape != result.shape:
                raise RuntimeError(
                    f"the gradient of a result of {result.shape} has the shape {gradient.shape}"
                )
        gradient = laid_out(gradient.to(result.dtype), step.strides[0])
        with torch.no_grad():
            found = step.passes.backward(saved, besides, [gradient])
            for leaf, grad in zip(leaves, found, strict=True):
                if grad is None:
                    continue
                if leaf.grad is None:
                    leaf.grad = grad
                else:
                    leaf.grad.add_(grad)
        return returned

    def accepts(self, flat: tuple[object, ...]) -> bool:
        """Whether these tensors and the model are as they were, at a glance."""
        return (
            len(flat) == len(self._kinds)
            # Passes without a step may change inputs, of which two could be one.
            and (self.step is not None or len(flat) < 2)
            and all(
                isinstance(a, torch.Tensor) and kind_in_training(a) == kind
                for a, kind in zip(flat, self._kinds, strict=True)
            )
            and (self.eager or self._holds())
        )

    def _holds(self) -> bool:
        return [p.requires_grad for p in self._parameters] == self._wanted and self.parts.hold()

    def __call__(self, flat: Sequence[Any]) -> Sequence[object] | None:
        """The results, with gradients; none if the model is to run as it is."""
        if self._as_it_is or self.eager:
            return None
        step = self.step
        if step is None or _torch.functorch_active():
            assert self._run is not None
            if self._waiting and all(p.settled() for p in self._waiting) and not _is_seen():
                self._compare(self._run, flat)
                if self.eager:
                    return None
            results: Sequence[object] = self._run(*flat)
            return results
        if not step.settled and step.ready and not _torch.saved_tensors_are_seen():
            self._settle(step, flat)
            if self.eager:
                return None
        return step(flat)


def _is_seen() -> bool:
    """Whether calls that are only timed would be seen."""
    return _torch.functorch_active() or _torch.saved_tensors_are_seen()


def _unseen() -> AbstractContextManager[object]:
    """Calls inside are only tried: a checkpoint does not count what autograd keeps of them."""
    if not _torch.saved_tensors_are_seen():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def _changed(passes: Sequence[Pass], count: int) -> list[int] | None:
    """Which of so many inputs of the forward graph are changed; none if it is not known."""
    known = next((p.metadata for p in passes if p.kind != "backward"), None)
    if known is None or len(known.input_info) != count:
        return None
    if any(info.mutates_metadata or info.mutates_storage_metadata for info in known.input_info):
        return None
    return [i for i, info in enumerate(known.input_info) if info.mutates_data]


def _why_not(gm: fx.GraphModule, passes: Sequence[Pass]) -> str:
    """Why AOTAutograd's functions cannot stand for the model; empty if they can."""
    (output,) = gm.graph.find_nodes(op="output")
    results = [value_of(n) for n in output.args[0] if isinstance(n, fx.Node)]
    if any(isinstance(r, torch.Tensor) and overlaps(r) for r in results):
        # It makes gradients lie as the results do, where they would overwrite each other.
        return "a result has elements that share memory"
    known = next((p.metadata for p in passes if p.kind != "backward"), None)
    if known is not None and any(i.mutates_data and i.requires_grad for i in known.input_info):
        # Its history would be that of one function, which has no second backward pass.
        return "a buffer or an input is changed by values that have gradients"
    return ""


def _check_gradients(passes: Sequence[Pass], wanted: Sequence[bool]) -> None:
    """Refuses passes whose results have gradients where eager's have none, or the other way round."""
    known = next((p.metadata for p in passes if p.kind != "backward"), None)
    if known is None:
        return
    found = [r.requires_grad for r in known.output_info if issubclass(r.raw_type, torch.Tensor)]
    if found != list(wanted):
        raise UnsupportedError("a captured graph would lose gradients that the model's results have")
