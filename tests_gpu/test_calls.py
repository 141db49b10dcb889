"""Calls into torch inside plans on a GPU: results stay where torch has put them, and are right."""

from __future__ import annotations

import torch
from test_plans import _assert_calls_right
from test_reads import Model


def _sorted(x: torch.Tensor) -> torch.Tensor:
    """Several results, of which one is read late and one by a call."""
    values, order = x.sort(-1)
    y = (values.cumsum(-1) * 0.5).exp()
    return y.sum(-1, keepdim=True) + values.gather(-1, order.argsort(-1)).relu()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    """Calls that read what calls have made, and views of it."""
    y = x.new_zeros(x.shape)
    y[:, 1:] = x[:, :-1]
    y[:, :, 2:] = y[:, :, 2:].cumsum(-1) * 2.0
    z = y.as_strided((x.shape[0], 3, x.shape[2]), (x.stride(0), x.stride(1), 1))
    return z.exp().sum(1) + y.cumsum(1)[:, 0]


def _returned(x: torch.Tensor) -> torch.Tensor:
    """A result that is the call's own."""
    return (x * 2.0).cumsum(-1)


def _large(x: torch.Tensor) -> torch.Tensor:
    """A large last result, which follows a recording and reads what a call in it has made."""
    order = x.cumsum(-1)
    return (order[:, :, None] * order[:, None, :]).tanh()


def check_results_of_calls() -> str:
    """In fp32 and 16 bits, by plans that are recorded."""
    torch.manual_seed(0)
    functions = {_sorted: (33, 64), _scattered: (5, 9, 64), _returned: (7, 130), _large: (4, 3000)}
    for dtype in (torch.float32, torch.bfloat16):
        for function, shape in functions.items():
            x = torch.randn(shape, device="cuda").to(dtype) * 0.1
            _assert_calls_right(f"{function.__name__} {dtype}", Model(function), x)
    return f"{2 * len(functions)} models"
