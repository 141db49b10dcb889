"""Models that change: buffers, inputs, weights and shapes, and models of many layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hypatia
from hypatia.errors import UnsupportedError
from outcomes import Call, assert_like_eager, grad_modes, mlp
from support import BACKEND, assert_as_close_as_eager, compile_count, fresh_dynamo


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_dynamo()
    torch.manual_seed(0)


class Counting(nn.Module):
    """Changes its buffers at every call, and the results depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.inner(x))
        self.calls += 1
        self.mean.lerp_(y.detach().mean(0), 0.5)
        return y * self.calls + self.mean


def test_a_model_that_changes_its_buffers() -> None:
    """The check runs the graph several times; buffers may change once a call."""
    with torch.no_grad():
        assert_like_eager(lambda: Call(Counting(), (torch.randn(5, 8),)), calls=3)
    # No bias before a batch norm, and no plain sum after one: their gradients are rounding and nothing else.
    norms = nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=0.5), nn.Tanh()
    normed = nn.Sequential(nn.Linear(8, 4, bias=False), *norms)
    assert_like_eager(lambda: Call(copy.deepcopy(normed), (torch.randn(5, 8),)), calls=3, backward=True)


def test_gradients_through_a_buffer_that_changes() -> None:
    """The backward graph must use what the forward graph read, not what the buffer holds later."""
    assert_like_eager(lambda: Call(Counting(), (torch.randn(5, 8),)), calls=1, backward=True)


@grad_modes
def test_optimize_leaves_the_model_as_it_was(grad: bool) -> None:
    """Optimizing is no call: buffers, parameters, inputs and random numbers stay as they were."""
    model, x = nn.Sequential(Counting(), nn.Dropout(0.5)).train(), torch.randn(5, 8)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        optimized = hypatia.optimize(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    theirs = twin(x)
    torch.manual_seed(1)
    assert_as_close_as_eager(optimized(x).detach(), theirs.detach())


@grad_modes
def test_optimize_draws_no_random_numbers(grad: bool) -> None:
    """Optimizing a model with dropout leaves the generator where it was."""
    model, x = nn.Sequential(mlp(), nn.Dropout(0.5)).train(), torch.randn(5, 8)
    state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        hypatia.optimize(model, x)
    assert torch.equal(torch.get_rng_state(), state)


@grad_modes
def test_a_model_that_changes_its_inputs(grad: bool) -> None:
    """Inputs change once a call, in eager's order, also where the change is not the last step."""

    def scribble(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        s = torch.relu(x * y)
        y[0] = s[0]
        z.copy_(y + x)
        x.mul_(z)
        return s + z

    def case() -> Call:
        return Call(scribble, tuple(torch.randn(4, 3) for _ in range(3)))

    with torch.set_grad_enabled(grad):
        assert_like_eager(case, calls=3)


def test_shapes_that_change_at_every_call() -> None:
    """After the second shape sizes are symbols; every later result is still eager's."""
    model = mlp()
    compiled = torch.compile(model, backend=BACKEND)
    for grad in (False, True):
        before = compile_count()
        with torch.set_grad_enabled(grad):
            for n in (3, 5, 1, 2, 17, 0, 4, 64):
                x = torch.randn(n, 8)
                assert_as_close_as_eager(compiled(x), model(x))
        assert compile_count() - before < 8, "a shape was compiled at every call"


def test_ranks_that_change_at_every_call() -> None:
    """Another rank is another graph."""
    model = mlp()
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        for shape in ((8,), (2, 8), (1, 2, 8), (2, 1, 2, 8), (8,)):
            x = torch.randn(shape)
            assert_as_close_as_eager(compiled(x), model(x))


class Wide(nn.Module):
    """Many layers that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 2) for _ in range(250))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.relu(layer(x)) for layer in self.layers]).sum(0)


def deep() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(250) for layer in (nn.Linear(8, 8), nn.Tanh())])


@pytest.mark.parametrize("make", [deep, Wide])
def test_500_layers(make: Callable[[], nn.Module]) -> None:
    """Nothing may recurse along the graph, nor take time or memory by the square of its size."""
    with torch.no_grad():
        assert_like_eager(lambda: Call(make(), (torch.randn(2, 8),)))


def changed_by_state(model: nn.Module) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


def changed_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()}, assign=True)


def changed_by_step(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with torch.enable_grad():
        model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


def changed_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1
        model[2].bias.zero_()


def changed_by_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn(16, 8))


def changed_by_new_data(model: nn.Module) -> None:
    model[0].weight.data = torch.randn(16, 8)


CHANGES = [
    changed_by_state,
    changed_by_assignment,
    changed_by_step,
    changed_in_place,
    changed_by_parameter,
    changed_by_new_data,
]


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_calls(change: Callable[[nn.Module], None]) -> None:
    """Folded and merged weights are made again when a source changes: q, k and v are one weight here."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND, options={"freeze": True})
    with torch.no_grad():
        for _ in range(3):
            assert_as_close_as_eager(compiled(x), model(x))
            before = model(x)
            change(model)
            assert not torch.equal(model(x), before)
        assert_as_close_as_eager(compiled(x), model(x))


def test_changes_through_data_are_seen_after_a_reset() -> None:
    """In-place changes through `.data` move no version counter: documented as not seen before a reset."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(3, 8)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        compiled(x)
        model[0].weight.data.mul_(2)
        fresh_dynamo()
        assert_as_close_as_eager(compiled(x), model(x))


class Aliased(nn.Module):
    """An attribute that is no buffer but the tensor of one, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))
        self.same = self.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.same.mul_(0.5).add_(self.mean.detach() * 0.25)
        return x + 1


def test_capturing_a_model_changes_no_tensor_of_it() -> None:
    model, theirs = Aliased(), Aliased()
    with torch.no_grad():
        compiled = hypatia.compile(model)
        for rows in (1, 2, 2, 3):
            x = torch.randn(rows, 1)
            torch.testing.assert_close(compiled(x), theirs(x))
            torch.testing.assert_close(model.mean, theirs.mean)
        with pytest.raises(UnsupportedError, match="changes same"):
            hypatia.optimize(model, x)
        torch.testing.assert_close(model.mean, theirs.mean)
