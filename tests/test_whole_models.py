"""Architectures of transformers and timm, tiny: each call runs by one plan, by either entry, and is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models import mlp_mixer
from timm.models.mobilevit import MobileVitBlock
from torch import nn

import hypatia
from hypatia.frontend.dynamo import collecting
from support import assert_as_close_as_eager, copied, fresh_dynamo

Call = tuple[nn.Module, dict[str, Any]]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def text(kind: str, config: str, **settings: Any) -> Callable[[], Call]:
    """A model of transformers that reads words, called by keyword."""

    def build() -> Call:
        model = getattr(transformers, kind)(getattr(transformers, config)(**WORDS, **settings))
        ids = torch.randint(3, 50, (1, 6))
        return model, {"input_ids": ids, **({"decoder_input_ids": ids[:, :4]} if "T5" in kind else {})}

    return build


def sight(kind: str, config: str) -> Callable[[], Call]:
    """A model of transformers that reads images, called by keyword."""

    def build() -> Call:
        made = getattr(transformers, config)(**SIZES, image_size=16, patch_size=8)
        return getattr(transformers, kind)(made), {"pixel_values": torch.randn(1, 3, 16, 16)}

    return build


def image(name: str, **settings: Any) -> Callable[[], Call]:
    """A model of timm."""

    def build() -> Call:
        model = timm.create_model(name, pretrained=False, num_classes=10, img_size=32, **settings)
        return model, {"x": torch.randn(1, 3, 32, 32)}

    return build


def resmlp() -> Call:
    """ResMLP of one block, with a scale for each layer."""
    kinds = {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine}
    model = mlp_mixer.MlpMixer(10, 32, patch_size=8, num_blocks=1, embed_dim=24, mlp_ratio=4, **kinds)
    return model, {"x": torch.randn(1, 3, 32, 32)}


def mobilevit() -> Call:
    """A block of MobileViT, which puts patches side by side for attention and back into an image."""
    block = MobileVitBlock(16, transformer_dim=24, transformer_depth=1, num_heads=2, patch_size=2)
    return block, {"x": torch.randn(1, 16, 8, 8)}


MODELS: dict[str, Callable[[], Call]] = {
    "bert": text("BertModel", "BertConfig", **SIZES),
    # These return caches, which are objects of their own.
    "llama": text("LlamaForCausalLM", "LlamaConfig", **SIZES, num_key_value_heads=2),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=1, n_head=2),
    "t5": text(
        "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    ),
    "mamba2": text(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=1,
        use_cache=False,
    ),
    # Complex numbers in between.
    "fnet": text("FNetModel", "FNetConfig", hidden_size=16, num_hidden_layers=1, intermediate_size=32),
    # Results that are parts of others.
    "clip": sight("CLIPVisionModel", "CLIPVisionConfig"),
    "siglip": sight("SiglipVisionModel", "SiglipVisionConfig"),
    # Calls that only torch knows read tensors with gaps.
    "vit": image("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2),
    "xcit": image("xcit_nano_12_p16_224", depth=1, embed_dim=32, num_heads=2),
    "pit": image("pit_ti_224", base_dims=[8, 8, 8], depth=[1, 1, 1], heads=[1, 2, 4]),
    "swin": image("swin_tiny_patch4_window7_224", window_size=4, embed_dim=16, depths=(2,), num_heads=(2,)),
    "visformer": image("visformer_tiny", embed_dim=32, depth=(1, 1, 1)),
    "resmlp": resmlp,
    "mobilevit": mobilevit,
}


def results(value: Any) -> Any:
    """The tensors of an output, those of a cache in it too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in results(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in results(v)]
    if hasattr(value, "self_attention_cache"):
        return results([value.self_attention_cache, value.cross_attention_cache])
    return [t for layer in getattr(value, "layers", ()) for t in (layer.keys, layer.values)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ["torch.compile", "compile"])
@pytest.mark.parametrize("name", MODELS)
def test_one_plan_serves_every_call(name: str, entry: str) -> None:
    fresh_dynamo()
    torch.manual_seed(0)
    model, kwargs = MODELS[name]()
    model.eval()
    wide = copy.deepcopy(model).double()
    with torch.no_grad(), collecting() as reports:
        compiled = torch.compile(model, backend="hypatia") if entry != "compile" else hypatia.compile(model)
        for _ in range(2):
            ours, eager = compiled(**kwargs), model(**kwargs)
            exact = wide(**copied(kwargs, double=True))
            assert type(ours) is type(eager)
            assert len(results(eager)) >= (3 if name in ("llama", "gpt2", "t5") else 1)
            assert_as_close_as_eager(results(ours), results(eager), results(exact))
        if entry == "compile":
            reports = compiled.reports
    assert [(r.kept, r.no_plan) for r in reports] == [("plan", "")]
