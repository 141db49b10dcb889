"""Convolutional nets on a CPU: images have channels last, and oneDNN reads weights in a form of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native import no_fallback, planned
from torch import nn

import hypatia
from hypatia.execute import plans
from hypatia.execute.described import described
from plan_models import _fresh, assert_right  # noqa: F401  (a fixture for this file too)

KINDS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(8, 12, 3, padding=1),
    "without bias": lambda: nn.Conv2d(8, 12, 3, bias=False),
    "stride": lambda: nn.Conv2d(8, 12, (3, 5), stride=(2, 1), padding=(0, 2)),
    "dilation": lambda: nn.Conv2d(8, 12, 3, dilation=2, padding=2),
    "groups": lambda: nn.Conv2d(8, 12, 3, groups=4, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 5, groups=8, padding=2),
    "two for each channel": lambda: nn.Conv2d(8, 16, 3, groups=8),
    "1x1": lambda: nn.Conv2d(8, 12, 1),
    "1x1 with a stride": lambda: nn.Conv2d(8, 12, 1, stride=2),
    "1x1 with zeros around": lambda: nn.Conv2d(8, 12, 1, padding=1),
    "1x1 in groups": lambda: nn.Conv2d(8, 12, 1, groups=4),
    "same": lambda: nn.Conv2d(8, 12, 4, padding="same"),
    "reflected": lambda: nn.Conv2d(8, 12, 3, padding=1, padding_mode="reflect"),
    "whole image": lambda: nn.Conv2d(8, 12, (9, 7)),
    "norm": lambda: nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(8, 12, 3), nn.GroupNorm(3, 12), nn.Conv2d(12, 8, 1)),
    "norm of all": lambda: nn.Sequential(nn.Conv2d(8, 12, 3), nn.GroupNorm(1, 12), nn.Conv2d(12, 8, 1)),
    "pools": lambda: nn.Sequential(
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(8, 12, 3), nn.MaxPool2d(2, 1)
    ),
    "turned": lambda: nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(8, 12, 3)),
}


class Split(nn.Module):
    """Two groups of channels, weighted by what is in them, and summed: the split attention of ResNeSt."""

    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self.both, self.weigh = nn.Conv2d(8, 24, 3, padding=1, groups=2), nn.Conv2d(12, 24, 1)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.both(x)).reshape(x.shape[0], 2, 12, *x.shape[2:])
        weights = self.weigh(x.sum(1).mean((2, 3), keepdim=True)).reshape(-1, 2, 12, 1, 1).softmax(1)
        found = (x * weights).sum(1, keepdim=self.keep)
        return found.flatten(1, 2) if self.keep else found


KINDS["split"] = lambda: nn.Sequential(Split(), nn.Conv2d(12, 8, 3))
KINDS["split, kept"] = lambda: Split(keep=True)


class Net(nn.Module):
    """A convolution between others, with what usually stands around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = KINDS[kind]()
        self.head = nn.Linear(self._channels(), 5)

    def _channels(self) -> int:
        return self.middle(torch.zeros(1, 8, 9, 7)).shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.stem(x))
        y = self.middle(y).relu()
        return self.head(y.mean((2, 3))) + y.amax((1, 2, 3)).unsqueeze(1)


def _lying(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if how == "with gaps":
        return torch.stack([x, -x], -1)[..., 0]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_are_right(kind: str, dtype: torch.dtype) -> None:
    model = Net(kind).eval().to(dtype)
    for how in ("as usual", "channels last", "with gaps"):
        x = _lying(torch.randn(2, 3, 9, 7).to(dtype), how)
        with no_fallback():
            assert_right(planned(model, x), model, x)
        torch._dynamo.reset()


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("entry", ["hypatia.compile", "torch.compile"])
@pytest.mark.parametrize("width", [7, 3])
def test_group_norms_are_as_precise_as_eagers(groups: int, entry: str, width: int) -> None:
    """Torch's own kernel for channels last loses digits where a mean is larger than what is around it.

    It takes it for images that are one element wide, too, if their strides say so.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(groups, 12), nn.ReLU(), nn.Conv2d(12, 4, 1)
    ).eval()
    x = torch.randn(2, 3, 9, width)
    with torch.no_grad():
        model[0].bias.add_(100.0)
        model[1].weight.normal_()
        model[1].bias.normal_()
        run = (
            hypatia.compile(model, x)
            if entry == "hypatia.compile"
            else torch.compile(model, backend="hypatia")
        )
        with no_fallback():
            run(x)
            assert_right(run(x), model, x)


@pytest.mark.parametrize("kind", ["3x3", "1x1", "depthwise"])
def test_results_lie_as_eagers(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), KINDS[kind](), nn.ReLU()).eval()
    for how in ("as usual", "channels last"):
        x = _lying(torch.randn(2, 3, 9, 7), how)
        run = hypatia.compile(model, x)
        with torch.no_grad():
            assert run(x).stride() == model(x).stride()


@pytest.mark.parametrize("kind", ["3x3", "1x1", "depthwise", "norm"])
def test_nan_and_infinities_are_kept(kind: str) -> None:
    """ReLU inside of oneDNN would make zeros of NaN."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), KINDS[kind](), nn.ReLU()).eval()
    x = torch.randn(1, 3, 9, 7)
    run = hypatia.compile(model, x)
    with torch.no_grad():
        for odd in (float("nan"), float("inf"), float("-inf")):
            x[0, 0, 4, 3] = odd
            torch.testing.assert_close(run(x), model(x), equal_nan=True)
            assert model(x).isnan().any()


@pytest.mark.parametrize("kind", ["3x3", "1x1", "depthwise", "norm"])
def test_changed_weights_are_seen(kind: str) -> None:
    model = Net(kind).eval()
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        run = hypatia.compile(model, x)
        run(x)
        for change in (_in_place, _replaced, _loaded, _in_place):
            change(model)
            torch.testing.assert_close(run(x), model(x))


def _in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1.5)


