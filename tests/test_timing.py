"""The fastest form is kept, and no form runs that was not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hypatia
from hypatia.execute import choose, native, timing
from hypatia.frontend import compiled_call, optimize
from hypatia.frontend.dynamo import collecting
from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


class Clock:
    """A clock that goes on when a form runs or somebody sleeps, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def takes(self, *seconds: float) -> Callable[[], None]:
        """A form whose calls take so long, the last number for all others."""
        left = list(seconds)

        def form() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return form


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(timing, "instead", None)
    return made


def fails() -> None:
    raise AssertionError("it was called")


def test_no_clock_decides_which_form_is_kept_in_tests() -> None:
    forms = dict.fromkeys(("plan", "eager", "graph"), fails)
    times = timing.in_turns(forms, 0.05, gpu=False)
    assert times["plan"] < times["graph"] < times["eager"]
    assert timing.in_few_turns({"eager": fails, "compiled": fails}, (3, 9), 1.0).keys() == {
        "eager",
        "compiled",
    }


def test_the_graph_is_left_out_where_eager_takes_twice_as_long(clock: Clock) -> None:
    forms = {"plan": clock.takes(0.001), "eager": clock.takes(0.0025), "graph": fails}
    times = timing.in_turns(forms, seconds=0.01, gpu=False)
    assert times == {"plan": pytest.approx(0.001), "eager": pytest.approx(0.0025)}
    forms = {"plan": clock.takes(0.001), "eager": clock.takes(0.0015), "graph": clock.takes(0.0014)}
    assert list(timing.in_turns(forms, seconds=0.01, gpu=False)) == ["plan", "eager", "graph"]


def test_a_graph_that_does_not_run_is_left_out(clock: Clock) -> None:
    forms = {"plan": clock.takes(0.003), "graph": fails}
    assert list(timing.in_turns(forms, seconds=0.01, gpu=False)) == ["plan"]


def test_a_call_that_was_disturbed_does_not_count(clock: Clock) -> None:
    forms = {"plan": clock.takes(0.003, 0.9, 0.003), "graph": clock.takes(0.004)}
    assert timing.in_turns(forms, seconds=0.05, gpu=False)["plan"] == pytest.approx(0.003)
    # Of a few, the fastest.
    forms = {"plan": clock.takes(0.5, 0.1, 0.5), "graph": clock.takes(0.4)}
    assert timing.in_turns(forms, seconds=0.05, gpu=False)["plan"] == pytest.approx(0.1)


def test_threads_of_torch_may_sleep_before_a_plan_is_timed(clock: Clock) -> None:
    timing.in_turns({"plan": clock.takes(0.01), "graph": clock.takes(0.01)}, seconds=0.0, gpu=False)
    assert clock.slept == pytest.approx(3 * timing.REST)
    clock.slept = 0.0
    timing.in_turns({"plan": clock.takes(9.0), "graph": clock.takes(9.0)}, seconds=0.0, gpu=False)
    assert clock.slept == pytest.approx(timing.REST), "it does not matter for calls that take long"


def test_few_turns_leave_out_the_first(clock: Clock) -> None:
    forms = {"compiled": clock.takes(9.0, 1.0), "eager": clock.takes(5.0, 2.0)}
    assert timing.in_few_turns(forms, (3, 15), 0.1) == {"compiled": 1.0, "eager": 2.0}
    assert timing.in_few_turns({"plan": clock.takes(7.0, 1.0)}, (1, 1), 0.0) == {"plan": 7.0}
    calls: list[int] = []
    timing.in_few_turns({"eager": lambda: calls.append(1)}, (3, 15), 0.1)
    assert len(calls) == 15


def timed(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[native.NativeGraph], None] | None = None,
    **seconds: float,
) -> None:
    """The forms of a plan take so long, whatever they are."""

    fastest = choose.keep_fastest

    def changed(graph: native.NativeGraph, *args: Any) -> dict[str, float]:
        if change is not None:
            change(graph)
        return fastest(graph, *args)

    monkeypatch.setattr(choose, "keep_fastest", changed)
    monkeypatch.setattr(choose, "timed", lambda forms, **_: {name: seconds[name] for name in forms})


def test_a_graph_that_is_faster_than_its_plan_is_checked_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, plan=3.0, eager=2.0, graph=1.0)
    model, x = mlp(), torch.randn(4, 8)
    compiled = hypatia.compile(model, x)
    (report,) = compiled.reports
    assert report.kept == "graph"
    assert report.check is not None
    assert report.check.status == "passed"
    assert compiled._last._run is not model
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_a_wrong_graph_does_not_run_for_its_right_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = optimize._interpreted

    def wrong(gm: Any) -> Any:
        right = interpreted(gm)
        return lambda args: [t + 0.1 for t in right(args)]

    def broken(graph: native.NativeGraph) -> None:
        monkeypatch.setattr(optimize, "_interpreted", wrong)

    timed(monkeypatch, broken, plan=3.0, eager=2.0, graph=1.0)
    model, x = mlp(), torch.randn(4, 8)
    with pytest.warns(hypatia.VerificationWarning, match="as it was captured"):
        compiled = hypatia.compile(model, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("right", [True, False])
def test_the_same_by_torch_compile(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(graph: native.NativeGraph) -> None:
        ops = graph.graph
        graph.graph = ops if right else lambda args: [t + 0.1 for t in ops(args)]

    timed(monkeypatch, change, plan=3.0, graph=1.0, eager=2.0)
    model, x = mlp(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad(), collecting() as reports:
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    (report,) = reports
    assert report.kept == ("graph" if right else "eager")
    assert "dropped" in str(report)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fastest", ["plan", "graph", "eager"])
def test_torch_compile_keeps_the_fastest_form(
    fastest: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager is among them: the graph as it was captured. On a CPU a training step has no plan."""
    times = {"plan": 3.0, "graph": 3.0, "eager": 3.0, fastest: 1.0}
    timed(monkeypatch, **times)
    model, x = mlp().train(training), torch.randn(4, 8)
    compiled = torch.compile(model, backend="hypatia")
    with torch.set_grad_enabled(training), collecting() as reports:
        for _ in range(2):
            result = compiled(x)
            torch.testing.assert_close(result, model(x))
        if training:
            result.sum().backward()
    wanted = "graph" if training and fastest == "plan" else fastest
    assert {report.kept for report in reports} == {wanted}
    assert all(report.times is not None and "eager" in report.times for report in reports)


def test_what_has_no_plan_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Dropout()).train(), torch.randn(4, 8)
    for graph, kept in ((1.0, "graph"), (3.0, "eager")):
        times = {"eager": 2.0, "graph": graph}
        monkeypatch.setattr(choose, "in_turns", lambda *_, answer=times, **__: (torch.rand(1), answer)[1])
        state = torch.get_rng_state()
        with torch.no_grad():
            compiled = hypatia.compile(model, x)
        assert torch.equal(state, torch.get_rng_state())
        assert compiled.reports[0].kept == kept
        assert (compiled._last._run is model) == (kept == "eager")
        assert "no plan" in str(compiled.reports[0])


def test_what_others_would_notice_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_call, "effects_of", lambda _: ["c10d.all_reduce"])
    monkeypatch.setattr(choose, "in_turns", lambda *_, **__: fails())
    monkeypatch.setattr(choose, "keep_fastest", lambda *_: fails())
    x = torch.randn(4, 8)
    for model in (mlp(), nn.Sequential(nn.Linear(8, 16), nn.Dropout()).train()):
        with torch.no_grad():
            assert hypatia.compile(model, x).reports[0].times is None
