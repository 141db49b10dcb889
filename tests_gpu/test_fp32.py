"""fp32 products by bf16 pieces: as exact as fp32's own, for every number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from forms import winning
from test_plans import _compiled
from torch import nn

Change = Callable[[torch.Tensor], Any]
SHAPES = [(64, 784, 256), (33, 68, 10), (1, 256, 512), (256, 512, 512), (512, 1024, 2048), (300, 2056, 1000)]


def _kinds(compiled: Any) -> list[str]:
    return compiled._last.native.__self__.binding.kinds


def _errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root of the mean square and greatest, where the exact result is finite."""
    error = (result.double() - exact)[torch.isfinite(exact)]
    return error.square().mean().sqrt().item(), error.abs().max().item()


def _assert_exact(model: nn.Module, compiled: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        eager, ours = _errors(model(x), exact), _errors(compiled(x), exact)
    step = exact.abs().max().item() * 2.0**-23
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine <= 2 * theirs + step, f"{mine:.2e}, eager {theirs:.2e}"


def _model(k: int, n: int, relu: bool, bias: bool = True) -> nn.Module:
    layer = nn.Linear(k, n, bias=bias)
    return nn.Sequential(layer, nn.ReLU() if relu else nn.Identity()).cuda().eval()


def check_products_are_as_exact_as_fp32() -> str:
    """Random and positive numbers, with and without ReLU and bias."""
    kinds = set()
    for m, k, n in SHAPES:
        for relu, bias in ((True, True), (False, False)):
            torch.manual_seed(0)
            model, x = _model(k, n, relu, bias), torch.randn(m, k, device="cuda")
            compiled = _compiled(model, x)
            kinds.update(_kinds(compiled))
            for given in (x, x.abs(), x * 1e-6, torch.randn_like(x).relu()):
                _assert_exact(model, compiled, given)
    # Which of them was used, the fastest one, is only said.
    return ", ".join(sorted(kinds))


def check_it_can_be_switched_off() -> str:
    """The option, and torch's own setting for less exact products."""
    model, x = _model(512, 512, relu=True), torch.randn(256, 512, device="cuda")
    assert _kinds(_compiled(model, x, fp32_products="plain")) == ["f32"]
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert _kinds(_compiled(model, x)) == ["tf32"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


ODD: dict[str, tuple[Change | None, Change | None]] = {
    "infinite": (lambda x: x[3, 5].fill_(torch.inf), None),
    "NaN": (lambda x: x[3, 5].fill_(torch.nan), None),
    "infinite and NaN": (lambda x: (x[3, 5].fill_(-torch.inf), x[4].fill_(torch.nan)), None),
    "greatest": (lambda x: x[3, 7].fill_(3.4e38), None),
    "huge rows": (lambda x: x[3:5].mul_(1e38), None),
    "tiny": (lambda x: x.mul_(1e-38), None),
    "subnormal": (lambda x: x.mul_(1e-42), None),
    "a tiny row": (lambda x: x[2].mul_(1e-36), lambda w: w.mul_(1e30)),
    "small, small": (lambda x: x.mul_(1e-19), lambda w: w.mul_(1e-18)),
    "zeros": (lambda x: x.zero_(), None),
    "infinite weight": (None, lambda w: w[3, 5].fill_(torch.inf)),
    "NaN weight": (None, lambda w: w[3, 5].fill_(torch.nan)),
    "tiny weights": (None, lambda w: w.mul_(1e-37)),
    "huge weights": (None, lambda w: w.mul_(1e38)),
    "greatest weight": (None, lambda w: w[1, 1].fill_(3.402e38)),
}


def check_odd_numbers() -> str:
    """What has no pieces gives what fp32 gives, in small and in large products."""
    kinds = set()
    for m, k, n in ((64, 512, 128), (512, 2048, 2048)):
        for name, (change_x, change_w) in ODD.items():
            torch.manual_seed(0)
            model, x = _model(k, n, relu=False, bias=False), torch.randn(m, k, device="cuda")
            with torch.no_grad():
                if change_w:
                    change_w(model[0].weight)
                compiled = _compiled(model, x, verify="off")
                compiled(x)
                kinds.update(_kinds(compiled))
                if change_x:
                    change_x(x)
                eager, result = model(x), compiled(x)
                exact = x.double() @ model[0].weight.double().T
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                same = torch.equal(kind(result), kind(eager))
                assert same, f"{name}, {m}x{k}x{n}: {kind.__name__} differs"
            finite = torch.isfinite(eager)
            error = (result.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
            allowed = (eager.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
            scale = exact[finite].abs().max().item() * 2.0**-22 if finite.any() else 0.0
            assert error <= 2 * allowed + scale + 2.0**-145, f"{name}: {error:.2e}, eager {allowed:.2e}"
            del model, compiled
    return f"{2 * len(ODD)} cases by {', '.join(sorted(kinds))}"


def check_residuals_and_rows_apart() -> None:
    """What is added to a product, and rows with gaps between them."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.up(x).chunk(2, -1)
            return right + self.down(left)

    for rows, width in ((48, 64), (1024, 1024)):
        torch.manual_seed(0)
        model, x = Block(width).cuda().eval(), torch.randn(rows, width, device="cuda")
        _assert_exact(model, _compiled(model, x), x)


def check_sizes_share_split_weights() -> str:
    """Other batch sizes use the pieces that are there; changed weights get new ones."""
    model, x = _model(2048, 2048, relu=True), torch.randn(512, 2048, device="cuda")
    compiled = _compiled(model, x)
    with winning("plan"), torch.no_grad():
        for rows in (600, 700, 512):
            given = torch.randn(rows, 2048, device="cuda")
            _assert_exact(model, compiled, given)
        model[0].weight.mul_(-0.5)
        for rows in (512, 600, 800):
            given = torch.randn(rows, 2048, device="cuda")
            _assert_exact(model, compiled, given)
    capped = _compiled(model, x, weight_copies=1000)
    assert capped._last.native.__self__.binding.bytes[1] == 0
    _assert_exact(model, capped, x)
    return ", ".join(_kinds(compiled))
