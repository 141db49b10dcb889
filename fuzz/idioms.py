"""Groups of calls as models have them: products and their relatives, norms, attention, by hand and whole."""

from __future__ import annotations

import torch

from .builder import Builder, is_float

ACTIVATIONS = ("torch.relu({0})", "F.gelu({0})", "F.silu({0})", "torch.tanh({0})", "torch.sigmoid({0})")
ACTIVATIONS += ("F.gelu({0}, approximate='tanh')", "{0} * torch.sigmoid({0})", "{0}")


def _with_columns(b: Builder, rank: int = 1) -> str | None:
    return b.pick(lambda v: is_float(v) and v.dim() >= rank and v.shape[-1] >= 1)


def linear(b: Builder, x: str | None = None, columns: int | None = None) -> str | None:
    """A linear layer in one of the ways to write it."""
    x = x or _with_columns(b, 2 if b.chance(0.9) else 1)
    if x is None:
        return None
    n, k, dtype = columns or b.size(), b.shape(x)[-1], b.of(x)
    bias = b.weight((n,), dtype) if b.chance(0.6) else None
    way = b.one("linear", "linear", "linear", "matmul", "t", "addmm", "einsum")
    if way == "addmm" and len(b.shape(x)) == 2 and bias:
        alpha = b.one("", "", ", beta=0.5, alpha=2")
        return b.emit(f"torch.addmm({{2}}, {{0}}, {{1}}{alpha})", x, b.weight((k, n), dtype), bias)
    if way in ("matmul", "t", "einsum"):
        text = {
            "matmul": "{0} @ {1}",
            "t": "torch.matmul({0}, {1}.t())",
            "einsum": "torch.einsum('...k,kn->...n', {0}, {1})",
        }
        y = b.emit(text[way], x, b.weight((n, k) if way == "t" else (k, n), dtype))
        return b.emit("{0} + {1}", y, bias) if bias and y else y
    w = b.weight((n, k), dtype)
    return b.emit("F.linear({0}, {1}, {2})", x, w, bias) if bias else b.emit("F.linear({0}, {1})", x, w)


def mlp(b: Builder) -> str | None:
    """Two layers, gated or not, with a residual now and then."""
    x = _with_columns(b, 2)
    if x is None:
        return None
    k, hidden = b.shape(x)[-1], b.size()
    h = b.emit(b.dice.choice(ACTIVATIONS), linear(b, x, hidden))
    if h and b.chance(0.4):
        h = b.emit("{0} * {1}", h, linear(b, x, hidden))
    y = linear(b, h, k) if h else None
    return b.emit(b.one("{0} + {1}", "{1} + {0}", "{1} - {0}"), x, y) if y and b.chance(0.6) else y


def several(b: Builder) -> str | None:
    """Layers that share their input or their weights: merged projections, adapters, sums of layers."""
    x = _with_columns(b, 2)
    if x is None:
        return None
    k, n = b.shape(x)[-1], b.size()
    what = b.one("sum", "adapter", "parts", "shared", "chain", "difference")
    if what == "adapter":
        low = linear(b, linear(b, x, 2), n)
        return b.emit(b.one("{0} + {1}", "{0} + {1} * 0.5"), linear(b, x, n), low)
    if what == "parts":
        whole = linear(b, x, 2 * n)
        first, second = (b.emit(f"{{0}}.chunk(2, -1)[{i}]", whole) for i in (0, 1))
        return b.emit(b.one("{0} * torch.sigmoid({1})", "F.silu({0}) * {1}", "{0} + {1}"), first, second)
    if what == "shared":
        y = b.like(x)
        if y is None or b.shape(y)[-1:] != (k,):
            return None
        w = b.weight((n, k), b.of(x))
        first, second = (b.emit("F.linear({0}, {1})", z, w) for z in (x, y))
        return b.emit(b.one("{0} + {1}", "{0} - {1}", "torch.cat([{0}, {0}], -1)"), first, second)
    if what == "chain":
        return linear(b, linear(b, x, b.size()), n)
    return b.emit("{0} + {1}" if what == "sum" else "{0} - {1}", linear(b, x, n), linear(b, x, n))


