"""Weights that are folded ahead: in enough digits, and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hypatia
from hypatia.execute.folding import FoldedWeights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_a_batch_norm_is_folded_in_fp32_and_rounded_once(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 3) if kind == "conv" else nn.Linear(8, 16)
    norm = nn.BatchNorm2d(16) if kind == "conv" else nn.BatchNorm1d(16)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
    model = nn.Sequential(layer, norm).to(dtype).eval()
    x = torch.randn(4, 8, 6, 6) if kind == "conv" else torch.randn(64, 8)
    with torch.no_grad():
        graph = hypatia.optimize(model, x.to(dtype))
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        weight = layer.weight.double() * scale.view(-1, *[1] * (layer.weight.dim() - 1))
        bias = (layer.bias.double() - norm.running_mean.double()) * scale + norm.bias.double()
        (folded,) = [m for m in graph.modules() if isinstance(m, FoldedWeights)]
        call = next(n for n in graph.graph.nodes if n.op == "call_module")
        found = folded(*[getattr_path(graph, n.target) for n in call.args])
    for want in (weight, bias):
        (have,) = [t for t in found if t.shape == want.shape]
        # One rounding, which fp32 before it can move by a tie at most.
        ulps = (have.double() - want).abs() / (want.abs() * torch.finfo(dtype).eps)
        assert float(ulps.max()) < 0.51


def getattr_path(root: nn.Module, path: str) -> torch.Tensor:
    for part in path.split("."):
        root = getattr(root, part)
    return root


class Tokens(nn.Module):
    """A layer over tokens and a batch norm of all of them, as LeViT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)


def test_a_batch_norm_of_tokens_is_folded() -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        graph = hypatia.optimize(model, x)
        torch.testing.assert_close(graph(x), model(x))
    assert "batch_norm" not in str(graph.graph)
