"""What a decoder computes for one token: products of few rows, attention of one query."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from test_plans import _assert_right, _compiled
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = (torch.bfloat16, torch.float16)
SIZES = [(2048, 2048), (1000, 264), (33, 4096), (1, 65536), (8192, 1024), (257, 8)]
ROWS = [1, 2, 7, 8, 9, 16]


class Layer(nn.Module):
    """A linear layer with what may follow it."""

    def __init__(self, inputs: int, outputs: int, bias: bool, follows: str) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias)
        self.follows = follows

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.follows == "relu":
            return y.relu() * r.sum()
        if self.follows == "gelu":
            return F.gelu(y, approximate="tanh") * r.sum()
        return y + r if self.follows == "residual" else y * r.sum()


def _steps(compiled: Any) -> list[str]:
    planner = compiled._last.native.__self__.planner
    steps: list[str] = json.loads(planner.at(planner.hints).describe())["steps"]
    return steps


def _kinds(compiled: Any) -> list[str]:
    return compiled._last.native.__self__.binding.kinds


def check_products_of_few_rows() -> str:
    """All dtypes, rows, odd sizes and what follows, each as exact as eager."""
    torch.manual_seed(0)
    count = by_kernel = 0
    follows = itertools.cycle([(True, ""), (False, "residual"), (True, "relu"), (True, "gelu"), (False, "")])
    for dtype, (outputs, inputs), rows in itertools.product(DTYPES, SIZES, ROWS):
        bias, after = next(follows)
        model = Layer(inputs, outputs, bias, after).cuda().to(dtype)
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        r = torch.randn(rows, outputs, device="cuda", dtype=dtype)
        with torch.no_grad():
            compiled = _compiled(model, x, r)
            _assert_right(compiled(x, r), model, x, r)
        count += 1
        by_kernel += _kinds(compiled) == ["few"]
    assert by_kernel > 0, "no product is computed by the kernel for few rows"
    return f"{count} layers, {by_kernel} by the kernel for few rows"


class Gated(nn.Module):
    """Two layers, one of which an activation makes the other's factor."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Callable[..., Any]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(inputs, outputs, bias), nn.Linear(inputs, outputs, bias)
        self.down = nn.Linear(outputs, inputs, bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


ACTIVATIONS = (F.silu, F.gelu, F.relu, torch.sigmoid, torch.tanh, nn.Identity())


def check_gated_layers() -> str:
    """All activations, by our kernel and by the library's and another one."""
    torch.manual_seed(0)
    count, kinds = 0, set()
    for dtype, rows, (outputs, inputs), activation in itertools.product(
        DTYPES, (1, 5, 16), ((1024, 512), (520, 136), (300, 1000)), ACTIVATIONS
    ):
        model = Gated(inputs, outputs, count % 2 == 0, activation).cuda().to(dtype)
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        with torch.no_grad():
            compiled = _compiled(model, x)
            for scale in (1.0, 20.0):
                _assert_right(compiled(scale * x), model, scale * x)
        kinds |= {name for name in _steps(compiled) if "linear" in name}
        count += 1
    assert "linear + silu, multiplied" in kinds, kinds
    return f"{count} layers: {', '.join(sorted(kinds))}"


def check_that_numbers_that_are_none_stay() -> str:
    """NaN and infinities of a row stay in this row, and those of a column in it."""
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048, bias=False).cuda().bfloat16()
    with torch.no_grad():
        model.weight[5, 7] = float("nan")
        x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
        compiled = _compiled(model, x)
        x[3, 100] = float("inf")
        ours, eager = compiled(x), model(x)
    assert torch.equal(ours.isfinite(), eager.isfinite())
    assert torch.equal(ours[3].isnan(), eager[3].isnan())
    return ", ".join(_kinds(compiled))