def product(b: Builder) -> str | None:
    """A product of two tensors."""
    x = b.pick(lambda v: is_float(v) and v.dim() >= 2)
    if x is None:
        return None
    k = b.shape(x)[-1]
    dtype = b.values[x].dtype

    def fits(v: torch.Tensor) -> bool:
        return v.dtype == dtype and v.dim() >= 2 and v.shape[-2] == k

    y = b.pick(fits)
    texts = [
        "{0} @ {0}.transpose(-1, -2)",
        "{0}.transpose(-1, -2) @ {0}",
        "torch.matmul({0}, {0}.mT) * 0.125",
    ]
    if len(b.shape(x)) == 3:
        texts += ["torch.bmm({0}, {0}.mT)", "torch.bmm({0}.mT, {0})"]
    if y is not None:
        texts += ["{0} @ {1}", "torch.matmul({0}, {1})", "({1}.mT @ {0}.mT).mT", "(2 * {0}) @ ({1} * 0.5)"]
        if len(b.shape(y)) == 3 == len(b.shape(x)):
            texts += [
                "torch.bmm({0}, {1})",
                "torch.baddbmm({0} @ {1}, {0}, {1}, beta=0.5)",
                "torch.einsum('bij,bjk->bik', {0}, {1})",
            ]
        if len(b.shape(y)) == 2 == len(b.shape(x)):
            texts += ["torch.mm({0}, {1})", "torch.mm({1}.t(), {0}.t()).t()"]
    if b.chance(0.15):
        texts = ["{0} @ {1}", "torch.einsum('...k,k->...', {0}, {1})", "torch.mv({0}, {1})"]
        return b.emit(b.dice.choice(texts), x, b.weight((k,), b.of(x)))
    return b.emit(b.dice.choice(texts), x, *([y] if y else []))


def norm(b: Builder) -> str | None:
    """A norm over the last dimension or over channels, whole or written out."""
    x = _with_columns(b, 2)
    if x is None:
        return None
    k, dtype = b.shape(x)[-1], b.of(x)
    eps = b.one("1e-5", "1e-6", "1e-3")
    what = b.one(
        "layer",
        "rms",
        "layer by hand",
        "layer by hand",
        "rms by hand",
        "rms by hand",
        "group",
        "batch",
        "rms in fp32",
    )
    w = b.weight((k,), dtype)
    if what == "layer":
        v = b.weight((k,), dtype)
        return b.emit(
            b.one(f"F.layer_norm({{0}}, ({k},), {{1}}, {{2}}, {eps})", f"F.layer_norm({{0}}, ({k},))"),
            x,
            w,
            v,
        )
    if what == "rms":
        return b.emit(f"F.rms_norm({{0}}, ({k},), {{1}}, {eps})", x, w)
    if what == "layer by hand":
        mean = b.emit("{0}.mean(-1, keepdim=True)", x)
        var = b.one("{0}.var(-1, unbiased=False, keepdim=True)", "({0} - {1}).pow(2).mean(-1, keepdim=True)")
        spread = b.emit(var, x, mean)
        text = b.one(
            f"({{0}} - {{1}}) / torch.sqrt({{2}} + {eps}) * {{3}}",
            f"({{0}} - {{1}}) * torch.rsqrt({{2}} + {eps}) * {{3}}",
        )
        return b.emit(text, x, mean, spread, w)
    if what == "rms by hand":
        return b.emit(f"{{0}} * torch.rsqrt({{0}}.pow(2).mean(-1, keepdim=True) + {eps}) * {{1}}", x, w)
    if what == "rms in fp32":
        y = b.emit("{0}.to(torch.float32)", x)
        y = b.emit(f"{{0}} * torch.rsqrt({{0}}.square().mean(-1, keepdim=True) + {eps})", y)
        return b.emit(f"{{0}} * {{1}}.to(torch.{dtype})", w, y)
    channels = b.shape(x)[1] if len(b.shape(x)) > 1 else 1
    if what == "group":
        groups = b.one(*[g for g in range(1, channels + 1) if channels % g == 0] or [1])
        return b.emit(
            f"F.group_norm({{0}}, {groups}, {{1}}, {{2}}, {eps})",
            x,
            b.weight((channels,), dtype),
            b.weight((channels,), dtype),
        )
    mean, var = (b.weight((channels,), dtype, buffer=True) for _ in range(2))
    var = b.emit("{0}.abs() + 0.5", var)
    return b.emit(
        f"F.batch_norm({{0}}, {{1}}, {{2}}, {{3}}, eps={eps})", x, mean, var, b.weight((channels,), dtype)
    )


def attention(b: Builder) -> str | None:
    """Attention: torch's own or written out, with heads, masks and merged projections."""
    x = b.pick(lambda v: is_float(v) and v.dim() == 3 and v.shape[1] <= 17 and v.shape[2] >= 1)
    if x is None:
        return None
    k = b.shape(x)[-1]
    heads, width = b.one(1, 2, 4), b.one(2, 4, 8)
    split = f"{{0}}.view({{0}}.shape[0], {{0}}.shape[1], {heads}, {width}).transpose(1, 2)"
    if b.chance(0.4):
        whole = linear(b, x, 3 * heads * width)
        parts = [b.emit(f"{{0}}.split({heads * width}, -1)[{i}]", whole) for i in range(3)]
        parts = [b.emit(split.replace("view", "reshape"), p) for p in parts]
    else:
        parts = [b.emit(split.replace("view", "reshape"), linear(b, x, heads * width)) for _ in range(3)]
    if any(p is None for p in parts):
        return None
    q, key, value = parts
    if b.chance(0.35):
        text = b.one("{0}, {1}, {2}", "{0}, {1}, {2}, is_causal=True", "{0}, {1}, {2}, scale=0.3")
        y = b.emit(f"F.scaled_dot_product_attention({text})", q, key, value)
    else:
        scale = b.one(f" / {width**0.5!r}", f" * {width**-0.5!r}", "", " / 8")
        scores = b.emit(f"{{0}} @ {{1}}.transpose(-2, -1){scale}", q, key)
        if scores and b.chance(0.4):
            mask = "torch.ones({0}.shape[-2:], device={0}.device).tril() == 0"
            scores = b.emit(f"{{0}}.masked_fill({mask}, float('-inf'))", scores)
        y = b.emit(
            "torch.matmul({0}, {1})",
            b.emit(b.one("{0}.softmax(-1)", "F.softmax({0}, dim=-1)"), scores),
            value,
        )
    y = b.emit("{0}.transpose(1, 2).reshape({0}.shape[0], {0}.shape[2], -1)", y)
    y = linear(b, y, k) if y else None
    return b.emit("{0} + {1}", x, y) if y and b.chance(0.5) else y


