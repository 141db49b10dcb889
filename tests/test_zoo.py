"""Real architectures through the backend under test: inference, and one training step, against eager.

Outputs, parameter gradients and buffers must be as close to the float64 model's as eager's are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from support import (
    BACKEND,
    Reference,
    assert_as_close_as_eager,
    captured_count,
    compile_count,
    copied,
    fresh_dynamo,
    other_values,
    tensors,
)
from zoo import ZOO, Entry, settle_statistics

SEED = 7

pytestmark = pytest.mark.filterwarnings("error::hypatia.errors.PrecisionWarning")
"""A model that is rolled back is checked as it was captured, which is no check."""

QUICK_IN_EVAL = {"mlp_3", "bert", "vit", "resnet_short", "unet"}
"""Entries whose gradients in eval mode (no dropout, frozen statistics) are checked in every run."""


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    fresh_dynamo()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    fresh_dynamo()
    # What lived longer than a test stays.
    gc.collect(1)


@dataclass
class Step:
    """What one call (and one backward) of a model left behind."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


class Subject:
    """A model of the zoo and its arguments, in four versions: eager, compiled, float64 and nudged float64."""

    def __init__(self, entry: Entry, *, train: bool = False) -> None:
        self.model = entry.model().train(train)
        self.arguments = entry.arguments()

    def eager(self) -> tuple[nn.Module, Any]:
        return copy.deepcopy(self.model), copied(self.arguments)

    def double(self, *, nudge: bool = False) -> tuple[nn.Module, Any]:
        model = copy.deepcopy(self.model).double()
        if nudge:
            with torch.no_grad():
                for weight, moved in zip(
                    model.parameters(), copied(list(model.parameters()), nudge=True), strict=True
                ):
                    weight.copy_(moved)
        return model, copied(self.arguments, double=True, nudge=nudge)


def infer(model: nn.Module, arguments: Any) -> Step:
    positional, named = arguments
    with torch.no_grad():
        return Step(tensors(model(*positional, **named)), [], [])


def train(model: nn.Module, arguments: Any) -> Step:
    """One forward and backward from a fixed cotangent, the random numbers of dropout seeded."""
    positional, named = arguments
    torch.manual_seed(SEED)
    outputs = [out for out in tensors(model(*positional, **named)) if out.requires_grad]
    dice = torch.Generator().manual_seed(SEED)
    start = [torch.randn(out.shape, generator=dice, dtype=torch.float32).to(out.dtype) for out in outputs]
    torch.autograd.backward(outputs, start)
    return Step(
        outputs,
        [parameter.grad for parameter in model.parameters()],
        [buffer.clone() for buffer in model.buffers()],
    )


def check(subject: Subject, compiled: Step, eager: Step, work: Any) -> None:
    try:
        exact = work(*subject.double())
    except RuntimeError:
        exact = None

    nudged: list[Step] = []

    def again() -> Step:
        if not nudged:
            nudged.append(work(*subject.double(nudge=True)))
        return nudged[0]

    for part in ("outputs", "gradients", "buffers"):
        reference = exact and Reference(
            tensors(getattr(exact, part)), lambda part=part: tensors(getattr(again(), part))
        )
        assert_as_close_as_eager(
            getattr(compiled, part), getattr(eager, part), reference, strides=part == "outputs", label=part
        )


def zoo(*extra: Any, quick: Callable[[Entry], bool] = lambda entry: not entry.slow) -> list[Any]:
    """Parameters for every entry; those that are not quick are left to the full run."""
    return [
        pytest.param(
            entry,
            *extra,
            id="-".join([name, *extra]),
            marks=[pytest.mark.zoo] if quick(entry) else [pytest.mark.zoo, pytest.mark.slow],
        )
        for name, entry in ZOO.items()
    ]


def assert_compiled(before: int) -> None:
    assert captured_count() > 0
    assert compile_count() > before, "Dynamo captured graphs, and the backend compiled none"


@pytest.mark.parametrize("entry", zoo())
def test_inference(entry: Entry) -> None:
    subject = Subject(entry)
    before = compile_count()
    (plain, arguments), (inner, compiled_arguments) = subject.eager(), subject.eager()
    compiled = torch.compile(inner, backend=BACKEND)
    check(subject, infer(compiled, compiled_arguments), infer(plain, arguments), infer)
    assert_compiled(before)

    # Weights and statistics that move in place: what was folded from the old ones must not be used again.
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.mul_(1.125)
    settle_statistics(subject.model, entry.inputs)
    for model in (plain, inner):
        model.load_state_dict(subject.model.state_dict())
    check(subject, infer(compiled, compiled_arguments), infer(plain, arguments), infer)

    # Later calls, which nothing verifies but this.
    for kind in ("moved", "ties", "nan", "strides"):
        subject.arguments = other_values(entry.arguments(), kind)
        check(
            subject,
            infer(compiled, copied(subject.arguments)),
            infer(plain, copied(subject.arguments)),
            infer,
        )


@pytest.mark.parametrize(
    ("entry", "mode"), [*zoo("train"), *zoo("eval", quick=lambda entry: entry.name in QUICK_IN_EVAL)]
)
def test_training_step(entry: Entry, mode: str) -> None:
    subject = Subject(entry, train=mode == "train")
    before = compile_count()
    (plain, arguments), (inner, compiled_arguments) = subject.eager(), subject.eager()
    eager = train(plain, arguments)
    assert all(p.grad is not None for p in plain.parameters() if p.requires_grad), "a parameter is not used"
    check(subject, train(torch.compile(inner, backend=BACKEND), compiled_arguments), eager, train)
    assert_compiled(before)
