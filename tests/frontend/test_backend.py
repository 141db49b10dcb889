"""How the backend behaves as a citizen of torch.compile."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import fx, nn

import hypatia
from hypatia.frontend import dynamo


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    dynamo.reset()
    torch.manual_seed(0)


def mlp(layers: int, width: int = 32) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(20, width), nn.ReLU()]
    for _ in range(layers - 2):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 7))


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# The founding bug: a rebuilt MLP with its parameters bound to the wrong layers.


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_mlp_through_torch_compile(layers: int) -> None:
    model, x = mlp(layers), torch.randn(5, 20)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        assert largest(compiled(x), model(x)) < 1e-5
    assert dynamo.reports()[-1].fused == ["fused_mlp_0"]

    compiled(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for mine, p in zip(ours, model.parameters(), strict=True):
        assert largest(mine, p.grad) < 1e-5
    kinds = {r.kind: r for r in dynamo.reports()}
    assert "fused_linear_relu_0" in kinds["forward"].fused
    assert "backward" in kinds


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_through_optimize(layers: int, bias: bool) -> None:
    model, x = mlp(layers), torch.randn(3, 5, 20)
    if not bias:
        model[0].bias = None
        model[-1].bias = None
    graph = hypatia.optimize(model, x)
    assert [n.name for n in graph.graph.nodes if n.op == "call_module"] == ["fused_mlp_0"]
    assert largest(graph(x), model(x)) < 1e-5

    graph(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for mine, p in zip(ours, model.parameters(), strict=True):
        assert largest(mine, p.grad) < 1e-5
    assert set(graph.state_dict()) == set(model.state_dict())


def test_registered_without_import() -> None:
    assert "hypatia" in torch._dynamo.list_backends()


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fast": True},
            "has no option 'fast'; it has: backward_in_caller, costs, disabled_rules, fp32_products, freeze",
        ),
        ({"node_limit": "many"}, "'node_limit' must be int"),
        ({"node_limit": True}, "'node_limit' must be int"),
        ({"numerics": "sloppy"}, "'numerics' must be one of"),
        ({"disabled_rules": ["no-such-rule"]}, "there is no rule 'no-such-rule'"),
    ],
)
def test_bad_options_are_errors(options: dict, message: str) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="hypatia", options=options)
    with pytest.raises(Exception, match=message):
        compiled(torch.randn(1, 2))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_are_served(mode: str) -> None:
    model = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    assert torch.equal(torch.compile(model, backend="hypatia", mode=mode)(x), model(x))


def test_a_name_given_to_torch_compile_is_taken() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.relu, (graph.placeholder("x"),)),))
    x = torch.randn(3)
    gm = fx.GraphModule(nn.Module(), graph)
    compiled = dynamo.hypatia(gm, [x], name="my model", mode="reduce-overhead")
    assert torch.equal(compiled(x)[0], x.relu())


def test_bad_mode_is_an_error() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="hypatia", mode="fastest")
    with pytest.raises(Exception, match="has no mode 'fastest'"):
        compiled(torch.randn(1, 2))


def test_disabled_rules_do_not_fire() -> None:
    rules = ["fuse-linear-relu", "fused-mlp"]
    compiled = torch.compile(mlp(2), backend="hypatia", options={"disabled_rules": rules})
    with torch.no_grad():
        compiled(torch.randn(5, 20))
    assert dynamo.reports()[-1].fused == []


# Frozen weights.


def test_changed_weights_are_folded_again() -> None:
    class Qkv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.q(x), self.k(x), self.v(x)

    model, x = Qkv(), torch.randn(4, 64)
    compiled = torch.compile(model, backend="hypatia")

    def check() -> None:
        for a, b in zip(compiled(x), model(x), strict=True):
            assert largest(a, b) < 1e-5

    with torch.no_grad():
        check()
        rules = [r["rule"] for r in dynamo.reports()[-1].data["rules"]]
        assert "merge-linears" in rules, rules
        model.q.weight.mul_(2)
        check()
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
        check()
        model.v.weight = nn.Parameter(torch.randn(32, 64))
        check()
        model.k.weight.data = torch.randn(32, 64)
        check()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(t.square().sum() for t in model(x)).backward()
    optimizer.step()
    with torch.no_grad():
        check()


def test_folded_weights_are_not_handed_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            doubled = self.w * 2
            return x @ doubled, doubled

    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        for _ in range(3):
            y, doubled = compiled(x)
            assert largest(y, x @ (model.w * 2)) < 1e-5
            doubled.zero_()


def test_two_models_share_a_graph() -> None:
    models = [mlp(3) for _ in range(3)]
    x = torch.randn(5, 20)
    compiled = [torch.compile(m, backend="hypatia") for m in models]
    with torch.no_grad():
        for _ in range(2):
            for m, c in zip(models, compiled, strict=True):
                assert largest(c(x), m(x)) < 1e-5


# Dynamic shapes.


def recompiles(name: str, model: nn.Module, inputs: list[torch.Tensor]) -> int:
    torch._dynamo.reset()
    count = 0
    inner = torch._dynamo.lookup_backend(name)

    def counting(gm: torch.fx.GraphModule, example_inputs: list) -> object:
        nonlocal count
        count += 1
        return inner(gm, example_inputs)

    compiled = torch.compile(model, backend=counting)
    for x in inputs:
        assert largest(compiled(x), model(x)) < 1e-5
    return count


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.ffn = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        return F.gelu(self.ffn(self.norm(x + a)))


@pytest.mark.parametrize("make", [lambda: mlp(3), Block], ids=["mlp", "block"])
@pytest.mark.parametrize("grad", [False, True])
def test_changed_batch_does_not_recompile_more_than_eager(make: object, grad: bool) -> None:
    model = make()
    shape = (20,) if isinstance(model, nn.Sequential) else (6, 16)
    inputs = [torch.randn(n, *shape) for n in (4, 5, 7, 9, 33)]
    with torch.set_grad_enabled(grad):
        assert recompiles("hypatia", model, inputs) <= recompiles("eager", model, inputs)


def test_symbolic_sizes_stay_symbolic() -> None:
    model = Block()
    compiled = torch.compile(model, backend="hypatia", dynamic=True)
    with torch.no_grad():
        for b, s in ((2, 3), (3, 5), (5, 2), (7, 11)):
            x = torch.randn(b, s, 16)
            assert largest(compiled(x), model(x)) < 1e-5
    assert sum(r.kind == "inference" for r in dynamo.reports()) == 1


# Mutation, aliasing, randomness, graph breaks, dtypes.


def test_input_mutation() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x.relu()
        x.add_(y)
        return before + x

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    a2, b2 = a.clone(), b.clone()
    out = torch.compile(f, backend="hypatia")(a, b)
    torch.testing.assert_close(out, f(a2, b2))
    torch.testing.assert_close(a, a2)


def test_buffers_change_as_in_eager() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="hypatia")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), other(x))
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        model.eval(), other.eval()
        torch.testing.assert_close(compiled(x), other(x))


def test_results_alias_as_in_eager() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.relu()
        return x.view(-1), x.clone(), y, y.clone(), y.view(-1), x

    compiled = torch.compile(f, backend="hypatia")

    def sharing(x: torch.Tensor, outs: tuple[torch.Tensor, ...]) -> list[list[bool]]:
        pointers = [t.untyped_storage().data_ptr() for t in (x, *outs)]
        return [[a == b for b in pointers] for a in pointers]

    x = torch.randn(3, 4)
    assert sharing(x, compiled(x)) == sharing(x, f(x))


def test_names_are_unique() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.fft.rfft(x[i].unsqueeze(0)).abs() for i in range(4))

    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(f, backend="hypatia")(x), f(x))
    names = [n.name for n in dynamo.reports()[-1].after.nodes]
    assert len(names) == len(set(names))


def test_opaque_calls_get_the_memory_they_had() -> None:
    """oneDNN's recurrent layer reads its input in memory order, so the copy before it must stay."""
    model, x = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), torch.randn(3, 5, 8)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="hypatia")(x), model(x))


