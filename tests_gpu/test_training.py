"""Training steps on a GPU: gradients beside float64, and what users do between the passes."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any
from unittest import mock

import torch
from forms import winning
from test_plans import BETWEEN, Layers
from torch import nn

import hypatia
from hypatia.execute import native
from hypatia.frontend.dynamo import collecting
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


def _assert_trains_by_torch_compile(what: str, model: nn.Module, x: torch.Tensor) -> None:
    """Gradients behind ``torch.compile`` are right; a plan that fails on the way is an error."""

    def failed(self: native.NativeGraph, error: Exception, args: Any) -> Any:
        raise error

    torch._dynamo.reset()
    with (
        winning("plan"),
        mock.patch.object(native.NativeGraph, "_failed", failed),
        collecting() as reports,
    ):
        call = torch.compile(model, backend="hypatia")
        try:
            for _ in range(3):
                _assert_right(model, call, (x,))
        except Exception as error:
            raise AssertionError(f"{what}, by torch.compile") from error
    assert {r.kind for r in reports} == {"forward", "backward"}, (what, *reports)


def check_layers() -> str:
    """Layers with something between them, in three dtypes, with odd sizes too; attention by both entries."""
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
            if "attention" in name:
                _assert_trains_by_torch_compile(f"{name} in {dtype}", model, x)
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
