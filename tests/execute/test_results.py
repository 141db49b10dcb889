"""Results are eager's in shape, strides, dtype and memory: in all entries, in inference and in training.

Views of what was computed, views of inputs, results that share memory, odd strides; at the first call and at
later ones with other strides and sizes.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hypatia
from hypatia.execute import native, recorded_plan
from hypatia.execute.binding import Binding
from hypatia.frontend.dynamo import collecting
from support import assert_as_close_as_eager, fresh_dynamo, tensors

ENTRIES = ("torch.compile", "compile", "optimize")


class Net(nn.Module):
    """Some layers, and what is made of them."""

    def __init__(self, form: Callable[[Net, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.norm = nn.BatchNorm2d(6)
        self.norm.running_mean.normal_()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self, x)


class Form(NamedTuple):
    """A way to return something."""

    returned: Callable[[Net, torch.Tensor], Any]
    shape: tuple[int, ...] = (4, 6, 8)
    planned: bool = True
    """There is a native plan for it in inference."""
    turned: bool = True
    """Inputs with other strides are tried, too."""


def _with(view: Callable[[torch.Tensor], Any]) -> Callable[[Net, torch.Tensor], Any]:
    """A value and something else in its memory."""

    def both(net: Net, x: torch.Tensor) -> Any:
        y = F.relu(net.layer(x))
        return y, view(y)

    return both


def _heads(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.layer(x).view(4, -1, 2, 4).transpose(1, 2)


def _joined(net: Net, x: torch.Tensor) -> Any:
    whole = torch.cat([net.layer(x), x])
    return whole, whole[4:]


def _joined_parts(net: Net, x: torch.Tensor) -> Any:
    whole = torch.cat([net.layer(x), x])
    return whole[4:], whole[:4]


def _merged(net: Net, x: torch.Tensor) -> Any:
    """Three layers of one input, which become one product: eager's results are apart."""
    return net.layer(x), net.other(x), net.third(x)


def _merged_heads(net: Net, x: torch.Tensor) -> Any:
    return tuple(y.view(4, -1, 2, 4).transpose(1, 2) for y in _merged(net, x))


