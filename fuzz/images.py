"""Programs of images: convolutions of every kind, and what convolutional nets have between them.

Devices run them in another layout, by kernels that are chosen by groups, windows and channels.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from .builder import Builder, is_float
from .case import Plan
from .tensors import CHANNELS_LAST, T

ACTIVATIONS = ("torch.relu({0})", "F.silu({0})", "F.gelu({0})", "F.hardswish({0})", "F.relu6({0})")
ACTIVATIONS += ("torch.sigmoid({0})", "F.leaky_relu({0}, 0.1)", "F.elu({0})", "torch.tanh({0})", "{0}.abs()")

BETWEEN = (
    "F.max_pool2d({0}, 2)",
    "F.max_pool2d({0}, 3, stride=1, padding=1)",
    "F.avg_pool2d({0}, 3, stride=2, padding=1)",
    "F.avg_pool2d({0}, 3, stride=1, padding=1, count_include_pad=False)",
    "F.interpolate({0}, scale_factor=2, mode='nearest')",
    "F.interpolate({0}, scale_factor=2, mode='bilinear', align_corners=False)",
    "F.pad({0}, (0, 1, 1, 0))",
    "F.pixel_shuffle({0}, 2)",
    "F.pixel_unshuffle({0}, 2)",
    "{0}[:, : {0}.shape[1] // 2]",
    "{0}[:, -2:]",
    "{0}[..., ::2, 1:]",
    "{0}.flip(3)",
    "torch.cat([{0}, {0}.neg()], 1)",
    "{0}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)",
    "{0}.chunk(2, 1)[0] * {0}.chunk(2, 1)[1].sigmoid()",
    "{0}.contiguous(memory_format=torch.channels_last)",
    "{0}.contiguous()",
    "{0} - {0}.mean((2, 3), keepdim=True)",
    "{0}.roll((1, -1), (2, 3))",
    "{0}.unflatten(1, (2, -1)).sum(1)",
    "({0}.unflatten(1, (2, -1)) * {0}.mean((2, 3)).unflatten(1, (2, -1)).softmax(1)[..., None, None]).sum(1)",
)
"""Ops that take an image and return one."""

ENDS = (
    "{0}.mean((2, 3))",
    "F.adaptive_avg_pool2d({0}, 1).flatten(1)",
    "{0}.amax((2, 3))",
    "{0}.flatten(2).transpose(1, 2)",
    "{0}.flatten(1)",
    "{0}.permute(0, 2, 3, 1)",
)
"""Ops that end a convolutional net, or go over to tokens."""


def begun(b: Builder) -> str:
    """The input of a convolutional net."""
    shape = (b.one(1, 2, 3), b.one(3, 4, 8), b.one(5, 6, 8), b.one(4, 6, 7))
    return b.input(shape, batch=True)


def laid_out(plans: Iterable[Plan], dice: random.Random) -> tuple[Plan, ...]:
    """The calls of a convolutional net, of which some have images with channels last."""
    share = dice.choice((0.0, 0.5, 1.0))

    def of(spec: object) -> object:
        is_image = isinstance(spec, T) and len(spec.shape) == 4 and spec.layout == "dense"
        return dataclasses.replace(spec, layout=CHANNELS_LAST) if is_image and dice.random() < share else spec

    return tuple(dataclasses.replace(plan, inputs=tuple(map(of, plan.inputs))) for plan in plans)


def image(b: Builder) -> str | None:
    """A part of a convolutional net."""
    x = b.pick(
        lambda v: is_float(v) and v.dim() == 4 and 0 < v.shape[1] <= 24 and min(v.shape[2:], default=0) >= 1
    )
    if x is None:
        return None
    what = b.one("conv", "conv", "conv", "norm", "norm", "act", "between", "between", "block", "gate", "end")
    if what == "conv":
        y = _convolution(b, x)
        return b.emit(b.dice.choice(ACTIVATIONS), y) if y and b.chance(0.4) else y
    if what == "norm":
        return _norm(b, x)
    if what == "act":
        return b.emit(b.dice.choice(ACTIVATIONS), x)
    if what == "between":
        return b.emit(b.dice.choice(BETWEEN), x)
    if what == "end":
        return b.emit(b.dice.choice(ENDS), x)
    return _block(b, x) if what == "block" else _gate(b, x)


def _convolution(b: Builder, x: str, out: int | None = None, kind: str = "") -> str | None:
    channels, dtype = b.shape(x)[1], b.of(x)
    kind = kind or b.one("plain", "plain", "plain", "1x1", "1x1", "depthwise", "groups", "transposed")
    bias = b.chance(0.6)
    if kind == "transposed":
        out = b.one(2, 4)
        uses = [b.weight((channels, out, 2, 2), dtype), *([b.weight((out,), dtype)] if bias else [])]
        return b.emit(f"F.conv_transpose2d({{0}}, {{1}}, {'{2}' if bias else None}, stride=2)", x, *uses)
    groups, window = 1, b.one((3, 3), (3, 3), (2, 2), (3, 5), (1, 3), (5, 5))
    if kind == "1x1":
        window = (1, 1)
    elif kind == "depthwise":
        groups, out = channels, channels * b.one(1, 1, 2)
    elif kind == "groups":
        groups = b.one(*[g for g in (1, 2, 3, 4) if channels % g == 0])
        out = groups * b.one(1, 2, 4)
    out = out or b.one(1, 2, 4, 8, 12)
    uses = [b.weight((out, channels // groups, *window), dtype), *([b.weight((out,), dtype)] if bias else [])]
    how = [f"stride={b.one(2, (1, 2))}"] if b.chance(0.25) else []
    how += [f"padding={b.one(1, 2, (1, 0), repr('same') if not how else 1)}"] if b.chance(0.7) else []
    how += ["dilation=2"] if b.chance(0.1) else []
    how += [f"groups={groups}"] if groups > 1 else []
    return b.emit(f"F.conv2d({', '.join(['{0}', '{1}', '{2}' if bias else 'None', *how])})", x, *uses)


def _norm(b: Builder, x: str) -> str | None:
    channels, dtype = b.shape(x)[1], b.of(x)
    scale, shift = (b.weight((channels,), dtype) for _ in range(2))
    kind = b.one("batch", "batch", "group", "layer", "instance")
    if kind == "batch":
        mean, var = (b.weight((channels,), dtype, buffer=True) for _ in range(2))
        if b.training and b.chance(0.5):
            if b.chance(0.5) and len({mean, var, scale, shift}) == 4:
                # Running statistics move.
                text = "F.batch_norm({0}, {1}, {2}, {3}, {4}, training=True, momentum=0.25)"
                return b.emit(text, x, mean, var, scale, shift)
            text = "F.batch_norm({0}, None, None, {1}, {2}, training=True)"
            return b.emit(text, x, scale, shift)
        text = "F.batch_norm({0}, {1}, {2}.abs() + 0.5, {3}, {4})"
        return b.emit(text, x, mean, var, scale, shift)
    if kind == "group":
        groups = b.one(*[g for g in (1, 2, 3, 4, channels) if channels % g == 0])
        return b.emit(f"F.group_norm({{0}}, {groups}, {{1}}, {{2}})", x, scale, shift)
    # Of one image torch's gradient on a CPU is wrong where what comes in is transposed.
    if kind == "instance" and not (b.training and b.shape(x)[0] == 1):
        return b.emit("F.instance_norm({0})", x)
    rows = b.emit("{0}.permute(0, 2, 3, 1)", x)
    rows = b.emit(f"F.layer_norm({{0}}, ({channels},), {{1}}, {{2}})", rows, scale, shift)
    if b.chance(0.5):
        rows = b.emit("F.linear({0}, {1}, {2})", rows, b.weight((channels, channels), dtype), shift)
    return b.emit("{0}.permute(0, 3, 1, 2)", rows)


def _block(b: Builder, x: str) -> str | None:
    """Convolutions beside what they were made from: residuals, or channels joined."""
    channels, dtype = b.shape(x)[1], b.of(x)
    if b.chance(0.4):
        w = b.weight((b.one(2, 4), channels, 3, 3), dtype)
        return b.emit("torch.cat([{0}, {1}], 1)", x, b.emit("F.conv2d({0}, {1}, padding=1)", x, w))
    w = b.weight((channels, channels, 3, 3), dtype)
    y = b.emit(b.dice.choice(ACTIVATIONS), b.emit("F.conv2d({0}, {1}, padding=1)", x, w))
    y = _convolution(b, y, channels, "1x1") if y else None
    y = b.emit(b.one("{0} + {1}", "{1} + {0}", "{1} - {0}"), x, y)
    return b.emit("torch.relu({0})", y) if y and b.chance(0.5) else y


def _gate(b: Builder, x: str) -> str | None:
    """Channels, weighted by what is in them."""
    channels, dtype = b.shape(x)[1], b.of(x)
    if b.chance(0.3):
        return b.emit("{0} * {1}[:, None, None]", x, b.weight((channels,), dtype))
    y = b.emit(b.one("{0}.mean((2, 3), keepdim=True)", "F.adaptive_avg_pool2d({0}, 1)"), x)
    y = b.emit("F.conv2d({0}, {1})", y, b.weight((4, channels, 1, 1), dtype))
    y = b.emit("F.conv2d(torch.relu({0}), {1})", y, b.weight((channels, 4, 1, 1), dtype))
    return b.emit("{0} * torch.sigmoid({1})", x, y)
