"""The fastest form is kept, and no form runs that was not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hypatia
from hypatia.execute import choose, native, timing
from hypatia.frontend import compiled_call, optimize
from hypatia.frontend.dynamo import collecting
from hypatia.verifier import first_call
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
        self.waited = 0.0
        """Of the time that went by, when others had the core."""

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now - self.slept - self.waited

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


CPU = torch.device("cpu")


def taken(forms: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    return timing.timed(forms, seconds, CPU).taken


def test_no_clock_decides_which_form_is_kept_in_tests() -> None:
    times = taken(dict.fromkeys(("plan", "eager", "graph"), fails), 0.05)
    assert times["plan"] < times["graph"] < times["eager"]
    assert timing.once({"eager": fails, "plain": fails}, CPU).keys() == {"eager", "plain"}


def test_the_graph_is_left_out_where_eager_takes_twice_as_long(clock: Clock) -> None:
    forms = {"plan": clock.takes(0.001), "graph": fails, "eager": clock.takes(0.0025)}
    assert taken(forms, 0.01) == {"plan": pytest.approx(0.001), "eager": pytest.approx(0.0025)}
    forms = {"plan": clock.takes(0.001), "graph": clock.takes(0.0014), "eager": clock.takes(0.0015)}
    assert list(taken(forms, 0.01)) == ["plan", "graph", "eager"]


def test_a_graph_that_does_not_run_is_left_out(clock: Clock) -> None:
    assert list(taken({"plan": clock.takes(0.003), "graph": fails}, 0.01)) == ["plan"]


def test_a_call_that_was_disturbed_does_not_count(clock: Clock) -> None:
    forms = {"plan": clock.takes(0.003, 0.9, 0.003), "graph": clock.takes(0.004)}
    assert taken(forms, 0.05)["plan"] == pytest.approx(0.003)
    # Of a few, the fastest.
    forms = {"plan": clock.takes(0.5, 0.1, 0.5), "graph": clock.takes(0.4)}
    assert taken(forms, 0.05)["plan"] == pytest.approx(0.1)


def test_what_others_take_of_a_core_does_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded() -> None:
        clock.now += 0.5
        clock.waited += 0.4

    assert taken({"plan": crowded, "eager": clock.takes(0.3)}, 0.05)["plan"] == pytest.approx(0.1)
    # Of several threads nothing is known.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert taken({"plan": crowded, "eager": clock.takes(0.3)}, 0.05)["plan"] == pytest.approx(0.5)


def test_a_form_that_has_clearly_lost_is_not_timed_on(clock: Clock) -> None:
    calls: list[str] = []

    def counted(name: str, seconds: float) -> Callable[[], None]:
        form = clock.takes(seconds)
        return lambda: (calls.append(name), form())[1]

    times = taken({"plan": counted("plan", 0.1), "eager": counted("eager", 0.13)}, 0.05)
    assert times == {"plan": pytest.approx(0.1), "eager": pytest.approx(0.13)}
    assert calls == ["plan", "eager"] * 2, "the first call of a long one counts"
    calls.clear()
    taken({"plan": counted("plan", 0.1), "eager": counted("eager", 0.12)}, 0.05)
    assert calls == ["plan", "eager"] * 3, "that is too close for two calls"


def test_a_step_with_a_loss_goes_back_from_the_loss_alone() -> None:
    x, seen = torch.ones(3, requires_grad=True), []

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        y.register_hook(lambda gradient: seen.append(gradient.tolist()))
        return y.sum(), y

    choose.with_backward(call, [x])()
    assert seen == [[1.0, 1.0, 1.0]]


def test_threads_of_torch_may_sleep_before_a_plan_is_timed(clock: Clock) -> None:
    taken({"plan": clock.takes(0.01), "graph": clock.takes(0.01)}, 0.0)
    assert clock.slept == pytest.approx(3 * timing.REST)
    clock.slept = 0.0
    taken({"plan": clock.takes(9.0), "graph": clock.takes(9.0)}, 0.0)
    assert clock.slept == pytest.approx(timing.REST), "it does not matter for calls that take long"


def test_one_call_of_each_form(clock: Clock) -> None:
    assert timing.once({"plan": clock.takes(7.0, 1.0), "graph": clock.takes(2.0)}, CPU) == {
        "plan": 7.0,
        "graph": 2.0,
    }


@pytest.mark.parametrize(
    ("times", "copies", "kept"),
    [
        ({"plan": 1.0, "graph": 1.0, "eager": 1.0}, 0, "plan"),
        ({"plan": 1.02, "graph": 1.0, "eager": 1.0}, 0, "plan"),
        ({"plan": 1.05, "graph": 1.02, "eager": 1.0}, 0, "graph"),
        ({"plan": 1.05, "graph": 1.05, "eager": 1.0}, 0, "eager"),
        ({"plan": 1.0, "graph": 1.02, "eager": 2.0}, choose.COPIES, "graph"),
        ({"plan": 1.0, "graph": 1.04, "eager": 2.0}, choose.COPIES, "plan"),
        ({"plan": 1.0, "plainer plan": 1.0, "graph": 2.0}, choose.COPIES, "plan"),
        ({"plan": 2.0, "recording": 1.0, "graph": 1.0, "eager": 1.0}, 0, "recording"),
        ({"plain": 1.0, "masked": 0.99, "eager": 0.98}, 0, "plain"),
        ({"plain": 1.1, "recorded": 1.0, "eager": 1.0}, 0, "recorded"),
        ({"eager": 1.0}, 0, "eager"),
    ],
)
def test_of_equals_the_first_is_kept(times: dict[str, float], copies: int, kept: str) -> None:
    assert choose.decide(times, copies) == kept


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, **apart: tuple[float, float]) -> None:
    def timed(forms: Any, *_: Any) -> timing.Times:
        known = {name: apart[name] for name in forms}
        return timing.Times({name: max(both) for name, both in known.items()}, known)

    monkeypatch.setattr(timing, "timed", timed)


def chosen_on_a_gpu(recorded: list[str]) -> choose.Choice:
    def record(name: str) -> Callable[[], object]:
        recorded.append(name)
        return fails

    forms = {"graph": fails, "eager": fails}
    return choose.fastest(forms, torch.device("cuda"), record=record)


def test_what_calls_wait_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is busy for as long in both, the device is not."""
    recorded: list[str] = []
    on_a_gpu(monkeypatch, graph=(5.5, 5.7), eager=(1.9, 5.7), recording=(2.0, 0.1))
    kept, times = chosen_on_a_gpu(recorded)
    assert (kept, recorded) == ("recording", ["eager"])
    assert list(times.taken) == ["recording", "graph", "eager"]
    assert times.taken["graph"] == 5.7
    assert times.apart["eager"] == (1.9, 5.7)


