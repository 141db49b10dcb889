"""Convolutional and windowed networks of torchvision and timm, and a diffusion U-Net, small and untrained."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Inputs, image, register


@register("resnet18", image(32))
def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=10)


@register("mobilenet_v2", image(32))
def _mobilenet_v2() -> nn.Module:
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(weights=None, num_classes=10, width_mult=0.35)


@register("mobilenet_v3", image(32))
def _mobilenet_v3() -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(weights=None, num_classes=10, width_mult=0.5)


@register("efficientnet_b0", image(32))
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
