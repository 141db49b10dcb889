"""The forms that a model is measured in: eager, Inductor, ours, and those under CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hypatia
from hypatia.frontend.dynamo import register

from .rows import Arguments, loss_of, tensors_of

LABELS = {
    "eager": "eager",
    "graph": "graph",
    "inductor": "Inductor",
    "ro": "ro",
    "ind+g": "ind+g",
    "hypatia": "hypatia.compile",
    "torch": "torch.compile",
}
"""``graph`` is eager under a CUDA graph, ``ro`` Inductor's reduce-overhead, ``ind+g`` Inductor's default code
under a CUDA graph made by hand, ``torch`` torch.compile(backend="hypatia")."""

OURS = ("hypatia", "torch")
GPU_ONLY = ("graph", "ro", "ind+g")
INDUCTOR = ("inductor", "ro", "ind+g")

TOLD = (
    "as it is",
    "not used",
    "not recorded",
    "not verified",
    "be exported",
    "not run",
    "cannot",
    "no native plan",
    "training step:",
)
"""Words of the messages that are kept."""

Call = Callable[[Arguments], list[torch.Tensor]]
"""Results of a call as tensors: in training the loss, then the gradients."""


def forms_for(device: str, given: str, check_only: bool) -> list[str]:
    """The forms to run, in the order of `LABELS`; eager is always one of them.

    Raises:
        ValueError: one is not known.
    """
    names = given.split(",") if given else ["hypatia", "torch"] if check_only else list(LABELS)
    if unknown := [n for n in names if n not in LABELS]:
        raise ValueError(f"there is no form {unknown[0]!r}; there are {', '.join(LABELS)}")
    names = [n for n in names if device != "cpu" or n not in GPU_ONLY]
    return [n for n in LABELS if n in ("eager", *names)]


class Form:
    """A model in one form. The first call compiles it."""

    def __init__(self, name: str, model: nn.Module, example: Arguments, training: bool) -> None:
        self.name = name
        self.model = model
        self.training = training
        self.compiled: Any = self._made(example)
        self._replay = self._recorded(example) if name in ("graph", "ind+g") else None

    def _made(self, example: Arguments) -> Any:
        if self.name in ("eager", "graph"):
            return self.model
        if self.name in INDUCTOR:
            mode = "reduce-overhead" if self.name == "ro" else None
            return torch.compile(self.model, backend="inductor", mode=mode)
        if self.name == "torch":
            register()
            return torch.compile(self.model, backend="hypatia")
        if self.training:
            return hypatia.compile(self.model)
        args, kwargs = example
        return hypatia.compile(self.model, *args, kwargs=kwargs)

    def __call__(self, arguments: Arguments) -> list[torch.Tensor]:
        """What the model returns, as tensors that stay as they are."""
        if self._replay is not None:
            return self._replay(arguments)
        if self.name == "ro":
            torch.compiler.cudagraph_mark_step_begin()
        results = self._run(arguments)
        # The next call of a recorded form overwrites the results of this one.
        return [t.clone() for t in results] if self.name == "ro" and not self.training else results

    def gradients(self) -> list[torch.Tensor]:
        """Those of the last call."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _run(self, arguments: Arguments) -> list[torch.Tensor]:
        args, kwargs = arguments
        if not self.training:
            return tensors_of(self.compiled(*args, **kwargs))
        self.model.zero_grad(set_to_none=True)
        loss = loss_of(self.compiled(*args, **kwargs))
        loss.backward()
        return [loss.detach()]

    def _recorded(self, example: Arguments) -> Call:
        """As one CUDA graph: inputs are copied in, results are cloned out, as a caller would have to."""
        still: Arguments = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, example)
        places = [t for t in pytree.tree_leaves(still) if isinstance(t, torch.Tensor)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run(still)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self._run(still)
        gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]

        def replay(arguments: Arguments) -> list[torch.Tensor]:
            given = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            for place, value in zip(places, given, strict=True):
                place.copy_(value)
            # The graph writes where the gradients were when it was recorded.
            for parameter, gradient in gradients:
                parameter.grad = gradient
            graph.replay()
            return [t.clone() for t in results]

        return replay


class Messages(logging.Handler):
    """What Hypatia logs while a form is compiled: why a model runs as it is, or a plan is not recorded."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps each message that says why something is not done, once."""
        text = record.getMessage().splitlines()[0]
        if not any(words in text for words in TOLD):
            return
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            lines = str(error).strip().splitlines()
            text += f" ({type(error).__name__}: {lines[0] if lines else ''})"
        if text not in self.lines:
            self.lines.append(text)

    def __enter__(self) -> Messages:
        self._log = logging.getLogger("hypatia")
        self._level = self._log.level
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._level)
