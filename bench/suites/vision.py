"""Models of timm, and convolutional nets of torchvision in several layouts, batches and dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .rows import Arguments, Row, Setting

TIMM = (
    *("beit_base_patch16_224", "botnet26t_256", "cait_s24_224", "coat_lite_mini", "convit_base"),
    *("convmixer_768_32", "convnext_base", "convnextv2_tiny", "crossvit_9_240", "cspdarknet53"),
    *("deit_base_distilled_patch16_224", "densenet121", "dla102", "dpn68", "eca_halonext26ts"),
    *("ese_vovnet19b_dw", "tf_efficientnet_b0", "efficientformer_l1", "fastvit_t8", "fbnetc_100"),
    *("gernet_l", "ghostnet_100", "gmixer_24_224", "gmlp_s16_224", "hrnet_w18", "inception_v3"),
    *("lcnet_050", "levit_128", "mixer_b16_224", "mnasnet_100", "mobilenetv2_100"),
    *("mobilenetv3_large_100", "mobilevit_s", "nfnet_l0", "pit_b_224", "poolformer_s12"),
    *("regnety_002", "repvgg_a2", "res2net50_14w_8s", "resmlp_12_224", "resnest14d", "resnet50"),
    *("rexnet_100", "selecsls42b", "spnasnet_100", "swin_base_patch4_window7_224", "tinynet_a"),
    *("tnt_s_patch16_224", "twins_pcpvt_base", "visformer_small", "vit_base_patch16_224"),
    *("volo_d1_224", "xcit_small_12_p16_224"),
)
TIMM_BATCH = 16


def _timm(name: str) -> Callable[[Setting], tuple[nn.Module, Any]]:
    def make(setting: Setting) -> tuple[nn.Module, Any]:
        import timm

        model = timm.create_model(name, pretrained=False)
        size = model.default_cfg["input_size"]
        return model, _images(1 if setting.small else TIMM_BATCH, *size)

    return make


def _images(*shape: int) -> Callable[[torch.Generator], Arguments]:
    return lambda dice: ((torch.randn(*shape, generator=dice),), {})


def timm_rows(setting: Setting) -> list[Row]:
    """All models of timm's list."""
    return [Row(name, _timm(name), TIMM_BATCH) for name in TIMM]


class UNet(nn.Module):
    """Three steps down and up again, with what was there on the way down beside."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(map(self._block, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in widths[:0:-1])
        self.back = nn.ModuleList(self._block(w, w // 2) for w in widths[:0:-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        convs = [nn.Conv2d(n, outputs, 3, padding=1, bias=False) for n in (inputs, outputs)]
        layers = [layer for conv in convs for layer in (conv, nn.BatchNorm2d(outputs), nn.ReLU())]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside: list[torch.Tensor] = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            beside.append(x)
        beside.pop()
        for up, back in zip(self.up, self.back, strict=True):
            x = back(torch.cat([beside.pop(), up(x)], 1))
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Conv:
    """A line of the table of convolutional nets."""

    model: str
    dtype: str
    channels_last: bool
    batch: int

    def row(self) -> Row:
        """As a row of a suite."""
        layout = ".cl" if self.channels_last else ""
        name = f"{self.model}.{self.dtype}{layout}.b{self.batch}"
        return Row(name, self.make, self.batch, dtype=self.dtype, channels_last=self.channels_last)

    def make(self, setting: Setting) -> tuple[nn.Module, Any]:
        """The model, and what draws its inputs."""
        images = _images(1 if setting.small else self.batch, 3, 224, 224)
        if self.model == "unet":
            return UNet(), images
        import torchvision

        return torchvision.models.get_model(self.model, weights=None), images


CONV = (
    Conv("resnet50", "bf16", True, 1),
    Conv("resnet50", "bf16", True, 32),
    Conv("resnet50", "bf16", False, 32),
    Conv("resnet50", "fp32", False, 1),
    Conv("resnet50", "fp32", False, 32),
    Conv("convnext_tiny", "bf16", True, 1),
    Conv("convnext_tiny", "bf16", True, 32),
    Conv("convnext_tiny", "fp32", False, 1),
    Conv("convnext_tiny", "fp32", False, 32),
    Conv("efficientnet_b0", "bf16", True, 1),
    Conv("efficientnet_b0", "bf16", True, 32),
    Conv("efficientnet_b0", "fp32", False, 1),
    Conv("efficientnet_b0", "fp32", False, 32),
    Conv("mobilenet_v3_large", "bf16", True, 1),
    Conv("mobilenet_v3_large", "bf16", True, 32),
    Conv("densenet121", "bf16", True, 32),
    Conv("densenet121", "fp32", False, 1),
    Conv("vgg16", "bf16", True, 32),
    Conv("regnet_y_400mf", "bf16", True, 32),
    Conv("unet", "bf16", True, 1),
    Conv("unet", "bf16", True, 8),
    Conv("unet", "fp32", False, 8),
)


def conv_rows(setting: Setting) -> list[Row]:
    """The settings of convolutional nets; with a dtype given, those of that dtype."""
    found = [entry.row() for entry in CONV]
    return [row for row in found if setting.dtype in ("own", row.dtype)]
