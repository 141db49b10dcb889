"""Workloads are what their notes say, and measuring them notices what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hypatia.tools import bench, measure, workloads
from hypatia.tools.workloads import WORKLOADS, GPTLayer, LlamaLayer, Workload
from hypatia.verifier.gradients import WithGradients, cotangents


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.001)


SMALL = Workload("small", lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), ((3, 6),), "")


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_run(name: str) -> None:
    """On the meta device: shapes and dtypes without the work."""
    workload = WORKLOADS[name]
    with torch.device("meta"):
        model = workload.make().eval()
        result = model(*(torch.empty(shape) for shape in workload.shapes))
    assert result.shape[:-1] == workload.shapes[0][:-1]
    assert workload.flops > 0
    assert workload.note


def test_sizes_are_the_published_ones() -> None:
    def parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in WORKLOADS[name].make().parameters())

    assert parameters("tiny_b64") == 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    # Without embeddings and heads: 12 layers of 7,087,872, and GPT-2's last norm.
    assert parameters("bert-base") == 12 * 7_087_872
    assert parameters("gpt2") == 12 * 7_087_872 + 2 * 768
    assert parameters("llama") == 4 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2048
    assert WORKLOADS["linear_relu_large"].flops == 2 * 8192 * 4096 * 4096


def test_builds_are_repeatable_and_leave_the_random_state() -> None:
    state = torch.get_rng_state()
    (a, (x,)), (b, (y,)) = SMALL.build(), SMALL.build()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, y)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    model, (x,) = SMALL.build(torch.bfloat16)
    assert {x.dtype, *(p.dtype for p in model.parameters())} == {torch.bfloat16}
    assert not model.training


@pytest.mark.parametrize("layer", [GPTLayer(16, 2, 32), LlamaLayer(16, 2, 32, 8)], ids=["gpt", "llama"])
def test_causal_layers_do_not_look_ahead(layer: nn.Module) -> None:
    x = torch.randn(1, 5, 16)
    y = x.clone()
    y[:, 3:] += 1
    with torch.no_grad():
        before, after = layer(x), layer(y)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_positions_matter_to_a_llama() -> None:
    layer, x = LlamaLayer(16, 2, 32, 8), torch.randn(1, 1, 16).repeat(1, 2, 1)
    keys = layer.rotate(torch.ones(1, 2, 2, 8))
    assert not torch.allclose(keys[..., 0, :], keys[..., 1, :])
    torch.testing.assert_close(keys.norm(dim=-1), torch.full((1, 2, 2), 8**0.5))
    assert layer(x).shape == x.shape


def test_names_are_found_loosely() -> None:
    assert workloads.find("BERT_base") is WORKLOADS["bert-base"]
    assert workloads.find("tiny-b64") is WORKLOADS["tiny_b64"]
    with pytest.raises(LookupError, match="did you mean 'bert-base'"):
        workloads.find("bert-bas")


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measured(training: bool, dtype: torch.dtype) -> None:
    cells = bench.bench(SMALL, ["eager", "hypatia"], training=training, dtype=dtype, repeats=2)
    assert [c.backend for c in cells] == ["eager", "hypatia"]
    for cell in cells:
        assert cell.reason == ""
        assert cell.correct is True
        assert cell.microseconds is not None
        assert cell.microseconds > 0
        assert len(cell.samples) == 2
    assert cells[0].ratio == 1.0


def test_what_cannot_be_measured_leaves_a_reason() -> None:
    graph, missing, ours = bench.bench(SMALL, ["eager-graph", "gcc", "hypatia"], repeats=1)
    assert graph.reason == "a CUDA graph needs a GPU"
    assert "there is no backend 'gcc'" in missing.reason
    assert graph.microseconds is missing.microseconds is None
    assert ours.ratio is not None, "eager is measured for the ratio"


def test_a_model_that_fails_leaves_a_reason_everywhere() -> None:
    def fail() -> nn.Module:
        raise ValueError("no such model\nat all")

    cells = bench.bench(Workload("bad", fail, ((1,),), ""), ["eager", "hypatia"], repeats=1)
    assert [c.reason for c in cells] == ["ValueError: no such model"] * 2


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    compiled = bench.compiled_by

    def spoiled(name: str, model: nn.Module, inputs: Any, training: bool) -> Any:
        right = compiled(name, model, inputs, training)
        return right if name == "eager" else lambda *args: right(*args) * 1.001

    monkeypatch.setattr(bench, "compiled_by", spoiled)
    eager, ours = bench.bench(SMALL, ["eager", "hypatia"], training=training, repeats=1)
    assert eager.correct is True
    assert ours.correct is False


def test_a_backend_that_fails_later_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = bench.compiled_by

    def tiring(name: str, model: nn.Module, inputs: Any, training: bool) -> Any:
        right, calls = compiled(name, model, inputs, training), []

        def call(*args: Any) -> Any:
            calls.append(1)
            if name == "hypatia" and len(calls) > 2:
                raise RuntimeError("tired")
            return right(*args)

        return call

    monkeypatch.setattr(bench, "compiled_by", tiring)
    eager, ours = bench.bench(SMALL, ["eager", "hypatia"], repeats=3)
    assert len(eager.samples) == 3
    assert ours.reason == "RuntimeError: tired"
    assert ours.microseconds is None


def test_some_backends_go_on_until_their_ratios_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETTLED", 0.0)
    monkeypatch.setattr(bench, "MANY", 4)
    cells = bench.bench(
        SMALL, ["eager", "hypatia", "hypatia-direct"], repeats=2, settle=["hypatia"], seconds=0.2
    )
    eager, ours, other = (len(cell.samples) for cell in cells)
    assert eager == ours > other == 2
    monkeypatch.setattr(bench, "SETTLED", float("inf"))
    (cell,) = bench.bench(SMALL, ["hypatia"], repeats=5, settle=["hypatia"], seconds=60.0)
    assert len(cell.samples) == 5


def test_ratios_are_of_common_rounds() -> None:
    assert bench.times_as_fast([1.0, 1.0, 9.0, 9.0, 9.0], [3.0, 3.0]) == 3.0
    assert bench.times_as_fast([1.0], []) is None


def test_noise_is_named() -> None:
    assert bench.Cell("m", "eager", samples=[1.0, 1.2]).noise == ""
    assert bench.Cell("m", "eager", samples=[1.0, 3.0]).noise == "noisy: samples differ by 3.0x"
    assert bench.Cell("m", "eager").noise == ""


def test_gradients_are_results() -> None:
    model, (x,) = SMALL.build()
    results, gradients = WithGradients(model)(x)
    y = model(x)
    y.backward(cotangents([y])[0])
    assert torch.equal(results, y)
    assert [g.shape for g in gradients] == [p.shape for p in model.parameters()]
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(c.double(), c.bfloat16().double()) for c in cotangents([y]))
