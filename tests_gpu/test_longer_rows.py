"""Products over rows that are no multiple of 16 bytes, which are written or copied with longer rows."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from forms import winning
from test_plans import _compiled
from test_products import DTYPES, _judge
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline

COLUMNS = (513, 1001, 30522, 50257)
ROWS, WIDTH = 512, 768


class Vocabulary(nn.Module):
    """A layer, logits over so many words, and the loss: in fp32, in the logits' type, or the caller's."""

    def __init__(self, words: int, bias: bool, loss: str) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.layer(x)))
        return logits if self.loss == "outside" else self.of(logits, target)

    def of(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss, large enough that gradients of 16 bits are not lost."""
        if self.loss == "wide":
            logits = logits.float()
        return 64.0 * F.cross_entropy(logits, target, reduction="sum")


class Logarithms(nn.Module):
    """What a kernel makes of the zeros behind a row is infinite, and would be seen in every sum."""

    def __init__(self, columns: int, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS if transposed else columns, WIDTH))
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logarithms = x.log()
        return torch.mm(logarithms.t() if self.transposed else logarithms, self.weight)


@contextlib.contextmanager
def _steps(noted: list[str]) -> Iterator[None]:
    """Notes the steps of all plans that are made."""
    made = pipeline.plans.planner_of

    def planner_of(*args: Any, **options: Any) -> Any:
        planner = made(*args, **options)
        if not isinstance(planner, str):
            noted.extend(json.loads(planner._first.describe())["steps"])
        return planner

    with mock.patch.object(pipeline.plans, "planner_of", planner_of):
        yield


def _padded(steps: list[str], columns: int) -> bool:
    longer = f" {(columns + 7) // 8 * 8}]"
    return any("pointwise" in step and step.endswith(longer) for step in steps)


def _gradients(
    call: Any, model: Vocabulary, x: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    result = call(x, target)
    (model.of(result, target) if model.loss == "outside" else result).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # The last columns are few, and an error of theirs would not be seen among the others.
    last = model.head.weight.shape[0] // 8 * 8
    return found | {"last words": found["head.weight"][last:]}


def check_training_steps() -> str:
    """Gradients of a head and of a layer; that of the logits is made by us or by torch, or is given."""
    done = longer = 0
    for dtype, words, loss, bias in itertools.product(
        (torch.bfloat16, torch.float16), COLUMNS, ("wide", "own", "outside"), (False, True)
    ):
        what = f"{words} words, {dtype}, loss {loss}, bias {bias}"
        torch.manual_seed(0)
        model = Vocabulary(words, bias, loss).cuda().to(dtype)
        x = torch.randn(ROWS, WIDTH, device="cuda").to(dtype)
        target = torch.randint(words, (ROWS,), device="cuda")
        wide = copy.deepcopy(model).double()
        exact = _gradients(wide, wide, x.double(), target)
        eager = _gradients(model, model, x, target)
        call, steps = hypatia.compile(model), []
        with winning("plain"), _steps(steps), warnings.catch_warnings():
            warnings.simplefilter("error", hypatia.VerificationWarning)
            for _ in range(3):
                ours = _gradients(call, model, x, target)
        unit = DTYPES[str(dtype).removeprefix("torch.")]
        for name, gradient in ours.items():
            assert gradient.is_contiguous(), f"{what}: {name}"
            _judge(f"{what}: {name}", gradient, eager[name], exact[name], unit)
        longer += _padded(steps, words)
        done += 1
        torch.cuda.empty_cache()
    assert longer, "no plan has longer rows"
    return f"{done} right, {longer} of them with longer rows"


def check_nothing_behind_rows_is_read() -> str:
    """Products over rows behind which is what is not finite, as terms and as rows of the result."""
    kinds: list[str] = []
    for dtype, columns, transposed in itertools.product(
        (torch.bfloat16, torch.float16), (1001, 1002, 1004, 4099, 50257), (False, True)
    ):
        what = f"{columns} columns, {dtype}, transposed {transposed}"
        torch.manual_seed(0)
        model = Logarithms(columns, transposed).cuda().to(dtype).eval().requires_grad_(False)
        x = torch.rand(ROWS, columns, device="cuda").add(0.1).to(dtype)
        steps: list[str] = []
        with _steps(steps):
            compiled = _compiled(model, x)
        assert _padded(steps, columns), f"{what}: {steps}"
        kinds += compiled._last.native.__self__.binding.kinds
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(x.double())
            for _ in range(3):
                out = compiled(x)
                assert out.is_contiguous()
                unit = DTYPES[str(dtype).removeprefix("torch.")]
                _judge(what, out, model(x), exact, unit)
                worst = (out.double() - exact).abs().max() / exact.abs().max()
                assert worst < 4 * unit, f"{what}: {worst:.1e}"
        torch.cuda.empty_cache()
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
