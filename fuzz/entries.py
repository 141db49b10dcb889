"""How programs are compiled: the four entries, with the choice among timed forms made by the case."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hypatia
from hypatia import faults
from hypatia.devices import table
from hypatia.errors import PrecisionWarning, VerificationWarning
from hypatia.execute import choose, timing
from hypatia.frontend import direct
from hypatia.frontend.dynamo import collecting, register

from .case import Entry

AT_ONCE = {"SECONDS": 0.005, "PAUSES": (), "NARROW": 1e9, "LATER": (2,), "LAPS": 1}
"""How forms are timed: briefly, and a plan that lost runs at the second call once more."""


class Seen(logging.Handler):
    """What the compiler said while a case ran."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rolled_back: list[str] = []
        self.imprecise: list[str] = []
        self.internal: list[str] = []
        self.plans = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Notes internal errors."""
        text = record.getMessage()
        if "internal error" in text or record.levelno >= logging.WARNING:
            error = record.exc_info[1] if record.exc_info else None
            self.internal.append(f"{text}: {type(error).__name__}: {error}" if error else text)


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    """Collects warnings and internal errors of what is compiled inside."""
    seen = Seen()
    log = logging.getLogger("hypatia")
    log.addHandler(seen)
    show = warnings.showwarning

    def shown(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if issubclass(category, PrecisionWarning):
            seen.imprecise.append(str(message))
        elif issubclass(category, VerificationWarning):
            seen.rolled_back.append(str(message))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = shown
            yield seen
    finally:
        warnings.showwarning = show
        log.removeHandler(seen)


@contextlib.contextmanager
def won_by(form: str) -> Iterator[None]:
    """Inside, this form of a graph is the fastest. The choice is left to a clock only if that is asked for:
    users' forms are called many times before one is kept."""
    if form == "clock":
        # Two programs are compared as on a GPU.
        both = mock.patch.object(table.Cpu, "compares_programs", True)
        with mock.patch.multiple(choose, **AT_ONCE), both:
            yield
        return
    order = [form, "plan", "plain", "recording", "graph", "eager", "plainer plan"]

    def instead(forms: Sequence[str]) -> dict[str, float]:
        return {name: 1.0 + order.index(name) if name in order else 9.0 for name in forms}

    with mock.patch.object(timing, "instead", instead), mock.patch.object(choose, "PAUSES", ()):
        yield


class Compiled:
    """A compiled program, and the reports of its graphs."""

    def __init__(self, entry: Entry, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entry = entry
        self.model = model
        self.reports: list[Any] = []
        options = dict(entry.options)
        with self._set_up():
            self.call: Callable[..., Any] = self._made(options, args, kwargs)

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(won_by(self.entry.form))
            if self.entry.random_costs is not None:
                stack.enter_context(faults.any_equal(self.entry.random_costs))
            stack.enter_context(torch.set_grad_enabled(self.entry.training))
            found = stack.enter_context(collecting())
            try:
                yield
            finally:
                self.reports += [r for r in found if r not in self.reports]

    def _made(
        self, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        entry = self.entry
        if entry.name == "torch":
            torch._dynamo.reset()
            if entry.peer:
                return torch.compile(self.model, backend="aot_eager", dynamic=entry.dynamic)
            register()
            return torch.compile(self.model, backend="hypatia", options=options, dynamic=entry.dynamic)
        if entry.name == "optimize":
            opened = _opened(args) if entry.dynamic and not kwargs else None
            if entry.peer:
                return torch.export.export(self.model, args, kwargs, dynamic_shapes=opened).module()
            made = hypatia.optimize(self.model, *args, kwargs=kwargs, options=options, dynamic_shapes=opened)
            self._note(made)
            if entry.again:
                faults.random_costs, random_costs = None, faults.random_costs
                try:
                    made = hypatia.optimize(made, *args, kwargs=kwargs, options=options)
                finally:
                    faults.random_costs = random_costs
                self._note(made)
            return made
        if entry.examples and not entry.training:
            return hypatia.compile(self.model, *args, kwargs=kwargs, **options)
        return hypatia.compile(self.model, **options)

    def _note(self, made: Any) -> None:
        if made.meta.get("hypatia") is not None:
            self.reports.append(made.meta["hypatia"])

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the compiled program returns."""
        with self._set_up():
            return self.call(*args, **kwargs)

    def step(self, args: tuple[Any, ...], loss: Callable[[Any], torch.Tensor]) -> Any:
        """Both passes by one call."""
        with self._set_up():
            return self.call.step(*args, loss=loss)

    def all_reports(self) -> list[Any]:
        """The reports of all graphs."""
        more = self.call.reports if isinstance(self.call, direct.CompiledModel) else []
        return self.reports + [r for r in more if r not in self.reports]

    def attends(self) -> bool:
        """Whether a graph calls torch's attention."""
        calls = [n for r in self.all_reports() for n in r.after.nodes if n.op == "call_function"]
        return any("attention" in str(n.target) for n in calls)


def _opened(args: tuple[Any, ...]) -> Any:
    """First dimensions are open, where torch.export finds that they can be."""
    auto = {0: torch.export.Dim.AUTO}
    return pytree.tree_map(
        lambda v: dict(auto) if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] > 1 else None, args
    )
