"""Training through hypatia.compile: gradients, and what users do between the passes.

A GPU's plans of training steps are run here by the CPU's runtime, which serves the same lowering.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline
from hypatia.devices import table
from hypatia.execute import native, timing
from hypatia.execute.cuda_graph import CopiesOut
from hypatia.frontend import step_forms, train_dynamo
from hypatia.tools.workloads import BertLayer, GPTLayer, LlamaLayer
from hypatia.verifier import reference


class Layers(nn.Module):
    """Two linear layers and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The second of the first."""
        return self.second(F.relu(self.first(x)))


@pytest.fixture
def never_eager() -> Iterator[None]:
    """A step runs compiled, whether that is faster or not."""
    with mock.patch.object(timing, "instead", lambda forms: {n: float(n == "eager") for n in forms}):
        yield


@pytest.fixture
def plans(never_eager: None) -> Iterator[None]:
    """Passes run by plans, and a failing plan is an error."""

    def failed(self: native.NativeGraph, error: Exception, args: Any) -> Any:
        raise error

    with (
        mock.patch.object(pipeline, "_no_kernels", return_value=""),
        mock.patch.object(native.NativeGraph, "_failed", failed),
    ):
        yield


def gradients(call: Any, model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Of the sum of squares, added over the inputs."""
    model.zero_grad()
    for x in inputs:
        call(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_same(model: nn.Module, call: Any, *inputs: torch.Tensor) -> None:
    """Gradients are eager's but for roundings."""
    for ours, theirs in zip(gradients(call, model, *inputs), gradients(model, model, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


LAYERS = {
    "mlp": (Layers, (5, 12)),
    "bert": (lambda: BertLayer(32, 4, 64), (2, 6, 32)),
    "gpt": (lambda: GPTLayer(32, 4), (2, 6, 32)),
    "llama": (lambda: LlamaLayer(32, 4, 48), (2, 6, 32)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("plans")
def test_gradients_of_plans_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = make(), torch.randn(shape)
    call = hypatia.compile(model)
    for _ in range(3):
        assert_same(model, call, x)
    step = call._last_training.step
    assert step is not None
    assert all(isinstance(p.latest(), native.NativeGraph) for p in step._graphs)
    assert all(p.latest().native for p in step._graphs)


@pytest.mark.parametrize("by", ["never_eager", "plans"])
def test_what_users_do_between_the_passes(by: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(by)
    torch.manual_seed(0)
    model, x, other = Layers(), torch.randn(5, 12), torch.randn(5, 12)
    call = hypatia.compile(model)
    for _ in range(2):
        assert_same(model, call, x, other)
    want = gradients(model, model, x, other)
    for order in (1, -1):
        model.zero_grad()
        for loss in [call(x).square().sum(), call(other).square().sum()][::order]:
            loss.backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], want)
    model.zero_grad()
    loss = call(x).square().sum()
    loss.backward(retain_graph=True)
    call(other).square().sum().backward()
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients(model, model, x, other, x))
    loss = call(x).square().sum()
    with torch.no_grad():
        model.second.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert_same(model, call, x)


@pytest.mark.usefixtures("never_eager")
def test_gradients_of_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    call, x = hypatia.compile(model), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        call(x).sum().backward()
    assert call._last_training.step is not None
    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x)
    found = []
    for f in (call, model):
        (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), model[2].weight)[0])
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("never_eager")
def test_frozen_parameters_and_inputs_that_want_gradients() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(5, 12, requires_grad=True)
    model.first.requires_grad_(False)
    call = hypatia.compile(model)
    for _ in range(3):
        wanted = [x, *model.second.parameters()]
        ours = torch.autograd.grad(call(x).square().sum(), wanted)
        torch.testing.assert_close(ours, torch.autograd.grad(model(x).square().sum(), wanted))
    model.first.requires_grad_(True)
    assert_same(model, call, x.detach())


@pytest.fixture(params=["torch's ops", "plans"])
def passes(request: pytest.FixtureRequest) -> None:
    """Passes run in both ways."""
    request.getfixturevalue("plans" if request.param == "plans" else "never_eager")


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.usefixtures("passes")
def test_buffers_that_change_have_a_step() -> None:
    torch.manual_seed(0)
    model, x = normed(), torch.randn(8, 6)
    twin = copy.deepcopy(model)
    call = hypatia.compile(model)
    for _ in range(4):
        versions = [b._version for b in model.buffers()]
        model.zero_grad(), twin.zero_grad()
        # Two forward passes before a backward pass: the first one's values are still there.
        for m in (call, twin):
            first, second = m(x), m(x * 2)
            (first.square().sum() + second.square().sum()).backward()
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert all(b._version > v for b, v in zip(model.buffers(), versions, strict=True))
    step = call._last_training.step
    assert step is not None
    assert step.settled
    assert len(step.changed) == 3