def _attended(net: Net, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (y.view(4, -1, 2, 4).transpose(1, 2) for y in _merged(net, x))
    return F.scaled_dot_product_attention(q, k, v)


FORMS: dict[str, Form] = {
    "plain": Form(lambda net, x: net.layer(x)),
    "pointwise": Form(lambda _, x: x * 2 + 1),
    "regression head": Form(lambda net, x: net.head(x).squeeze(-1)),
    "squeezed": Form(lambda _, x: (x * 2).squeeze(0), (1, 6, 8)),
    "squeezed wherever": Form(lambda _, x: (x * 2).squeeze(), (1, 6, 8)),
    "unsqueezed": Form(lambda _, x: (x * 2).unsqueeze(1)),
    "unsqueezed last": Form(lambda net, x: net.layer(x).unsqueeze(-1)),
    "first": Form(lambda _, x: (x * 2)[0]),
    "last": Form(lambda net, x: net.layer(x)[-1]),
    "first of each": Form(lambda net, x: net.layer(x)[:, 0]),
    "columns": Form(lambda net, x: net.layer(x)[..., 2:5]),
    "every other": Form(lambda net, x: net.layer(x)[:, ::2]),
    "viewed": Form(lambda _, x: (x * 2).view(2, -1)),
    "flat": Form(lambda net, x: net.layer(x).flatten(1)),
    "unflattened": Form(lambda net, x: net.layer(x).unflatten(-1, (2, 4))),
    "transposed": Form(lambda net, x: net.layer(x).transpose(-1, -2)),
    "transposed and copied": Form(lambda net, x: net.layer(x).transpose(-1, -2).contiguous()),
    "heads": Form(_heads),
    "heads put together": Form(lambda net, x: _heads(net, x).transpose(1, 2).reshape(4, -1, 8)),
    "attended": Form(_attended, planned=False),
    "attended, put together": Form(lambda net, x: _attended(net, x).transpose(1, 2).flatten(2)),
    "repeated": Form(lambda net, x: net.layer(x).repeat_interleave(2, 0)),
    "expanded": Form(lambda net, x: net.layer(x).unsqueeze(0).expand(3, -1, -1, -1)),
    "chunks": Form(lambda net, x: net.layer(x).chunk(2, -1)),
    "chunks of rows": Form(lambda net, x: F.relu(net.layer(x)).chunk(2)),
    "some of the chunks": Form(lambda net, x: net.layer(x).split([2, 2, 4], -1)[::2]),
    "merged": Form(_merged),
    "merged heads": Form(_merged_heads),
    "merged, one row": Form(_merged, (1, 8)),
    "whole and part": Form(_with(lambda y: y[:, 0])),
    "part and whole": Form(lambda net, x: _with(lambda y: y[1:])(net, x)[::-1]),
    "whole and transposed": Form(_with(lambda y: y.transpose(0, 1))),
    "whole and itself": Form(_with(lambda y: y)),
    "whole and flat": Form(_with(lambda y: y.view(-1))),
    "whole and a copy": Form(_with(lambda y: y.clone())),
    "whole and windows": Form(_with(lambda y: y.unfold(1, 2, 1)), planned=False),
    "overlapping parts": Form(lambda net, x: (lambda y: (y[:3], y[1:]))(F.relu(net.layer(x)))),
    "joined and a part": Form(_joined),
    "parts of what was joined": Form(_joined_parts, planned=False),
    "input": Form(lambda net, x: (x, net.layer(x))),
    "input squeezed": Form(lambda net, x: (x.squeeze(), net.layer(x)), (1, 6, 8)),
    "input alone": Form(lambda _, x: x.squeeze(0), (1, 6, 8), planned=False),
    "input transposed": Form(lambda net, x: (net.layer(x), x.transpose(0, 1))),
    "part of an input": Form(lambda net, x: (net.layer(x), x[1:, 2:4])),
    "input and a copy": Form(lambda net, x: (net.layer(x), x, x.clone())),
    "input, copied": Form(lambda net, x: (net.layer(x), x.transpose(0, 1).contiguous())),
    "weights alone": Form(lambda net, x: (net.layer(x), net.head.weight * net.head.weight)),
    "a weight": Form(lambda net, x: (net.layer(x), net.head.weight), planned=False),
    "numbers beside": Form(lambda net, x: (net.layer(x)[0], None, 3, x * 2)),
    "another dtype": Form(lambda net, x: (net.layer(x).transpose(0, 1).double(), (x > 0)[0])),
    "empty": Form(lambda net, x: net.layer(x)[:, :0]),
    # With strides of another order torch's own backends have wrong gradients of its weight.
    "norm": Form(lambda net, x: net.norm(x.unsqueeze(-1)).squeeze(-1), planned=False, turned=False),
    "norm of permuted": Form(
        lambda net, x: net.norm(x.permute(0, 2, 1).unsqueeze(2)), (4, 8, 6), planned=False
    ),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A rollback is an error."""
    fresh_dynamo()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hypatia.VerificationWarning)
        warnings.simplefilter("error", hypatia.PrecisionWarning)
        yield


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time a plan was asked, whether it ran."""
    seen: list[bool] = []
    run = native.NativeGraph.run

    def watched(graph: native.NativeGraph, args: Any) -> Any:
        results = run(graph, args)
        seen.append(results is not None)
        return results

    monkeypatch.setattr(native.NativeGraph, "run", watched)
    return seen


def lies(results: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """How results lie in memory: whose it is, from where on, and with which strides."""
    first: dict[int, tuple[int, int]] = {}
    for number, tensor in enumerate(inputs):
        first.setdefault(tensor.untyped_storage().data_ptr(), (number, tensor.data_ptr()))
    found: list[Any] = []
    for tensor in tensors(results):
        memory = tensor.untyped_storage().data_ptr()
        owner, start = first.setdefault(memory, (len(first), tensor.data_ptr()))
        strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        found.append((tuple(tensor.shape), strides if tensor.numel() else [], tensor.dtype))
        found.append((owner, tensor.data_ptr() - start) if tensor.numel() else None)
    return found


def compiled_by(entry: str, model: nn.Module, x: torch.Tensor, verify: str) -> Callable[..., Any]:
    if entry == "torch.compile":
        return torch.compile(model, backend="hypatia", options={"verify": verify})
    if entry == "compile":
        return hypatia.compile(model, verify=verify)
    return hypatia.optimize(model, x, options={"verify": verify})


def assert_like_eager(compiled: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> None:
    """Values, gradients and memory as eager's."""
    weights = list(model.parameters())
    ours = compiled(x)
    our_gradients = gradients(ours, weights)
    theirs = model(x)
    assert lies(ours, [x, *weights]) == lies(theirs, [x, *weights])
    wide = copy.deepcopy(model).double()
    exact = wide(x.double())
    assert_as_close_as_eager(ours, theirs, tensors(exact))
    kept = gradients(exact, list(wide.parameters()))
    assert_as_close_as_eager(our_gradients, gradients(theirs, weights), kept, strides=False, label="gradient")


def gradients(results: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a sum over all results."""
    wanted = [t for t in tensors(results) if t.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return []
    total = sum((t.double() * torch.linspace(0, 1, t.numel()).view(t.shape)).sum() for t in wanted)
    found = torch.autograd.grad(total, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]


def is_served(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether eager takes this input."""
    try:
        model(x)
    except RuntimeError:
        return False
    return True


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same with strides in another order."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def larger(x: torch.Tensor) -> torch.Tensor:
    """Another size of the dimension before the last."""
    return torch.cat([x, x + 1, x - 1], -2)


def later_inputs(form: Form, model: nn.Module, x: torch.Tensor, verify: str) -> list[torch.Tensor]:
    """Other strides and sizes. Each is compiled anew, into what runs with the check and without it: one of
    them is enough without it."""
    others = (turned(x), x, larger(x), x, larger(turned(x)))
    served = [o for o in others if is_served(model, o) and (form.turned or o.is_contiguous())]
    return served if verify == "strict" else [*served[-1:], x]


def entries_and_forms() -> Iterator[Any]:
    """Every form by every entry with the check, and by one in turns without it: the others are slow."""
    for at, name in enumerate(FORMS):
        for place, entry in enumerate(ENTRIES):
            for verify in ("strict", "off"):
                is_slow = verify == "off" and at % len(ENTRIES) != place
                yield pytest.param(name, entry, verify, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("name", "entry", "verify"), entries_and_forms())
def test_results_lie_as_in_eager(
    name: str, entry: str, training: bool, verify: str, runs: list[bool]
) -> None:
    form = FORMS[name]
    model, x = Net(form.returned).eval(), torch.randn(form.shape)
    with torch.set_grad_enabled(training), collecting() as reports:
        compiled = compiled_by(entry, model, x, verify)
        for _ in range(2):
            assert_like_eager(compiled, model, x)
        if form.planned and not training and entry != "optimize":
            assert any(runs)
            assert all(runs)
        if entry != "optimize":
            for other in later_inputs(form, model, x, verify):
                assert_like_eager(compiled, model, other)
    assert all(r.check is None or r.check.status != "rolled back" for r in reports)


PERMUTED = torch.randn(4, 5, 7, 6).permute(0, 3, 1, 2)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("train", "inputs"),
    [
        (False, [PERMUTED]),
        (True, [PERMUTED, PERMUTED[:, :, ::2], PERMUTED.transpose(2, 3), PERMUTED.flip(0).transpose(0, 2)]),
    ],
    ids=["running", "of the batch"],
)
def test_norms_of_permuted_inputs(entry: str, train: bool, inputs: list[torch.Tensor]) -> None:
    for x in inputs:
        fresh_dynamo()
        model = Net(lambda net, x: net.norm(x)).train(train)
        model.norm = nn.BatchNorm2d(x.shape[1]).train(train)
        eager = copy.deepcopy(model)
        with torch.no_grad():
            compiled = compiled_by(entry, copy.deepcopy(model), x, "strict")
            assert lies(compiled(x), [x]) == lies(eager(x), [x])


@pytest.mark.parametrize("verify", ["strict", "off"])
def test_plans_are_for_strides(verify: str, runs: list[bool]) -> None:
    """What is dense for one input is not for another."""
    model, x = Net(lambda net, x: net.layer(x).t() + x.t()), torch.randn(8, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, verify=verify)
        for given in (x, x.t(), x, x[::2].repeat(2, 1).t(), torch.randn(16, 8)[::2], x):
            assert_like_eager(compiled, model, given)
    assert any(runs)


NOTED: list[tuple[int, ...]] = []


@torch.library.custom_op("hypatia_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    """A copy; it notes how its operand lies."""
    NOTED.append(x.stride())
    return x.clone()


noted.register_fake(lambda x: torch.empty_like(x))


class Biased(nn.Module):
    """A call that only torch knows, on what is made of weights."""

    def __init__(self, bias: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.table, self.bias = nn.Parameter(torch.randn(25, 3)), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + noted(self.bias(self.table))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "bias",
    [
        lambda t: t.view(5, 5, 3).permute(2, 0, 1).contiguous(),
        lambda t: t.view(5, 5, 3).permute(2, 0, 1),
        lambda t: (t * 2).view(5, 5, 3).permute(2, 0, 1).contiguous().unsqueeze(0),
        lambda t: (t @ t.t())[:5, :5].t(),
        lambda t: (t * 2)[::5].unsqueeze(-1).expand(-1, -1, 5).transpose(0, 1),
    ],
    ids=["copied", "permuted", "folded", "product", "expanded"],
)
def test_calls_that_only_torch_knows_read_weights_as_they_lie_in_eager(
    entry: str, bias: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, x = Biased(bias), torch.randn(3, 5, 5)
    with torch.no_grad():
        NOTED.clear()
        model(x)
        (expected,) = NOTED
        compiled = compiled_by(entry, model, x, "strict")
        for _ in range(3):
            compiled(x)
            assert NOTED[-1] == expected


class Attention(nn.Module):
    """A bias by relative position, which is made of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(36, 4))
        self.register_buffer("index", torch.randint(0, 36, (9, 9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table[self.index.view(-1)].view(9, 9, 4).permute(2, 0, 1).contiguous().unsqueeze(0)
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=bias)


@pytest.mark.parametrize("entry", ENTRIES)
def test_kernels_that_were_chosen_by_layout_get_it(entry: str) -> None:
    model, x = Attention(), torch.randn(2, 4, 9, 16)
    with torch.no_grad(), collecting() as reports:
        compiled = compiled_by(entry, model, x, "strict")
        assert_like_eager(compiled, model, x)
    if entry == "optimize":
        reports = [compiled.meta["hypatia"]]
    elif entry == "compile":
        reports = compiled.reports
    (report,) = reports
    strides = [
        [
            [n.meta["val"].stride() for n in call.all_input_nodes]
            for call in graph.nodes
            if "scaled_dot_product" in str(call.target)
        ]
        for graph in (report.before, report.after)
    ]
    assert strides[0]
    assert strides[0] == strides[1]


def test_the_report_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(FORMS["plain"].returned).eval(), torch.randn(4, 6, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        assert compiled.reports[0].kept == "plan"
        # The e-graph finds something to do, but no plan is made.
        monkeypatch.setattr("hypatia.execute.plans.planner_of", lambda *_, **__: "a test")
        compiled = hypatia.compile(model, x)
        assert compiled.reports[0].kept in ("graph", "eager")
        assert "plan" not in (compiled.reports[0].times or {})
        with collecting() as reports:
            torch.compile(model, backend="hypatia", options={"verify": "off"})(x)
        assert [r.kept for r in reports] == ["graph"]
        assert hypatia.optimize(model, x).meta["hypatia"].kept == "graph"


@pytest.mark.parametrize("entry", ["torch.compile", "compile"])
def test_a_plan_that_does_not_run_is_not_kept_and_says_why(
    entry: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Net(FORMS["plain"].returned).eval(), torch.randn(4, 6, 8)
    monkeypatch.setattr(Binding, "bind", lambda binding, *_: setattr(binding, "refusal", "a test"))
    caplog.set_level("INFO", logger="hypatia")
    with torch.no_grad(), collecting() as reports:
        compiled = compiled_by(entry, model, x, "strict")
        assert_like_eager(compiled, model, x)
    (report,) = compiled.reports if entry == "compile" else reports
    assert report.kept in ("graph", "eager")
    assert "plan" not in (report.times or {})
    assert "the native plan does not run: a test" in caplog.text


def test_bound_plans_say_why_they_do_not_run() -> None:
    model, x = Net(FORMS["plain"].returned).eval(), torch.randn(4, 6, 8)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        graph = compiled.prepare(x).native.__self__
        ((bound, _),) = graph.binding.bound.values()
        assert "input 0 is not float32[4, 6, 8]" in bound.refusal(turned(x))
        assert "takes 1 inputs, not 2" in bound.refusal(x, x)
        model.layer.weight.add_(1)
        assert bound.refusal(x) == "a weight changed"


@pytest.mark.parametrize("parts", ["row", "rows", "product"])
def test_kernels_of_torch_that_write_as_if_contiguous_are_given_no_other_memory(parts: str) -> None:
    """Torch's gradient of a log softmax is wrong in memory that lies as its operand does."""

    def gradient(tangents: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        given = torch.bmm(tangents, x).permute(0, 2, 1)
        found = torch.ops.aten._log_softmax_backward_data(given, out, -1, torch.float32)
        if parts == "row":
            return found.reshape(16, 6)
        return (found - out).reshape(16, 6) if parts == "rows" else found.reshape(16, 6) @ out.reshape(6, 16)

    class Gradient(nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return gradient(*args)

    args = (torch.randn(16, 3, 3), torch.randn(16, 3, 2), torch.randn(16, 2, 3).log_softmax(-1))
    with torch.no_grad():
        compiled = hypatia.compile(Gradient(), *args, verify="off")
        torch.testing.assert_close(compiled(*args), gradient(*args))


class _Returning(nn.Module):
    """Returns what it changed, or what shares memory in eager alone."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.total.add_(x.sum(0)),
        lambda m, x: m.total.copy_(x[0]).unsqueeze(0),
        lambda m, x: x[0].neg_(),
        lambda m, x: (x.mul_(2.0), x.relu()),
        lambda m, x: x.to(torch.float64).to(torch.float32).unbind(1)[0],
        lambda m, x: 100.0 + F.logsigmoid(x.t()),
    ],
)
def test_changed_and_cast_tensors_are_returned_in_eagers_memory(function: Any) -> None:
    ours, eager = _Returning(function), _Returning(function)
    compiled = hypatia.compile(ours)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 4)
            y = x.clone()
            got, want = compiled(x), eager(y)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close((x, ours.total), (y, eager.total))
            for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
                assert a.stride() == b.stride()
                shares = [
                    [t.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in others]
                    for t, others in ((a, (x, ours.total)), (b, (y, eager.total)))
                ]
                assert shares[0] == shares[1]


class Form(nn.Module):
    """A model made of a function."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.form = form

    def forward(self, *args: torch.Tensor) -> Any:
        return self.form(self, *args)


def _changed_view(_: Any, x: torch.Tensor) -> torch.Tensor:
    view = x.transpose(0, 1)
    view.masked_fill_(view > 0.5, 0.0)
    return view


CHANGES = {
    "a view from before": lambda _, x: (x.narrow(0, 0, 1), x.mul_(x))[0],
    "a view from after": lambda _, x: (x.zero_(), x[0])[1],
    "a transposed view": _changed_view,
    "a view of a buffer": lambda m, x: m.kept.add_(x.sum()).reshape(1, 2),
}


@pytest.mark.parametrize("verify", ["strict", "off"])
@pytest.mark.parametrize("entry", ["compile", "optimize"])
@pytest.mark.parametrize("name", CHANGES)
def test_results_lie_in_what_a_model_changes(name: str, entry: str, verify: str) -> None:
    model = Form(CHANGES[name])
    theirs = copy.deepcopy(model)
    with torch.no_grad():
        x = torch.randn(2, 2)
        if entry == "compile":
            ours = hypatia.compile(model, x.clone(), verify=verify)
        else:
            ours = hypatia.optimize(model, x.clone(), options={"verify": verify})
        for _ in range(2):
            a, b = x.clone(), x.clone()
            mine, want = ours(a), theirs(b)
            torch.testing.assert_close(mine, want)
            torch.testing.assert_close(a, b)
            assert mine.stride() == want.stride()
            shares = [
                r.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
                for r, t in ((mine, a), (want, b), (mine, model.kept), (want, theirs.kept))
            ]
            assert shares[0] == shares[1]
            assert shares[2] == shares[3]


def test_sizes_left_open_by_a_tensor_of_odd_strides_do_not_serve_others() -> None:
    def form(_: Any, x: torch.Tensor) -> torch.Tensor:
        # A copy, or the input itself.
        return x.contiguous().relu_().sum()

    compiled = hypatia.compile(Form(form))
    with torch.no_grad():
        for x in (-torch.ones(2, 2), -torch.ones(1, 2).expand(3, 2), -torch.ones(3, 2)):
            theirs = x.clone(memory_format=torch.preserve_format) if x.is_contiguous() else x
            compiled(x)
            Form(form)(theirs)
            torch.testing.assert_close(x, theirs)
            assert (x == 0).all() == x.is_contiguous()


def test_a_copy_and_a_view_of_what_it_copies_share_nothing() -> None:
    def form(_: Any, x: torch.Tensor) -> Any:
        y = x * 2 + 1
        return y.diagonal(), y.clone()

    fresh_dynamo()
    with torch.no_grad():
        first, second = torch.compile(Form(form), backend="hypatia", dynamic=True)(torch.randn(2, 3, 3))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_training_step_has_the_strides_that_eager_has() -> None:
    weight = nn.Parameter(torch.randn(1, 2))
    model = Form(lambda m, x: torch.einsum("...k,kn->...n", x.mT.nan_to_num(), m.weight))
    model.weight = weight
    x = torch.randn(1, 1, 2)
    assert hypatia.compile(model)(x).stride() == model(x).stride()


class TestInputsOfOptimizedGraphs:
    """A graph says what it was made for."""

    def test_other_sizes(self) -> None:
        with torch.no_grad():
            graph = hypatia.optimize(nn.Linear(4, 2), torch.randn(3, 4))
            with pytest.raises(
                hypatia.InputError, match=r"made for input = float32\[3, 4\], not float32\[2, 4\]"
            ):
                graph(torch.randn(2, 4))
            with pytest.raises(hypatia.InputError, match=r"not float64\[3, 4\]"):
                graph(torch.randn(3, 4).double())

    def test_open_sizes(self) -> None:
        model = nn.Linear(4, 2)
        with torch.no_grad():
            open_sizes = ({0: torch.export.Dim("rows", min=2, max=16)},)
            graph = hypatia.optimize(model, torch.randn(3, 4), dynamic_shapes=open_sizes)
            x = torch.randn(9, 4)
            torch.testing.assert_close(graph(x), model(x))
            with pytest.raises(hypatia.InputError, match=r"float32\[2..16, 4\], not float32\[17, 4\]"):
                graph(torch.randn(17, 4))

    def test_other_numbers(self) -> None:
        model = Form(lambda _, x, scale: x * scale)
        with torch.no_grad():
            graph = hypatia.optimize(model, torch.ones(2), 3)
            torch.testing.assert_close(graph(torch.ones(2), 3), torch.full((2,), 3.0))
            with pytest.raises(hypatia.InputError, match=r"made for .* = 3, not 4"):
                graph(torch.ones(2), 4)

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("order", [("turned", "plain"), ("plain", "turned")])
    def test_other_strides_where_the_model_changes_something(
        self, order: tuple[str, str], grad: bool
    ) -> None:
        """What `flatten` returns is a view of the input or a copy, as its strides say."""
        model = Form(lambda _, x: (x.flatten().masked_fill_(x.flatten() > 0.5, 0.0), x)[1])
        made = {"turned": lambda: torch.rand(2, 3).t(), "plain": lambda: torch.rand(3, 2)}
        with torch.set_grad_enabled(grad):
            graph = hypatia.optimize(model, made[order[0]]())
            x = made[order[0]]()
            same = x.clone()
            torch.testing.assert_close(graph(x), model(same))
            torch.testing.assert_close(x, same)
            with pytest.raises(hypatia.InputError, match="which decide what the model changes"):
                graph(made[order[1]]())

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize(
        "change",
        [
            lambda _, x: x.flatten() * 2,
            lambda _, x: (x * 2).relu_().flatten(),
            lambda _, x: x.clone().add_(1)[:, 0].mul_(2),
            lambda m, x: (m.count.add_(1), x.reshape(-1) * m.count)[1],
        ],
        ids=["none", "of what was computed", "of a copy", "of a buffer"],
    )
    def test_strides_count_for_nothing_else(self, change: Any, grad: bool) -> None:
        model = Form(change)
        model.register_buffer("count", torch.zeros(()))
        with torch.set_grad_enabled(grad):
            graph = hypatia.optimize(model, torch.rand(3, 2))
            x = torch.rand(2, 3).t()
            count = model.count.clone()
            found = graph(x)
            model.count.copy_(count)
            torch.testing.assert_close(found, model(x))

    @pytest.mark.parametrize(
        "change",
        [
            lambda _, x: ((h := x * 2), h.flatten(), h.add_(1))[1],
            lambda _, x: ((h := x * 2), (p := h[:1]).add_(1), p.flatten(), h.add_(1))[2],
        ],
        ids=["of the whole", "of a part that was changed"],
    )
    def test_strides_that_decide_what_is_read_later(self, change: Any) -> None:
        model = Form(change)
        with torch.no_grad():
            graph = hypatia.optimize(model, torch.rand(3, 2))
            with pytest.raises(hypatia.InputError, match="which decide what the model changes"):
                graph(torch.rand(2, 3).t())

    def test_copies_files_and_compilers(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        x = torch.randn(3, 4)
        with torch.no_grad():
            graph = hypatia.optimize(model, x)
            for other in (
                copy.deepcopy(graph),
                pickle.loads(pickle.dumps(graph)),
                hypatia.optimize(graph, x),
                hypatia.compile(graph, x),
                torch.compile(graph, backend="eager"),
            ):
                torch.testing.assert_close(other(x), model(x))

    def test_a_size_that_turns_out_to_be_fixed(self) -> None:
        model = Form(lambda _, x: torch.take_along_dim(x, x.argsort(1), 1).expand(3, *x.shape) * 2)
        open_sizes = ((dict.fromkeys([0], torch.export.Dim.AUTO),),)
        x = torch.randn(5, 4)
        with torch.no_grad():
            graph = hypatia.optimize(model, x, dynamic_shapes=open_sizes)
            torch.testing.assert_close(graph(x), model(x))
            with pytest.raises(hypatia.InputError):
                graph(torch.randn(3, 4))


def test_a_recording_is_compared_by_results_alone() -> None:
    """Between the elements of a result may be memory that nobody wrote."""
    recorded = object.__new__(recorded_plan.Recorded)
    recorded._stream = 0
    recorded._results = lambda outputs, inputs: [outputs[0][::2]]
    after = mock.Mock(is_now=lambda: True)
    expected, found = torch.ones(8), torch.ones(8)
    found[1::2] = 7.0
    assert recorded._is_right(lambda *_: (found,), (), (expected,), after)
    found[2] = 3.0
    assert not recorded._is_right(lambda *_: (found,), (), (expected,), after)
