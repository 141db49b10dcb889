"""How many shapes are compiled, bound and recorded, and which graphs are recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

import hypatia
from hypatia import _torch
from hypatia.execute import binding, choose, cuda_graph, recorded_plan, recording, timing
from hypatia.frontend import direct
from hypatia.frontend.dynamo import collecting
from support import fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


class Branching(nn.Module):
    """Sizes cannot be left open: the way depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2.0 if x.shape[0] % 2 else x.shape[0])


@pytest.mark.parametrize("model", [Branching().eval(), nn.Linear(4, 4).eval()])
def test_shapes_in_turns_are_compiled_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []
    made = direct.CompiledCall

    def counted(*args: Any, **kwargs: Any) -> Any:
        compilations.append(args)
        return made(*args, **kwargs)

    monkeypatch.setattr(direct, "CompiledCall", counted)
    monkeypatch.setattr(direct, "_KEPT", 3)
    compiled = hypatia.compile(model)
    sizes = range(2, 8)
    with torch.no_grad():
        for turn in range(4):
            for size in sizes:
                x = torch.randn(size, 4)
                torch.testing.assert_close(compiled(x), model(x))
            if not turn:
                first = len(compilations)
    # A size that cannot be left open is tried as an open one first.
    assert first <= 2 * len(sizes)
    assert len(compilations) == first


def test_plans_for_sizes_in_turns_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    bind = binding.Binding._newly_bound

    def counted(self: Any, args: Any, sizes: Any, *rest: Any) -> Any:
        bound.append(sizes)
        return bind(self, args, sizes, *rest)

    monkeypatch.setattr(binding.Binding, "_newly_bound", counted)
    monkeypatch.setattr(binding, "KEPT", 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    compiled = hypatia.compile(model, torch.randn(9, 4))
    sizes = range(2, 8)
    with torch.no_grad():
        for turn in range(4):
            for size in sizes:
                x = torch.randn(size, 4)
                torch.testing.assert_close(compiled(x), model(x))
            if not turn:
                first = len(bound)
        assert len(bound) == first
        # Other weights, and all begins anew.
        model[0].weight.mul_(2.0)
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), model(x))


