"""Training steps on a GPU in all forms, by both entries: recorded, by plans, by torch's ops, as eager."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from forms import described, winning
from test_training import _assert_right
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hypatia
from hypatia.frontend import dynamo
from hypatia.frontend.step_forms import PLANS
from hypatia.frontend.train_contest import Contest


class _Tied(nn.Module):
    """The weight of an embedding is that of the last layer, too."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.middle, self.norm = nn.Embedding(96, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.drop, self.last = nn.Dropout(drop), nn.Linear(64, 96, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.middle(self.embedding(x)))))


def _normed(drop: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(drop),
    )


_RECORDED = ("recorded", "torch's, recorded", "plain", "eager")


def _train_beside(make: Any, x: torch.Tensor, form: str, entry: Any = hypatia.compile) -> Any:
    """Ten steps of SGD beside eager's, with the same random numbers; the compiled model."""
    torch.manual_seed(0)
    model = make().cuda().train()
    twin = copy.deepcopy(model)
    call = entry(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, twin)]
    with winning(form):
        for i in range(10):
            for m, optimizer in zip((call, twin), optimizers, strict=True):
                torch.manual_seed(i)
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
                drawn = torch.rand(1, device="cuda")
                if m is call:
                    mine = drawn
            assert torch.equal(mine, drawn), f"step {i}: other random numbers are next"
            for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
                torch.testing.assert_close(
                    a, b, rtol=2e-3, atol=2e-4, msg=lambda m, n=name, i=i: f"{n}, {i}: {m}"
                )
    return call


def _check_recorded(make: Any, x: torch.Tensor) -> str:
    for form in _RECORDED:
        step = _train_beside(make, x, form)._last_training.step
        assert step is not None
        assert step.settled
        assert {"recorded", "eager"} <= {*step.times}, step.times
        _check_by_torch(make, x, form)
    return ", ".join(step.times)


def _by_torch(model: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="hypatia")


@contextlib.contextmanager
def _contests() -> Iterator[list[Contest]]:
    """What decides about training steps that torch.compile compiles inside."""
    made: list[Contest] = []

    class Noted(Contest):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with mock.patch.object(dynamo, "Contest", Noted):
        yield made


def _check_by_torch(make: Any, x: torch.Tensor, form: str) -> None:
    with _contests() as made:
        # What was recorded goes with the model.
        call = _train_beside(make, x, form, _by_torch)
    (contest,) = made
    assert contest._decided
    assert contest._run is not contest._compiled
    assert (contest._run is contest._eager) == (form == "eager")
    del call


class _Cache(nn.Module):
    """A cache that is nearly full, and a count that says where the next call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("place", torch.ones(1, dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.kept.index_copy_(0, self.place, y.detach()[:1])
        self.place.add_(1)
        return y + self.kept.sum(0)


def check_caches_of_steps() -> str:
    """Steps that are only tried do not write past the end of a cache."""
    x = torch.randn(3, 8, device="cuda")
    for entry in (hypatia.compile, _by_torch):
        for form in ("recorded", "torch's, recorded", PLANS, "plain"):
            torch.manual_seed(0)
            model = _Cache().cuda()
            twin = copy.deepcopy(model)
            with winning(form):
                call = entry(model)
                for _ in range(4):
                    for net, run in ((model, call), (twin, twin)):
                        net.place.fill_(1)
                        net.zero_grad()
                        run(x).square().mean().backward()
                    torch.cuda.synchronize()
                    found, expected = (
                        [*n.buffers(), *(p.grad for p in n.parameters())] for n in (model, twin)
                    )
                    torch.testing.assert_close(found, expected)
    return "2 entries"


class _Images(nn.Module):
    """A convolutional net with all kinds of windows, whose images have their channels last in training."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        kinds = [
            nn.Conv2d(16, 32, 1, bias=False),
            nn.Conv2d(32, 32, 7, padding=3, groups=32),
            nn.Conv2d(32, 16, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False),
            nn.Conv2d(16, 24, 3, stride=2, padding=1),
            nn.Conv2d(24, 24, 5, padding=2, groups=24, bias=False),
            nn.Conv2d(24, 24, 2, stride=2),
            nn.Conv2d(24, 40, 1, bias=False),
        ]
        self.kinds = nn.ModuleList(kinds)
        self.norms = nn.ModuleList([norm(k.out_channels) for k in kinds])
        self.last = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for i, (kind, norm) in enumerate(zip(self.kinds, self.norms, strict=True)):
            y = norm(kind(x))
            y = F.gelu(y) if i % 3 else torch.relu(y)
            x = x + y if x.shape == y.shape else y
        return self.last(x.mean((2, 3)))


class _Rows(nn.LayerNorm):
    """A norm over channels, as ConvNeXt has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def check_convolutional_nets() -> str:
    """Images with channels last in both passes, by plans and by torch's ops."""
    kept = []
    for norm in (nn.BatchNorm2d, _Rows, nn.Identity):
        for dtype in (torch.bfloat16, torch.float16):
            for form in (PLANS, "plain", "recorded"):
                torch.manual_seed(0)
                model = _Images(norm).cuda().to(dtype).train()
                if norm is nn.BatchNorm2d:
                    # Statistics of few values are all roundings.
                    for each in model.norms:
                        each.momentum = 0.0
                x = torch.randn(8, 3, 48, 40, device="cuda", dtype=dtype)
                call = hypatia.compile(model)
                with winning(form):
                    for _ in range(3):
                        _assert_right(model, call, [x])
                        x = torch.randn_like(x)
                kept += [r.kept for r in call.reports]
    return ", ".join(f"{n} {k}" for k, n in Counter(kept).items())