HAND_WRITTEN = (
    "{0} * 0.5 * (1.0 + torch.erf({0} / 1.4142135623730951))",
    "0.5 * {0} * (1 + torch.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} ** 3)))",
    "{0} * torch.sigmoid({0})",
    "{0} * torch.tanh(F.softplus({0}))",
    "{0} * (({0} + 3.0).clamp(0.0, 6.0) / 6.0)",
    "{0} * F.relu6({0} + 3.0) / 6.0",
    "torch.exp({0}) / torch.exp({0}).sum(-1, keepdim=True)",
    "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp({0} - {0}.amax(-1, keepdim=True)))",
    "torch.log(torch.softmax({0}, -1))",
    "torch.exp(F.log_softmax({0}, -1))",
    "torch.log(torch.exp({0}).sum(-1))",
    "torch.softmax({0} + 2.0, -1)",
    "torch.softmax({0} - {0}.amax(-1, keepdim=True), -1)",
    "1.0 / torch.sqrt({0}.abs() + 1e-5)",
    "1 / (1 + torch.exp(-{0}))",
    "torch.relu(torch.relu({0}))",
    "torch.relu({0}.abs())",
    "(-{0}).abs()",
    "-(-{0})",
    "(-{0}) * (-{0})",
    "torch.max({0}, torch.zeros_like({0}))",
    "{0} - {0}.mean(-1, keepdim=True)",
    "(({0} - {0}.mean(-1, keepdim=True)) ** 2).mean(-1)",
    "({0} ** 2).mean(-1) - {0}.mean(-1) ** 2",
    "({0} * 2.0) * 0.25 + ({0} / 3.0) * 6.0",
    "({0} + 1.0) - 3.0",
    "torch.where({0} > 0, {0}, 0.01 * {0})",
    "torch.where({0} > 0, {0}, torch.exp({0}) - 1)",
    "{0}.clamp(min=0.0, max=6.0) * 2 - {0}.clamp(min=0.0, max=6.0)",
    "torch.cat([-{0}[..., {0}.shape[-1] // 2:], {0}[..., :{0}.shape[-1] // 2]], -1)",
)


def by_hand(b: Builder) -> str | None:
    """A formula that has a name: activations, softmax, variances, written out."""
    return b.emit(b.dice.choice(HAND_WRITTEN), b.floats(1))


def convolution(b: Builder) -> str | None:
    """A convolution with what follows it."""
    x = b.pick(lambda v: is_float(v) and v.dim() == 4 and 0 < v.shape[1] <= 8 and min(v.shape[2:]) >= 2)
    if x is None:
        y = b.pick(lambda v: is_float(v) and v.dim() == 3 and 0 < v.shape[1] <= 8 and v.shape[2] >= 2)
        if y is None:
            return None
        w = b.weight((b.one(1, 2, 4), b.shape(y)[1], b.one(1, 2)), b.of(y))
        return b.emit(b.one("F.conv1d({0}, {1})", "F.conv1d({0}, {1}, padding=1)"), y, w)
    channels, out, dtype = b.shape(x)[1], b.one(1, 2, 4), b.of(x)
    w = b.weight((out, channels, b.one(1, 2), b.one(1, 2)), dtype)
    y = b.emit(
        b.one(
            "F.conv2d({0}, {1})", "F.conv2d({0}, {1}, padding=1)", "F.conv2d({0}, {1}, stride=2, padding=1)"
        ),
        x,
        w,
    )
    if y and b.chance(0.5):
        mean, var = (b.weight((out,), dtype, buffer=True) for _ in range(2))
        y = b.emit(
            "F.batch_norm({0}, {1}, {2}.abs() + 0.5, {3}, {4})",
            y,
            mean,
            var,
            b.weight((out,), dtype),
            b.weight((out,), dtype),
        )
    text = b.one(
        "torch.relu({0})",
        "F.max_pool2d({0}, 2)",
        "F.avg_pool2d({0}, 2)",
        "F.adaptive_avg_pool2d({0}, 1)",
        "{0}.flatten(1)",
    )
    return b.emit(text, y) or y
