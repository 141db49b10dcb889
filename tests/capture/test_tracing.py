"""Graphs by one run on fake tensors: the ones that torch.export gives, or none."""

from __future__ import annotations

import copy
import operator
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import hypatia
from hypatia.capture import recorder, trace
from hypatia.capture.fake_tensors import fakes_of
from hypatia.compiler import pipeline

aten = torch.ops.aten


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)).log_softmax(-1)


class Views(nn.Module):
    """A buffer that lies in the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("right", self.weight.detach()[:, 4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:, :4].mT + x @ self.right.mT


class Called(nn.Module):
    """A model of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.scale, *args, **kwargs)


def _attend(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x * scale).unflatten(-1, (2, 2)).transpose(1, 2).expand(3, -1, -1, -1, -1).unbind()
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _by_kind(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x = x.to(scale.dtype).reshape(-1, 4).contiguous()
    if x.device.type == "cpu" and x.shape[0] % 2 == 0:
        x = x + torch.arange(4, device=x.device)
    return nn.functional.dropout(x.chunk(2, -1)[1], 0.5, training=False)


def _in_place(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    z = y.relu_().add_(1, alpha=2)
    return nn.functional.hardtanh(y, inplace=True).view(-1, 4) * z.flatten(0, 1)


X = torch.randn(2, 6, 4)
SERVED: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)), (X,)),
    "conv": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (torch.randn(2, 3, 8, 8),)),
    "encoder": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (X,)),
    "tied": (Tied(), (torch.randint(17, (2, 5)),)),
    "views": (Views(), (X,)),
    "attention": (Called(_attend), (X,)),
    "kinds": (Called(_by_kind), (X,)),
    "in place": (Called(_in_place), (X,)),
    "several": (Called(lambda s, pair: {"sum": pair[0] + s, "max": pair[1].max(-1)}), ((X, X + 1),)),
}


def _ops(gm: fx.GraphModule) -> list[Any]:
    """Calls, what they read, and what their values look like."""
    asserts = aten._assert_tensor_metadata.default
    calls = (n for n in gm.graph.nodes if n.op == "call_function" and n.target is not asserts)
    numbers = {node: i for i, node in enumerate(calls)}

    def named(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return id(operator.attrgetter(node.target)(gm))
        return numbers.get(node, node.op)

    return [
        (
            str(node.target),
            fx.node.map_arg(_with_defaults(node), lambda n: str(named(n))),
            [(v.shape, v.stride(), v.dtype) for v in pytree.tree_leaves(node.meta.get("val", ()))],
        )
        for node in numbers
    ]


def _with_defaults(node: fx.Node) -> list[Any]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.args)
    places = enumerate(node.target._schema.arguments)
    return [
        node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for i, a in places
        if not a.name.startswith("cudnn_enable")
    ]


@pytest.mark.parametrize("name", SERVED)
def test_the_graph_is_the_one_of_torch_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = SERVED[name]
    model.eval()
    with torch.no_grad():
        ours, _ = recorder.recorded(model, args, {})
        monkeypatch.setattr(trace, "recorded", _refused)
        theirs = trace.captured(model, args, {}, None).gm
        assert _ops(ours) == _ops(theirs)
        torch.testing.assert_close(ours(*args), theirs(*args), rtol=0, atol=0)
        torch.testing.assert_close(ours(*args), model(*args))


class _Flat(nn.Module):
    """An image behind a convolution, flattened; with a change of a buffer torch.export captures it."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> Any:
        if self.counts:
            self.calls.add_(1)
        return self.layer(x).detach().flatten(1) if self.counts else self.layer(x).flatten(1)


@pytest.mark.parametrize("entry", ["recorded", "exported", "torch.compile", "training"])
def test_what_a_convolution_returns_is_reshaped_wherever_it_lies(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it may lie otherwise than fake tensors say, and then a view of it does not exist."""
    captured: list[fx.GraphModule] = []
    compile_one = pipeline._compile

    def noted(gm: fx.GraphModule, request: Any) -> Any:
        found = compile_one(gm, request)
        captured.append(found.captured)
        return found

    monkeypatch.setattr(pipeline, "_compile", noted)
    torch._dynamo.reset()
    model, x = _Flat(counts=entry == "exported").eval(), torch.randn(2, 3, 5, 5)
    with torch.set_grad_enabled(entry == "training"):
        compiled = (
            torch.compile(model, backend="hypatia") if entry == "torch.compile" else hypatia.compile(model)
        )
        torch.testing.assert_close(compiled(x), model(x))
    graph = captured[0].graph
    assert not graph.find_nodes(op="call_function", target=aten.view.default)
    assert graph.find_nodes(op="call_function", target=aten.reshape.default)


