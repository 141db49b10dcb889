"""Convolutional and windowed networks of torchvision and timm, and a diffusion U-Net, small and untrained."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Inputs, image, register


@register("resnet_short", image(32))
def _resnet_short() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 1, 1, 1], num_classes=10)


@register("resnet18", image(32), slow=True)
def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=10)


@register("mobilenet_v2_short", image(32), slow=True)
def _mobilenet_v2_short() -> nn.Module:
    """Stages of at most two blocks: how much wider inside, channels, blocks, stride."""
    from torchvision.models import mobilenet_v2

    stages = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2], [6, 96, 2, 2], [6, 160, 1, 2]]
    return mobilenet_v2(weights=None, num_classes=10, width_mult=0.35, inverted_residual_setting=stages)


@register("mobilenet_v2", image(32), slow=True)
def _mobilenet_v2() -> nn.Module:
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(weights=None, num_classes=10, width_mult=0.35)


@register("mobilenet_v3_short", image(32))
def _mobilenet_v3_short() -> nn.Module:
    """A block of each kind: with and without gates, residuals and hardswish."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    rows = [
        (16, 3, 16, 16, True, "RE", 2, 1),
        (16, 3, 72, 24, False, "RE", 2, 1),
        (24, 3, 88, 24, False, "RE", 1, 1),
        (24, 5, 96, 40, True, "HS", 2, 1),
        (40, 5, 240, 40, True, "HS", 1, 1),
    ]
    return MobileNetV3([InvertedResidualConfig(*row, 0.5) for row in rows], 512, num_classes=10)


@register("mobilenet_v3", image(32), slow=True)
def _mobilenet_v3() -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(weights=None, num_classes=10, width_mult=0.5)


@register("efficientnet_short", image(32))
def _efficientnet_short() -> nn.Module:
    """How much wider inside, kernel, stride, channels before and after, blocks."""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    rows = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 1), (6, 3, 2, 40, 80, 2)]
    return EfficientNet([MBConvConfig(*row) for row in rows], dropout=0.2, num_classes=10)


@register("efficientnet_b0", image(32), slow=True)
def _efficientnet_b0() -> nn.Module:
    from torchvision.models import efficientnet_b0

    return efficientnet_b0(weights=None, num_classes=10)


@register("convnext", image(32))
def _convnext() -> nn.Module:
    import timm

    return timm.create_model(
        "convnext_tiny", pretrained=False, num_classes=10, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)
    )


@register("swin", image(32))
def _swin() -> nn.Module:
    import timm

    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        pretrained=False,
        num_classes=10,
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    )


@register("resnet50", image(64), slow=True)
def _resnet50() -> nn.Module:
    import timm

    return timm.create_model("resnet50", pretrained=False, num_classes=10)


@register("convnext_tiny", image(64), slow=True)
def _convnext_tiny() -> nn.Module:
    from torchvision.models import convnext_tiny

    return convnext_tiny(weights=None, num_classes=10)


@register("swin_tiny", image(64), slow=True)
def _swin_tiny() -> nn.Module:
    from torchvision.models import swin_t

    return swin_t(weights=None, num_classes=10)


def _noisy_picture() -> Inputs:
    return {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 6, 24),
    }


@register("diffusion_unet", _noisy_picture, slow=True)
def _diffusion_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=4,
    )


class DiffusionBlock(nn.Module):
    """One step down of a diffusion U-Net: a residual block with time, attention to itself and to the text."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D

        self.block = CrossAttnDownBlock2D(
            in_channels=16,
            out_channels=32,
            temb_channels=24,
            num_layers=1,
            num_attention_heads=4,
            cross_attention_dim=24,
            resnet_groups=4,
        )

    def forward(self, latent: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.block(latent, time, encoder_hidden_states=text)[0]


@register("diffusion_block", lambda: (torch.randn(2, 16, 12, 12), torch.randn(2, 24), torch.randn(2, 6, 24)))
def _diffusion_block() -> nn.Module:
    return DiffusionBlock()
