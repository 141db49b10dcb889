"""Norms in 16 bits whose result is rounded and then multiplied by a weight, as decoders have them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline
from hypatia.execute import timing
from tests.support import assert_as_close_as_eager


class Norm(nn.Module):
    """As in Llama: the norm in float32, rounded, times the weight."""

    def __init__(self, width: int, centered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.centered = centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[-1],)
        normed = F.layer_norm(x, shape) if self.centered else F.rms_norm(x, shape, eps=1e-6)
        return self.weight * normed


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 33), (2, 1, 7, 520)])
def test_they_are_one_step_and_round_as_eager(
    centered: bool, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "raise_errors", True)
    monkeypatch.setattr(timing, "instead", lambda forms: {name: 1.0 + (name != "plan") for name in forms})
    torch.manual_seed(0)
    model = Norm(shape[-1], centered).to(dtype).eval()
    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        planner = compiled._last.native.__self__.planner
        assert len(json.loads(planner.at(planner.hints).describe())["steps"]) == 1
        exact = Norm(shape[-1], centered).double()
        exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
        for value in (x, 8 * x + 1, torch.randn(shape).to(dtype)):
            assert_as_close_as_eager(compiled(value), model(value), exact(value.double()))
