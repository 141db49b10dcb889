"""Native plans: whole graphs as one call into Rust, through torch.compile and through hypatia.compile."""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute import native, plans, timing, torch_calls
from hypatia.frontend.dynamo import collecting
from plan_models import Layers, Mixed, _fresh, assert_right  # noqa: F401  (a fixture for this file too)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def planned(model: nn.Module, *inputs: torch.Tensor, native_wanted: bool = True) -> Any:
    """The result of a first and a second call; the graph has a native plan if one is wanted."""
    compiled = torch.compile(model.eval(), backend="hypatia")
    with torch.no_grad(), collecting() as reports:
        compiled(*inputs)
        result = compiled(*inputs)
    assert [plans.KERNEL in r.kernels for r in reports] == [native_wanted], reports
    assert all(r.check.status == "passed" for r in reports)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_layers(name: str, bias: bool, dtype: torch.dtype) -> None:
    model, x = Layers(ACTIVATIONS[name], bias).to(dtype), torch.randn(7, 19).to(dtype)
    assert_right(planned(model, x), model, x)


@pytest.mark.parametrize("shape", [(19,), (1, 19), (33, 19), (2, 3, 19), (0, 19), (2, 0, 19)])
def test_batch_shapes(shape: tuple[int, ...]) -> None:
    model, x = Layers(F.relu), torch.randn(shape)
    assert_right(planned(model, x), model, x)


def test_residuals_and_broadcasts() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
            self.scale = nn.Parameter(torch.randn(24))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x + self.down(F.gelu(self.up(x)))
            return torch.tanh(z * self.scale - y.clamp(-1, 1)).abs() / 3 + 0.5

    model, x, y = Block(), torch.randn(6, 24), torch.randn(6, 1)
    assert_right(planned(model, x, y), model, x, y)


def test_a_graph_that_has_no_plan_runs_on_torch() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sort().values

    model, x = Sorted(), torch.randn(4, 8)
    assert_right(planned(model, x, native_wanted=False), model, x)


def _attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(-1, 4, 2, 12).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, 24)


def _greatest(x: torch.Tensor) -> torch.Tensor:
    values, places = x.topk(2, 0)
    return x + values[:1] * places[1:]


TORCH_OPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "writes its result": (lambda x: x.softmax(0), "dispatcher"),
    "returns its result": (_attention, "dispatcher"),
    "takes a list": (lambda x: torch.cat([x[:, 12:], x[:, :12]], 1), "dispatcher"),
    "takes an optional number": (lambda x: x.std(1, correction=0, keepdim=True) + x, "python"),
    "has two results": (_greatest, "dispatcher"),
    "returns a list": (lambda x: torch.unbind_copy(x.exp(), 0)[3] + x, "python"),
    "takes a dtype": (lambda x: x.cumsum(0, dtype=torch.float64).float() + x, "dispatcher"),
}


@pytest.mark.parametrize(("between", "kind"), TORCH_OPS.values(), ids=list(TORCH_OPS))
def test_steps_that_torch_computes(between: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
    model, x = Mixed(between), torch.randn(8, 16)
    with no_fallback(), mock.patch.object(torch_calls, "call", wraps=torch_calls.call) as made:
        assert_right(planned(model, x), model, x)
    kinds = {type(torch_calls.call(*c.args)) is str for c in made.call_args_list}
    assert (False in kinds) == (kind == "python"), made.call_args_list


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [-1e30, 0, 2.5])
def test_filling_where_a_mask_says_so_is_a_kernel(dtype: torch.dtype, value: float) -> None:
    model = Mixed(lambda x: x.masked_fill((x > 0.5).mT.contiguous().mT, value) + 1).to(dtype)
    x = torch.randn(16, 16).to(dtype)
    with no_fallback(), mock.patch.object(torch_calls, "call", wraps=torch_calls.call) as made:
        assert_right(planned(model, x), model, x)
    assert not any("masked_fill" in str(call.args[0]) for call in made.call_args_list)


