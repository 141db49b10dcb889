"""Convolutional nets that are trained with their channels last compute what they did before."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hypatia.capture import channels_last
from hypatia.devices import table
from hypatia.frontend import dynamo


class Changed(nn.Module):
    """Changes an image in place between two convolutions that read it; the first is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(2))
        self.first.requires_grad_(False)
        self.deep = nn.Conv2d(4, 4, 3, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = self.first(x)
        F.relu_(x.sub_(1))
        return self.deep(y + self.second(x)).mean((2, 3))


@pytest.mark.parametrize("casts", [False, True], ids=["plain", "autocast"])
def test_images_that_change_in_place(casts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "LEAST", 1)
    monkeypatch.setattr(table.Cpu, "rewrites_training", lambda self: True)
    monkeypatch.setattr(channels_last, "_DTYPES", (torch.bfloat16 if casts else torch.float32,))
    counts: list[int] = []
    turned = channels_last.turned
    monkeypatch.setattr(channels_last, "turned", lambda gm: counts.append(turned(gm)) or counts[-1])
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Changed()
    twin = copy.deepcopy(model)
    with mock.patch.object(dynamo, "Contest", lambda eager, compiled, *_: compiled):
        call = torch.compile(model, backend="hypatia")
        for _ in range(2):
            x = torch.randn(2, 3, 7, 7)
            found = []
            for each, run in ((model, call), (twin, twin)):
                each.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    result = run(x)
                result.square().sum().backward()
                found.append([result.detach(), *(p.grad for p in each.parameters() if p.requires_grad)])
            room = {"rtol": 0.05, "atol": 0.02} if casts else {}
            torch.testing.assert_close(*found, **room)
    assert counts == [3]
