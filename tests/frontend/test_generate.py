"""`generate` of transformers' models: eager's tokens, and compiled calls for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hypatia
from hypatia.errors import VerificationWarning
from hypatia.frontend.direct import CompiledModel

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
NEW = 10
"""Tokens that are generated."""


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16))


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2}, head_dim=16, sliding_window=8, layer_types=kinds
    )
    return transformers.Gemma3ForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=96, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def made(make: Callable[[], Any]) -> tuple[Any, CompiledModel]:
    torch.manual_seed(0)
    model = make().eval()
    return model, hypatia.compile(model)


def tokens(model: Any, rows: int = 2, length: int = 5, **settings: Any) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(3, 96, (rows, length))
    more = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    result: torch.Tensor = model.generate(ids, **{**more, **settings})
    return result


def assert_same(model: Any, compiled: CompiledModel, **settings: Any) -> None:
    torch.testing.assert_close(tokens(compiled, **settings), tokens(model, **settings), rtol=0, atol=0)


@pytest.fixture(autouse=True)
def no_plan_is_wrong() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", VerificationWarning)
        yield


@pytest.mark.parametrize("make", [llama, gpt2, qwen3, gemma3, t5])
def test_a_growing_cache_settles(make: Callable[[], Any]) -> None:
    model, compiled = made(make)
    assert_same(model, compiled)
    known = {id(e) for e in compiled._entries.values()}
    assert not any(e.by_torch for e in compiled._entries.values())
    assert all(e.native is not None for e in compiled._entries.values())
    # Prompt, first length, open lengths; a length of one, and a window before, while and after it is full.
    assert len(known) <= {t5: 4, gemma3: 8}.get(make, 3)
    compiles = hypatia.compile_count()
    assert_same(model, compiled)
    assert_same(model, compiled, do_sample=True)
    assert hypatia.compile_count() == compiles
    assert {id(e) for e in compiled._entries.values()} == known


def test_a_static_cache_settles() -> None:
    model, compiled = made(llama)
    assert_same(model, compiled, cache_implementation="static")
    compiles = hypatia.compile_count()
    assert_same(model, compiled, cache_implementation="static")
    assert hypatia.compile_count() == compiles
    assert all(e.native is not None for e in compiled._entries.values())


def test_batches_lengths_and_beams() -> None:
    model, compiled = made(llama)
    for rows, length in ((2, 5), (4, 5), (3, 9), (1, 5)):
        assert_same(model, compiled, rows=rows, length=length)
    assert_same(model, compiled, num_beams=2)
    compiles = hypatia.compile_count()
    for rows, length in ((3, 5), (4, 9), (2, 5)):
        assert_same(model, compiled, rows=rows, length=length)
    assert_same(model, compiled, num_beams=2)
    assert hypatia.compile_count() == compiles


def test_padded_prompts() -> None:
    model, compiled = made(llama)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    for _ in range(2):
        assert_same(model, compiled, attention_mask=mask)
    assert any(e.open for e in compiled._entries.values())
    assert not any(e.by_torch for e in compiled._entries.values())


def test_drafts_are_checked_by_the_model_itself() -> None:
    model, compiled = made(llama)
    assert_same(model, compiled, rows=1, prompt_lookup_num_tokens=2)
    assert_same(model, compiled, rows=1, assistant_model=made(llama)[0])


def test_where_nothing_compiles_the_model_generates() -> None:
    model, compiled = made(llama)
    handle = model.register_forward_hook(lambda *_: None)
    assert_same(model, compiled)
    assert not compiled.reports
    handle.remove()


def test_a_class_that_nothing_derives_from() -> None:
    class Final(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("no")

        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x))

    model = Final(4, 4)
    compiled = hypatia.compile(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(compiled.generate(x), model.generate(x))
    assert not compiled.reports
    assert not hasattr(hypatia.compile(nn.Linear(2, 2)), "generate")


def test_what_generate_sets_is_set_on_the_model() -> None:
    class Counting(nn.Linear):
        def generate(self, x: torch.Tensor) -> Any:
            self.times = getattr(self, "times", 0) + 1
            assert isinstance(self, Counting)
            self(x)
            return self

    model = Counting(4, 4)
    compiled = hypatia.compile(model)
    with torch.no_grad():
        compiled.generate(torch.randn(2, 4))
    assert model.times == compiled.times == 1
    assert compiled.reports


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_is_the_callers(kind: str) -> None:
    model, compiled = made(gemma3 if kind == "static" else llama)

    def cache() -> Any:
        if kind == "static":
            return transformers.StaticCache(config=model.config, max_cache_len=24)
        return transformers.DynamicCache(config=model.config)

    ours, theirs = cache(), cache()
    with torch.no_grad():
        for at in range(12):
            ids = torch.randint(3, 96, (2, 4 if at == 0 else 1), generator=torch.Generator().manual_seed(at))
            kept = [layer.keys for layer in ours.layers]
            result = compiled(input_ids=ids, past_key_values=ours, use_cache=True)
            expected = model(input_ids=ids, past_key_values=theirs, use_cache=True)
            assert result.past_key_values is ours
            torch.testing.assert_close(result.logits, expected.logits)
            for mine, other in zip(ours.layers, theirs.layers, strict=True):
                torch.testing.assert_close((mine.keys, mine.values), (other.keys, other.values))
                assert mine.get_seq_length() == other.get_seq_length()
            if kind == "static" and at:
                assert all(a is b.keys for a, b in zip(kept, ours.layers, strict=True))


@pytest.mark.parametrize("by", ["model", "forward", "config", "default config"])
def test_torch_compile_generates(by: str) -> None:
    torch.compiler.reset()
    model, _ = made(llama)
    settings: dict[str, Any] = {"cache_implementation": "static"}
    expected, compiles = tokens(model, **settings), hypatia.compile_count()
    if by == "model":
        found = tokens(torch.compile(model, backend="hypatia"), **settings)
    elif by == "forward":
        with mock.patch.object(model, "forward", torch.compile(model.forward, backend="hypatia")):
            found = tokens(model, **settings)
    else:
        config = transformers.CompileConfig(backend="hypatia", **({"mode": None} if by == "config" else {}))
        assert (config.mode is None) == (by == "config"), "transformers has a mode of its own"
        config._compile_all_devices = True
        found = tokens(model, **settings, compile_config=config)
    # torch hands `generate` of what it compiled on to the model itself.
    assert hypatia.compile_count() > compiles or by == "model"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
