"""Gradients: layouts of tangents, backward passes written by hand, copies in place, orders of results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hypatia
from hypatia.errors import UnsupportedError


class Transposed(nn.Module):
    """Its result does not lie one element after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(-1, -2).relu()


class View(Transposed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(-1, -2)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(-1, -2).square().unsqueeze(-1)


TANGENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one number": lambda r: r.sum(),
    "dense": lambda r: (r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum(),
    "transposed": lambda r: r.transpose(1, 2).contiguous().square().sum(),
    "made dense": lambda r: r.contiguous().square().sum(),
    "a part": lambda r: r[:, 1:3].square().sum(),
    "flat": lambda r: (r.reshape(-1).cumsum(0) ** 2).mean(),
}


@pytest.mark.parametrize("loss", TANGENTS)
@pytest.mark.parametrize("kind", [Transposed, View, ChannelsLast])
def test_tangents_of_any_layout(kind: type[nn.Module], loss: str) -> None:
    torch.manual_seed(0)
    model = kind()
    compiled = hypatia.compile(model)
    x = torch.randn(2, 5, 4)
    TANGENTS[loss](model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    given = torch.autograd.grad(TANGENTS[loss](r := model(x)), r)[0]
    for run in (
        lambda: TANGENTS[loss](compiled(x)).backward(),
        lambda: compiled.step(x, loss=TANGENTS[loss]),
        lambda: compiled.step(x, gradient=given),
    ):
        for _ in range(3):
            model.zero_grad()
            run()
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class Model(nn.Module):
    def __init__(self, inside: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inside(self.first, x))


def _silently(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = layer(x)
    return y + layer(x).detach() * x


INSIDE: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a backward by hand": lambda layer, x: _Rounded.apply(layer(x)),
    "a reentrant checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "a checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "a part without gradients": _silently,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("wanted", [True, False], ids=["inputs too", "weights alone"])
@pytest.mark.parametrize("inside", INSIDE)
def test_gradients_that_a_graph_of_ops_would_lose(inside: str, wanted: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(INSIDE[inside])
    x = torch.randn(3, 4, requires_grad=wanted)
    leaves = [*model.second.parameters(), *([*model.first.parameters(), x] if wanted else [])]

    # Where no input of a reentrant checkpoint has a gradient, eager gives its weights none, and Dynamo does.
    def gradients(call: Callable[..., torch.Tensor]) -> list[torch.Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        call(x).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(model)
    compiled = hypatia.compile(model)
    for _ in range(4):
        torch.testing.assert_close(gradients(compiled), expected)


def test_optimize_refuses_a_backward_by_hand() -> None:
    with pytest.raises(UnsupportedError, match="backward of its own"):
        hypatia.optimize(Model(INSIDE["a backward by hand"]), torch.randn(3, 4))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).clone()
        y[:, 1:3] = x[:, :2] * 2
        z = torch.zeros_like(y.t())
        z.copy_(y.t())
        w = torch.zeros(3, 4, dtype=torch.float64)
        w.copy_(y[0])
        return z.relu() @ w.float()


def test_optimize_differentiates_copies_in_place() -> None:
    torch.manual_seed(0)
    model = InPlace()
    x = torch.randn(3, 4, requires_grad=True)
    graph = hypatia.optimize(model, x)
    assert graph.meta["hypatia"].check.status == "passed"
    leaves = (x, *model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(graph(x).square().sum(), leaves), expected)


@pytest.mark.parametrize("verify", ["off", None])
def test_optimize_differentiates_batch_norms_that_move_their_statistics(verify: str | None) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), nn.BatchNorm2d(4), norm)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    graph = hypatia.optimize(model, x, options={"verify": verify})
    for _ in range(2):
        leaves, others = (x, *model.parameters()), (x, *twin.parameters())
        expected = torch.autograd.grad(twin(x).square().sum(), others)
        torch.testing.assert_close(torch.autograd.grad(graph(x).square().sum(), leaves), expected)
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


OVERWRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "whole": lambda y, x: y.copy_(x),
    "as a view": lambda y, x: (y.view(-1).copy_(x[0, 0]), y)[1],
    "transposed": lambda y, x: (y.t().copy_(x.t()), y)[1],
    "twice": lambda y, x: torch.zeros_like(y).copy_(y).copy_(x),
    "one number": lambda y, x: y[0, 0].clone().copy_(x[0, 0]),
    "a part": lambda y, x: (y[:1].copy_(x[:1]), y)[1],
    "one that lies otherwise": lambda y, x: torch.zeros(3, 2).t().mul_(y).copy_(x).relu(),
}


class Overwrites(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.change(y + y, x).sigmoid()


@pytest.mark.parametrize("change", OVERWRITES)
def test_what_is_overwritten_has_zeros_for_a_gradient(change: str) -> None:
    model = Overwrites(OVERWRITES[change])
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    graph = hypatia.optimize(model, *leaves)
    result, wanted = graph(*leaves), model(*leaves)
    assert result.stride() == wanted.stride()
    torch.testing.assert_close(result, wanted)
    expected = torch.autograd.grad(wanted.square().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), leaves), expected)
    assert not any("copy_" in str(n.target) for n in graph.graph.nodes)


class Backwards(nn.Module):
    """Returns results in another order than they are computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = self.layer(x)
        b = a.relu() * 2
        c = x.sum() + b.mean()
        return c, b, a, b


def test_optimize_accepts_results_in_another_order() -> None:
    model = Backwards()
    graph = hypatia.optimize(model, torch.randn(3, 4, requires_grad=True))
    assert graph.meta["hypatia"].check.status == "passed"


class Takes(nn.Module):
    """A part of what it puts together: the rest has gradients of zero, not none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.unseen = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.weight * x, self.unseen]).narrow(0, 0, 2)