def check_batch_norms_by_kernels() -> str:
    """Batch norms as kernels of ours: statistics move as eager's do, also of numbers far from zero."""
    count = 0
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    # Images in 16 bits, also where autocast makes them so, and rows of fp32.
    images = [(d, w, shift) for d, w in ((low, low), (half, half), (full, low)) for shift in (0.0, 30.0)]
    for dtype, within, shift in [*images, (full, full, 1000.0)]:
        torch.manual_seed(0)
        # Under autocast it is torch.compile's, which would run what it compiled for the model before.
        torch._dynamo.reset()
        size = (700, 33) if within is full else (8, 3, 48, 40)
        norms = nn.BatchNorm1d(33) if within is full else _Images(nn.BatchNorm2d)
        model = norms.cuda().to(dtype).train()
        twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
        x = torch.randn(size, device="cuda", dtype=dtype) + shift
        # The gradient of images that nobody asks for is of the first layer; of rows it is asked for.
        x.requires_grad_(within is full)
        call = hypatia.compile(model)
        with winning(PLANS), described() as plans:
            for _ in range(3):
                for each in (call, twin, wide):
                    cast = dtype is not within and each is not wide
                    with torch.autocast("cuda", within) if cast else contextlib.nullcontext():
                        each(x.double() if each is wide else x).float().square().mean().backward()
                # Statistics of 16-bit numbers have the roundings of those.
                _compare_buffers(model, twin, wide, 1e-4 if within is full else torch.finfo(within).eps)
                x = (torch.randn_like(x) - shift).requires_grad_(within is full)
                count += 1
        found = [step for steps in plans for step in steps]
        for kind in ("column moments", "column sums and sums"):
            least = 1 if within is full else 8
            assert sum(step.startswith(kind) for step in found) >= least, found
        assert not any("batch_norm" in step or "copy_" in step for step in found), found
    return f"{count} steps"


def _compare_buffers(model: nn.Module, twin: nn.Module, wide: nn.Module, eps: float) -> None:
    for (name, mine), eager, exact in zip(model.named_buffers(), twin.buffers(), wide.buffers(), strict=True):
        if not mine.is_floating_point():
            assert torch.equal(mine, eager), name
            continue
        off, own = ((t.double() - exact).abs().max().item() for t in (mine, eager))
        assert off <= 2 * own + 2 * eps * exact.abs().max().item(), (name, off, own, exact.abs().max())


def check_steps_under_autocast() -> str:
    """Autocast around a model is part of its graphs: nothing is cast twice, by a recording, too."""
    for form in _RECORDED[:3]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32)).cuda()
        x = torch.randn(16, 64, device="cuda")
        with _contests() as made, winning(form):
            call = _by_torch(model)
            for _ in range(4):
                found = []
                for each in (call, model):
                    model.zero_grad()
                    with torch.autocast("cuda", torch.bfloat16):
                        result = each(x)
                    assert result.dtype == torch.bfloat16
                    result.float().square().mean().backward()
                    found.append([result.detach().clone(), *(p.grad.clone() for p in model.parameters())])
                torch.testing.assert_close(*found, rtol=3e-2, atol=3e-3)
        assert made[0]._run is not made[0]._compiled
    return f"{len(_RECORDED[:3])} forms"


def check_checkpoints() -> str:
    """A checkpoint runs a pass again in the backward pass, and counts what autograd keeps of it."""
    x = torch.randn(16, 32, device="cuda", requires_grad=True)
    for entry in (hypatia.compile, _by_torch):
        for form in ("recorded", "plain"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 32)).cuda()
            found = []
            with winning(form):
                for call in (entry(model), model):
                    torch.manual_seed(1)
                    # Compiled and recorded without a checkpoint, then with one, then without again.
                    for i in range(9):
                        model.zero_grad()
                        kept = checkpoint(call, x, use_reentrant=False) if 3 <= i < 6 else call(x)
                        kept.square().mean().backward()
                    found.append([p.grad.clone() for p in model.parameters()])
            torch.testing.assert_close(*found, rtol=2e-3, atol=2e-4)
    return "2 entries"


def check_tied_weights() -> str:
    """Tied weights, recorded: gradients of both uses are added."""
    return _check_recorded(_Tied, torch.randint(0, 96, (4, 16), device="cuda"))


def check_batch_norms() -> str:
    """Buffers are changed once a step, by a recording, too."""
    return _check_recorded(_normed, torch.randn(4, 3, 16, 16, device="cuda"))


def check_dropout() -> str:
    """Random numbers are eager's, by a recording, too."""
    _check_recorded(lambda: _normed(0.5), torch.randn(4, 3, 16, 16, device="cuda"))
    return _check_recorded(lambda: _Tied(0.5), torch.randint(0, 96, (4, 16), device="cuda"))
