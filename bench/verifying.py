"""What verification adds to a compile, beside what it may add: three eager calls and one in float64.

Results that are eager's bit for bit need no float64 run, which makes many checks one eager call. What
it would be if every result differed is measured too.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from hypatia.errors import VerificationWarning
from hypatia.frontend.dynamo import collecting
from hypatia.tools.workloads import NINE_MLPS, WORKLOADS
from hypatia.verifier import compare

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one model."""

    name: str
    eager: float
    float64: float
    added: float
    added_at_worst: float
    status: str

    @property
    def allowed(self) -> float:
        """Four eager calls, one of them in float64."""
        return 3 * self.eager + self.float64

    def data(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "allowed": self.allowed}


def cases(quick: bool) -> Iterator[tuple[str, nn.Module, Inputs, bool]]:
    """Name, model, inputs, training."""
    for shape in NINE_MLPS:
        large = shape.name.startswith(("large", "xlarge"))
        if not (quick and large):
            yield shape.name, shape.build().eval(), (torch.randn(shape.batch, shape.features),), False
    for name in ("bert-base", "lora") if not quick else ():
        model, inputs = WORKLOADS[name].build()
        yield name, model, inputs, False
    yield "conv + batch norm", _convolutions().eval(), (torch.randn(8, 3, 64, 64),), False
    shape = NINE_MLPS[0]
    yield f"{shape.name} step", shape.build().train(), (torch.randn(shape.batch, shape.features),), True
    yield "conv + bn step", _convolutions().train(), (torch.randn(8, 3, 64, 64),), True


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for wide, narrow in ((3, 32), (32, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(wide, narrow, 3, padding=1), nn.BatchNorm2d(narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def measure(name: str, model: nn.Module, inputs: Inputs, training: bool, repeats: int) -> Cost:
    """Eager calls and checked first calls of one model."""
    float64 = _float64(model, inputs, training, max(3, repeats // 2))
    eager, added, worst, status = [], [], [], ""
    for i in range(repeats + 1):
        eager.append(_median(lambda: _call(model, inputs, training), 3))
        once, status = _checked(model, inputs, training)
        with _everything_differs():
            all_of_it, _ = _checked(model, inputs, training)
        if i:
            added.append(once)
            worst.append(all_of_it)
    return Cost(
        name, statistics.median(eager), float64, statistics.median(added), statistics.median(worst), status
    )


def _float64(model: nn.Module, inputs: Inputs, training: bool, repeats: int) -> float:
    wide = copy.deepcopy(model).double()
    wide_inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    return _median(lambda: _call(wide, wide_inputs, training), repeats)


def _call(model: Callable[..., Any], inputs: Inputs, training: bool) -> None:
    with torch.set_grad_enabled(training):
        result = model(*inputs)
        if training:
            result.sum().backward()


def _checked(model: nn.Module, inputs: Inputs, training: bool) -> tuple[float, str]:
    """Milliseconds that the checks of a first call added, and what they said."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="hypatia", options={"verify": "strict"})
    with warnings.catch_warnings(), collecting() as reports:
        warnings.simplefilter("error", VerificationWarning)
        _call(compiled, inputs, training)
    checks = [r.check for r in reports if r.check is not None]
    return 1e3 * sum(c.seconds for c in checks), "; ".join(dict.fromkeys(c.status for c in checks))


@contextmanager
def _everything_differs() -> Iterator[None]:
    with mock.patch.object(compare, "same", return_value=False):
        yield


def _median(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])