@pytest.mark.usefixtures("never_eager")
def test_gradients_of_gradients_do_not_change_buffers_again() -> None:
    model, x = normed(), torch.randn(8, 6, requires_grad=True)
    call = hypatia.compile(model)
    call(x).sum().backward()
    before = model[1].num_batches_tracked.item()
    (g,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert model[1].num_batches_tracked.item() == before + 1


@pytest.mark.usefixtures("never_eager")
def test_forms_are_compared_from_the_same_state() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*normed(), nn.Dropout(0.5)), torch.randn(8, 6)
    call = hypatia.compile(model)
    for _ in range(2):
        call(x).sum().backward()
    step = call._last_training.step
    primals, device = [t.detach() for t in (*step.parameters, x)], torch.device("cpu")
    before, random = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()

    def changing(args: list[torch.Tensor]) -> Any:
        results = step.passes.forward(args)
        model[1].running_var.add_(1.0)
        return results

    wrong = step_forms.Passes(changing, step.passes.backward)
    forms = {"plain": step.passes, "alike": step.passes, "wrong": wrong}
    with torch.no_grad():
        found = step_forms.right_ones(forms, primals, [torch.ones(8, 3)], step.state(device))
    assert list(found) == ["plain", "alike"]
    torch.testing.assert_close(dict(model.named_buffers()), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_step_whose_forms_cannot_be_compared_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on: what fails was only to make it faster."""
    monkeypatch.setattr(pipeline, "raise_errors", False)
    monkeypatch.setattr(train_dynamo.Step, "_recorded_forms", mock.Mock(side_effect=RuntimeError("no")))
    monkeypatch.setattr(type(table.of(torch.device("cpu"))), "records", True)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    call = hypatia.compile(model)
    for _ in range(3):
        result = call(x)
        result.sum().backward()
        torch.testing.assert_close(result, model(x))
    assert "it runs as it is" in caplog.text


def test_a_result_of_another_shape_than_torch_foretold() -> None:
    """torch 2.11 foretells that a norm over one row keeps the row; the model trains as it is then."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    call = hypatia.compile(model)
    call(x).sum().backward()
    step = call._last_training.step
    step._is_new, step._tangents = True, [torch.empty(1, 2, 3)]
    with pytest.raises(RuntimeError, match="a result has the shape"):
        step([x])


def test_forms_are_not_compared_where_a_result_has_another_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known before that: the model trains as it is, and nothing is warned of."""
    monkeypatch.setattr(type(table.of(torch.device("cpu"))), "records", True)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    before = train_dynamo.Step.__init__

    def foretold_otherwise(self: train_dynamo.Step, *args: object) -> None:
        before(self, *args)
        self._tangents = [torch.empty(1, 2, 3)]

    monkeypatch.setattr(train_dynamo.Step, "__init__", foretold_otherwise)
    monkeypatch.setattr(train_dynamo.Step, "ready", True)
    monkeypatch.setattr(pipeline, "raise_errors", False)
    call = hypatia.compile(model)
    for _ in range(3):
        result = call(x)
        result.sum().backward()
        torch.testing.assert_close(result, model(x))
    assert call._last_training.step is None
    assert "cannot be compared" not in caplog.text


class Detached(nn.Module):
    """A result, and a part of it that has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x)
        return y.view(2, -1), y.detach()[:1], y.data.flatten()[1:], y


