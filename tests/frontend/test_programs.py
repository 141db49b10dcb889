"""Which of two programs runs: attention as a call of torch's, or as the products that a model writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia
from hypatia.capture import attention_calls
from hypatia.compiler.pipeline import CompiledGraph, Request
from hypatia.devices import table
from hypatia.execute import timing
from hypatia.execute.step_times import plan_calls
from hypatia.frontend import optimize, programs


class Written(nn.Module):
    """Attention as products, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(2, 7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.relu(self.qkv(x)).reshape(len(x), 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-2, -1) * 8**-0.5 + self.bias).softmax(-1)
        return (shares @ v).transpose(1, 2).reshape(x.shape)


def steps(compiled: Callable[..., object]) -> list[str]:
    x = torch.randn(3, 7, 16)
    with torch.no_grad(), plan_calls() as calls:
        compiled(x)
    ((native, _),) = calls
    return native.binding.steps


@pytest.mark.parametrize("products_take", [0.5, 2.0])
def test_the_faster_program_runs(products_take: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.Cpu, "compares_programs", True)
    usual, seen = timing.instead, []
    assert usual is not None

    def times(forms: list[str]) -> dict[str, float]:
        if set(forms) == set(programs.NAMES):
            seen.append(forms)
            return dict(zip(programs.NAMES, (1.0, products_take), strict=True))
        return usual(forms)

    monkeypatch.setattr(timing, "instead", times)
    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(3, 7, 16)
    compiled = hypatia.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert len(seen) == 1
        torch.testing.assert_close(compiled(x.flip(0)), model(x.flip(0)))
    is_call = any("attention" in step for step in steps(compiled))
    assert is_call == (products_take > 1)


class Noisy(Written):
    """It draws random numbers as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand_like(x)


def test_timing_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.Cpu, "compares_programs", True)
    model, x = Noisy().eval(), torch.randn(3, 7, 16)
    compiled = hypatia.compile(model)
    for _ in range(2):
        state = torch.random.get_rng_state()
        with torch.no_grad():
            found = compiled(x)
            torch.random.set_rng_state(state)
            torch.testing.assert_close(found, model(x))


def test_what_a_check_takes_out_does_not_bring_the_slower_program_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table.Cpu, "compares_programs", True)
    monkeypatch.setattr(timing, "instead", lambda forms: {n: float(n != forms[-1]) for n in forms})
    asked, usual = [], optimize.compile_graph

    def noted(gm: torch.fx.GraphModule, request: Request) -> CompiledGraph:
        asked.append({name for _, name in request.without})
        return usual(gm, request)

    monkeypatch.setattr(optimize, "compile_graph", noted)
    with torch.no_grad(), hypatia.faults.wrong_rule(), pytest.warns(hypatia.VerificationWarning):
        hypatia.compile(Written().eval())(torch.randn(3, 7, 16))
    first, *others = asked
    assert not first
    assert len(others) > 1
    assert all(attention_calls.PASS in without for without in others)


def test_a_cpu_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_taken", lambda *_: pytest.fail("it was timed"))
    with torch.no_grad():
        hypatia.compile(Written().eval())(torch.randn(3, 7, 16))