def _replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data + 0.25


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def test_sizes_in_turns() -> None:
    model = Net("3x3").eval()
    with torch.no_grad():
        run = hypatia.compile(model, torch.randn(2, 3, 9, 7))
        for sizes in [(2, 9, 7), (5, 9, 7), (1, 12, 16), (2, 9, 7), (1, 12, 16)]:
            x = torch.randn(sizes[0], 3, *sizes[1:])
            torch.testing.assert_close(run(x), model(x))


def test_sizes_share_prepared_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.ReLU()).eval()
    with torch.no_grad():
        run = hypatia.compile(model, torch.randn(2, 3, 9, 7))
        for rows in (2, 3, 4, 5, 3):
            x = torch.randn(rows, 3, 9, 7)
            torch.testing.assert_close(run(x), model(x))
    plans_made = [bound for bound, _ in run._last.native.__self__.binding.bound.values()]
    assert len(plans_made) == 3
    sizes = sum(c.weight.nbytes for c in model if isinstance(c, nn.Conv2d))
    assert {bound.bytes()[1] for bound in plans_made} == {sizes}


@pytest.mark.parametrize("bytes_", [0, 3000, None])
def test_weights_are_copied_in_as_many_bytes_as_may_be(bytes_: int | None) -> None:
    """Without room oneDNN is given the model's own."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        run = hypatia.compile(model, x, weight_copies=bytes_)
        torch.testing.assert_close(run(x), model(x))
    packed = run.reports[0].memory[1]
    sizes = [c.weight.nbytes for c in model if isinstance(c, nn.Conv2d)]
    assert packed == {0: 0, 3000: sizes[0], None: sum(sizes)}[bytes_]


def test_torch_has_onednns_ops() -> None:
    if torch.backends.mkldnn.is_available():
        assert plans._onednn_serves("f32")


OFF = {
    "not built": lambda patch: patch.setattr(torch.backends.mkldnn, "is_available", lambda: False),
    "no bf16": lambda patch: patch.setattr(plans, "_onednn_serves", lambda dtype: dtype == "f32"),
}
"""Machines and builds of torch on which oneDNN does not serve."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("why", OFF)
def test_without_onednn(why: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    OFF[why](monkeypatch)
    model, x = Net("3x3").eval().to(dtype), torch.randn(2, 3, 9, 7).to(dtype)
    with no_fallback():
        assert_right(planned(model, x), model, x)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")], ids=str)
def test_onednn_is_asked_for_the_dtype(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(plans, "_onednn_serves", lambda dtype: asked.append(dtype) or True)
    hypatia.compile(Net("3x3").eval().to(dtype), torch.randn(2, 3, 9, 7).to(dtype))
    assert set(asked) == {name}


def _steps(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The steps of the first plan that is made."""
    made = []
    start = plans.Planner.__init__

    def begun(self: plans.Planner, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        made.append(described(self._first)["steps"])

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(plans.Planner, "__init__", begun)
        hypatia.compile(model.eval(), x)
    return made[0]


def test_which_convolutions_are_linear_layers() -> None:
    steps = _steps(Net("1x1"), torch.randn(2, 3, 9, 7))
    assert "linear + relu" in steps
    assert steps.count("aten.convolution.default") == 1


@pytest.mark.parametrize("kind", ["split", "split, kept"])
def test_sums_of_two_groups_are_additions(kind: str) -> None:
    steps = _steps(Net(kind), torch.randn(2, 3, 9, 7))
    assert not [s for s in steps if "sum" in s], steps


def test_the_sum_of_negative_zeros_is_positive() -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            nn.init.constant_(self.stem.bias, 100.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stem(x).clamp(max=0.0).neg().unflatten(1, (2, 4)).sum(1)

    model, x = Zeros(), torch.randn(2, 3, 5, 4)
    result = planned(model, x)
    assert not torch.signbit(result).any()
    assert torch.equal(result, model(x))


class _Star(nn.Module):
    """An activation with a scale and a bias of one number each, as MetaFormers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor([0.9])), nn.Parameter(torch.tensor([[-0.4]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.relu(x) ** 2 + self.bias


def test_numbers_beside_images_leave_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), _Star(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 9, 7)
    steps = _steps(model, x)
    assert not any("[2, 8, 9, 7]" in step for step in steps), steps
    with no_fallback():
        assert_right(planned(model, x), model, x)


@pytest.mark.parametrize("entry", ["plan", "graph"])
@pytest.mark.parametrize("last", [False, True])
def test_pooling_to_one_place_is_as_precise_as_eagers(entry: str, last: bool) -> None:
    """It is a mean: torch's kernel for other sizes is off by seventeen roundings here."""
    x = torch.full((1, 8, 12, 14), 0.57556546)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    model = nn.Sequential(nn.ELU(), nn.AdaptiveAvgPool2d(1)).eval()
    with torch.no_grad():
        exact = nn.functional.elu(x.double()).mean((2, 3), keepdim=True)
        result = planned(model, x) if entry == "plan" else hypatia.optimize(model, x)(x)
    eps = torch.finfo(torch.float32).eps
    assert ((result - exact) / exact).abs().max() <= 2 * eps
