"""A model compiled for training, for one kind of inputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .. import _torch
from .._torch import FakeTensorMode, TracingContext, pytree, tracing
from ..capture.layout import overlaps
from ..capture.model_state import Parts
from ..capture.records import value_of
from ..capture.trace import distinct, exported
from ..compiler.report import GraphReport
from ..errors import UnsupportedError
from ..execute import choose
from ..options import Options
from ..verifier.first_call import device_of, effects_of
from ..verifier.same_layout import lies_alike
from .call_key import trained_kind
from .dynamo import Pass
from .dynamo import hypatia as backend
from .train_dynamo import Step, laid_out, step_of

log = logging.getLogger(__name__)


class Trained:
    """The model compiled for training: forward and backward graphs behind one autograd function."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        options: Mapping[str, object],
        *,
        compiled: bool = True,
    ) -> None:
        self.model = model
        self.parts = Parts(model)
        self.reports: list[GraphReport] = []
        self.eager = False
        """The model trains faster as it is."""
        self.step: Step | None = None
        """Runs both graphs without what AOTAutograd does around them."""
        self._run: Callable[..., Any] | None = None
        self._parameters = list(model.parameters())
        self._wanted = [p.requires_grad for p in self._parameters]
        args = distinct(model, args)
        leaves, self._form = pytree.tree_flatten(args)
        self._kinds = [trained_kind(leaf) for leaf in leaves]
        self._positional = all(isinstance(a, torch.Tensor) for a in args)
        self._as_it_is = False
        if self.parts.hooked or not compiled:
            return
        passes: list[Pass] = []
        try:
            gm, self._spec, wanted, reads = exported(model, args)
            self.parts.count_on(reads)
            # There AOTAutograd tells what it knows of inputs and results.
            with tracing(TracingContext(FakeTensorMode())):
                run = backend(gm, leaves, options=options, reports=self.reports, passes=passes)
            _check_gradients(passes, wanted)
            self._run = run
            self._single = self._spec.is_leaf()
            self.step = step_of(gm, leaves, passes)
            if self.step is not None and self._positional and not self.step.random:
                self.step.again = lambda inputs: pytree.tree_leaves(model(*inputs))
            if self.step is not None and any(t.is_cuda for t in leaves):
                self.step.in_caller = Options.parse(options).backward_in_caller
            why = _why_not(gm, passes)
            if not why and not effects_of(gm) and not self._lies_alike(args):
                why = "results would lie otherwise in memory"
            if why:
                # By torch.compile the same would be wrong.
                log.info("the model trains as it is: %s", why)
                self._run, self.step, self._as_it_is = None, None, True
        except Exception:
            log.info("the model trains through torch.compile: it cannot be exported", exc_info=True)

    def _lies_alike(self, args: tuple[object, ...]) -> bool:
        """Whether results lie as the model's own do: torch does not always foretell their strides."""
        try:
            return lies_alike(
                lambda *a: self(pytree.tree_leaves(a)), self.model, args, {}, changes=True, training=True
            )
        except RuntimeError:
            log.info("AOTAutograd cannot make the results of the model", exc_info=True)
            return False

    @property
    def usable(self) -> bool:
        """Whether the model could be compiled here, or is known to train best as it is."""
        return self._run is not None or self._as_it_is

    def _settle(self, step: Step, leaves: Sequence[Any]) -> None:
        """Keeps the fastest form of the step, or eager if that is faster than all of them."""
        device = device_of(leaves)
        with torch.random.fork_rng(sorted({t.device.index for t in leaves if t.is_cuda})):
            forms = step.forms(leaves)
            if not forms:
                return
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
            wanted = (*self.model.parameters(), *leaves)
            calls: dict[str, Callable[[], object]] = {
                name: functools.partial(step.by, passes, leaves) for name, passes in forms.items()
            }
            calls["eager"] = lambda: self._as_model(leaves)
            steps = {name: choose.with_backward(call, wanted) for name, call in calls.items()}
            kept, (step.times, step.apart) = choose.fastest(steps, device)
        step.passes, step.settled = forms.get(kept, step.passes), True
        self.eager = kept == "eager"

    def _as_model(self, leaves: Sequence[Any]) -> Any:
        return self.model(*pytree.tree_unflatten(list(leaves), self._form))

    def is_direct(self) -> bool:
        """Whether both passes can run without autograd: there is one result, and nobody else listens."""
        step = self.step
        return (
            step is not None
            and step.settled
            and not self.eager
            and self._single
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

    def accepts(self, args: tuple[object, ...]) -> bool:
        """Whether these inputs and the model are as they were, at a glance."""
        return (
            self._positional
            and len(args) == len(self._kinds)
            # Passes without a step may change inputs, of which two could be one.
            and (self.step is not None or len(args) < 2)
            and all(
                isinstance(a, torch.Tensor) and trained_kind(a) == kind
                for a, kind in zip(args, self._kinds, strict=True)
            )
            and (self.eager or self._holds())
        )

    def _holds(self) -> bool:
        return [p.requires_grad for p in self._parameters] == self._wanted and self.parts.hold()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, with gradients."""
        if self._as_it_is:
            return self._as_model(leaves)
        step = self.step
        if step is None or _torch.functorch_active():
            assert self._run is not None
            results = self._run(*leaves)
        else:
            if not step.settled and step.ready:
                self._settle(step, leaves)
            if self.eager:
                return self._as_model(leaves)
            results = step(leaves)
        return results[0] if self._single else pytree.tree_unflatten(list(results), self._spec)


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