class Recorded:
    """In place of a recording."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.folded: list[object] = []

    def __call__(self, args: Any) -> list[object]:
        return ["recorded"]


class Fake(recording.Recordings):
    """Recordings on a machine without a GPU, of so many bytes each."""

    def __init__(self, size: int = 1) -> None:
        graph = fx.symbolic_trace(nn.ReLU())
        super().__init__(graph, lambda _: ["run"], torch.device("cpu"))
        self.made = 0
        self.size = size

    def _key(self, args: Any) -> object:
        return args[0]

    def _record(self, args: Any) -> Any:
        self.made += 1
        return Recorded(self.size)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "is_recordable_here", lambda _: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 8 << 30))


@pytest.mark.usefixtures("gpu")
def test_a_shape_is_recorded_when_it_comes_again_and_again() -> None:
    graph = Fake()
    assert [graph(["a"]) for _ in range(4)] == [["run"], ["run"], ["recorded"], ["recorded"]]
    assert graph.try_on(["b"]) is not None
    assert graph.made == 2


@pytest.mark.usefixtures("gpu")
def test_a_hundred_shapes_in_turns_are_not_recorded_again_and_again() -> None:
    graph = Fake()
    for _ in range(20):
        for shape in range(100):
            graph([shape])
    assert graph.made == cuda_graph.MOST + recording.EVICTED
    assert len(graph._cache._known) == cuda_graph.MOST
    assert sum(graph([shape]) == ["recorded"] for shape in range(100)) == cuda_graph.MOST


@pytest.mark.usefixtures("gpu")
def test_recordings_hold_memory_within_a_limit() -> None:
    graph = Fake(600 << 20)
    for _ in range(20):
        for shape in range(100):
            graph([shape])
    assert sum(graph._cache._room._held.values()) <= cuda_graph.HELD + graph.size
    large = Fake(4 << 30)
    assert all(large(["a"]) == ["run"] for _ in range(9)), "more than its share of free memory"


@pytest.mark.usefixtures("gpu")
def test_weights_that_are_folded_anew_every_time_end_recordings() -> None:
    graph = Fake()
    graph._is_current = lambda *_: False  # type: ignore[method-assign]
    assert all(graph(["a"]) == ["run"] for _ in range(100))
    assert graph.made == recording.EVICTED


def captured(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    class Called(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return torch.export.export(Called(), inputs).run_decompositions({}).module(check_guards=False)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.relu() @ x, ""),
        (lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), ""),
        (lambda x: nn.functional.dropout(x), "draws random numbers"),
        (lambda x: torch.rand_like(x) + x, "draws random numbers"),
        (lambda x: x.nonzero(), "waits for the values"),
        (lambda x: x.to("meta"), "is on meta"),
    ],
)
def test_what_cannot_be_recorded(function: Any, why: str) -> None:
    said = recording.why_not(captured(function, torch.randn(4, 4)), torch.device("cpu"))
    assert (why in said) if why else not said, said


def test_results_are_copied_as_they_lie() -> None:
    whole = torch.randn(6, 4)
    results = [whole, whole[2:], None, whole.t(), 3, torch.randn(4, 5).t(), torch.randn(8, 8)[:, ::2]]
    made = cuda_graph.CopiesOut(results).make()
    for ours, theirs in zip(made, results, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
            assert ours.data_ptr() != theirs.data_ptr()
        else:
            assert ours == theirs
    made[0][3, 0] = 7.0
    assert made[1][1, 0] == made[3][0, 3] == 7.0


class Replayed:
    """In place of a CUDA graph: it runs again what it recorded, into the same memory."""

    def __init__(self, _: int, run: Any, *, warm: Any = None, **__: Any) -> None:
        for _ in range(2 if warm else 0):
            warm()
        self._run = run
        self.results = run()

    def replay(self) -> None:
        written, again = (
            torch.utils._pytree.tree_leaves(r.early if isinstance(r, Rest) else r)
            for r in (self.results, self._run())
        )
        for place, value in zip(written, again, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)


@pytest.fixture
def replays(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings on a CPU, which are the fastest form of all."""
    known = {"plan": (9.0, 9.0), "graph": (1.0, 5.0), "eager": (1.1, 5.0), "recording": (1.0, 0.1)}

    def timed(forms: Any, *_: Any) -> timing.Times:
        apart = {name: known.get(name, (9.0, 9.0)) for name in forms}
        return timing.Times({name: max(both) for name, both in apart.items()}, apart)

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(recording, "CudaGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(_torch, "cuda_stream", lambda _: 0)
    monkeypatch.setattr(choose, "PAUSES", ())


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()


def made(entry: str, model: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    with torch.no_grad(), collecting() as reports:
        if entry == "compile":
            compiled: Any = hypatia.compile(model, x)
            return compiled, compiled.reports[0]
        compiled = torch.compile(model, backend="hypatia")
        compiled(x)
        (report,) = reports
        return compiled, report


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("entry", ["compile", "torch.compile"])
def test_a_recording_runs_where_it_is_the_fastest(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block(), torch.randn(3, 8)
    compiled, report = made(entry, model, x)
    assert report.kept == "recording"
    assert "recording" in str(report)
    runs = []
    call = recording.Recording.__call__
    monkeypatch.setattr(recording.Recording, "__call__", lambda *a: (runs.append(1), call(*a))[1])
    with torch.no_grad():
        first = compiled(x)
        before = first.clone()
        for _ in range(3):
            y = torch.randn(3, 8)
            torch.testing.assert_close(compiled(y), model(y))
        assert torch.equal(first, before)
        assert len(runs) == 4
        # Weights that were folded are folded again, and others are read where they lie.
        for change in (model[0].weight, model[1].weight, model[3].bias):
            change.mul_(1.5)
            for _ in range(4):
                torch.testing.assert_close(compiled(x), model(x))
        model[3].weight.data = model[3].weight.data * 2
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x))
        for size in (2, 5, 2, 5, 2, 5, 2, 5):
            y = torch.randn(size, 8)
            torch.testing.assert_close(compiled(y), model(y))


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("entry", ["compile", "torch.compile"])
def test_a_result_that_is_an_input_is_not_recorded(entry: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.view(-1), x.cumsum(0)

    x = torch.randn(3, 4)
    compiled, report = made(entry, Model(), x)
    assert report.kept != "recording"
    with torch.no_grad():
        assert compiled(x)[0].data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("replays")
def test_a_recording_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Replayed):
        def replay(self) -> None:
            super().replay()
            self.results[0].add_(1.0)

    monkeypatch.setattr(recording, "CudaGraph", Wrong)
    model, x = block(), torch.randn(3, 8)
    compiled, report = made("compile", model, x)
    assert report.kept != "recording"
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


class Decoding(nn.Module):
    """Writes into a cache, which is an input or a buffer, and reads it."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("cache", torch.zeros(6, 8) if buffer else None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64) if buffer else None)

    def forward(self, x: torch.Tensor, at: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        if cache is None:
            cache = self.cache
            self.steps.add_(1)
        cache.index_copy_(0, at, self.first(x).relu())
        result: torch.Tensor = self.second(cache.cumsum(0))
        return result


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("entry", ["compile", "torch.compile"])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_graph_that_changes_a_cache_is_recorded(
    entry: str, buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoding(buffer).eval()
    twin = copy.deepcopy(model)
    runs = []
    call = recording.Recording.__call__
    monkeypatch.setattr(recording.Recording, "__call__", lambda *a: (runs.append(1), call(*a))[1])
    caches = [() if buffer else (torch.zeros(6, 8),) for _ in range(2)]
    with torch.no_grad(), collecting() as reports:
        compiled: Any = torch.compile(model, backend="hypatia") if entry != "compile" else None
        for i in range(6):
            x, at = torch.randn(2, 8), torch.tensor([i, 5 - i])
            if compiled is None:
                compiled = hypatia.compile(model, x, at, *caches[0])
                reports = compiled.reports
                torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
            if i == 1:
                runs.clear()
            versions = [t._version for t in (*caches[0], *model.buffers())]
            torch.testing.assert_close(compiled(x, at, *caches[0]), twin(x, at, *caches[1]))
            torch.testing.assert_close(caches[0], caches[1])
            torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
            changed = zip((*caches[0], *model.buffers()), versions, strict=True)
            assert all(t._version > v for t, v in changed)
        (report,) = reports
        assert report.kept == "recording"
        assert len(runs) == 5
        if not buffer:
            # At another address the graph runs, until that was seen several times.
            runs.clear()
            caches = [(t[0].clone(),) for t in caches]
            for i in range(4):
                x, at = torch.randn(2, 8), torch.tensor([i, 5 - i])
                torch.testing.assert_close(compiled(x, at, *caches[0]), twin(x, at, *caches[1]))
                torch.testing.assert_close(caches[0], caches[1])
            # One call checks the new recording.
            assert len(runs) >= 3


class Rest:
    """In place of the last steps of a plan: the results that the first ones wrote, and nothing more."""

    def __init__(self, early: list[torch.Tensor | None]) -> None:
        self.early = early

    def __call__(self, _: int) -> tuple[torch.Tensor, ...]:
        return ()


class Planned:
    """In place of a plan on a GPU: adds to a sum in place, draws a number, and returns both."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, _: int, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.runs += 1
        total.add_(x)
        return total * 2, torch.rand(3)

    def begin(self, stream: int, *inputs: torch.Tensor) -> Rest:
        return Rest(list(self(stream, *inputs)))

    def current(self) -> bool:
        return True

    def refusal(self, *_: Any) -> str:
        return ""


@pytest.fixture
def recorded(replays: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(recorded_plan, "CudaGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make(changes: list[int]) -> Any:
        inputs = (torch.ones(3), torch.zeros(3))
        room = cuda_graph.Room(0)
        return recorded_plan.Recorded(Planned(), torch.device("cpu"), inputs, room, changes)  # type: ignore[arg-type]

    return make


def test_a_plan_is_recorded_where_its_changes_lie(recorded: Any) -> None:
    plan = recorded([1])
    assert plan.bound.runs == 0, "a first call is checked on copies"
    for total in (torch.zeros(3), torch.zeros(3)):
        for i in range(6):
            x = torch.randn(3)
            torch.manual_seed(i)
            before = total.clone()
            result, drawn = plan(0, x, total)
            after = torch.rand(1)
            torch.manual_seed(i)
            # Neither a run before the recording nor the recording itself adds or draws anything more.
            torch.testing.assert_close(total, before + x)
            torch.testing.assert_close(result, 2 * total)
            torch.testing.assert_close((drawn, after), (torch.rand(3), torch.rand(1)))
            assert (total.data_ptr(),) in plan._cache._known or i < recorded_plan.AFTER - 1
    assert len(plan._cache._known) == 2
    assert plan(0, torch.randn(4), total) is None, "not for these inputs"


def test_recordings_of_changes_at_new_addresses_are_bounded(recorded: Any) -> None:
    plan = recorded([1])
    x, totals = torch.ones(3), [torch.zeros(3) for _ in range(100)]
    for _ in range(20):
        for total in totals:
            plan(0, x, total)
    assert all(torch.equal(t, torch.full((3,), 20.0)) for t in totals)
    assert len(plan._cache._known) == cuda_graph.MOST
    assert plan._cache.evicted <= cuda_graph.EVICTED + 1


def test_a_recorded_plan_that_changes_something_else_is_not_used(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Replayed):
        def replay(self) -> None:
            super().replay()
            self._run()

    monkeypatch.setattr(recorded_plan, "CudaGraph", Wrong)
    plan, total = recorded([1]), torch.zeros(3)
    for i in range(5):
        plan(0, torch.ones(3), total)
        torch.testing.assert_close(total, torch.full((3,), i + 1.0))
    assert not plan._cache._known


def test_a_cache_of_which_there_is_no_room_for_copies(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (64, 64))
    plan, total = recorded([1]), torch.zeros(3)
    for _ in range(5):
        plan(0, torch.ones(3), total)
    assert not plan._cache._known
    torch.testing.assert_close(total, torch.full((3,), 5.0))


class Doubled(Rest):
    """Its last steps write twice what the first ones wrote, and add one to that."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__([None, first, None])
        self.streams: list[int] = []

    def __call__(self, stream: int) -> tuple[torch.Tensor, ...]:
        self.streams.append(stream)
        assert self.early[1] is not None
        late = (self.early[1] * 2, self.early[1] * 3)
        self.early[1].add_(1)
        return late


class WithLateResults(Planned):
    """In place of a plan whose last steps follow the recording."""

    def __call__(self, stream: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, total = inputs
        return 2 * (x + total), x + total + 1, 3 * (x + total)

    def begin(self, _: int, *inputs: torch.Tensor) -> Rest:
        x, total = inputs
        return Doubled(x + total)


def test_late_results_are_new_at_every_call(replays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_plan, "CudaGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    inputs = (torch.ones(3), torch.zeros(3))
    plan = WithLateResults()
    recorded = recorded_plan.Recorded(plan, torch.device("cpu"), inputs, cuda_graph.Room(0))  # type: ignore[arg-type]
    ((_, recording),) = recorded._cache._known.items()
    given, found = [], []
    for _ in range(4):
        given.append((torch.randn(3), torch.randn(3)))
        results = recorded(0, *given[-1])
        assert results is not None
        found.append(results)
    # All are as they were returned, the copy of an early one after the last steps wrote to it.
    for x, results in zip(given, found, strict=True):
        torch.testing.assert_close(results, plan(0, *x))
    assert len({r.data_ptr() for results in found for r in results}) == 12
    assert recording._graph.results.streams[-1:] == [0]