def test_strides_as_in_eager() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), F.linear(x, v), F.linear(x, w).transpose(0, 1), x.permute(1, 2, 0).clone()

    args = torch.randn(3, 4, 64), torch.randn(32, 64), torch.randn(16, 64)
    with torch.no_grad():
        got, want = torch.compile(f, backend="hypatia")(*args), f(*args)
    assert [t.stride() for t in got] == [t.stride() for t in want]


@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_the_same_numbers(training: bool) -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
    model.train(training)
    x = torch.randn(6, 20)
    compiled = torch.compile(model, backend="hypatia")
    torch.manual_seed(3)
    want, after = model(x), torch.rand(3)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), want)
    torch.testing.assert_close(torch.rand(3), after)


def test_graph_breaks() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.relu(x)
        torch._dynamo.graph_break()
        return F.gelu(y) + 1 if y.sum() > 0 else y

    x = torch.randn(5, 5)
    torch.testing.assert_close(torch.compile(f, backend="hypatia")(x), f(x))
    assert len(dynamo.reports()) >= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, x = mlp(3).to(dtype), torch.randn(5, 20, dtype=dtype)
    with torch.no_grad():
        got = torch.compile(model, backend="hypatia")(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got, model(x))


def test_mixed_dtypes_in_one_graph() -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x * i + i.bool()).to(torch.bfloat16).float() + x.double().relu()

    args = torch.randn(4, 4), torch.arange(16).view(4, 4)
    torch.testing.assert_close(torch.compile(f, backend="hypatia")(*args), f(*args))


