"""However attention is written, it is one call on a GPU, too, and right."""

from __future__ import annotations

import copy
import itertools

import torch
from forms import winning
from torch import nn
from torch.nn import functional as F

import hypatia
from tests.capture.spellings import OTHERS, SPELLINGS, Model, calls, inputs
from tests.support import assert_as_close_as_eager

DTYPES = (torch.float32, torch.bfloat16)
HIDES_ROWS = ("added", "padding added", "filled", "filled with the least", "where", "both in one", "alibi")


def _wide(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in given]


def _check_inference(name: str, dtype: torch.dtype, *, is_call: bool = True) -> None:
    spelling = {**SPELLINGS, **OTHERS}[name]
    torch.manual_seed(0)
    model = Model(spelling).eval().to("cuda", dtype)
    exact = copy.deepcopy(model).double()
    first, later = ([t.cuda() for t in inputs(spelling, dtype, seed=seed)] for seed in (0, 1))
    with torch.no_grad():
        try:
            model(*first)
        except RuntimeError:
            # Torch multiplies no matrices of two dtypes: this spelling has its scores in fp32.
            assert dtype != torch.float32, name
            return
        compiled = hypatia.compile(model, *first)
        for given in (first, later):
            assert_as_close_as_eager(compiled(*given), model(*given), exact(*_wide(given)))
    assert calls(compiled.reports)[0] == (is_call and name in SPELLINGS), name


def check_every_spelling() -> str:
    """Inference, as calls."""
    with winning():
        for dtype in DTYPES:
            for name in (*SPELLINGS, *OTHERS):
                _check_inference(name, dtype)
    return f"{len(SPELLINGS)} spellings"


def check_products_that_are_faster() -> str:
    """The program without the call is kept where it is the faster one."""
    with winning("plainer plan"):
        for name in SPELLINGS:
            _check_inference(name, torch.bfloat16, is_call=False)
    return f"{len(SPELLINGS)} spellings"


def _check_training(name: str, dtype: torch.dtype) -> None:
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    model = Model(spelling).to("cuda", dtype)
    exact = copy.deepcopy(model).double()
    try:
        model(*[t.cuda() for t in inputs(spelling, dtype)])
    except RuntimeError:
        # As above: of two dtypes.
        assert dtype != torch.float32, name
        return
    run = hypatia.compile(model, *[t.cuda() for t in inputs(spelling, dtype)])
    for seed in (0, 1):
        given = [t.cuda() for t in inputs(spelling, dtype, seed=seed)]
        found = []
        for call, args, of in ((run, given, model), (model, given, model), (exact, _wide(given), exact)):
            args[0].requires_grad_()
            out = call(*args)
            made = torch.autograd.grad(out.float().square().sum(), [args[0], *of.parameters()])
            found.append([out.detach(), *made])
        for each in zip(*found, strict=True):
            assert_as_close_as_eager(*each)
    names = [str(n.target) for r in run.reports if r.kind == "forward" for n in r.after.nodes]
    # Products stay: gradients of torch's kernels were wrong for some of these.
    assert not any("scaled_dot_product" in n for n in names), name


def check_training() -> str:
    """Results and gradients; biases learn, too."""
    for dtype in DTYPES:
        for name in SPELLINGS:
            _check_training(name, dtype)
    return f"{len(SPELLINGS)} spellings"


class Called(nn.Module):
    """A call of torch's attention, the gradient of which lies as ``after`` leaves it."""

    def __init__(self, before: str, after: str) -> None:
        super().__init__()
        self.layer, self.before, self.after = nn.Linear(64, 3 * 64), before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.layer(x).chunk(3, -1))
        if self.before == "dense":
            q, k, v = (t.contiguous() for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return out.reshape(-1, *out.shape[2:]) if self.after == "joined" else out.transpose(1, 2).flatten(2)


def check_gradients_of_calls() -> str:
    """However the gradient of attention lies; eager's own error beside ours, since eager is wrong where a
    gradient lies otherwise than the first one of these sizes. So is what is compiled for open sizes."""
    found = []
    torch._dynamo.reset()
    for rows, before, after in itertools.product((12, 128), ("turned", "dense"), ("joined", "turned")):
        torch.manual_seed(0)
        model = Called(before, after).to("cuda", torch.bfloat16)
        exact = copy.deepcopy(model).double()
        x = torch.randn(2, rows, 64, device="cuda", dtype=torch.bfloat16)
        gradients = []
        for call, of, given in (
            (torch.compile(model, backend="hypatia", dynamic=False), model, x),
            (model, model, x),
            (exact, exact, x.double()),
        ):
            out = call(given)
            weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view_as(out)
            gradients.append(torch.autograd.grad((out * weight).sum(), [*of.parameters()])[0])
        ours, eager, right = gradients
        scale = right.abs().max()
        errors = [float((g - right).abs().max() / scale) for g in (ours, eager)]
        found.append(f"{rows} {before} {after}: {errors[0]:.1e} (eager {errors[1]:.1e})")
        assert errors[0] < 3e-2, found
    return "; ".join(found)


def check_rows_that_see_nothing() -> str:
    """They are NaN where eager's are, and uniform where those are."""
    for name in HIDES_ROWS:
        for dtype in DTYPES:
            spelling = SPELLINGS[name]
            torch.manual_seed(0)
            model = Model(spelling).eval().to("cuda", dtype)
            given = [t.cuda() for t in inputs(spelling, dtype)]
            hidden = 0 if spelling.extra == "kept" else torch.finfo(dtype).min
            given[1][1] = -torch.inf if name == "added" else hidden
            with torch.no_grad(), winning():
                found, expected = hypatia.compile(model, *given)(*given), model(*given)
            assert found.isnan().equal(expected.isnan()), (name, dtype)
            numbers = expected.isfinite()
            allowed = 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(found[numbers], expected[numbers], rtol=allowed, atol=allowed)
    return f"{len(HIDES_ROWS)} masks"
