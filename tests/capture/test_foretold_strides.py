"""Results of batch norms and of `roll` lie as eager's do, whatever strides torch foretells."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import hypatia
from hypatia import faults
from hypatia._torch import FakeTensorMode
from hypatia.capture import recorder
from hypatia.capture.fake_tensors import fakes_of, kind_of
from hypatia.capture.predicted_strides import as_it_lies
from hypatia.compiler import pipeline
from hypatia.errors import UnsupportedError
from hypatia.options import Options


class _Turned(nn.Module):
    """A batch norm of channels that come last, as in models of speech."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.norm(self.linear(x).transpose(1, 2)))


FOLLOWERS: dict[str, Callable[..., Any]] = {
    "nothing": lambda y: y,
    "relu": torch.relu,
    "residual": lambda y: y + y.mean(1, keepdim=True),
    "back": lambda y: y.transpose(1, 2),
    "two": lambda y: (y.flatten(1), y * 2.0),
    "split": lambda y: y.chunk(2, 1),
}


def _compiled(entry: str, model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    if entry == "hypatia.compile":
        return hypatia.compile(model, x)
    return torch.compile(model, backend="hypatia")


@pytest.mark.parametrize("entry", ["torch.compile", "hypatia.compile"])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_batch_norm_of_a_turned_tensor(name: str, entry: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = _Turned(FOLLOWERS[name]).eval(), torch.randn(4, 5, 8)
    with torch.no_grad():
        expected = model(x)
        found = _compiled(entry, model, x)(x)
    several = isinstance(expected, tuple)
    for mine, eager in zip(*((found, expected) if several else ((found,), (expected,))), strict=True):
        torch.testing.assert_close(mine, eager)
        assert mine.stride() == eager.stride()


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)])
def test_a_batch_norm_of_images_in_any_order(order: tuple[int, ...], gap: int) -> None:
    torch._dynamo.reset()
    shape = (2, 3, 4, 5)
    memory = torch.randn(*[shape[d] for d in order], gap).select(-1, 0)
    x = memory.permute([order.index(d) for d in range(4)])
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).eval()
    with torch.no_grad():
        assert torch.compile(model, backend="hypatia")(x).stride() == model(x).stride()


class _Changed(nn.Module):
    """What is contiguous already is no copy: the batch norm's own result is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y.contiguous().clamp_(-0.5, 0.5)
        return y * 2


def test_what_is_contiguous_in_eager_is_changed_itself() -> None:
    model, x = _Changed().eval(), torch.randn(2, 3).t()
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert [report.no_plan for report in compiled.reports] == [""]


class _Rolled(nn.Module):
    """Images are rolled; what follows depends on how they lie then."""

    def __init__(self, shifts: Any, dims: Any) -> None:
        super().__init__()
        self.how = shifts, dims
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.roll(*self.how)
        return y * 2, torch.einsum("...k,kn->...n", y, self.weight)


ROLLS: dict[str, tuple[Any, Any]] = {
    "places": ((1, -1), (2, 3)),
    "one dimension twice": ((1, -1), (2, 2)),
    "by nothing": (0, 1),
    "images": (1, 0),
    "flat": (1, ()),
}


@pytest.mark.parametrize("entry", ["torch.compile", "hypatia.compile"])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", ROLLS)
def test_rolled_images(name: str, order: tuple[int, ...], entry: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = (2, 3, 4, 5)
    x = torch.randn(*[shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    model = _Rolled(*ROLLS[name]).eval()
    with torch.no_grad():
        for mine, eager in zip(_compiled(entry, model, x)(x), model(x), strict=True):
            torch.testing.assert_close(mine, eager)
            assert mine.stride() == eager.stride()


def test_rolled_images_have_a_plan() -> None:
    model, x = _Rolled(*ROLLS["places"]), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        compiled(x)
    assert [report.no_plan for report in compiled.reports] == [""]


class _Counts(nn.Module):
    """Changes a buffer: torch.export captures it, by its own strides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.roll(1, -2).flatten(0, -2) * self.calls