@pytest.mark.parametrize("verify", ["strict", "off"])
def test_every_result_keeps_what_it_has_gradients_for(verify: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y.max(), torch.cat([x, y]).narrow(0, 0, 1)

    x, y = torch.ones(1), torch.ones(1, requires_grad=True)
    graph = hypatia.optimize(Model(), x, y, options={"verify": verify})
    assert [r.requires_grad for r in graph(x, y)] == [True, True]


@pytest.mark.parametrize("verify", ["strict", "off"])
def test_what_does_not_matter_has_zeros_for_a_gradient(verify: str) -> None:
    model = Takes()
    graph = hypatia.optimize(model, torch.ones(2), options={"verify": verify})
    graph(torch.ones(2)).sum().backward()
    assert model.unseen.grad is not None
    assert not model.unseen.grad.any()


class Remembers(nn.Module):
    """Its buffer becomes part of autograd's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(x)
        return x * torch.sigmoid(x)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_buffer_may_be_changed_by_what_has_gradients(by_name: bool) -> None:
    model = Remembers()
    compiled = hypatia.compile(model)
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        (compiled(x=x) if by_name else compiled(x)).sum().backward()
        assert x.grad is not None
    torch.testing.assert_close(model.sum.detach(), torch.full((2,), 3.0))


class Windows(nn.Module):
    """Its result has elements several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).unfold(-1, 2, 1)


@pytest.mark.parametrize("stepped", [False, True])
def test_results_that_overlap_have_their_gradients(stepped: bool) -> None:
    model = Windows()
    compiled = hypatia.compile(model)
    x, weights = torch.randn(3, 2), torch.randn(3, 3, 2)
    expected = torch.autograd.grad((model(x) * weights).sum(), list(model.parameters()))
    for _ in range(3):
        model.zero_grad()
        if stepped:
            compiled.step(x, loss=lambda y: (y * weights).sum())
        else:
            (compiled(x) * weights).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


class Smallest(nn.Module):
    """The gradient of the least value goes where a value equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y = 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y**3)))
        return y.amin(-1)


@pytest.mark.parametrize("entry", [hypatia.compile, lambda m: torch.compile(m, backend="hypatia")])
def test_what_a_value_is_compared_with_is_not_computed_twice(entry: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Smallest()
    compiled = entry(model)
    for _ in range(8):
        x = torch.randn(16, 4).half()
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


class Detached(nn.Module):
    """A result that is a view of a product, and the same without gradients: AOTAutograd fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ self.weight).transpose(-3, -2)
        return y.detach(), y


def test_what_aot_autograd_cannot_return_trains_as_it_is() -> None:
    model = Detached()
    compiled = hypatia.compile(model)
    x = torch.randn(3, 2, 3, 1)
    for _ in range(2):
        ours, theirs = compiled(x), model(x)
        torch.testing.assert_close(ours, theirs)
        grads = [torch.autograd.grad(r[1].sum(), model.weight) for r in (ours, theirs)]
        torch.testing.assert_close(*grads)


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        turned = y.transpose(0, -1)
        turned.copy_(turned)
        return y


def test_optimize_returns_what_it_cannot_make_functional() -> None:
    model, x = CopiesItself(), torch.randn(1)
    graph = hypatia.optimize(model, x)
    torch.testing.assert_close(graph(x), model(x))
    graph(x).sum().backward()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("check", ["strict", "off"])
def test_inputs_that_change_are_read_before(check: str, recwarn: pytest.WarningsRecorder) -> None:
    """A rule takes ``x * 1`` away; the layer must not read the input itself, which changes then."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
            y = self.layer(x * by)
            x.mul_(0.5)
            return y

    torch.manual_seed(0)
    model = Changing()
    x = torch.randn(5, 4)
    call = hypatia.optimize(model, x.clone(), options={"verify": check})
    found = []
    for each in (call, model):
        model.zero_grad()
        given = x.clone()
        each(given).square().sum().backward()
        found.append([given, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)
    assert not [w for w in recwarn if "rule" in str(w.message)]


class ChangedBehindAutograd(nn.Module):
    """A value that has gradients is changed by way of detach(), and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.first(x)
        v.detach().div_(3.0)
        return self.second(v)


@pytest.mark.parametrize("entry", ["optimize", "direct", "torch"])
def test_a_value_that_is_changed_behind_autograd_keeps_its_gradient(entry: str) -> None:
    torch.compiler.reset()
    model, x = ChangedBehindAutograd(), torch.randn(3, 4)
    made = {
        "optimize": lambda: hypatia.optimize(model, x),
        "direct": lambda: hypatia.compile(model),
        "torch": lambda: torch.compile(model, backend="hypatia"),
    }
    call = made[entry]()
    for _ in range(3):
        found = []
        for each in (call, model):
            model.zero_grad()
            each(x).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(*found)


class _Cancels(nn.Module):
    """Gradients of `x` that cancel, beside a small one of a result that nothing else reads."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.sigmoid(x)
        z = x - x
        return (z * w).sum(), torch.neg(z) * 2, y


def test_gradients_are_added_in_eagers_order() -> None:
    model = _Cancels()
    x, w = torch.randn(4, 5), torch.full((4, 5), 3e38)
    found = []
    for call in (model, hypatia.optimize(model, x.clone().requires_grad_(), w.sqrt())):
        given = x.clone().requires_grad_()
        first, second, third = call(given, w)
        (first + second.sum() + third.sum()).backward()
        found.append(given.grad)
    assert found[0].all()
    assert torch.equal(*found)
