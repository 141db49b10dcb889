"""What `hypatia.compile` returns is a module that stands for the model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import fx, nn

import hypatia
from hypatia.frontend.direct import CompiledModel

x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Config:
    hidden = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.config = Config()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.layer(x)) * scale + self.shift

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))

    def half(self) -> Any:
        raise RuntimeError("not this one")


def made() -> tuple[Net, CompiledModel]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, hypatia.compile(model, x)


def ops(gm: Any) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def test_state_and_methods_are_the_models() -> None:
    model, compiled = made()
    assert isinstance(compiled, nn.Module)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [*compiled.parameters()] == [*model.parameters()]
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in model.named_modules()]
    assert compiled.config is model.config
    assert compiled.layer is model.layer
    assert torch.equal(compiled.generate(x), model.generate(x))
    assert compiled.train() is compiled
    assert model.training
    assert compiled.training
    assert compiled.eval() is compiled
    assert not model.layer.training
    assert compiled.to(torch.float64) is compiled
    assert model.layer.weight.dtype is torch.float64
    compiled.float().load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="not this one"):
        compiled.half()


def test_what_is_set_is_set_on_the_model() -> None:
    model, compiled = made()
    compiled.flag = 3
    assert model.flag == 3
    compiled.layer = nn.Linear(8, 8)
    assert model.layer is compiled.layer
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    del compiled.flag
    assert not hasattr(model, "flag")


def test_it_is_a_part_of_other_modules() -> None:
    model, compiled = made()
    net = nn.Sequential(compiled, nn.ReLU())
    assert list(net.state_dict()) == [f"0.{name}" for name in model.state_dict()]
    assert len([*net.parameters()]) == 2
    net.train()
    assert model.training
    net.eval().double().float()
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x).relu())
    outer = hypatia.compile(net, x)
    with torch.no_grad():
        torch.testing.assert_close(outer(x), model(x).relu())
    assert outer.reports[0].kept == "plan"


def test_it_is_copied_and_pickled_without_what_was_compiled() -> None:
    model, compiled = made()
    for other in (
        copy.deepcopy(compiled),
        copy.deepcopy(nn.Sequential(compiled))[0],
        pickle.loads(pickle.dumps(compiled)),
    ):
        assert type(other) is CompiledModel
        assert other.model is not model
        assert not other.reports
        with torch.no_grad():
            torch.testing.assert_close(other(x), model(x))
        assert other.reports
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x))
    assert copy.copy(compiled).model is model


def test_it_is_exported_and_traced_as_the_model() -> None:
    model, compiled = made()
    net = nn.Sequential(compiled)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            wanted = ops(torch.export.export(model, (x,)))
            for strict in (False, True):
                assert ops(torch.export.export(compiled, (x,), strict=strict)) == wanted
    with torch.no_grad():
        program = torch.export.export(net, (x,))
        assert ops(program) == wanted
        assert set(program.state_dict) == set(net.state_dict())
        assert "aten::linear" in str(torch.jit.trace(compiled, (x,)).inlined_graph)
    assert [n.target for n in fx.symbolic_trace(net).graph.nodes if n.op == "call_module"] == ["0.layer"]


def test_inside_torch_compile_it_is_the_model() -> None:
    model, compiled = made()
    for net in (compiled, nn.Sequential(compiled, nn.Identity())):
        graphs: list[fx.GraphModule] = []

        def backend(gm: fx.GraphModule, _: Any, graphs: list[fx.GraphModule] = graphs) -> Any:
            graphs.append(gm)
            return gm

        with torch.no_grad():
            torch.testing.assert_close(torch.compile(net, backend=backend, fullgraph=True)(x), model(x))
        (gm,) = graphs
        assert any("linear" in name for name in ops(gm))


def test_under_a_dispatch_mode_it_is_the_model() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    _, compiled = made()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compiled(x)
        compiled(x[:2])
    assert counter.get_total_flops() == 2 * (4 + 2) * 8 * 8


def test_it_trains_in_a_wrapper() -> None:
    model, compiled = made()
    wrapper = nn.Sequential(compiled.train(), nn.Linear(8, 2))
    wrapper(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    wrapper.zero_grad()
    wrapper[1](model(x)).sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])


WORDS = ["[PAD]", "[UNK]", "a", "small", "plan", "runs"]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def classifier_of_text() -> tuple[nn.Module, dict[str, Any], list[Any]]:
    """A model of transformers, what a pipeline needs beside it, and inputs."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    known = {word: number for number, word in enumerate(WORDS)}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="[PAD]", unk_token="[UNK]"
    )
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=len(WORDS), **SIZES)
    )
    return model, {"task": "text-classification", "tokenizer": tokenizer}, ["a small plan", "a plan runs"]


def classifier_of_images() -> tuple[nn.Module, dict[str, Any], list[Any]]:
    """The same of one that sees."""
    transformers, image = pytest.importorskip("transformers"), pytest.importorskip("PIL.Image")
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)
    )
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    images = [image.effect_noise((20, 20), sigma).convert("RGB") for sigma in (50, 90)]
    return model, {"task": "image-classification", "image_processor": processor}, images


@pytest.mark.parametrize("make", [classifier_of_text, classifier_of_images])
def test_a_pipeline_of_transformers_takes_it(make: Any) -> None:
    torch.manual_seed(0)
    model, settings, inputs = make()
    compiled = hypatia.compile(model.eval())
    from transformers import pipeline

    ours, theirs = (pipeline(model=m, device="cpu", **settings) for m in (compiled, model))
    for given in inputs:
        for mine, other in zip(ours(given), theirs(given), strict=True):
            assert mine["label"] == other["label"]
            assert mine["score"] == pytest.approx(other["score"], abs=1e-5)
    assert [r.kept for r in compiled.reports] == ["plan"]