def test_nothing_is_recorded_where_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    on_a_gpu(monkeypatch, graph=(5.0, 1.0), eager=(6.0, 1.0))
    assert (chosen_on_a_gpu(recorded).kept, recorded) == ("graph", [])


def test_a_host_that_is_about_as_busy_as_the_device_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls find a busier one."""
    recorded: list[str] = []
    on_a_gpu(monkeypatch, graph=(5.2, 3.0), eager=(5.2, 3.0), recording=(5.3, 0.1))
    assert (chosen_on_a_gpu(recorded).kept, recorded) == ("recording", ["graph"])


def timed(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[native.NativeGraph], None] | None = None,
    **seconds: float,
) -> None:
    """The forms of a plan take so long, whatever they are."""

    fastest = choose.fastest

    def changed(*args: Any, plan: native.NativeGraph | None = None, **more: Any) -> choose.Choice:
        if change is not None and plan is not None:
            change(plan)
        return fastest(*args, plan=plan, **more)

    monkeypatch.setattr(choose, "fastest", changed)
    monkeypatch.setattr(timing, "instead", lambda forms: {name: seconds[name] for name in forms})


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
    if not right:
        made = first_call.Guard._fastest

        def broken(guard: Any, trial: Any, form: Any) -> Any:
            ops = form.forward.graph
            form.forward.graph = lambda args: [t + 0.1 for t in ops(args)]
            return made(guard, trial, form)

        monkeypatch.setattr(first_call.Guard, "_fastest", broken)
    timed(monkeypatch, plan=3.0, graph=1.0, eager=2.0)
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
    """Eager is among them: the graph as it was captured."""
    times = {"plan": 3.0, "graph": 3.0, "eager": 3.0, "plain": 3.0, fastest: 1.0}
    timed(monkeypatch, **times)
    model, x = mlp().train(training), torch.randn(4, 8)
    compiled = torch.compile(model, backend="hypatia")
    with torch.set_grad_enabled(training), collecting() as reports:
        for _ in range(2):
            result = compiled(x)
            torch.testing.assert_close(result, model(x))
        if training:
            result.sum().backward()
    assert {report.kept for report in reports} == {fastest}
    assert all(report.times is not None and "eager" in report.times for report in reports)


def test_what_has_no_plan_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Dropout()).train(), torch.randn(4, 8)
    for graph, kept in ((1.0, "graph"), (3.0, "eager")):
        times = {"eager": 2.0, "graph": graph}
        monkeypatch.setattr(timing, "instead", lambda _, answer=times: (torch.rand(1), answer)[1])
        state = torch.get_rng_state()
        with torch.no_grad():
            compiled = hypatia.compile(model, x)
        assert torch.equal(state, torch.get_rng_state())
        assert compiled.reports[0].kept == kept
        assert (compiled._last._run is model) == (kept == "eager")
        assert "no plan" in str(compiled.reports[0])


def test_what_others_would_notice_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_call, "effects_of", lambda _: ["c10d.all_reduce"])
    monkeypatch.setattr(choose, "fastest", lambda *_, **__: fails())
    x = torch.randn(4, 8)
    for model in (mlp(), nn.Sequential(nn.Linear(8, 16), nn.Dropout()).train()):
        with torch.no_grad():
            assert hypatia.compile(model, x).reports[0].times is None


def assert_rematches(compiled: Any, model: nn.Module, x: torch.Tensor, calls: int) -> None:
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("entry", ["compile", "torch.compile"])
def test_a_plan_that_lost_by_little_is_timed_again_later(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "PAUSES", ())
    timed(monkeypatch, plan=1.1, graph=1.3, eager=1.0, kept=1.0)
    model, x = mlp(), torch.randn(4, 8)
    with collecting() as reports, torch.no_grad():
        if entry == "compile":
            compiled: Any = hypatia.compile(model, x)
            reports = compiled.reports
        else:
            compiled = torch.compile(model, backend="hypatia")
            compiled(x)
    (report,) = reports
    assert (report.kept, report.later) == ("eager", "")
    assert_rematches(compiled, model, x, 64 + 2 * choose.LAPS)
    assert report.kept == "eager"
    assert report.later.startswith("after 79 calls")
    timed(monkeypatch, plan=1.0, kept=1.0)
    runs: list[bool] = []
    run = native.NativeGraph.run
    monkeypatch.setattr(native.NativeGraph, "run", lambda *a: (runs.append(True), run(*a))[1])
    assert_rematches(compiled, model, x, 900)
    assert not runs
    assert_rematches(compiled, model, x, 100)
    assert report.kept == "plan"
    assert "the plan is kept now" in str(report)
    del runs[:]
    assert_rematches(compiled, model, x, 3)
    assert len(runs) >= 3


def test_a_plan_that_lost_by_much_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "PAUSES", ())
    timed(monkeypatch, plan=1.2, graph=1.3, eager=1.0)
    monkeypatch.setattr(choose, "LaterTiming", fails)
    hypatia.compile(mlp(), torch.randn(4, 8))


class Rounds:
    """A later_timing on a clock, the plan of which takes so long, and runs or does not."""

    def __init__(self, clock: Clock, plan: float) -> None:
        self.runs = True
        self.planned = 0
        self.ended: list[tuple[int, dict[str, float], bool]] = []
        kept = clock.takes(2.0)

        def planned(_: Any) -> object:
            self.planned += 1
            clock.now += plan
            return ["plan"] if self.runs else None

        def by_kept(_: Any) -> object:
            kept()
            return ["kept"]

        self.later_timing = choose.LaterTiming(by_kept, planned, CPU, lambda *told: self.ended.append(told))

    def call(self, times: int = 1) -> list[object]:
        return [self.later_timing([]) for _ in range(times)]


@pytest.mark.parametrize("plan", [1.0, 3.0])
def test_a_rematch_times_calls_that_are_made_anyway(plan: float, clock: Clock) -> None:
    rounds = Rounds(clock, plan)
    assert rounds.call(63) == 63 * [["kept"]]
    assert rounds.call(choose.LAPS) == choose.LAPS * [["plan"]]
    assert not rounds.ended
    assert rounds.call(choose.LAPS) == choose.LAPS * [["kept"]]
    assert rounds.ended == [(79, {"plan": plan, "kept": 2.0}, plan < 2.0)]
    rounds.call(2000)
    assert len(rounds.ended) == len(choose.LATER)
    assert rounds.planned == choose.LAPS * len(choose.LATER)


def test_there_is_no_rematch_where_the_plan_does_not_run_or_somebody_looks(clock: Clock) -> None:
    rounds = Rounds(clock, 1.0)
    rounds.runs = False
    assert rounds.call(200) == 200 * [["kept"]]
    assert (rounds.planned, rounds.ended) == (1, [])
    rounds = Rounds(clock, 1.0)
    with torch.autocast("cpu"):
        assert rounds.call(1000) == 1000 * [["kept"]]
    with FlopCounterMode(display=False):
        assert rounds.call(200) == 200 * [["kept"]]
    assert (rounds.planned, rounds.ended) == (0, [])


def test_optimize_returns_the_model_as_it_is_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(4, 8)
    for training in (False, True):
        for graph, kept in ((1.0, "graph"), (3.0, "eager")):
            timed(monkeypatch, graph=graph, eager=2.0)
            with torch.set_grad_enabled(training):
                made = hypatia.optimize(model, x)
                torch.testing.assert_close(made(x), model(x))
            report = made.meta["hypatia"]
            assert (report.kept, report.times) == (kept, {"graph": graph, "eager": 2.0})
