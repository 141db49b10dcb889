"""Training steps on a GPU: gradients beside float64, and what users do between the passes."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from forms import winning
from test_plans import BETWEEN, Layers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hypatia
from hypatia.execute import native
from hypatia.frontend import dynamo
from hypatia.frontend.step_forms import PLANS
from hypatia.frontend.train_contest import Contest
from hypatia.nn import FusedLinearReLU, FusedMLP
from hypatia.tools.workloads import NINE_MLPS, WORKLOADS


def _gradients(call: Any, model: nn.Module, inputs: Any, g: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    call(*inputs).backward(g.to(next(model.parameters()).dtype))
    return [p.grad for p in model.parameters() if p.grad is not None]


def _assert_right(model: nn.Module, call: Any, inputs: Any) -> None:
    """Gradients are as close to float64 as eager's: at most four times its error, plus a few roundings."""
    with torch.no_grad():
        g = torch.randn_like(model(*inputs))
    wide = copy.deepcopy(model).double()
    exact = _gradients(wide, wide, [x.double() if x.is_floating_point() else x for x in inputs], g)
    eager = [t.clone() for t in _gradients(model, model, inputs, g)]
    ours = _gradients(call, model, inputs, g)
    # Some gradients are zero but for roundings, as those of the biases of keys.
    scale = max(w.norm().item() for w in exact)
    for at, (a, b, w) in enumerate(zip(ours, eager, exact, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        unit = torch.finfo(b.dtype).eps
        # Where an input of a ReLU is nearly zero, rounding decides whether it has a gradient. That is most of
        # the error of large MLPs, and chance decides who has more of it.
        allowed = 4 * (b.double() - w).norm() + 4 * unit * w.norm() + 0.1 * unit * scale
        error = (a.double() - w).norm()
        assert error <= allowed, f"gradient {at} of {w.norm():.2e}: error {error:.2e}, allowed {allowed:.2e}"


def _reference(
    model: nn.Module, x: torch.Tensor, g: torch.Tensor, kept: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of an MLP in float64 with its ReLUs on where what was kept of a pass says so."""
    wide = copy.deepcopy(model).double()
    layers = [m for m in wide.modules() if isinstance(m, nn.Linear)]
    wide.zero_grad(set_to_none=True)
    h = x.double()
    for i, layer in enumerate(layers):
        h = layer(h)
        if i + 1 < len(layers):
            on, scale = kept[i] > 0, h.abs().max()
            off = h[(h > 0) != on]
            assert not off.numel() or (off.abs().max() <= 1e-5 * scale).item(), (
                f"layer {i}: {off.abs().max()}"
            )
            h = h * on
    h.backward(g.double())
    return [p.grad for p in wide.parameters()]


def _assert_right_where_on(model: nn.Module, call: Any, x: torch.Tensor) -> None:
    """Gradients of an MLP in fp32, given which of its ReLUs are on.

    One of millions whose input is nearly zero is on or off by the last digit, and changes all gradients in
    the fourth digit; who has more of them is chance.
    """
    with torch.no_grad():
        g = torch.randn_like(model(x))
    eager = [t.clone() for t in _gradients(model, model, (x,), g)]
    ours = [t.clone() for t in _gradients(call, model, (x,), g)]
    hidden = []
    with torch.no_grad():
        h = x
        for layer in model:
            h = layer(h)
            if isinstance(layer, nn.ReLU):
                hidden.append(h)
        step = call._last_training.step
        saved = list(step.passes.forward([p.detach() for p in (*step.parameters, x)])[1])
        found = []
        for h in hidden:
            alike = [t for t in saved if t.shape == h.shape and t.dtype == h.dtype]
            found.append(min(alike, key=lambda t, h=h: (t - h).abs().max().item()))
    errors = []
    for gradients, kept in ((ours, found), (eager, hidden)):
        exact = _reference(model, x, g, kept)
        errors.append(
            [((a.double() - w).norm() / w.norm()).item() for a, w in zip(gradients, exact, strict=True)]
        )
    unit = torch.finfo(torch.float32).eps
    for at, (mine, theirs) in enumerate(zip(*errors, strict=True)):
        assert mine <= 2 * theirs + 4 * unit, f"gradient {at}: error {mine:.2e}, eager's {theirs:.2e}"


def check_mlps() -> str:
    """The nine MLPs in three dtypes, in both forms."""
    done = 0
    for shape in NINE_MLPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for form in ("plain", "masked"):
                model, inputs = shape.workload().build(dtype, "cuda")
                model.train().requires_grad_()
                call = hypatia.compile(model)
                with winning(form):
                    try:
                        for _ in range(4):
                            if dtype is torch.float32:
                                _assert_right_where_on(model, call, *inputs)
                            else:
                                _assert_right(model, call, inputs)
                    except Exception as error:
                        raise AssertionError(f"{shape.name} in {dtype}, {form}") from error
                step = call._last_training.step
                assert step is not None, shape.name
                assert step.settled, shape.name
                done += 1
        torch.cuda.empty_cache()
    return f"{done} cases"


def check_layers() -> str:
    """Layers with something between them, in three dtypes, with odd sizes too."""
    done = 0
    for name, between in BETWEEN.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            model, x = Layers(between).cuda().to(dtype), torch.randn(8, 32, device="cuda").to(dtype)
            call = hypatia.compile(model)
            try:
                with winning("plain"):
                    for _ in range(3):
                        _assert_right(model, call, (x,))
            except Exception as error:
                raise AssertionError(f"{name} in {dtype}") from error
            done += 1
    for m, k, n in ((3, 5, 7), (1, 16, 16), (33, 17, 9), (64, 784, 10)):
        for dtype in (torch.float32, torch.bfloat16):
            model = nn.Sequential(nn.Linear(k, 19), nn.ReLU(), nn.Linear(19, n)).cuda().to(dtype)
            call = hypatia.compile(model)
            with winning("plain"):
                for _ in range(3):
                    _assert_right(model, call, (torch.randn(m, k, device="cuda").to(dtype),))
            done += 1
    return f"{done} cases"


class _Sum(nn.Module):
    """Two layers of which one row or column may be all."""

    def __init__(self, terms: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(terms, columns), nn.Linear(terms, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) - self.second(x)


def check_single_rows_and_columns() -> str:
    """Matrices with one row or column lie like their transposes."""
    done = 0
    for terms, columns in ((1, 8), (8, 1), (1, 1), (16, 1), (8, 16)):
        for shape in ((1, 4), (3, 4), (1, 3, 4), (5, 2, 4)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, terms), _Sum(terms, columns)).cuda()
            call = hypatia.compile(model)
            x = torch.randn(shape, device="cuda")
            with winning("plain"), warnings.catch_warnings():
                warnings.simplefilter("error", hypatia.VerificationWarning)
                for _ in range(3):
                    _assert_right(model, call, (x,))
            done += 1
    return f"{done} cases"


def check_differences() -> str:
    """Gradients in f32 beside differences of the function in float64, along random directions."""
    for name in ("relu", "gelu", "silu", "layer_norm", "attention"):
        torch.manual_seed(1)
        model, x = Layers(BETWEEN[name]).cuda(), torch.randn(8, 32, device="cuda", requires_grad=True)
        call = hypatia.compile(model)
        with winning("plain"):
            for _ in range(3):
                y = call(x)
                weights = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)
                found = torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])
        wide = copy.deepcopy(model).double()
        places = [x.detach().double(), *[p.detach() for p in wide.parameters()]]

        def value(moved: list[torch.Tensor], wide: nn.Module = wide, weights: Any = weights) -> torch.Tensor:
            names = [n for n, _ in wide.named_parameters()]
            given = dict(zip(names, moved[1:], strict=True))
            return (torch.func.functional_call(wide, given, (moved[0],)) * weights).sum()

        for at, (place, gradient) in enumerate(zip(places, found, strict=True)):
            step = torch.randn_like(place)
            step *= 1e-5 / step.norm()
            ahead, behind = ([*places[:at], place + s * step, *places[at + 1 :]] for s in (1, -1))
            with torch.no_grad():
                difference = (value(ahead) - value(behind)) / 2
            said = (gradient.double() * step).sum()
            scale = gradient.double().norm() * step.norm()
            assert (difference - said).abs() <= 1e-4 * scale, f"{name}, gradient {at}"
    return "5 models"


def _passes_of(form: str) -> tuple[nn.Module, Any, torch.Tensor]:
    """A model whose steps run in a form."""
    torch.manual_seed(0)
    between = BETWEEN["attention"] if form == "recorded" else torch.relu
    model = Layers(between).cuda()
    call = hypatia.compile(model)
    x = torch.randn(8, 32, device="cuda")
    with winning(form):
        for _ in range(3):
            call(x).sum().backward()
    assert form in call._last_training.step.times or form == "plain"
    return model, call, x


def check_between_the_passes() -> str:
    """Several forward passes, retained graphs, added gradients, changed weights, gradients of gradients."""
    for form in ("plain", "masked", "recorded"):
        model, call, x = _passes_of(form)
        other = torch.randn_like(x)

        def expected(*inputs: torch.Tensor, model: nn.Module = model) -> list[torch.Tensor]:
            model.zero_grad()
            sum(model(i).square().sum() for i in inputs).backward()
            return [p.grad.clone() for p in model.parameters()]

        def close(want: list[torch.Tensor], model: nn.Module = model, form: str = form) -> None:
            for p, w in zip(model.parameters(), want, strict=True):
                torch.testing.assert_close(p.grad, w, rtol=1e-4, atol=1e-4, msg=lambda m: f"{form}: {m}")

        want = expected(x, other)
        # Two forward passes, then both backward passes, in either order.
        for order in (1, -1):
            model.zero_grad()
            losses = [call(x).square().sum(), call(other).square().sum()][::order]
            for loss in losses:
                loss.backward()
            close(want)
        # One after the other, added up.
        model.zero_grad()
        call(x).square().sum().backward()
        call(other).square().sum().backward()
        close(want)
        # A graph that is kept.
        model.zero_grad()
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        call(other).square().sum().backward()
        loss.backward()
        close(expected(x, other, x))
        # Gradients that are kept are not written to later.
        (first,) = torch.autograd.grad(call(x).square().sum(), model.first.weight)
        before = first.clone()
        torch.autograd.grad(call(other).square().sum(), model.first.weight)
        assert torch.equal(first, before), form
        # Gradients that stay where they are from step to step.
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            call(x).square().sum().backward()
            call(other).square().sum().backward()
            close(want)
        # Optimizers that throw them away.
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            call(x).square().sum().backward()
        close(expected(x))
        # A weight that is changed before it is read.
        loss = call(x).square().sum()
        with torch.no_grad():
            model.second.weight.mul_(2.0)
        said = ""
        try:
            loss.backward()
        except RuntimeError as e:
            said = str(e)
        assert "modified by an inplace operation" in said, f"{form}: a changed weight was not noticed"
        # Gradients of gradients, which torch's attention has not.
        if form == "recorded":
            continue
        given = x.clone().requires_grad_()
        found = []
        for f in (call, model):
            (g,) = torch.autograd.grad(f(given).square().sum(), given, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), model.second.weight)[0])
        torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    return "3 forms"


def check_optimizers_and_threads() -> None:
    """Training goes as eager's does; autograd's threads are left alone if that is asked for."""
    torch._C._set_multithreading_enabled(True)
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Layers(torch.relu).cuda()
        call = hypatia.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        x, y = torch.randn(64, 32, device="cuda"), torch.randn(64, 16, device="cuda")
        losses = []
        with winning("plain"):
            for _ in range(50):
                optimizer.zero_grad()
                loss = (call(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        runs.append(losses)
    assert abs(runs[0][-1] - runs[1][-1]) < 1e-3 * runs[0][0], (runs[0][-1], runs[1][-1])
    assert runs[1][-1] < 0.8 * runs[1][0]
    # Only where the user wants it.
    for asked in (False, True):
        torch._C._set_multithreading_enabled(True)
        model, x = Layers(torch.relu).cuda(), torch.randn(64, 32, device="cuda")
        call = hypatia.compile(model, backward_in_caller=asked)
        call(x).sum().backward()
        assert torch._C._is_multithreading_enabled() is not asked


def check_fused_modules() -> str:
    """The fused layers run by plans, by themselves, and train."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.randn(64, 48, device="cuda").to(dtype)
        for model in (FusedLinearReLU(48, 32).cuda().to(dtype), FusedMLP(48, 64, 32, 16).cuda().to(dtype)):
            layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
            parts = [nn.Linear(m.in_features, m.out_features).cuda().to(dtype) for m in layers]
            for mine, theirs in zip(parts, layers, strict=True):
                mine.load_state_dict(theirs.state_dict())
            plain = nn.Sequential(
                *[m for part in parts for m in (part, nn.ReLU())][: None if len(parts) == 1 else -1]
            )
            with winning("plain"):
                for _ in range(3):
                    got, want = model(x), plain(x)
                    torch.testing.assert_close(got, want)
                    got = torch.autograd.grad(got.float().square().sum(), list(model.parameters()))
                    want = torch.autograd.grad(want.float().square().sum(), list(plain.parameters()))
                    for a, b in zip(got, want, strict=True):
                        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()
            assert model._compiled._last_training.step is not None
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x))
            assert copy.deepcopy(model)._compiled is None
    return "2 modules"


class Normed(nn.Module):
    """Two norms, with something added."""

    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.scale, self.first, self.second = nn.Parameter(torch.ones(width)), norm(width), norm(width)
        for p in self.parameters():
            nn.init.normal_(p, 1.0, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The second of the first and of what that was given."""
        x = x * self.scale
        return self.second(x + torch.relu(self.first(x)))


def check_norms() -> str:
    """Norms of odd and of large widths, few rows and many, in three dtypes, by own kernels."""
    done = 0
    for width, rows in ((1, 5), (7, 1), (33, 300), (768, 2048), (1000, 9), (1024, 64), (1026, 7), (8192, 3)):
        for norm in (nn.LayerNorm, nn.RMSNorm):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                torch.manual_seed(0)
                # The second norm of one element is its bias.
                model = Normed(width, norm).cuda().to(dtype)
                x = torch.randn(rows, width, device="cuda").to(dtype)
                call = hypatia.compile(model)
                try:
                    with winning("plain"):
                        for _ in range(3):
                            _assert_right(model, call, (x,))
                    graphs = [p.latest() for p in call._last_training.step._graphs]
                    assert all(isinstance(g, native.NativeGraph) and g.native for g in graphs)
                    words = ("with statistics", "backward over")
                    pairs = zip(graphs, words, strict=True)
                    assert all(sum(word in s for s in g.binding.steps) == 2 for g, word in pairs), graphs[
                        1
                    ].binding.steps
                except Exception as error:
                    raise AssertionError(f"{norm.__name__} of {rows} x {width} in {dtype}") from error
                done += 1
    return f"{done} cases"


def check_both_passes_as_one_call() -> str:
    """``step`` adds what autograd adds."""
    done = 0
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, x = Layers(torch.relu, 512).cuda().to(dtype), torch.randn(64, 32, device="cuda").to(dtype)
        call = hypatia.compile(model)
        target = torch.randn_like(model(x)).detach()
        with winning("plain"):
            for _ in range(4):
                model.zero_grad(set_to_none=True)
                for _ in range(2):
                    loss = call.step(x, loss=lambda y, target=target: nn.functional.mse_loss(y, target))
                ours = [p.grad.clone() for p in model.parameters()]
        assert call._last_training.is_direct()
        model.zero_grad(set_to_none=True)
        for _ in range(2):
            expected = nn.functional.mse_loss(model(x), target)
            expected.backward()
        unit = torch.finfo(dtype).eps
        assert abs(loss - expected).item() <= 8 * unit * expected.item()
        for a, p in zip(ours, model.parameters(), strict=True):
            assert (a - p.grad).norm().item() <= 16 * unit * p.grad.norm().item()
        done += 1
    return f"{done} dtypes"


def check_transformers() -> str:
    """Layers of transformers, recorded, both passes by plans."""
    names = ("bert-base-b16", "gpt2", "llama-b8")
    for name in names:
        model, inputs = WORKLOADS[name].build(torch.bfloat16, "cuda")
        model.train().requires_grad_()
        call = hypatia.compile(model)
        with winning("plain"):
            for _ in range(3):
                _assert_right(model, lambda *i, call=call: _first(call(*i)), inputs)
        graphs = [p.latest() for p in call._last_training.step._graphs]
        assert all(isinstance(g, native.NativeGraph) and g.binding.only is not None for g in graphs), name
        del model, call
        torch.cuda.empty_cache()
    return ", ".join(names)


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else _first(result[0])


def check_memory_of_recordings() -> str:
    """Recording one more model takes none of the memory that torch keeps for products on a stream."""
    sizes = []
    for _ in range(4):
        model, call, x = _passes_of("recorded")
        call(x).square().sum().backward()
        del model, call, x
        sizes.append(_allocated())
    assert sizes[-1] - sizes[0] < 1 << 20, sizes
    return f"{sizes[-1] >> 20} MiB after one and after four"


def _allocated() -> int:
    """Bytes in use, without what earlier checks left in cycles of references."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def check_leaks() -> str:
    """Two thousand steps leave no memory behind."""
    model, x = Layers(torch.relu).cuda(), torch.randn(8, 32, device="cuda")
    call = hypatia.compile(model)
    with winning("plain"):
        for i in range(2100):
            model.zero_grad(set_to_none=True)
            call(x).sum().backward()
            if i == 100:
                before = _allocated()
    after = _allocated()
    assert after <= before, f"{before} bytes before, {after} after"
    return f"{before >> 10} KiB before and after"


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
        _train_beside(make, x, form, _by_torch)
    (contest,) = made
    assert contest._decided
    assert contest._run is not contest._compiled
    assert (contest._run is contest._eager) == (form == "eager")


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