@pytest.mark.parametrize("entry", ["compile", "torch.compile"])
@pytest.mark.parametrize("kept", ["plan", "graph", "eager"])
def test_a_detached_part_of_a_result_has_no_gradients(
    kept: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever form the forward pass has."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(timing, "instead", lambda forms: {name: float(name != kept) for name in forms})
    model, x = Detached(), torch.randn(4, 4)
    call = hypatia.compile(model) if entry == "compile" else torch.compile(model, backend="hypatia")
    for _ in range(3):
        results, expected = call(x), model(x)
        assert [r.requires_grad for r in results] == [True, False, False, True]
        torch.testing.assert_close(results, expected)
        (results[0].sum() + results[3].square().sum()).backward()


class Tied(nn.Module):
    """The weight of an embedding is that of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 10, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of ten words."""
        result: torch.Tensor = self.last(self.middle(self.embedding(x)).relu())
        return result


@pytest.mark.usefixtures("passes")
def test_tied_weights_have_a_step() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 10, (3, 4))
    call = hypatia.compile(model)
    for _ in range(3):
        assert_same(model, call, x)
        assert_same(model, call, x, x.flip(0))
    step = call._last_training.step
    assert step is not None
    assert step.settled
    for loss in (lambda y: y.square().sum(), lambda y: y.sum()):
        model.zero_grad()
        call.step(x, loss=loss)
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss(model(x)).backward()
        torch.testing.assert_close(ours, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("never_eager")
def test_gradients_of_gradients_of_tied_weights() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 10, (3, 4))
    call = hypatia.compile(model)

    def second(m: Any) -> tuple[torch.Tensor, ...]:
        wanted = list(model.parameters())
        first = torch.autograd.grad(m(x).square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    assert_same(model, call, x)
    for _ in range(2):
        torch.testing.assert_close(second(call), second(model), rtol=1e-4, atol=1e-4)


class Counting(nn.Module):
    """Changes an input and a buffer: there is no step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """A layer."""
        y: torch.Tensor = F.dropout(self.layer(x), 0.5)
        self.calls.add_(1)
        total.add_(y.detach().sum())
        return y


@pytest.mark.parametrize("faster", ["plain", "eager"])
def test_what_has_no_step_is_compared_with_eager(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def instead(forms: Any) -> dict[str, float]:
        asked.append(list(forms))
        return {n: 1.0 + (n != faster) for n in forms}

    monkeypatch.setattr(timing, "instead", instead)
    model = Counting()
    twin = copy.deepcopy(model)
    call = hypatia.compile(model)
    totals = [torch.zeros(()), torch.zeros(())]
    for i in range(4):
        x = torch.randn(3, 6)
        for m, total in zip((call, twin), totals, strict=True):
            torch.manual_seed(i)
            y = m(x, total)
            y.square().sum().backward()
            drawn = torch.rand(1)
        torch.testing.assert_close(totals[0], totals[1])
        torch.testing.assert_close(model.calls, twin.calls)
        torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
        torch.manual_seed(i)
        torch.testing.assert_close(call(x, totals[0].clone()), y)
        torch.testing.assert_close(torch.rand(1), drawn)
        twin.calls.add_(1)
    assert call._last_training.step is None
    assert ["eager", "plain"] in asked, "of equals, eager is kept on a CPU"
    assert call._last_training.eager is (faster == "eager")


@pytest.mark.usefixtures("never_eager")
def test_random_numbers_are_eagers() -> None:
    model, x = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 4)), torch.randn(8, 6)
    call = hypatia.compile(model)
    for _ in range(3):
        torch.manual_seed(1)
        ours = gradients(call, model, x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, gradients(model, model, x))


def test_eager_is_kept_where_it_is_faster() -> None:
    model, x = Layers(), torch.randn(5, 12)
    call = hypatia.compile(model)
    with mock.patch.object(timing, "instead", lambda forms: {n: float(n != "eager") for n in forms}):
        for _ in range(3):
            assert_same(model, call, x)
    assert call._last_training.eager
    assert {report.kept for report in call._last_training.reports} == {"eager"}
    assert_same(model, call, torch.randn(7, 12))


def test_training_goes_as_eagers_does() -> None:
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Layers()
        call = hypatia.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        x, y = torch.randn(16, 12), torch.randn(16, 8)
        for _ in range(30):
            optimizer.zero_grad()
            loss = (call(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        runs.append(loss.item())
    assert runs[1] == pytest.approx(runs[0], rel=1e-3)


@pytest.mark.usefixtures("plans")
def test_passes_in_16_bits_are_kept() -> None:
    # Layer norms keep means in fp32, as uncertain as what they are the means of. Calls into torch are
    # repeated, since a tensor that is freed too early is seen only by chance.
    torch.manual_seed(0)
    model, x = GPTLayer(32, 4, 64).bfloat16(), torch.randn(2, 4, 32).bfloat16()
    call = hypatia.compile(model)
    for _ in range(100):
        model.zero_grad()
        call(x).float().square().sum().backward()
    for report in call.reports:
        assert report.check.status == "passed"
    step = call._last_training.step
    assert all(isinstance(p.latest(), native.NativeGraph) and p.latest().native for p in step._graphs)


def test_what_depends_on_16_bits_is_coarse() -> None:
    gm = torch.export.export(Halves(), (torch.randn(4, 4),)).module()
    found = {n.name for n in reference.narrower(gm.graph, torch.float32)}
    (output,) = gm.graph.find_nodes(op="output")
    first, second = output.args[0]
    assert (first.name in found, second.name in found) == (True, False)


class Halves(nn.Module):
    """One result goes through 16 bits."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both are fp32."""
        return x.bfloat16().exp().float(), x.exp()


def test_a_plan_that_loses_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        {"plan": 3.0, "graph": 2.0, "eager": 2.0},
        {"plan": 1.0, "graph": 2.5, "eager": 2.0},
    ]
    asked = []

    def instead(forms: Any) -> dict[str, float]:
        asked.append(forms)
        answer = answers[min(len(asked), 2) - 1]
        return {name: answer.get(name, 9.0) for name in forms}

    monkeypatch.setattr(timing, "instead", instead)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    compiled = hypatia.compile(model, x)
    assert len(asked) == 2  # the second time it wins
    assert compiled.reports[0].times == {"plan": 1.0, "graph": 2.0, "eager": 2.0}
    assert compiled._last.native is not None


