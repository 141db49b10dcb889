"""What a model is measured beside: eager, CUDA graphs of eager, Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .. import _torch
from .._torch import pytree
from ..frontend.direct import compile as hypatia_compile
from ..verifier.gradients import cotangents, differentiable
from .measure import Call

BACKENDS = (
    *("eager", "eager-graph", "aot-eager", "inductor", "inductor-max-autotune", "inductor-freezing"),
    *("hypatia", "hypatia-direct"),
)
"""What can be measured; ``eager-graph`` is eager under a CUDA graph, ``aot-eager`` a call through
torch.compile that changes nothing, ``hypatia-direct`` a call through hypatia.compile."""

AT_ONCE = ("eager-graph", "inductor-freezing")
"""Backends whose first call is made while they are set up, on the inputs alone."""


class NotMeasured(Exception):  # noqa: N818 (no error: the reason why a cell stays empty)
    """Why a backend was left out."""


def compiled_by(
    name: str, model: nn.Module, inputs: Sequence[torch.Tensor], training: bool
) -> Callable[..., object]:
    """The model as a backend of this module compiles it, before its first call."""
    if name == "eager":
        return model
    if name == "eager-graph":
        if inputs[0].device.type != "cuda":
            raise NotMeasured("a CUDA graph needs a GPU")
        if training:
            raise NotMeasured("eager under a CUDA graph is measured in inference only")
        return _graphed(model, inputs)
    if name == "hypatia-direct":
        return hypatia_compile(model, *inputs)
    if name == "inductor-freezing":
        if training:
            raise NotMeasured("weights are frozen in inference only")
        return _frozen(model, inputs)
    if name == "inductor-max-autotune":
        return torch.compile(model, backend="inductor", mode="max-autotune", dynamic=False)
    if name in ("aot-eager", "inductor", "hypatia"):
        return torch.compile(model, backend=name.replace("-", "_"), dynamic=False)
    raise NotMeasured(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")


def _frozen(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """By Inductor with freezing and max-autotune, compiled already."""

    # As options they tell Dynamo that this is another compiler than plain Inductor; in some releases
    # freezing does nothing as an option.
    settings = {"freezing": True, "max_autotune": True}
    compiled = torch.compile(model, backend="inductor", options=dict(settings), dynamic=False)
    with torch.no_grad(), _torch.inductor_config.patch(settings):
        compiled(*inputs)
    return compiled


def _graphed(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """Eager as one CUDA graph: inputs are copied in, results are cloned out, as a caller would have to."""
    still = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(*still)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = model(*still)

    def replay(*given: torch.Tensor) -> object:
        for place, x in zip(still, given, strict=True):
            place.copy_(x)
        graph.replay()
        return pytree.tree_map(torch.clone, results)

    return replay


def training_step(compiled: Callable[..., object], model: nn.Module, inputs: Sequence[torch.Tensor]) -> Call:
    """Forward and backward; gradients are dropped before, as optimizers do."""
    starts: list[torch.Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        outputs = differentiable(compiled(*inputs))
        starts[:] = starts or cotangents(outputs)
        torch.autograd.backward(outputs, starts)

    return step
