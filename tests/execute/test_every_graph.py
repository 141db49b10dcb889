"""A plan for every graph: assertions, constants, random ops, changes of inputs, odd results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute import binding, plans
from hypatia.frontend.dynamo import collecting
from plan_models import _fresh  # noqa: F401  (a fixture for this file too)
from support import fresh_dynamo


class Around(nn.Module):
    """Something between two linear layers."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)
        self.between = between

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.second(self.between(self.first(x).relu(), *more).relu())


def leaves(results: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def assert_same(results: Any, expected: Any) -> None:
    """Values, dtypes and strides are eager's."""
    found, wanted = leaves(results), leaves(expected)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def served(model: nn.Module, *calls: tuple[torch.Tensor, ...], direct: bool = True) -> None:
    """Both entries have a plan, which is right and runs at every call: the inputs are other values."""
    for entry in ("compile", "torch.compile") if direct else ("torch.compile",):
        fresh_dynamo()
        with torch.no_grad(), collecting() as reports:
            if entry == "compile":
                compiled = hypatia.compile(model.eval(), *[t.clone() for t in calls[0]])
                reports = compiled.reports
            else:
                compiled = torch.compile(model.eval(), backend="hypatia")
            for call in calls:
                mine, theirs = [
                    [t.clone(memory_format=torch.preserve_format) for t in call] for _ in range(2)
                ]
                state = torch.get_rng_state()
                results = compiled(*mine)
                after = torch.get_rng_state()
                torch.set_rng_state(state)
                assert_same(results, model(*theirs))
                assert torch.equal(after, torch.get_rng_state()), "random numbers are drawn alike"
                assert_same(mine, theirs)
        assert [plans.KERNEL in r.kernels for r in reports] == [True], (entry, [r.no_plan for r in reports])
        assert all(r.check.status == "passed" and r.kept == "plan" for r in reports)


def inputs(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(4, 16),) for _ in range(count)]


def test_assertions_of_export_are_no_effects() -> None:
    # A tensor that is made in the model leads to torch.export, which notes what `to` was given.
    served(Around(lambda x: x.to(torch.float64).cumsum(-1).to(torch.float32) + torch.tensor(0.5)), *inputs())


@pytest.mark.parametrize("freeze", [None, False])
def test_tensors_that_are_part_of_the_graph(freeze: bool | None) -> None:
    model = Around(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).repeat(8)).eval()
    options = {} if freeze is None else {"freeze": freeze}
    compiled = torch.compile(model, backend="hypatia", options=options)
    with torch.no_grad(), collecting() as reports:
        for (x,) in inputs():
            torch.testing.assert_close(compiled(x), model(x))
    assert [r.no_plan for r in reports] == [""]


def test_random_ops_draw_torchs_numbers_in_order() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(4, 24)
        return F.dropout(x, 0.3, training=True) * noise + torch.randn_like(x)

    served(Around(between), *inputs())


def test_changes_of_inputs_are_the_last_steps() -> None:
    class Changing(Around):
        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> Any:
            old = cache * 2
            cache.index_copy_(0, at, self.first(x))
            return self.second(cache.relu()), old, cache.sum(-1)

    calls = [(torch.randn(2, 16), torch.randn(6, 24), torch.tensor([i, 5 - i])) for i in (1, 2, 3)]
    served(Changing(F.relu), *calls, direct=False)


def calls_of(make: Callable[[], nn.Module], *calls: tuple[torch.Tensor, ...]) -> list[str]:
    """Steps of the plan of a model that changes an input or buffers of its own, which is right."""
    model, twin = make().eval(), make().eval()
    twin.load_state_dict(model.state_dict())
    steps: list[list[str]] = []
    plain = binding.Binding._describe

    def noted(self: Any, about: Any) -> None:
        steps.append(about["steps"])
        plain(self, about)

    fresh_dynamo()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), collecting() as reports:
        patch.setattr(binding.Binding, "_describe", noted)
        compiled = torch.compile(model, backend="hypatia")
        for call in calls:
            mine, theirs = [[t.clone() for t in call] for _ in range(2)]
            assert_same(compiled(*mine), twin(*theirs))
            assert_same(mine, theirs)
            assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert [r.no_plan for r in reports] == [""]
    return steps[0]