def test_autocast() -> None:
    model, x = mlp(3), torch.randn(5, 20)
    compiled = torch.compile(model, backend="hypatia")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = compiled(x), model(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_inference_mode() -> None:
    model, x = Block(), torch.randn(2, 6, 16)
    compiled = torch.compile(model, backend="hypatia")
    with torch.inference_mode():
        assert largest(compiled(x), model(x)) < 1e-5
    with torch.no_grad():
        assert largest(compiled(x), model(x)) < 1e-5


def test_proofs_hold_when_replayed() -> None:
    model, x = Block(), torch.randn(2, 6, 16)
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        compiled(x)
    compiled(x).sum().backward()
    assert {r.kind for r in dynamo.reports()} == {"inference", "forward", "backward"}
    for report in dynamo.reports():
        replay = report.replay(seed=1)
        assert replay.holds, replay.failures
        assert replay.evaluated + replay.skipped == len(report.proof) == report.data["steps"]
    assert all(step["before"] != step["after"] for step in dynamo.reports()[0].proof)


def test_same_graph_same_program() -> None:
    programs = set()
    for _ in range(3):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(Block(), backend="hypatia")(torch.randn(2, 6, 16))
        programs.add(dynamo.reports()[-1].programs[1])
    assert len(programs) == 1


def test_log_lines_say_what_was_rewritten(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hypatia"), torch.no_grad():
        torch.compile(mlp(2), backend="hypatia")(torch.randn(5, 20))
    assert "fused_mlp_0" in caplog.text
    assert "rules" in caplog.text


def test_an_internal_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("hypatia.compiler.pipeline.rebuild", broken)
    monkeypatch.setattr("hypatia.compiler.pipeline.raise_errors", False)
    model, x = mlp(2), torch.randn(5, 20)
    with torch.no_grad():
        assert largest(torch.compile(model, backend="hypatia")(x), model(x)) == 0
    assert largest(hypatia.optimize(model, x)(x), model(x)) == 0


def test_views_share_memory_beside_numbers_that_are_open() -> None:
    def function(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * factor
        return y, y.reshape(y.shape[0], 4, 8, 1)

    with torch.no_grad():
        whole, seen = torch.compile(function, backend="hypatia", dynamic=True)(torch.randn(2, 2, 4, 4), 0.5)
    assert whole.untyped_storage().data_ptr() == seen.untyped_storage().data_ptr()


def _targets(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The ops of what runs in a model's place, which is right."""
    found: list[str] = []
    compile_graph = dynamo.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_graph(*args, **kwargs)
        found.extend(str(node.target) for node in compiled.optimized.graph.nodes)
        return compiled

    with torch.no_grad(), mock.patch.object(dynamo, "compile_graph", noted):
        torch.testing.assert_close(torch.compile(model, backend="hypatia")(x), model(x))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_whose_statistics_nobody_reads_are_steps_of_plans(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm(24), nn.ReLU()).to(dtype).eval()
    targets = _targets(model, torch.randn(4, 16, 24, dtype=dtype))
    assert "aten.layer_norm.default" in targets
    assert "aten.native_layer_norm.default" not in targets


@pytest.mark.parametrize("how", [{}, {"padding": 1, "stride": 2}, {"dilation": 2, "stride": (1, 3)}])
def test_unfolded_images_are_views(how: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Unfold(3, **how), nn.ReLU())
    assert "aten.im2col.default" not in _targets(model, torch.randn(2, 3, 8, 9))


SIZES: dict[str, dict[str, Any]] = {
    "twice": {"scale_factor": 2},
    "other": {"size": (9, 13)},
    "smaller": {"scale_factor": (0.5, 1.7)},
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_images_are_resized_by_torchs_kernel(mode: str, size: str, layout: torch.memory_format) -> None:
    corners = {"align_corners": size == "other"} if mode.startswith("bi") else {}
    model = nn.Sequential(nn.Tanh(), nn.Upsample(mode=mode, **SIZES[size], **corners), nn.ReLU())
    x = torch.randn(2, 3, 8, 9).to(memory_format=layout)
    targets = _targets(model, x)
    assert [t for t in targets if "upsample" in t]
    assert not [t for t in targets if "index" in t]
    with torch.no_grad():
        compiled = torch.compile(model, backend="hypatia")
        assert compiled(x).stride() == model(x).stride()
        torch.testing.assert_close(compiled(-x), model(-x))


@pytest.mark.parametrize(
    ("mode", "sizes"), [("linear", (2, 3, 8)), ("nearest", (2, 3, 8)), ("trilinear", (1, 2, 3, 4, 5))]
)
def test_other_dimensions_are_resized_by_torchs_kernel(mode: str, sizes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Upsample(scale_factor=2, mode=mode))
    assert [t for t in _targets(model, torch.randn(sizes)) if "upsample" in t]


def test_images_of_open_sizes_are_resized() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReLU())
    with torch.no_grad():
        compiled = torch.compile(model, backend="hypatia", dynamic=True)
        for n in (8, 9, 12):
            x = torch.randn(2, 3, n, n + 1)
            torch.testing.assert_close(compiled(x), model(x))
