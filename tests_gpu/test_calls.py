"""Calls into torch inside plans on a GPU: results stay where torch has put them, and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from forms import winning
from test_plans import _assert_calls_right, _compiled
from test_reads import Model
from test_training import _allocated
from test_training import _assert_right as _assert_gradients_right
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import hypatia


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


def _several(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results that calls make: one that a kernel reads, one that nobody reads, one that lies otherwise."""
    values, indices = (x * 2.0).cummax(-1)
    return values, indices, (values + 1.0).cummax(0).values.mT


def _assert_alike(results: Any, expected: Any, what: str) -> None:
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), f"result {i} {what}"
        assert torch.equal(a, b), f"result {i} {what}"


def _calls(compiled: Any, others: bool) -> Callable[..., Any]:
    """Calls of a recording, or of the plan: on a stream of its own it runs without one."""
    side = torch.cuda.Stream()

    def call(*inputs: torch.Tensor) -> Any:
        if not others:
            return compiled(*inputs)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results = compiled(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return results

    return call


def check_results_that_calls_make() -> str:
    """They are the caller's: later calls, on other streams too, leave them as they are, and free memory."""
    torch.manual_seed(0)
    model = Model(_several)
    inputs = [torch.randn(64, 96, device="cuda") for _ in range(8)]
    compiled = _compiled(model, inputs[0])
    with torch.no_grad():
        expected = [_several(x) for x in inputs]
        for others in (False, True):
            call = _calls(compiled, others)
            results = [call(x) for x in inputs]
            torch.cuda.synchronize()
            for a, b in zip(results, expected, strict=True):
                _assert_alike(a, b, "on another stream" if others else "of a recording")
            del results, a
            before = _allocated()
            for x in inputs * 7:
                call(x)
            assert _allocated() <= before, f"{before} bytes before, {_allocated()} after"
        both = [(_calls(compiled, True)(x), _calls(compiled, False)(x)) for x in inputs]
        torch.cuda.synchronize()
        for (a, b), c in zip(both, expected, strict=True):
            _assert_alike(a, c, "of two streams in turns")
            _assert_alike(b, c, "of two streams in turns")
    return "recorded, not recorded, two streams"


def _copies(call: Callable[[], object]) -> int:
    """Copies on the device."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found = [e for e in profiler.key_averages() if "Memcpy DtoD" in e.key or "direct_copy" in e.key]
    return sum(e.count for e in found)


def check_copies_of_results() -> str:
    """A plan copies nothing that eager does not: neither values in between nor results."""
    x = torch.randn(64, 96, device="cuda")
    compiled = _compiled(Model(_several), x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        ours, eagers = _copies(lambda: compiled(x)), _copies(lambda: _several(x))
    assert ours <= eagers, f"{ours} copies, eager has {eagers}"
    return f"{ours} copies, eager has {eagers}"


class _Block(nn.Module):
    """Attention whose results a backward pass reads, and a norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(96, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(y)


class _Twice(nn.Module):
    """Two forward passes before a backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(tokens) * self.block(tokens.flip(0))


def check_training_steps_with_calls() -> str:
    """What a forward pass keeps for the backward pass, in all forms; fifty steps leave no memory behind."""
    done = 0
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("plain", "recorded"):
            torch.manual_seed(0)
            model, tokens = _Block().cuda().to(dtype), torch.randint(0, 96, (4, 40), device="cuda")
            call = hypatia.compile(model)
            with winning(form):
                for _ in range(4):
                    _assert_gradients_right(model, call, (tokens,))
                for i in range(60):
                    model.zero_grad(set_to_none=True)
                    call(tokens).square().sum().backward()
                    if i == 9:
                        before = _allocated()
                assert _allocated() <= before, f"{form}: {before} bytes before, {_allocated()} after"
                # The second forward pass must not write to what the first one kept.
                _assert_gradients_right(
                    _Twice(model), lambda t, call=call: call(t) * call(t.flip(0)), (tokens,)
                )
            done += 1
    return f"{done} cases"