class Caching(nn.Module):
    """Writes rows into a cache, and does something with both."""

    def __init__(self, write: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)
        self.write, self.after = write, after

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> Any:
        return self.after(self, cache, self.write(cache, at, self.first(x)))


def copy_rows(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    cache.index_copy_(0, at, rows)


def put_rows(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    cache[at] = rows


def add_rows(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    cache.index_put_((at,), rows, accumulate=True)


def read_first(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    old = cache * 2
    cache.index_copy_(0, at, rows)
    return old


def of_itself(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    cache.index_copy_(0, at, cache[:2].relu() + rows)


def twice(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    cache.index_copy_(0, at, rows)
    cache.index_copy_(0, at + 1, rows)


def use(self: Any, cache: torch.Tensor, old: Any) -> Any:
    return self.second(cache.relu()), cache.sum(-1), old


@pytest.mark.parametrize(
    ("write", "in_place"),
    [
        (copy_rows, True),
        (put_rows, True),
        (add_rows, False),
        (read_first, False),
        (of_itself, False),
        (twice, False),
    ],
)
def test_a_cache_is_written_in_place(write: Any, in_place: bool) -> None:
    calls = [(torch.randn(2, 16), torch.randn(6, 24), torch.tensor([i, 4 - i])) for i in (0, 1, 3)]
    steps = calls_of(lambda: Caching(write, use), *calls)
    assert any("aten.copy_.default" in s for s in steps) is not in_place, steps


def test_results_are_not_in_the_memory_of_a_cache() -> None:
    def copied(self: Any, cache: torch.Tensor, _: Any) -> Any:
        return self.second(cache.relu()), cache.clone(), cache[1:].clone(), cache.view(3, 2, 24)

    calls = [(torch.randn(2, 16), torch.randn(6, 24), torch.tensor([i, 5 - i])) for i in (0, 1, 2)]
    model = Caching(copy_rows, copied).eval()
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        for x, cache, at in calls:
            theirs = cache.clone()
            results, expected = compiled(x, cache, at), model(x, theirs, at)
            assert_same(results, expected)
            *others, view = results
            assert view.data_ptr() == cache.data_ptr()
            values = [t.clone() for t in others]
            cache.zero_()
            assert_same(others, values)


def test_an_index_that_is_out_of_range_is_torchs_error() -> None:
    model = Caching(copy_rows, use).eval()
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        compiled(torch.randn(2, 16), torch.randn(6, 24), torch.tensor([0, 1]))
        with pytest.raises((RuntimeError, IndexError), match=r"out of (range|bounds)"):
            compiled(torch.randn(2, 16), torch.randn(6, 24), torch.tensor([0, 9]))


def test_inputs_that_take_each_others_place() -> None:
    class Swapping(Around):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            return self.second(self.first(x).relu()) + a[0, 0]

    served(
        Swapping(F.relu),
        *[(torch.randn(2, 16), torch.randn(3, 5), torch.randn(3, 5)) for _ in range(3)],
        direct=False,
    )


def test_a_change_is_noted_by_autograd() -> None:
    class Adding(Around):
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
            y = self.second(self.first(x).relu())
            total.add_(y.sum())
            return y

    model, total = Adding(F.relu).eval(), torch.zeros(3)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        for _ in range(3):
            before = total._version
            compiled(torch.randn(2, 16), total)
            assert total._version > before


class Cached(nn.Module):
    """A cache of keys that grows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)
        self.register_buffer("cache", torch.zeros(10, 24))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache[at] = self.first(x).relu()
        result: torch.Tensor = self.second(self.cache)
        return result


def test_a_buffer_that_changes() -> None:
    models = [Cached().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = torch.compile(models[0], backend="hypatia")
    with torch.no_grad(), collecting() as reports:
        for i in range(4):
            x, at = torch.randn(2, 16), torch.tensor([i, i + 5])
            torch.testing.assert_close(compiled(x, at), models[1](x, at))
            torch.testing.assert_close(models[0].cache, models[1].cache)
    assert [r.no_plan for r in reports] == [""]


def test_changes_at_sizes_that_were_left_open() -> None:
    class Adding(Around):
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
            y = self.second(F.dropout(self.first(x).relu(), 0.5, training=True))
            total.add_(y.sum())
            return y

    model = Adding(F.relu).eval()
    compiled = torch.compile(model, backend="hypatia", dynamic=True)
    with torch.no_grad(), collecting() as reports:
        for rows in (4, 7, 9, 7):
            x, mine, theirs = torch.randn(rows, 16), torch.zeros(3), torch.zeros(3)
            state = torch.get_rng_state()
            result = compiled(x, mine)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            torch.testing.assert_close(result, model(x, theirs))
            torch.testing.assert_close(mine, theirs)
            assert torch.equal(after, torch.get_rng_state())
    assert [r.no_plan for r in reports] == [""]


def test_complex_numbers_between_and_as_results() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.fft(x, dim=-1)
        return turned.real + torch.fft.irfft(torch.fft.rfft(x)[:, :4], n=24)

    served(Around(between), *inputs())

    class Turned(Around):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
            y = self.first(x).relu()
            return torch.view_as_complex(y.view(-1, 12, 2)) * more[0], self.second(y)

    served(Turned(F.relu), *[(torch.randn(4, 16), torch.randn(12, dtype=torch.complex64)) for _ in range(2)])


def test_assertions_on_values_are_made() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 100).all())
        return x

    model = Around(between)
    served(model, *inputs())


class Distances(nn.Module):
    """A call that only torch knows reads a weight by its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x.relu(), self.weight.mT)


def test_weights_lie_as_calls_want_them() -> None:
    """They are turned when the plan is bound, not at every call."""
    steps = calls_of(Distances, *inputs())
    assert sum("pointwise" in s for s in steps) == 1, steps


class Parts(nn.Module):
    """Queries, keys and values as parts of one layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.layer(x).reshape(-1, 3, 16).unbind(1)
        return torch.tanh(q) * k + v


def test_parts_of_a_tensor_are_views() -> None:
    steps = calls_of(Parts, *inputs())
    assert not any("unbind" in s for s in steps), steps


class States(nn.Module):
    """A sum over a state, written by broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.layer(x).reshape(-1, 4, 6)
        last = (left[:, :, None, :] * left[:, None, :, :].exp()).sum(-1)
        first = (left[:, :, :, None] * left[:, :, None, :].exp()).sum(1, keepdim=True)
        return torch.cat([last.flatten(1), first.flatten(1)], -1)


def test_sums_of_broadcast_products_are_matrix_products() -> None:
    steps = calls_of(States, *inputs())
    assert not any("sum" in s for s in steps), steps
    assert sum("bmm" in s or "matmul" in s for s in steps) == 2, steps


class Shares(nn.Module):
    """A softmax that is asked for in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x.bfloat16())
        return y.softmax(-1, dtype=torch.float32), y.tanh().log_softmax(-1, dtype=torch.float32)


def test_a_softmax_in_fp32_has_a_kernel() -> None:
    steps = calls_of(Shares, *inputs())
    assert not any("aten" in s for s in steps), steps


class Widened(nn.Module):
    """Tensors of two precisions in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.bfloat16())
        return (y.relu() * self.scale - y.half()) / (x.sum(-1, keepdim=True).abs() + 1)


def test_ops_of_two_precisions_are_part_of_regions() -> None:
    steps = calls_of(Widened, *inputs())
    assert not any("aten" in s for s in steps), steps