@pytest.mark.parametrize("by", ["never_eager", "plans"])
def test_both_passes_as_one_call(by: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(by)
    torch.manual_seed(0)
    model, x, g = Layers(), torch.randn(5, 12), torch.randn(5, 8)
    call = hypatia.compile(model)
    want = gradients(model, model, x, x)
    for direct in (False, False, True):
        model.zero_grad()
        for _ in range(2):
            loss = call.step(x, loss=lambda y: y.square().sum())
        torch.testing.assert_close([p.grad for p in model.parameters()], want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loss, model(x).square().sum().detach(), rtol=1e-4, atol=1e-4)
        assert not loss.requires_grad
        assert not direct or call._last_training.is_direct()
    model.zero_grad()
    model(x).backward(g)
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # A gradient that does not lie densely.
    result = call.step(x, gradient=g.t().contiguous().t())
    torch.testing.assert_close([p.grad for p in model.parameters()], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result, model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("never_eager")
def test_what_one_call_does_not_serve_is_autograds() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(5, 12)
    call = hypatia.compile(model)
    loss = torch.Tensor.sum
    for _ in range(3):
        call.step(x, loss=loss)
    seen = []
    hook = model.first.weight.register_hook(lambda grad: seen.append(grad.shape))
    call.step(x, loss=loss)
    assert seen == [model.first.weight.shape]
    hook.remove()
    given = x.clone().requires_grad_()
    for _ in range(3):
        call.step(given, loss=loss)
    assert given.grad is not None
    with pytest.raises(TypeError, match="a loss or the gradient"):
        call.step(x)
    with pytest.raises(RuntimeError, match="shape"):
        call.step(x, gradient=torch.ones(3))


@pytest.mark.parametrize(
    "function", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.sigmoid, torch.tanh]
)
@pytest.mark.usefixtures("plans")
def test_gradients_of_activations(function: Any) -> None:
    class Activated(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(function(self.first(x)))

    torch.manual_seed(0)
    model, x = Activated().double(), torch.randn(5, 12).double()
    call = hypatia.compile(model)
    for _ in range(2):
        assert_same(model, call, x)
    backward = call._last_training.step._graphs[1].latest()
    assert any(step.startswith("pointwise") for step in backward.binding.steps)
    assert not any("backward" in step for step in backward.binding.steps)


def test_copies_of_recorded_results_lie_as_they_do() -> None:
    whole = torch.randn(4, 6)
    results = [
        whole,
        whole[1:, ::2],
        torch.randn(3, 4).t(),
        torch.randn(5, 2, 4, 4)[:, :, 0, :-1],
        torch.empty(0),
        torch.tensor(3.0),
        whole.view(-1),
        torch.randn(1, 3).expand(2, 3),
    ]
    copies = CopiesOut(results).make()
    for i, result in enumerate(results):
        assert torch.equal(copies[i], result)
        assert copies[i].stride() == result.stride()
    assert copies[0].data_ptr() == copies[6].data_ptr() != whole.data_ptr()