class Attention(nn.Module):
    """Attention to a cache, whose keys and values some heads share."""

    def __init__(self, heads: int, scale: float | None) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        def repeated(x: torch.Tensor) -> torch.Tensor:
            b, g, s, d = x.shape
            return x[:, :, None].expand(b, g, self.heads, s, d).reshape(b, g * self.heads, s, d)

        k, v = (repeated(k), repeated(v)) if self.heads > 1 else (k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return y.transpose(1, 2).flatten(2)


ATTENTIONS = [
    # Batch, groups, heads of a group, keys, numbers of a head.
    (1, 8, 4, 1088, 64),
    (2, 3, 1, 77, 64),
    (1, 8, 2, 4096, 128),
    (4, 2, 8, 513, 128),
    (1, 1, 1, 1, 8),
    (3, 2, 3, 70, 16),
    (2, 3, 2, 129, 96),
    (1, 2, 5, 1000, 40),
    (1, 4, 4, 300, 256),
    (16, 8, 4, 200, 64),
]


def _mask(kind: str, batch: int, heads: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    if kind == "flags":
        mask = torch.rand(batch, 1, 1, keys, device="cuda") < 0.7
        mask[..., 0] = True
        return mask
    if kind == "first":
        return (torch.arange(keys, device="cuda") <= keys // 3)[None, None, None]
    if kind == "numbers":
        mask = torch.randn(1, heads, 1, keys, device="cuda").to(dtype)
        mask[..., keys // 2 + 1 :] = float("-inf")
        return mask
    return None


def check_attention_of_one_query() -> str:
    """All dtypes, sizes and masks, each as exact as eager, by a step of ours."""
    torch.manual_seed(0)
    count = 0
    for dtype, sizes in itertools.product(DTYPES, ATTENTIONS):
        for kind, lying in (("", "usual"), ("flags", "turned"), ("first", "usual"), ("numbers", "turned")):
            batch, groups, heads, keys, width = sizes

            q = torch.randn(batch, groups * heads, 1, width, device="cuda", dtype=dtype)
            k, v = torch.randn(2, batch, groups, keys, width, device="cuda", dtype=dtype)
            if lying == "turned":
                k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
            mask = _mask(kind, batch, groups * heads, keys, dtype)
            given = [t for t in (q, k, v, mask) if t is not None]
            model = Attention(heads, 0.3 if kind == "flags" else None)
            compiled = _compiled(model, *given)
            steps = _steps(compiled)
            assert any(s.startswith("attention of") for s in steps), f"{sizes} {kind}: {steps}"
            _assert_right(compiled(*given), model, *given)
            count += 1
    return f"{count} calls"


def check_that_a_query_which_sees_nothing_has_zeros() -> str:
    """As torch's plain attention has; what its fused kernels return there depends on the kernel."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 300, 300))
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
    model = Attention(1, None)
    compiled = _compiled(model, q, k, v, mask)
    mask[1] = False
    with sdpa_kernel(SDPBackend.MATH):
        plain = model(q, k, v, mask)
    ours, eager = compiled(q, k, v, mask), model(q, k, v, mask)
    assert torch.equal(ours[1], plain[1])
    assert not ours[1].any()
    return f"eager has {float(eager[1].flatten()[0])}"


def check_ten_thousand_calls() -> str:
    """Of a layer and of attention: all have the bits of the first, on two streams in turns."""
    torch.manual_seed(0)
    layer = nn.Linear(2048, 2048).cuda().bfloat16()
    x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    told = []
    for model, given in ((layer, (x,)), (Attention(1, None), (q, k, v))):
        with torch.no_grad():
            compiled = _compiled(model, *given)
            first = compiled(*given).clone()
            differing = torch.zeros((), device="cuda", dtype=torch.int64)
            for call in range(10_000):
                stream = streams[call // 1000 % 2]
                if call % 1000 == 0:
                    torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    differing += (compiled(*given) != first).sum()
            torch.cuda.synchronize()
        assert differing.item() == 0, f"{differing.item()} numbers differ"
        told.append(", ".join(_kinds(compiled) or _steps(compiled)))
    return "; ".join(told)
