"""Faults planted in the text of kernels: unchecked they show, and the check of the first call finds them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from test_few_rows import _kinds
from test_plans import _assert_right, _compiled
from test_reads import Model
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.faults import wrong_cuda_text

BF16 = torch.bfloat16


def _images(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


# What the kernel is, the text, what is planted in its place, the model, and sizes of its inputs.
Fault = tuple[str, str, str, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]
FAULTS: tuple[Fault, ...] = (
    ("pointwise", "add(v0, v1)", "add(v0, v1 * 1.05f)", lambda x, y: (x + y).tanh(), ((64, 256), (256,))),
    (
        "rows",
        "[](N a, N b) { return a + b; }",
        "[](N a, N b) { return a + b * (N)0.97; }",
        lambda x: x.softmax(-1),
        ((64, 1000),),
    ),
    (
        "columns",
        "mul(v0, v1)",
        "mul(v0, v1 * 1.05f)",
        # A sum of products alone is a product of matrices.
        lambda x, y: (x * y).tanh().sum(0),
        ((500, 64), (500, 64)),
    ),
    (
        "depthwise",
        "taps[x][c] = value(tap.at[c]);",
        "taps[x][c] = value(tap.at[c]) * 1.05f;",
        lambda x, w: F.conv2d(_images(x), w, padding=1, groups=x.shape[1]).relu(),
        ((2, 64, 14, 14), (64, 1, 3, 3)),
    ),
    (
        "attention",
        "sum[warp][octet] = total_weight;",
        "sum[warp][octet] = 1.05f * total_weight;",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        ((2, 8, 1, 64), (2, 8, 300, 64), (2, 8, 300, 64)),
    ),
    (
        "parts",
        "x0_at_in ? value(",
        "x0_at_in ? 1.05f * value(",
        lambda x, y: torch.cat([x, y], 1) * 2,
        ((4, 3, 64), (4, 7, 64)),
    ),
)


def check_planted_faults() -> str:
    """Each is wrong where nothing is checked; where it is, results are eager's, and a warning says why."""
    torch.manual_seed(0)
    for name, old, new, f, shapes in FAULTS:
        model = Model(f).cuda()
        inputs = [torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes]
        with torch.no_grad(), wrong_cuda_text(old, new):
            wrong = _compiled(model, *inputs, verify="off")(*inputs)
            eager = model(*inputs)
            assert (wrong - eager).abs().max() > 0.01 * eager.abs().max(), f"{name}: the fault does not show"
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                checked = hypatia.compile(copy.deepcopy(model), *inputs)
            for _ in range(3):
                _assert_right(checked(*inputs), model, *inputs)
        warned = [w for w in said if issubclass(w.category, hypatia.VerificationWarning)]
        assert warned, f"{name}: nothing was said"
    return ", ".join(fault[0] for fault in FAULTS)


def check_a_fault_in_products_of_few_rows() -> str:
    """Candidates are compared before they are timed, so that a wrong one is never taken."""
    torch.manual_seed(0)
    model = nn.Linear(1032, 520).cuda().to(BF16)
    x = torch.randn(5, 1032, device="cuda", dtype=BF16)
    old, new = "if (bias) sum += wide(bias[column]);", "if (bias) sum += 1.0f + wide(bias[column]);"
    with torch.no_grad(), wrong_cuda_text(old, new):
        compiled = _compiled(model, x, verify="off")
        _assert_right(compiled(x), model, x)
    assert "few" not in _kinds(compiled)
    return ", ".join(_kinds(compiled))


def check_a_fault_in_copies_of_padded_rows() -> str:
    """The same, of what copies aligned rows to where they belong. With more rows another kernel is faster."""
    torch.manual_seed(0)
    model = nn.Linear(768, 30523, bias=False).cuda().to(BF16)
    x = torch.randn(96, 768, device="cuda", dtype=BF16)
    found = []
    for old, new in (("words[i + skipped],", "words[i],"), ("*to = low;", "*to = units[1];")):
        with torch.no_grad(), wrong_cuda_text(old, new):
            compiled = _compiled(model, x, verify="off")
            _assert_right(compiled(x), model, x)
        assert "padded" not in _kinds(compiled)
        found += _kinds(compiled)
    return ", ".join(found)


def check_a_fault_in_unaligned_rows() -> str:
    """The same, of the kernel for rows that begin anywhere: columns, rows, ends of rows, and sums."""
    torch.manual_seed(0)
    x = torch.randn(512, 768, device="cuda", dtype=BF16)
    found = []
    faults = (
        ("const u32 shift = skips * DEEP;", "const u32 shift = (skips ^ 1) * DEEP;"),
        ("by_hand(i / UNIT, ends + i % UNIT)", "by_hand(i / UNIT, ends + i % 7)"),
        ("place(row, 2 * i + lane / 16)", "place(row, 2 * i + lane / 16) % 8176"),
        # Not to begin the sums in two steps: what nothing reads are registers that the compiler uses while
        # tensor cores still write them.
        ("step + i > 0", "step > 0"),
        ("? wide(bias[at]) : 0.0f", "? 1.0f + wide(bias[at]) : 0.0f"),
    )
    # What was measured of a layer is known from then on, so each fault has a layer of its own.
    for columns, (old, new) in zip(range(30523, 30600, 2), faults, strict=False):
        model = nn.Linear(768, columns).cuda().to(BF16)
        with torch.no_grad(), wrong_cuda_text(old, new):
            compiled = _compiled(model, x, verify="off")
            _assert_right(compiled(x), model, x)
        assert "unaligned" not in _kinds(compiled), old
        found += _kinds(compiled)
    with torch.no_grad():
        assert _kinds(_compiled(nn.Linear(768, 30537).cuda().to(BF16), x)) == ["unaligned"]
    return ", ".join(found)
