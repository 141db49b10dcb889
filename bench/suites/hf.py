"""Models of transformers: the list of PyTorch's Dynamo benchmarks, and newer ones. Weights are random.

A row is one line: name, class, inputs, batch, sequence, and where its configuration differs from the default
of its class. Depth is set by the run (``--layers``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .rows import NO_DROPOUT, Arguments, Row, Setting

SMALL_SEQUENCE = 64
LAYERS, SMALL_LAYERS = 4, 2
SMALL_VOCABULARY = 30522
SMALL_SECONDS = 4000
"""Samples of sound in a small run: a quarter of a second."""

DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
"""What configurations call the number of layers."""


@dataclasses.dataclass(frozen=True)
class HF:
    """A line of the table."""

    name: str
    model: str
    inputs: str
    """text, pair (encoder and decoder), image, clip (text and image), sound or speech."""
    batch: int
    sequence: int
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Functions are called with the number of layers."""

    def row(self) -> Row:
        """As a row of a suite."""
        return Row(self.name, self.make, self.batch, self.sequence)

    def make(self, setting: Setting) -> tuple[nn.Module, Any]:
        """The model, and what draws its inputs."""
        import transformers

        cls = getattr(transformers, self.model)
        config = self.configuration(cls.config_class, setting)
        batch = 1 if setting.small else self.batch
        sequence = min(self.sequence, SMALL_SEQUENCE) if setting.small else self.sequence

        def draw(dice: torch.Generator) -> Arguments:
            return (), INPUTS[self.inputs](self.model, config, (batch, sequence), setting, dice)

        return cls(config), draw

    def configuration(self, cls: Any, setting: Setting) -> Any:
        """The configuration at the depth asked for; small vocabularies and no dropout where that is asked."""
        layers = setting.layers or (SMALL_LAYERS if setting.small else LAYERS)
        given = _at_depth(cls, {"use_cache": False, **self.config}, layers, setting.small)
        for part, part_class in getattr(cls, "sub_configs", {}).items():
            if part in ("text_config", "vision_config"):
                given[part] = _at_depth(part_class, given.get(part, {}), layers, setting.small)
        config = cls(**given)
        if setting.training:
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, NO_DROPOUT)
        return config


def _at_depth(cls: Any, given: dict[str, Any], layers: int, small: bool) -> dict[str, Any]:
    """Arguments of a configuration, with so many layers; tokens of their own are inside the vocabulary."""
    given = {name: value(layers) if callable(value) else value for name, value in given.items()}
    depths = {name for name in DEPTHS if name in vars(cls())}
    given = {**given, **dict.fromkeys(depths, layers)}
    plain = cls(**given)
    if small and hasattr(plain, "max_source_positions"):
        # Frames of sound after the first convolutions; thirty seconds are the default.
        given["max_source_positions"] = SMALL_SEQUENCE
    vocabulary = getattr(plain, "vocab_size", None)
    if small and isinstance(vocabulary, int):
        given["vocab_size"] = min(vocabulary, SMALL_VOCABULARY)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            token = getattr(plain, name, None)
            if isinstance(token, int) and token >= given["vocab_size"]:
                given[name] = 1
    return given


Shape = tuple[int, int]


def _tokens(config: Any, shape: Shape, dice: torch.Generator) -> torch.Tensor:
    # The first ones mean padding and ends of sentences.
    return torch.randint(4, config.get_text_config().vocab_size, shape, generator=dice)


def _labelled(
    model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator
) -> dict[str, Any]:
    if not setting.training:
        return {}
    if "Classification" in model:
        return {"labels": torch.randint(0, config.num_labels, shape[:1], generator=dice)}
    return {"labels": _tokens(config, shape, dice)}


def _text(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(config, shape, dice), **_labelled(model, config, shape, setting, dice)}


