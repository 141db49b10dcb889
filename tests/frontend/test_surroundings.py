"""Around the call: modes of torch, threads, processes and copies."""

from __future__ import annotations

import copy
import os
import pickle
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fresh
import hypatia
from hypatia.execute import plans
from outcomes import Call, assert_like_eager, grad_modes, mlp
from support import BACKEND, PEER, assert_as_close_as_eager, compile_count, fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


def test_no_grad_after_a_training_call() -> None:
    """Training and inference are different graphs of one model, in any order, before and after a step."""
    model, x = nn.Sequential(mlp(), nn.Dropout(0.5), nn.BatchNorm1d(4)), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=BACKEND)
    for training in (True, False, True, False):
        for m, call in ((model, compiled), (twin, twin)):
            m.train(training)
            torch.manual_seed(2)
            with torch.set_grad_enabled(training):
                m.result = call(x)
                if training:
                    m.result.square().sum().backward()
                    torch.optim.SGD(m.parameters(), lr=0.01).step()
        assert_as_close_as_eager(model.result, twin.result)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_as_close_as_eager(ours.grad, theirs.grad)


def test_inference_mode_before_and_after() -> None:
    """Inference tensors have no version counter; results of one mode must not be kept for the other."""
    model, x = mlp(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    for _ in range(2):
        with torch.inference_mode():
            ours = compiled(x)
            assert ours.is_inference()
            assert_as_close_as_eager(ours, model(x))
            assert_as_close_as_eager(compiled(x.clone()), model(x))
        ours = compiled(x)
        assert not ours.is_inference()
        ours.sum().backward()


def test_weights_that_are_inference_tensors() -> None:
    """They change without a version counter, so that nothing of them may be folded and kept."""
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(3, 8)
        compiled = torch.compile(model, backend=BACKEND)
        for _ in range(3):
            assert_as_close_as_eager(compiled(x), model(x))
            model[0].weight.mul_(2)


@grad_modes
def test_autocast_on_and_off(grad: bool) -> None:
    """The casts are part of the graph; another state of autocast is another graph."""
    model, x = mlp(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.set_grad_enabled(grad):
        for on in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                assert_as_close_as_eager(compiled(x), model(x))


@pytest.fixture
def deterministic() -> Any:
    """Deterministic algorithms, for one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@grad_modes
def test_deterministic_algorithms(grad: bool, deterministic: None) -> None:
    """In deterministic mode `torch.empty` fills its memory, which counts as eager's result too."""

    class Scatter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.inner(x)
            return torch.zeros(4, 4).index_add(0, i, y), torch.empty_like(y)

    with torch.set_grad_enabled(grad):
        assert_like_eager(lambda: Call(Scatter(), (torch.randn(6, 8), torch.arange(6) % 4)), backward=grad)


class Seen(TorchDispatchMode):
    """A user's mode that writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the op and runs it."""
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets Dynamo compile while the mode is on."""
        return True


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_flop_counter_counts_what_eager_does(first: bool) -> None:
    """The runs of the check are hidden from modes: counted twice they would spoil every profile."""
    x = torch.randn(3, 8)

    def flops(call: Callable[..., Any]) -> int:
        with torch.no_grad():
            if not first:
                call(x)
            with FlopCounterMode(display=False) as counter:
                call(x)
        return counter.get_total_flops()

    model = mlp()
    assert flops(torch.compile(model, backend=BACKEND)) == flops(model) > 0


def test_a_flop_counter_around_a_backward_call() -> None:
    """The backward graph is checked in its own first call, and a counter may be on by then."""
    model, x = mlp(), torch.randn(3, 8)

    def flops(call: Callable[..., Any]) -> int:
        loss = call(x).square().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    before = compile_count()
    assert flops(torch.compile(model, backend=BACKEND)) == flops(model) > 0
    assert compile_count() > before


def test_a_dispatch_mode_sees_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that is active during the first call sees one run, as with a backend that does nothing."""
    x = torch.randn(3, 8)
    monkeypatch.setattr(plans, "planner_of", lambda *_, **__: "torch's ops are to be seen")

    def products(backend: str) -> int:
        fresh_dynamo()
        model = mlp()
        with torch.no_grad(), Seen() as seen:
            torch.compile(model, backend=backend)(x)
        return sum("mm" in call or "linear" in call for call in seen.calls)

    before = compile_count()
    assert products(BACKEND) == products(PEER) == 2
    assert compile_count() > before


def run_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time; their results, or the first error."""
    barrier, found = threading.Barrier(len(targets)), [None] * len(targets)

    def work(i: int) -> None:
        barrier.wait()
        try:
            found[i] = targets[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a thread hangs"
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@grad_modes
@pytest.mark.parametrize("shared", [True, False], ids=["same model", "own models"])
def test_threads_that_compile_at_once(shared: bool, grad: bool) -> None:
    """Dynamo's lock, our lock of the verdict and the collections of reports must not block each other."""
    models = [mlp() for _ in range(3)]
    compiled = [torch.compile(m, backend=BACKEND) for m in models]
    x = torch.randn(3, 8)

    def call(i: int) -> list[torch.Tensor]:
        with torch.set_grad_enabled(grad):
            results = [compiled[i](x) for _ in range(5)]
            if grad:
                results[-1].sum().backward()
        return [r.detach() for r in results]

    chosen = [0 if shared else i for i in range(3)]
    for i, results in zip(chosen, run_threads(*[lambda i=i: call(i) for i in chosen]), strict=True):
        for result in results:
            assert_as_close_as_eager(result, models[i](x).detach())


def run_script(text: str, **environment: str) -> str:
    """What a program of its own prints; it must end well and in time."""
    done = fresh.run(textwrap.dedent(text), env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fork_after_compiling() -> None:
    """Children have the locks and caches of their parent, not its threads: a lock that is held hangs them.

    A forked child calls what was compiled and compiles anew, and so do the workers of a data loader.
    """
    said = run_script(
        """
        import os, signal, torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.ones(3, 8)
        compiled = torch.compile(model, backend="hypatia")
        expected = compiled(x)

        class Samples(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                with torch.no_grad():
                    return compiled(torch.full((3, 8), float(i)))

        child = os.fork()
        if child == 0:
            signal.alarm(40)
            other = torch.compile(lambda t: model(t).tanh(), backend="hypatia")
            same = torch.equal(compiled(x), expected) and torch.allclose(other(x), model(x).tanh())
            os._exit(0 if same else 3)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        loader = DataLoader(Samples(), num_workers=2, multiprocessing_context="fork", timeout=250)
        for i, batch in enumerate(loader):
            assert torch.allclose(batch[0], model(torch.full((3, 8), float(i))), atol=1e-6)
        assert torch.equal(compiled(x), expected)
        print("samples", i + 1)
        """
    )
    assert said.splitlines() == ["child 0", "samples 4"]


@grad_modes
def test_copies_of_a_compiled_model(grad: bool) -> None:
    """A deep copy has weights of its own: a graph shared with the original must not mix them up."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.set_grad_enabled(grad):
        compiled(x)
        twin = copy.deepcopy(compiled)
        with torch.no_grad():
            twin._orig_mod[0].weight.mul_(-1)
        for _ in range(2):
            assert_as_close_as_eager(twin(x), twin._orig_mod(x))
            assert_as_close_as_eager(compiled(x), model(x))


def test_a_model_compiled_in_place_is_pickled() -> None:
    """`model.compile()` is pickled as the model it is, and can be compiled again."""
    model, x = mlp(), torch.randn(3, 8)
    expected = model(x)
    model.compile(backend=BACKEND)
    model(x)
    again = pickle.loads(pickle.dumps(model))
    again.compile(backend=BACKEND)
    assert_as_close_as_eager(again(x), expected)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_of_an_optimized_graph(duplicate: Callable[[Any], Any]) -> None:
    """The copy has parameters of its own, and folds those."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(3, 8)
    with torch.no_grad():
        graph = hypatia.optimize(model, x)
        expected = graph(x)
        twin = duplicate(graph)
        assert torch.equal(twin(x), expected)
        for p in twin.parameters():
            p.zero_()
        assert twin(x).abs().max() == 0
        assert torch.equal(graph(x), expected)
