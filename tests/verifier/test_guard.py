"""Verification of the first call: faults are found, named and rolled back, and nothing else is touched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hypatia
from hypatia import faults
from hypatia.compiler.report import GraphReport
from hypatia.execute.changes import RandomState
from hypatia.frontend.dynamo import collecting
from hypatia.verifier import candidates, compare, first_call
from hypatia.verifier.blame import smallest
from hypatia.verifier.candidates import checksum
from hypatia.verifier.reference import Script, Stream
from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).eval()


def run(
    model: nn.Module, *inputs: Any, mode: str = "strict", grad: bool = False
) -> tuple[torch.Tensor, list[GraphReport], list[str]]:
    """A first call: the result, the reports and the warnings."""
    compiled = torch.compile(model, backend="hypatia", options={"verify": mode})
    with (
        warnings.catch_warnings(record=True) as caught,
        collecting() as reports,
        torch.set_grad_enabled(grad),
    ):
        warnings.simplefilter("always")
        result = compiled(*inputs)
        if grad:
            result.square().sum().backward()
    messages = [str(w.message) for w in caught if issubclass(w.category, hypatia.VerificationWarning)]
    return result, reports, messages


FAULTS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "planted-relu-lost": faults.wrong_rule,
    "planted-bias-lost": lambda: faults.wrong_rule("planted-bias-lost"),
    "planted-wrong-kernel": faults.wrong_kernel,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_strict_returns_the_right_answer_and_names_what_is_wrong(name: str, grad: bool) -> None:
    model, x = mlp(), torch.randn(16, 32)
    expected = model(x)
    expected.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with FAULTS[name]():
        result, reports, messages = run(model, x, grad=grad)
    assert torch.allclose(result, expected, atol=1e-6)
    assert any(name in m for m in messages), messages
    assert all("float32" in m and "error" in m for m in messages)
    removed = [r for report in reports for r in report.check.removed]
    assert {r.name for r in removed} == {name}
    assert {report.check.status for report in reports} <= {"passed", "rolled back"}
    if grad:
        for parameter, right in zip(model.parameters(), wanted, strict=True):
            assert torch.allclose(parameter.grad, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAULTS)
def test_only_what_is_wrong_is_taken_out(name: str) -> None:
    with FAULTS[name]():
        _, (report,), _ = run(mlp(), torch.randn(16, 32))
    assert [r.kind for r in report.check.removed] == ["kernel" if "kernel" in name else "rule"]


@pytest.mark.parametrize("name", FAULTS)
def test_soft_warns_and_off_says_nothing(name: str) -> None:
    model, x = mlp(), torch.randn(16, 32)
    for mode in ("soft", "off"):
        fresh_dynamo()
        with FAULTS[name]():
            result, (report,), messages = run(model, x, mode=mode)
        assert not torch.allclose(result, model(x), atol=1e-3)
        assert bool(messages) == (mode == "soft")
        assert (report.check is None) == (mode == "off")


def test_optimize_is_verified_too() -> None:
    model, x = mlp(), torch.randn(16, 32)
    with faults.wrong_rule(), torch.no_grad(), pytest.warns(hypatia.VerificationWarning, match="relu-lost"):
        graph = hypatia.optimize(model, x)
    assert torch.allclose(graph(x), model(x), atol=1e-6)
    assert graph.meta["hypatia"].check.status == "rolled back"


def test_optimize_checks_gradients() -> None:
    """A kernel that is right forwards but has no gradient of its own."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)

    def detached(body: Any, *operands: torch.Tensor) -> torch.Tensor:
        return body(*operands).detach() + 0 * operands[0].sum()

    with (
        faults._planted("planted-detached", None, detached),
        pytest.warns(hypatia.VerificationWarning, match="gradient of"),
    ):
        graph = hypatia.optimize(model, x)
    graph(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_later_calls_go_straight_to_the_graph() -> None:
    model, x = mlp(), torch.randn(16, 32)
    guards: list[first_call.Guard] = []
    init = first_call.Guard.__init__

    def remember(self: first_call.Guard, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        guards.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_call.Guard, "__init__", remember)
        run(model, x)
    (made,) = guards
    assert made.forward != made.first_call
    assert not hasattr(made, "original"), "what only the check needed is kept"


@pytest.mark.parametrize("entry", ["torch.compile", "compile"])
def test_a_check_runs_a_net_once_as_it_is_and_once_in_float64(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions in float64 take many times as long as others."""
    runs: list[tuple[bool, bool]] = []
    plain = Stream.__iter__

    def noted(stream: Any) -> Any:
        runs.append((stream.wide, stream.nudge))
        return plain(stream)

    monkeypatch.setattr(Stream, "__iter__", noted)
    layers = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(3)]
    model = nn.Sequential(*(part for layer in layers for part in layer)).eval()
    x = torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        for batch_norm in (part for part in model if isinstance(part, nn.BatchNorm2d)):
            batch_norm.running_mean.normal_()
            batch_norm.running_var.uniform_(0.5, 2.0)
        compiled = hypatia.compile(model) if entry == "compile" else torch.compile(model, backend="hypatia")
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x)
    assert sorted(runs) == [(False, False), (True, False)]


def test_a_failing_kernel_is_left_out() -> None:
    model, x = mlp(), torch.randn(16, 32)
    with faults.failing_kernel():
        result, (report,), _ = run(model, x)
    assert torch.allclose(result, model(x), atol=1e-6)
    assert [r.name for r in report.check.removed] == ["planted-failing-kernel"]


def test_a_kernel_that_writes_into_a_parameter_is_found() -> None:
    model, x = mlp(), torch.randn(16, 32)
    with faults.scribbling_kernel():
        _, (report,), messages = run(model, x)
    assert [r.name for r in report.check.removed] == ["planted-scribbling-kernel"]
    assert "was changed by the compiled graph" in messages[0]


def test_errors_of_the_model_are_eagers() -> None:
    class Pick(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)[i]

    model, x = Pick(), torch.randn(4)
    with pytest.raises(IndexError) as theirs:
        model(x, torch.tensor([9]))
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad(), pytest.raises(IndexError) as ours:
        compiled(x, torch.tensor([9]))
    assert str(ours.value) == str(theirs.value)
    with torch.no_grad():
        assert torch.equal(compiled(x, torch.tensor([1])), model(x, torch.tensor([1])))


def test_random_numbers_are_drawn_once() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp().train()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.inner(x)) + torch.rand_like(x[:, :10])

    def states(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        fresh_dynamo()
        torch.manual_seed(3)
        result = torch.compile(Noisy().train(), backend=backend)(torch.ones(16, 32))
        result.sum().backward()
        return result.detach(), torch.get_rng_state()

    (ours, state), (theirs, expected) = states("hypatia"), states("aot_eager")
    assert torch.allclose(ours, theirs)
    assert torch.equal(state, expected)


def test_buffers_are_updated_once() -> None:
    def trained(compile_it: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).train()
        step = torch.compile(model, backend="hypatia") if compile_it else model
        step(torch.randn(32, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
        return model

    ours, theirs = trained(True), trained(False)
    assert ours[1].num_batches_tracked == 1
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.allclose(a, b), name


def test_inputs_are_changed_once() -> None:
    def add_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.relu(x) + y

    x, y = torch.zeros(4), torch.ones(4)
    with torch.no_grad():
        result = torch.compile(add_one, backend="hypatia")(x, y)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(result, torch.full((4,), 2.0))


def test_without_memory_for_float64_eager_is_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "memory_allowed", lambda inputs: 0.0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.randn(8, 64)
    result, (report,), messages = run(model, x)
    assert report.check.results, "the rewrite changes no bit, so that nothing was measured"
    assert any("compared with eager alone" in note for note in report.check.notes)
    assert not messages
    fresh_dynamo()
    with faults.wrong_rule("planted-bias-lost"):
        result, _, messages = run(model, x)
    assert messages
    assert torch.allclose(result, model(x), atol=1e-5)


def test_running_out_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(compare.Comparer, "compare", exhausted)
    model, x = mlp(), torch.randn(16, 32)
    result, (report,), _ = run(model, x)
    assert torch.allclose(result, model(x), atol=1e-6)
    assert "not verified: out of memory" in report.check.notes


def test_a_check_that_breaks_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(compare.Comparer, "compare", broken)
    monkeypatch.setattr(hypatia.compiler.pipeline, "raise_errors", False)
    model, x = mlp(), torch.randn(16, 32)
    with faults.wrong_rule():
        result, (report,), _ = run(model, x)
    assert torch.allclose(result, model(x), atol=1e-6)
    assert report.check.status == "not checked"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), torch.randn(16, 32, dtype=dtype)
    _, (report,), messages = run(model, x)
    assert report.check.status == "passed"
    assert not messages
    fresh_dynamo()
    with faults.wrong_rule():
        result, _, messages = run(model, x)
    assert messages
    assert torch.allclose(result, model(x), rtol=1e-2, atol=1e-2)


def test_nan_and_infinity_are_results_like_others() -> None:
    model, x = mlp(), torch.randn(16, 32)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    _, (report,), messages = run(model, x)
    assert report.check.status == "passed"
    assert not messages


def test_uninitialised_memory_is_not_judged() -> None:
    def fresh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), torch.empty_like(x)

    compiled = torch.compile(fresh, backend="hypatia")
    with torch.no_grad(), collecting() as reports:
        result, _ = compiled(torch.randn(1000))
    (report,) = reports
    assert (result >= 0).all()
    assert report.check.status == "passed"


def test_threads_wait_for_the_verdict() -> None:
    model, x = mlp(), torch.randn(16, 32)
    expected = model(x).detach()
    results: list[torch.Tensor] = []
    with faults.wrong_rule(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="hypatia")

        def call() -> None:
            with torch.no_grad():
                results.append(compiled(x))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    assert all(torch.allclose(r, expected, atol=1e-6) for r in results)


def test_a_first_call_is_checked_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypatia.verifier import first_call

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert first_call._checkable([torch.ones(2)])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert not first_call._checkable([torch.ones(2)])


def test_collectives_are_made_once() -> None:
    """A rank that checks and one that does not would wait for each other forever."""
    from torch import distributed
    from torch.distributed import _functional_collectives as collectives

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:

        def total(x: torch.Tensor) -> torch.Tensor:
            return collectives.all_reduce(torch.relu(x), "sum", distributed.group.WORLD) * 2

        x = torch.randn(8)
        with collecting() as reports, torch.no_grad():
            result = torch.compile(total, backend="hypatia")(x)
    finally:
        distributed.destroy_process_group()
    assert torch.equal(result, torch.relu(x) * 2)
    assert [r.check.status for r in reports] == ["not checked"]
    assert "all_reduce" in reports[0].check.notes[0]


def test_modes_come_from_options_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPATIA_CHECKSUM_MODE", raising=False)
    parse = hypatia.Options.parse
    assert parse().checksum_mode == "strict"
    monkeypatch.setenv("HYPATIA_CHECKSUM_MODE", "OFF")
    assert parse().checksum_mode == "off"
    assert parse({"verify": "soft"}).checksum_mode == "soft"
    monkeypatch.setenv("HYPATIA_CHECKSUM_MODE", "sometimes")
    with pytest.raises(hypatia.OptionError, match="HYPATIA_CHECKSUM_MODE"):
        _ = parse().checksum_mode
    with pytest.raises(hypatia.OptionError, match="verify"):
        parse({"verify": "sometimes"})


@given(st.integers(1, 12), st.sets(st.integers(0, 11), min_size=1, max_size=4))
def test_halving_finds_exactly_what_is_wrong(count: int, guilty: set[int]) -> None:
    parts = [("rule", str(i)) for i in range(count)]
    wanted = {("rule", str(i % count)) for i in guilty}
    found = smallest(parts, lambda without: wanted <= without)
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 4)])
def test_a_checksum_sees_every_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape, dtype=dtype)
    before = checksum(value)
    flat = value.view(-1)
    for i in range(flat.numel()):
        flat[i] = 0
        assert checksum(value) != before
        flat[i] = 1
    assert checksum(value) == before
    assert checksum(value.t() if value.ndim == 2 else value) == before


def test_streams_hold_only_what_is_needed() -> None:
    """A long chain: float64 values are dropped as soon as they were read."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                x = torch.sin(x)
            return x

    gm = torch.export.export(Chain(), (torch.randn(1000),), strict=False).module(check_guards=False)
    gm.graph.lint()
    script = Script(gm)
    alive: list[int] = []
    stream = Stream(script, dict.fromkeys(script.inputs, torch.randn(1000)), RandomState([]), wide=True)
    original = stream._run

    def watched(step: Any) -> Any:
        alive.append(len(stream.env))
        return original(step)

    stream._run = watched
    results = list(stream)
    assert [v.dtype for _, v in results] == [torch.float64]
    assert max(alive) <= 3


def test_a_planted_rule_is_not_in_the_table() -> None:
    assert "planted" not in hypatia._native.rules()


def test_nothing_is_planted_outside() -> None:
    _, (report,), messages = run(mlp(), torch.randn(16, 32))
    assert report.check.status == "passed"
    assert not messages


def test_parameters_are_bound_to_the_same_values() -> None:
    """The founding bug: a graph rebuilt with the parameters of another layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    gm = torch.export.export(model, (torch.randn(2, 4),), strict=False).module(check_guards=False)
    twin = torch.export.export(model, (torch.randn(2, 4),), strict=False).module(check_guards=False)
    assert candidates.misbound(gm, twin) == ""
    weights = [n for n in twin.graph.find_nodes(op="get_attr") if "weight" in n.target]
    getattr(twin, "0").weight = nn.Parameter(getattr(twin, "2").weight.detach().clone())
    assert "has other values than in the model" in candidates.misbound(gm, twin), weights
    (place,) = gm.graph.find_nodes(op="placeholder")
    place._rename("other")
    assert "inputs are bound as" in candidates.misbound(gm, twin)