def _pair(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    text = _text(model, config, shape, setting, dice)
    return {**text, "decoder_input_ids": _tokens(config, shape, dice)}


def _pixels(config: Any, batch: int, dice: torch.Generator) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    return torch.randn(batch, 3, vision.image_size, vision.image_size, generator=dice)


def _image(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    labels = _labelled(model, config, shape, setting, dice)
    return {"pixel_values": _pixels(config, shape[0], dice), **labels}


def _clip(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    loss = {"return_loss": True} if setting.training else {}
    text = _tokens(config, shape, dice)
    return {"input_ids": text, "pixel_values": _pixels(config, shape[0], dice), **loss}


def _sound(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    length = SMALL_SECONDS if setting.small else shape[1]
    return {"input_values": torch.randn(shape[0], length, generator=dice)}


def _speech(model: str, config: Any, shape: Shape, setting: Setting, dice: torch.Generator) -> dict[str, Any]:
    features = torch.randn(shape[0], config.num_mel_bins, 2 * config.max_source_positions, generator=dice)
    labels = _labelled(model, config, shape, setting, dice)
    return {"input_features": features, "decoder_input_ids": _tokens(config, shape, dice), **labels}


INPUTS = {"text": _text, "pair": _pair, "image": _image, "clip": _clip, "sound": _sound, "speech": _speech}

_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
}
_DEBERTA_V2 = {
    **_BASE,
    **_DEBERTA,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
_XLNET = {"d_model": 768, "n_head": 12, "d_inner": 3072}
_LONG = {"attention_window": 64, "max_position_embeddings": 1026}
_NEO = {"hidden_size": 768, "num_heads": 12, "attention_types": lambda n: [[["global", "local"], n // 2]]}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
_GEMMA2 = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
_GEMMA3 = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
_MIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_MAMBA2 = {
    "hidden_size": 768,
    "num_heads": 24,
    "head_dim": 64,
    "n_groups": 1,
    "chunk_size": 64,
    "vocab_size": 50288,
}
_WHISPER = {
    "d_model": 384,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
}

TABLE = (
    HF("AlbertForMaskedLM", "AlbertForMaskedLM", "text", 8, 512, _BASE),
    HF("AllenaiLongformerBase", "LongformerForMaskedLM", "text", 4, 1024, _LONG),
    HF("BartForCausalLM", "BartForCausalLM", "text", 4, 1024),
    HF("BartForConditionalGeneration", "BartForConditionalGeneration", "pair", 2, 1024),
    HF("BertForMaskedLM", "BertForMaskedLM", "text", 8, 512),
    HF("BlenderbotForCausalLM", "BlenderbotForCausalLM", "text", 8, 128),
    HF("BlenderbotSmallForCausalLM", "BlenderbotSmallForCausalLM", "text", 32, 128),
    HF(
        "CamemBert",
        "CamembertForMaskedLM",
        "text",
        8,
        512,
        {"vocab_size": 32005, "max_position_embeddings": 514},
    ),
    HF("DebertaForMaskedLM", "DebertaForMaskedLM", "text", 8, 512, _DEBERTA),
    HF("DebertaV2ForMaskedLM", "DebertaV2ForMaskedLM", "text", 8, 512, _DEBERTA_V2),
    HF("DistilBertForMaskedLM", "DistilBertForMaskedLM", "text", 32, 128),
    HF("DistillGPT2", "GPT2LMHeadModel", "text", 8, 512),
    HF("DistillGPT2.use_cache", "GPT2LMHeadModel", "text", 8, 512, {"use_cache": True}),
    HF("ElectraForCausalLM", "ElectraForCausalLM", "text", 8, 512, {"is_decoder": True}),
    HF(
        "GPT2ForSequenceClassification", "GPT2ForSequenceClassification", "text", 4, 1024, {"pad_token_id": 0}
    ),
    HF("GPTNeoForCausalLM", "GPTNeoForCausalLM", "text", 8, 512, _NEO),
    HF("GoogleFnet", "FNetForMaskedLM", "text", 8, 512),
    HF("LayoutLMForMaskedLM", "LayoutLMForMaskedLM", "text", 8, 512),
    HF("M2M100ForConditionalGeneration", "M2M100ForConditionalGeneration", "pair", 8, 128),
    HF("MBartForCausalLM", "MBartForCausalLM", "text", 4, 1024),
    HF("MT5ForConditionalGeneration", "MT5ForConditionalGeneration", "pair", 8, 128),
    HF("MegatronBertForCausalLM", "MegatronBertForCausalLM", "text", 8, 512, {"is_decoder": True}),
    HF("MobileBertForMaskedLM", "MobileBertForMaskedLM", "text", 32, 128),
    HF("OPTForCausalLM", "OPTForCausalLM", "text", 2, 2048),
    HF("PLBartForCausalLM", "PLBartForCausalLM", "text", 4, 1024),
    HF("PegasusForCausalLM", "PegasusForCausalLM", "text", 32, 128),
    HF(
        "RobertaForCausalLM",
        "RobertaForCausalLM",
        "text",
        8,
        512,
        {"max_position_embeddings": 514, "is_decoder": True},
    ),
    HF("T5Small", "T5ForConditionalGeneration", "pair", 4, 1024),
    HF("TrOCRForCausalLM", "TrOCRForCausalLM", "text", 16, 256),
    HF("XGLMForCausalLM", "XGLMForCausalLM", "text", 8, 128),
    HF("XLNetLMHeadModel", "XLNetLMHeadModel", "text", 8, 512, _XLNET),
    HF("YituTechConvBert", "ConvBertForMaskedLM", "text", 8, 512),
    HF("Llama-3.2-1B", "LlamaForCausalLM", "text", 4, 512, {**_LLAMA, "vocab_size": 128256}),
    HF("Qwen3-0.6B", "Qwen3ForCausalLM", "text", 4, 512, {**_QWEN, "head_dim": 128, "vocab_size": 151936}),
    HF("Gemma2-2B", "Gemma2ForCausalLM", "text", 2, 512, {**_GEMMA2, "head_dim": 256, "vocab_size": 256000}),
    HF("Gemma3-1B", "Gemma3ForCausalLM", "text", 2, 512, {**_GEMMA3, "head_dim": 256, "vocab_size": 262144}),
    HF("Phi3-mini", "Phi3ForCausalLM", "text", 4, 512),
    HF("Mixtral", "MixtralForCausalLM", "text", 4, 512, _MIXTRAL),
    HF("Mamba2-130m", "Mamba2ForCausalLM", "text", 4, 512, _MAMBA2),
    HF(
        "whisper-tiny",
        "WhisperForConditionalGeneration",
        "speech",
        8,
        128,
        {**_WHISPER, "decoder_ffn_dim": 1536},
    ),
    HF("CLIP-B32", "CLIPModel", "clip", 16, 77),
    HF("ViT-B16", "ViTForImageClassification", "image", 16, 0, {"num_labels": 1000}),
    HF("DINOv2-B", "Dinov2ForImageClassification", "image", 16, 0, {"num_labels": 1000}),
    HF("SigLIP-B16", "SiglipModel", "clip", 16, 64),
    HF("Wav2Vec2", "Wav2Vec2ForCTC", "sound", 4, 32000),
)


def rows(setting: Setting) -> list[Row]:
    """All models of the list."""
    return [entry.row() for entry in TABLE]