def _refused(*_: Any) -> Any:
    raise recorder.UnservedError


def _seen_by_a_view(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    view = y.view(-1)
    y.relu_()
    return view


def _rounded(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = (x * scale).half()
    return y.add_(x)


def _branches(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * scale if bool(x.sum() > 0) else x


NUMBER = torch.full((4,), 3.0)
REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "change that a view sees": (_seen_by_a_view, (X,)),
    "change of another dtype": (_rounded, (X,)),
    "branch on a value": (_branches, (X,)),
    "value of a weight": (lambda s, x: x * s.tolist()[0], (X,)),
    "tensor from elsewhere": (lambda s, x: x * s + NUMBER, (X,)),
    "size that depends on values": (lambda s, x: (x * s).nonzero(), (X,)),
    "number": (lambda s, x, n: x * s + n, (X, 3)),
    "result that is an input": (lambda s, x: (x * s, x), (X,)),
    "result of another type": (lambda s, x: (x * s, complex(1, 2)), (X,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_and_right(name: str) -> None:
    function, args = REFUSED[name]
    model = Called(function).eval()
    parameter = model.scale
    with torch.no_grad():
        with pytest.raises(Exception, match=r"."):
            recorder.recorded(model, args, {})
        assert model.scale is parameter
        compiled = hypatia.compile(model, *args)
        torch.testing.assert_close(compiled(*args), model(*args))
        others = tuple(a * 2 if isinstance(a, torch.Tensor) else a for a in args)
        torch.testing.assert_close(compiled(*others), model(*others))


@pytest.mark.parametrize("training", [False, True])
def test_an_input_given_twice_is_not_tied(training: bool) -> None:
    model = Called(lambda s, x, y: x * s - y).eval()
    with torch.set_grad_enabled(training):
        compiled = hypatia.compile(model)
        for given in ((X, X), (X, 2 * X)):
            torch.testing.assert_close(compiled(*given), model(*given))


@pytest.mark.parametrize("training", [False, True])
def test_a_weight_given_as_an_input_is_not_tied(training: bool) -> None:
    model = Called(lambda s, x: x * s - s).eval()
    with torch.set_grad_enabled(training):
        compiled = hypatia.compile(model)
        for given in (model.scale, torch.randn(4, requires_grad=True)):
            torch.testing.assert_close(compiled(given), model(given))


def test_results_that_are_no_tensors(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(4, 64)
    model = Called(lambda s, x: (None, layer(x * s).relu(), 3, {"name": "y", "y": x + s})).eval()
    with torch.no_grad(), caplog.at_level("WARNING", logger="hypatia"):
        compiled = hypatia.compile(model, X)
        assert compiled._last is not None
        assert compiled._last.native is not None
        for x in (X, 2 * X, torch.randn(3, 6, 4), torch.randn(4, 6, 4)):
            (none, y, three, named), theirs = compiled(x), model(x)
            assert (none, three, named["name"]) == (None, 3, "y")
            torch.testing.assert_close((y, named["y"]), (theirs[1], theirs[3]["y"]))
    assert not caplog.text


def test_a_number_from_a_weight(caplog: pytest.LogCaptureFixture) -> None:
    model = Called(lambda s, x: x * s[0].item()).eval()
    with torch.no_grad(), caplog.at_level("WARNING", logger="hypatia"):
        torch.testing.assert_close(hypatia.compile(model, X)(X), model(X))
    assert not caplog.text


class Remembers(nn.Module):
    """Changes what is not in the graph."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = nn.Identity()
        self.change = change
        self.last: Any = None
        self.kept: list[Any] = []
        self.named: dict[str, Any] = {"calls": 0}
        self.cache = types.SimpleNamespace(length=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.change(self, y)
        return y.relu() * (1 + self.cache.length)


CHANGES: dict[str, Any] = {
    "last": lambda m, y: setattr(m, "last", y),
    "inner.seen": lambda m, y: setattr(m.inner, "seen", 1 + getattr(m.inner, "seen", 0)),
    "kept": lambda m, y: m.kept.append(y),
    "named.calls": lambda m, y: m.named.update(calls=m.named["calls"] + 1),
    "cache.length": lambda m, y: setattr(m.cache, "length", m.cache.length + 1),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_its_attributes_runs_as_it_is(
    name: str, training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Remembers(CHANGES[name])
    theirs = copy.deepcopy(model)
    with torch.set_grad_enabled(training), caplog.at_level("INFO", logger="hypatia"):
        compiled = hypatia.compile(model)
        for scale in (1, 2, 3):
            torch.testing.assert_close(compiled(scale * X), theirs(scale * X))
    if not training:
        assert f"changes {name} when" in caplog.text
    assert (model.named, model.cache, len(model.kept)) == (theirs.named, theirs.cache, len(theirs.kept))
    assert type(model.last) is type(theirs.last)


def test_a_buffer_that_is_replaced_is_replaced() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.last
            self.last = x[0]
            return y

    model = Replaces()
    theirs = copy.deepcopy(model)
    rows = torch.randn(3, 4)
    with torch.no_grad():
        compiled = hypatia.compile(model, rows)
        for scale in (1, 2, 3):
            torch.testing.assert_close(compiled(scale * rows), theirs(scale * rows))
            torch.testing.assert_close(model.last, theirs.last)


def test_names_of_arguments() -> None:
    model = Called(lambda s, x, *, other: x * s + other).eval()
    with torch.no_grad():
        gm, _ = recorder.recorded(model, (X,), {"other": X + 1})
        torch.testing.assert_close(gm(X, other=X + 1), model(X, other=X + 1))


def test_remembered_results_are_memory_of_their_own() -> None:
    mode = FakeTensorMode()
    fakes = fakes_of(mode)
    with mode:
        x = torch.empty(3, 4)
    calls = []

    def run(*args: Any) -> torch.Tensor:
        calls.append(args)
        with mode:
            return aten.mul.Tensor(*args)

    first, second = (fakes.call("mul", run, (x, 2), {}) for _ in range(2))
    assert len(calls) == 1
    assert (first.shape, first.stride(), first.device) == (second.shape, second.stride(), second.device)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    fakes.call("mul", run, (x, 2.0), {})
    assert len(calls) == 2


def test_results_in_the_same_memory_are_not_remembered() -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(3, 4)
        for _ in range(2):
            left, right = fakes_of(mode).call("both", lambda x: [x + 1] * 2, (x,), {})
            assert left is right


def test_views_are_not_remembered() -> None:
    mode = FakeTensorMode()
    fakes = fakes_of(mode)
    with mode:
        x = torch.empty(3, 4)
        parts = [fakes.call("view", aten.view.default, (x, [12]), {}) for _ in range(2)]
    assert all(p.untyped_storage()._cdata == x.untyped_storage()._cdata for p in parts)


@pytest.mark.parametrize("training", [False, True])
def test_threads_that_compile_the_same_model(training: bool) -> None:
    inputs = [torch.randn(n % 3 + 2, 8) for n in range(6)]
    for _ in range(5):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        compiled = hypatia.compile(model)
        with torch.no_grad():
            expected = [model(x) for x in inputs]

        def call(x: torch.Tensor, compiled: Any = compiled) -> torch.Tensor:
            with torch.set_grad_enabled(training):
                return compiled(x).detach()

        with ThreadPoolExecutor(len(inputs)) as pool:
            for _ in range(3):
                for ours, theirs in zip(pool.map(call, inputs), expected, strict=True):
                    torch.testing.assert_close(ours, theirs)
        assert all(entry.report is not None for entry in compiled._entries.values())
        # Those with open sizes run behind AOTAutograd's function.
        assert all(t.step is not None or t.open for t in compiled._trainings.values())
        assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("window", [3, 4])
def test_paddings_with_names_are_numbers(window: int) -> None:
    """Convolutions with a name for their padding are in the op table as those with numbers."""
    model = nn.Sequential(nn.Conv2d(8, 8, window, padding="same"), nn.ReLU()).eval()
    x = torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert "0 not in the op table" in str(compiled.reports[0])


def _taken_apart(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("ij,kj->ik", x, torch.multiply(x, scale))
    return nn.functional.pad(scores, (1, 0)).repeat_interleave(2, dim=0)


def test_composites_that_the_table_does_not_know_are_taken_apart() -> None:
    """Their parts are what eager runs, and join kernels."""
    model, x = Called(_taken_apart), torch.randn(3, 4)
    with torch.no_grad():
        gm, _ = recorder.recorded(model, (x,), {})
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    called = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    assert {aten.bmm.default, aten.mul.Tensor, aten.constant_pad_nd.default} <= called
    composites = {
        aten.einsum.default,
        aten.multiply.Tensor,
        aten.pad.default,
        aten.repeat_interleave.self_int,
    }
    assert not called & composites


def test_composites_stay_whole_where_eager_runs_other_parts() -> None:
    """torch has parts in Python for resizing, made of lookups; eager calls a kernel."""
    model = nn.Upsample(size=(7, 9), mode="bicubic").eval()
    with torch.no_grad():
        graph = recorder.recorded(model, (torch.randn(1, 2, 5, 5),), {})[0].graph
    assert sum(n.op == "call_function" for n in graph.nodes) == 1


def _written(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, -2.0, 3.0, 4.0]) + torch.tensor(2.5) * scale


def test_tensors_that_are_written_in_the_code() -> None:
    model, x = Called(_written), torch.randn(3, 4)
    with torch.no_grad():
        gm, _ = recorder.recorded(model, (x,), {})
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
        compiled = hypatia.compile(model, x)
        for value in (x, -x, x + 1):
            torch.testing.assert_close(compiled(value), model(value))


def _a_row(scale: torch.Tensor, x: torch.Tensor) -> Any:
    y = x * scale
    y[0] = 0
    return y


def _parts_of_parts(scale: torch.Tensor, x: torch.Tensor) -> Any:
    y = (x * scale).clone()
    part = y[:, 1:]
    part[1:, :2] = x[1:, :2].half()
    part += 1
    y[-1].mul_(2)
    y[0, 0].fill_(3.0)
    return y.sum(0), y + 1


def _a_part_afterwards(scale: torch.Tensor, x: torch.Tensor) -> Any:
    y = x * scale
    part = y[1:]
    part.add_(1)
    return part * 2, y


def _steps(scale: torch.Tensor, x: torch.Tensor) -> Any:
    y = torch.zeros_like(x) + scale
    y[::2, -2:] = x[::2, :2]
    return y


def _known_branch(scale: torch.Tensor, x: torch.Tensor) -> Any:
    seen = torch.ones(3, dtype=torch.long)
    return x * scale if bool((seen > 0).all()) and int(seen.sum()) == 3 else x


CHANGED = (_a_row, _parts_of_parts, _a_part_afterwards, _steps, _known_branch)


@pytest.mark.parametrize("function", CHANGED)
def test_changes_of_parts_and_values_that_depend_on_nothing(function: Any) -> None:
    model = Called(function).eval()
    with torch.no_grad():
        gm, _ = recorder.recorded(model, (X,), {})
        assert not any(n.target._schema.is_mutable for n in gm.graph.nodes if hasattr(n.target, "_schema"))
        compiled = hypatia.compile(model, X)
        for x in (X, -X, 2 * X):
            expected = model(x)
            torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
            torch.testing.assert_close(compiled(x), expected)


def _stale(scale: torch.Tensor, x: torch.Tensor) -> Any:
    y = x * scale
    rows, columns = y[1:], y[:, 1:]
    rows.add_(1)
    return columns * 2


def _of_the_input(scale: torch.Tensor, x: torch.Tensor) -> Any:
    x[0] = 1
    return x * scale


@pytest.mark.parametrize("function", [_stale, _of_the_input])
def test_changes_that_others_see_are_left_to_torch_export(function: Any) -> None:
    model = Called(function).eval()
    with torch.no_grad():
        with pytest.raises(recorder.UnservedError):
            recorder.recorded(model, (X.clone(),), {})
        compiled = hypatia.compile(model, X.clone())
        for x in (X, -X):
            mine, theirs = x.clone(), x.clone()
            torch.testing.assert_close(compiled(mine), model(theirs))
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("options", [(3, 1, 1, 2), ((2, 3), (2, 1), (1, 2), (1, 2)), ((9, 1), 1, (4, 0), 1)])
def test_windows_of_images_are_views(options: tuple[Any, ...]) -> None:
    """nn.Unfold copies them, and what reads them would copy them again."""
    model = nn.Sequential(nn.Unfold(*options), nn.ReLU()).eval()
    with torch.no_grad():
        for x in (torch.randn(2, 3, 12, 11), torch.randn(3, 12, 11)):
            gm, _ = recorder.recorded(model, (x,), {})
            assert aten.im2col.default not in {n.target for n in gm.graph.nodes}
            torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
            torch.testing.assert_close(hypatia.compile(model, x)(x), model(x), rtol=0, atol=0)