def test_several_results_are_written_by_structured_ops_alone() -> None:
    """`cudnn_batch_norm.out` corrupts the heap, called from Python as well."""
    image, row = torch_calls.Read(0), torch_calls.Read(1)
    calls = {
        torch.ops.aten.cudnn_batch_norm.default: ((image, row, row, row, row, False, 0.1, 1e-5), False),
        torch.ops.aten.native_batch_norm.default: ((image, row, row, row, row, False, 0.1, 1e-5), False),
        torch.ops.aten.topk.default: ((image, 2), True),
        torch.ops.aten.mean.dim: ((image, [1]), True),
    }
    for target, (args, writes) in calls.items():
        made = torch_calls.call(target, args, {})
        assert isinstance(made, str)
        assert ('"out"' in made) == writes, made


class Vectors(nn.Module):
    """A vector times matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (torch.matmul(torch.matmul(x, self.weight).relu(), m) + 1).tanh()


def test_a_vector_times_a_matrix_makes_torch_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """`matmul.out` of a vector resizes what it is given, with a warning each time."""
    model, x, m = Vectors(), torch.randn(6), torch.randn(5, 5)
    with no_fallback():
        assert_right(planned(model, x, m), model, x, m)
    assert "resized" not in capfd.readouterr().err


@pytest.mark.parametrize(("between", "kind"), TORCH_OPS.values(), ids=list(TORCH_OPS))
def test_without_the_c_functions_steps_run_in_python(
    between: Callable[[torch.Tensor], torch.Tensor], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_calls, "LIBTORCH", Path("there is none"))
    model, x = Mixed(between), torch.randn(8, 16)
    with no_fallback():
        assert_right(planned(model, x), model, x)


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """A plan that fails is an error here."""

    def failed(self: native.NativeGraph, error: Exception, args: Any) -> Any:
        raise error

    with mock.patch.object(native.NativeGraph, "_failed", failed):
        yield


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(x)).relu()


def test_an_error_of_torch_is_torchs_and_names_the_step() -> None:
    compiled = hypatia.compile(Embedded().eval(), torch.tensor([[1, 2], [3, 4]]))
    with torch.no_grad():
        compiled(torch.tensor([[9, 0], [0, 9]]))
        with pytest.raises(IndexError) as raised:
            compiled(torch.tensor([[1, 2], [3, 10]]))
        assert any("embedding" in note for note in raised.value.__notes__)
        good = torch.tensor([[5, 6], [7, 8]])
        assert_right(compiled(good), compiled.model, good)


def test_a_table_is_not_copied() -> None:
    model = Embedded().eval()
    compiled = hypatia.compile(model, torch.tensor([1, 2]))
    with torch.no_grad():
        before = compiled(torch.tensor([1, 2]))
        model.table.weight[1] += 1
        after = compiled(torch.tensor([1, 2]))
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_sizes_that_change_need_no_new_graph() -> None:
    model = Mixed(lambda x: x.softmax(0)).eval()
    compiled = torch.compile(model, backend="hypatia", dynamic=True)
    with torch.no_grad(), collecting() as reports, no_fallback():
        for rows in (8, 3, 64, 5, 8):
            x = torch.randn(rows, 16)
            assert_right(compiled(x), model, x)
    assert [plans.KERNEL in r.kernels for r in reports] == [True]


@pytest.mark.parametrize("verify", ["strict", "off"])
@pytest.mark.parametrize("entry", ["torch.compile", "compile"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_layer_at_open_sizes_has_a_plan(bias: bool, entry: str, verify: str) -> None:
    """Without a bias it is captured as a product of two open sizes, and with no check nobody measures it."""
    model = nn.Sequential(nn.Linear(8, 8, bias), nn.ReLU()).eval()
    with torch.no_grad(), collecting() as reports, no_fallback():
        if entry == "compile":
            compiled: Any = hypatia.compile(model, verify=verify)
        else:
            compiled = torch.compile(model, backend="hypatia", dynamic=True, options={"verify": verify})
        for shape in ((3, 7, 8), (2, 9, 8), (4, 5, 8), (3, 7, 8)):
            x = torch.randn(shape)
            assert_right(compiled(x), model, x)
        reports = compiled.reports if entry == "compile" else reports
    assert {(r.kept, r.no_plan) for r in reports} == {("plan", "")}
    assert len(reports) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_one_layer(bias: bool, dtype: torch.dtype) -> None:
    """Captured as a product with the transposed weight."""
    model, x = nn.Linear(19, 37, bias).to(dtype), torch.randn(7, 19).to(dtype)
    assert_right(planned(model, x), model, x)


def test_ops_along_rows() -> None:
    dtype = torch.float32

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.plain, self.root = (
                nn.LayerNorm(24),
                nn.LayerNorm(24, bias=False),
                nn.RMSNorm(24, eps=1e-6),
            )
            self.mix = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = self.mix(self.norm(x + y))
            return torch.softmax(self.plain(z), -1), self.root(z * y), z.mean(-1), y.sum(-1, keepdim=True)

    model, x, y = Rows().to(dtype).eval(), torch.randn(3, 5, 24).to(dtype), torch.randn(3, 5, 24).to(dtype)
    ours = planned(model, x, y)
    with torch.no_grad():
        eager, wide = model(x, y), copy.deepcopy(model).double()(x.double(), y.double())
    for a, e, w in zip(ours, eager, wide, strict=True):
        allowed = 2 * (e.double() - w).abs().max() + 4 * torch.finfo(dtype).eps * w.abs().max()
        assert (a.double() - w).abs().max() <= allowed


def test_weights_that_change_are_packed_again() -> None:
    model, x = Layers(F.relu).eval(), torch.randn(7, 19)
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        assert_right(compiled(x), model, x)
        model.first.weight.mul_(3)
        assert_right(compiled(x), model, x)
        model.load_state_dict(Layers(F.relu).state_dict())
        assert_right(compiled(x), model, x)
        model.second = nn.Linear(37, 5)
        assert_right(compiled(x), model, x)
        model.second.weight = nn.Parameter(torch.randn(5, 37))
        assert_right(compiled(x), model, x)


def test_new_shapes_and_dtypes_are_compiled_when_seen() -> None:
    model = Layers(F.relu).eval()
    compiled = hypatia.compile(model, torch.randn(7, 19))
    with torch.no_grad():
        for batch in (1, 7, 3, 1):
            x = torch.randn(batch, 19)
            assert_right(compiled(x), model, x)
        assert len(compiled.reports) == 3
        strided = torch.randn(19, 7).t()
        assert_right(compiled(strided), model, strided)
        model.bfloat16()
        x = torch.randn(7, 19).bfloat16()
        assert_right(compiled(x), model, x)


def test_tensors_that_are_not_what_their_memory_says() -> None:
    model, x = Layers(F.relu).eval(), torch.randn(1, 19)
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        negated = torch._neg_view(x)
        assert negated.is_neg()
        assert_right(compiled(negated), model, negated)
        sparse = x.to_sparse()
        assert torch.allclose(compiled(sparse), model(sparse), atol=1e-6)
        with torch.inference_mode():
            assert torch.allclose(compiled(x), model(x), atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(x).dtype is torch.bfloat16


def test_a_mode_that_counts_ops_sees_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = Layers(F.relu).eval(), torch.randn(7, 19)
    through_dynamo, direct = torch.compile(model, backend="hypatia"), hypatia.compile(model, x)
    with torch.no_grad():
        through_dynamo(x)
        counts = []
        for call in (model, through_dynamo, direct):
            with FlopCounterMode(display=False) as counter:
                call(x)
            counts.append(counter.get_total_flops())
    assert counts == [counts[0]] * 3
    assert counts[0] > 0


def test_errors_are_eagers() -> None:
    model = Layers(F.relu).eval()
    compiled = hypatia.compile(model, torch.randn(7, 19))
    with torch.no_grad(), pytest.raises(RuntimeError) as theirs:
        model(torch.randn(7, 18))
    with torch.no_grad(), pytest.raises(RuntimeError) as ours:
        compiled(torch.randn(7, 18))
    assert str(ours.value) == str(theirs.value)


def test_gradients_are_eagers() -> None:
    model, x = Layers(F.relu), torch.randn(7, 19)
    compiled = hypatia.compile(model, x)
    compiled(x).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for a, p in zip(ours, model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6)


def test_structures_and_keywords() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {"a": torch.relu(self.a(x)), "b": self.b(x) * scale}

    model, x = Pair().eval(), torch.randn(2, 4)
    compiled = hypatia.compile(model, x)
    with torch.no_grad():
        for kwargs in ({}, {"scale": 2.0}):
            ours, theirs = compiled(x, **kwargs), model(x, **kwargs)
            assert list(ours) == list(theirs)
            for key in theirs:
                assert torch.allclose(ours[key], theirs[key], atol=1e-6)


def test_eight_threads_call_one_model() -> None:
    model = Layers(F.gelu).eval()
    compiled = hypatia.compile(model, torch.randn(7, 19))
    wrong: list[float] = []

    def call(seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(50):
                x = torch.randn(7, 19, generator=dice)
                difference = (compiled(x) - model(x)).abs().max().item()
                if difference > 1e-5:
                    wrong.append(difference)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_leak_nothing() -> None:
    model, x = Layers(F.relu).eval(), torch.randn(256, 19)
    compiled = hypatia.compile(model, x)

    def peak() -> int:
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with torch.no_grad():
        for _ in range(1000):
            compiled(x)
        before = peak()
        for _ in range(10_000):
            compiled(x)
    assert peak() - before < 4096, "kilobytes"


def test_a_wrong_plan_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    call = native.NativeGraph.__call__

    def wrong(self: native.NativeGraph, args: list[Any]) -> Any:
        return tuple(t * 1.01 for t in call(self, args))

    monkeypatch.setattr(native.NativeGraph, "__call__", wrong)
    model, x = Layers(F.relu).eval(), torch.randn(7, 19)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad(), pytest.warns(hypatia.VerificationWarning, match="native plan"):
        result = compiled(x)
    assert_right(result, model, x)


def test_a_wrong_plan_is_not_used_by_the_direct_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    run = native.NativeGraph.run

    def wrong(self: native.NativeGraph, args: Any) -> Any:
        return tuple(t * 1.01 for t in run(self, args))

    monkeypatch.setattr(native.NativeGraph, "run", wrong)
    model, x = Layers(F.relu).eval(), torch.randn(7, 19)
    with pytest.warns(hypatia.VerificationWarning, match="native plan"):
        compiled = hypatia.compile(model, x)
    with torch.no_grad():
        assert_right(compiled(x), model, x)


@pytest.mark.parametrize(("plan", "dropped"), [(1.0, False), (2.02, False), (3.0, True)])
def test_the_slower_of_plan_and_graph_is_dropped(
    plan: float, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "instead", lambda forms: {**dict.fromkeys(forms, 2.0), "plan": plan})
    model, x = Layers(F.relu).eval(), torch.randn(7, 19)
    with torch.no_grad(), collecting() as reports:
        torch.compile(model, backend="hypatia")(x)
    (report,) = reports
    assert report.times == {"plan": plan, "graph": 2.0, "eager": 2.0}
    assert ("dropped" in str(report)) == dropped


def test_a_variance_that_overflows_is_not_zero() -> None:
    """The difference of two infinities is no number; a layer norm of float64 took it for zero."""
    model = nn.LayerNorm(5, elementwise_affine=False).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        for scale in (1.0, 1e150, 1e160, 1e300):
            torch.testing.assert_close(compiled(x * scale), model(x * scale))