def test_a_captured_view_of_rolled_images_is_a_reshape() -> None:
    model, x = _Counts().eval(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    eager = copy.deepcopy(model)
    compiled = hypatia.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), eager(x))
    assert [report.no_plan for report in compiled.reports] == [""]


def test_such_a_model_keeps_its_plan() -> None:
    model, x = _Turned(FOLLOWERS["nothing"]).eval(), torch.randn(4, 5, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        compiled(x)
    assert [report.no_plan for report in compiled.reports] == [""]


def test_a_batch_norm_of_a_turned_tensor_with_open_sizes() -> None:
    torch._dynamo.reset()
    model = _Turned(FOLLOWERS["relu"]).eval()
    compiled = torch.compile(model, backend="hypatia", dynamic=True)
    with torch.no_grad():
        for rows in (4, 7):
            x = torch.randn(rows, 5, 8)
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled(x).stride() == model(x).stride()


def test_a_training_step_that_torchs_own_graph_cannot_run() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = _Turned(FOLLOWERS["relu"]), torch.randn(4, 5, 8)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hypatia")
    found, expected = compiled(x), eager(x)
    assert found.stride() == expected.stride()
    found.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 5), (2, 5, 7), (2, 5, 2, 3, 4), (1, 5, 1, 1)])
def test_a_batch_norm_returns_what_torch_makes_of_its_parts(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """It is foretold without taking it apart; no GPU is needed for fake tensors of one."""
    norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    with FakeTensorMode() as mode, torch.no_grad():
        x, mean = torch.empty(shape, device=device, dtype=dtype), torch.empty(5, device=device)
        turned = [x.contiguous(memory_format=torch.channels_last)] if x.dim() == 4 else []
        for value in (x, *turned, x.transpose(0, 1).clone().transpose(0, 1)):
            for weight in (None, mean, mean.to(dtype)):
                args = (value, weight, weight, mean, mean, 0.1, 1e-5)
                expected = as_it_lies(norm, args, norm(*args))
                found = fakes_of(mode).call(norm, norm, args, {})
                assert [kind_of(t) for t in found] == [kind_of(t) for t in expected]
                assert isinstance(found, tuple)


@pytest.fixture
def _counts_as_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded on a CPU has fake tensors of a GPU."""

    def fake(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        device = torch.device("cuda:0")
        made = self._fakes.like(tensor.shape, tensor.stride(), tensor.dtype, device)
        return made.requires_grad_(tensor.requires_grad)

    monkeypatch.setattr(recorder._Recorder, "_fake", fake)


@pytest.mark.usefixtures("_counts_as_a_gpus")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_norm_on_a_gpu_takes_any_strides(last: bool, seed: int) -> None:
    """cuDNN's own call refuses what does not lie as the example did, so no program has it."""
    model, x = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).eval(), torch.randn(2, 3, 4, 5)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), faults.any_equal(seed):
        gm, _ = recorder.recorded(model, (x,), {})
        optimized = pipeline.compile_graph(gm, pipeline.Request(Options.parse(None), "inference")).optimized
    for graph in (gm.graph, optimized.graph):
        norms = [str(n.target) for n in graph.nodes if "batch_norm" in str(n.target)]
        assert norms
        assert not [name for name in norms if "cudnn" in name]
    # The same graph, with what it was captured with and without; a CPU has no cuDNN.
    torch.testing.assert_close(gm(x), model(x))
    torch.testing.assert_close(gm(x[..., ::2]), model(x[..., ::2]))


def test_zeros_whose_strides_are_not_known_are_refused() -> None:
    """With open sizes torch 2.11 foretells contiguous ones; a run keeps those of the input."""
    zero = torch.ops.aten.zero.default
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for turned in (False, True):
        example = torch.empty(4, 6, 5)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
        given = mode.from_tensor(example, symbolic_context=context)
        with mode:
            predicted = torch.empty_like(given, memory_format=torch.contiguous_format)
            if turned:
                given, predicted = given.permute(2, 1, 0), torch.empty(given.shape[::-1])
        if turned:
            with pytest.raises(UnsupportedError, match="strides of zeros"):
                as_it_lies(zero, (given,), predicted)
        else:
            assert as_it_lies(zero, (given,), predicted) is predicted
