"""Single calls, by family: each function adds one of its family to a program, if it fits something."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .builder import Builder, is_float
from .tensors import FLOATS, INTEGERS

Maker = Callable[[Builder], str | None]

UNARY = (
    *("torch.relu({0})", "torch.sigmoid({0})", "torch.tanh({0})", "torch.exp({0})", "-{0}", "{0}.abs()"),
    *("torch.log({0}.abs() + 0.1)", "torch.sqrt({0}.abs())", "torch.rsqrt({0}.abs() + 0.01)"),
    *("torch.reciprocal({0} + 3.0)", "torch.reciprocal({0})", "torch.square({0})", "torch.sign({0})"),
    *("torch.sin({0})", "torch.cos({0})", "torch.erf({0})", "torch.floor({0})", "torch.ceil({0})"),
    *("torch.round({0})", "torch.trunc({0})", "torch.expm1({0})", "torch.log1p({0}.abs())", "F.gelu({0})"),
    *("F.gelu({0}, approximate='tanh')", "F.silu({0})", "F.mish({0})", "F.hardswish({0})"),
    *("F.hardsigmoid({0})", "F.leaky_relu({0}, 0.2)", "F.elu({0})", "F.softplus({0})", "F.relu6({0})"),
    *("F.hardtanh({0})", "{0}.clamp(-0.5, 0.7)", "{0}.clamp(min=0.0)", "{0}.clamp(max=0.3)"),
    *("{0}.clamp(0.0, 6.0)", "{0} ** 2", "{0} ** 3", "{0}.abs() ** 0.5", "{0} ** 1.0", "torch.isnan({0})"),
    *("F.selu({0})", "F.celu({0})", "F.softsign({0})", "F.logsigmoid({0})", "F.softplus({0}, 2.0, 5.0)"),
    *("torch.exp(-{0}.abs())", "torch.isfinite({0})", "torch.frac({0})", "F.threshold({0}, 0.1, 0.2)"),
    *(
        "{0}.nan_to_num()",
        "torch.erfc({0})",
        "torch.atan({0})",
        "torch.signbit({0}.nan_to_num())",
        "{0}.sinh()",
    ),
)

WHOLE_UNARY = (
    *("-{0}", "{0}.abs()", "torch.relu({0})", "~{0}", "torch.sign({0})", "{0} ** 2", "{0}.clamp(-1, 3)"),
    *(
        "torch.square({0})",
        "torch.sigmoid({0})",
        "{0}.bool()",
        "torch.sqrt({0}.abs())",
        "{0} >> 1",
        "{0} << 1",
    ),
)

BINARY = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.5)", "{0} / {1}"),
    *("torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.where({0} > {1}, {0}, {1})"),
    *("{0} + {1} * 0.5", "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)"),
    *("torch.where({1} > 0, {0}, -{0})", "torch.atan2({0}, {1})", "torch.copysign({0}, {1})"),
    *("torch.fmod({0}, {1}.abs() + 0.5)", "torch.remainder({0}, {1}.abs() + 0.5)", "torch.hypot({0}, {1})"),
    *(
        "torch.lerp({0}, {1}, 0.3)",
        "torch.addcmul({0}, {0}, {1}, value=0.5)",
        "{0}.abs() ** {1}.clamp(-2, 2)",
    ),
    *(
        "torch.div({0}, {1}.abs() + 0.5, rounding_mode='floor')",
        "torch.rsub({0}, {1})",
        "torch.fmin({0}, {1})",
    ),
)

WHOLE_BINARY = (
    *(
        "{0} + {1}",
        "{0} - {1}",
        "{0} * {1}",
        "torch.maximum({0}, {1})",
        "torch.minimum({0}, {1})",
        "{0} / {1}",
    ),
    *("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "torch.where({0} > {1}, {0}, {1})", "{0} // ({1}.abs() + 1)"),
)

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")

NUMBERS = (
    0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    0.7,
    3.0,
    6.0,
    1e-5,
    -0.1,
    1 / 3,
    0.125,
    100.0,
    1.5,
    0.1,
    -2.5,
    1,
    2,
    3,
    0,
)
WHOLE_NUMBERS = (0, 1, -1, 2, 3, 7, 100, 255, 2**31 - 1, -(2**31), 2**53 + 1, 5)
NUMBERED = (
    "{0} + N",
    "{0} - N",
    "{0} * N",
    "N - {0}",
    "{0} / N",
    "N * {0}",
    "N + {0}",
    "{0} ** N",
    "N / {0}",
)


def unary(b: Builder) -> str | None:
    """A pointwise op of one tensor."""
    return b.emit(b.dice.choice(UNARY), b.floats())


def binary(b: Builder) -> str | None:
    """A pointwise op of two tensors."""
    x = b.floats()
    y = b.like(x)
    return b.emit(b.dice.choice(BINARY), *((x, y) if b.chance(0.5) else (y, x)))


def numbered(b: Builder) -> str | None:
    """A pointwise op of a tensor and a number; sometimes several in a row."""
    x = b.floats()
    for _ in range(b.one(1, 1, 2, 3)):
        x = b.emit(b.dice.choice(NUMBERED).replace("N", repr(b.dice.choice(NUMBERS))), x) or x
    return x


def whole(b: Builder) -> str | None:
    """Arithmetic of integers and booleans."""
    x = b.pick(lambda v: not is_float(v))
    if x is None:
        return b.input(tuple(b.size() for _ in range(b.one(1, 2))), b.dice.choice(INTEGERS))
    what = b.dice.random()
    if what < 0.3:
        return b.emit(b.dice.choice(WHOLE_UNARY), x)
    if what < 0.6:
        number = repr(b.dice.choice(WHOLE_NUMBERS if b.chance(0.8) else NUMBERS))
        return b.emit(b.dice.choice(NUMBERED[:7]).replace("N", number), x)
    if what < 0.7:
        return b.emit(f"{{0}} {b.dice.choice(COMPARISONS)} {b.dice.choice(WHOLE_NUMBERS)}", x)
    return b.emit(b.dice.choice(WHOLE_BINARY), x, b.pick(lambda v: not is_float(v)))


def compared(b: Builder) -> str | None:
    """A comparison, and often a choice by it."""
    x = b.floats()
    sign = b.dice.choice(COMPARISONS)
    if b.chance(0.6):
        mask = b.emit(f"{{0}} {sign} {b.dice.choice(NUMBERS)!r}", x)
    else:
        # Two computed numbers are equal by chance, but for whole ones.
        equal = "{0}.round() S {1}.round()" if sign in ("==", "!=") else "{0} S {1}"
        mask = b.emit(equal.replace("S", sign), x, b.like(x))
    texts = ("torch.where({0}, {1} * 2, -{1})", "{1}.masked_fill({0}, 0.7)", "torch.where({0}, {1}, 0.1)")
    texts += ("{1}.masked_fill({0}, float('-inf')).softmax(-1)", "{0}.to({1}.dtype) * {1}")
    return b.emit(b.dice.choice(texts), mask, x) if b.chance(0.7) else mask


def cast(b: Builder) -> str | None:
    """A change of dtype, now and then there and back."""
    x = b.pick()
    kinds = [*FLOATS, *FLOATS, *INTEGERS, "bool"]
    to = f"{{0}}.to(torch.{b.dice.choice(kinds)})"
    y = b.emit(to, x)
    if y is not None and b.chance(0.4):
        return b.emit(f"{{0}}.to(torch.{b.of(x)})", y)
    return y


def reduction(b: Builder) -> str | None:
    """A sum, a mean, an extreme, a norm or a scan."""
    x = b.floats(1) if b.chance(0.85) else b.pick(lambda v: v.dim() >= 1 and v.dtype != torch.bool)
    if x is None:
        return None
    d, keep = b.dim(x), b.one(True, False)
    rank = len(b.shape(x))
    dims = b.one(f"({d},)", f"{d}", str(tuple(b.dice.sample(range(rank), b.one(1, min(2, rank))))))
    texts = (
        *(
            f"{{0}}.sum({dims}, keepdim={keep})",
            f"{{0}}.mean({dims}, keepdim={keep})",
            "{0}.sum()",
            "{0}.mean()",
        ),
        *(f"{{0}}.amax({dims}, keepdim={keep})", f"{{0}}.amin({dims}, keepdim={keep})", f"{{0}}.max({d})[0]"),
        *(f"{{0}}.max({d})[1]", f"{{0}}.min({d}, keepdim={keep})[0]", "{0}.max()", f"{{0}}.argmax({d})"),
        *(f"{{0}}.argmin({d}, keepdim={keep})", f"{{0}}.var({dims}, unbiased=False, keepdim={keep})"),
        *(f"{{0}}.std({dims}, keepdim={keep})", f"torch.var_mean({{0}}, {dims})[1]", f"{{0}}.prod({d})"),
        *(
            f"torch.var_mean({{0}}, {dims}, keepdim=True)[0]",
            f"torch.logsumexp({{0}}, {dims})",
            f"{{0}}.cumsum({d})",
        ),
        *(
            f"{{0}}.norm(dim={d}, keepdim={keep})",
            f"torch.linalg.vector_norm({{0}}, 1, {d})",
            f"{{0}}.softmax({d})",
        ),
        *(
            f"F.log_softmax({{0}}, {d})",
            f"(({{0}} > 0).any({d}))",
            f"({{0}} == {{0}}).all({d})",
            f"{{0}}.sort({d})[0]",
        ),
        *(f"{{0}}.topk(1, {d})[0]", f"F.normalize({{0}}, dim={d})", f"{{0}}.sum({d}, dtype=torch.float64)"),
        *(
            f"{{0}}.softmax({d}, dtype=torch.float32)",
            f"{{0}}.sum({dims}) / {b.size()}",
            f"{{0}}.cumprod({d})",
        ),
        *(
            f"{{0}}.median({d})[0]",
            f"{{0}}.logcumsumexp({d})",
            f"F.softmin({{0}}, {d})",
            f"{{0}}.cummax({d})[0]",
        ),
    )
    return b.emit(b.dice.choice(texts), x)


def indexed(b: Builder) -> str | None:
    """Values looked up by integers."""
    x = b.pick(lambda v: v.dim() >= 1 and min(v.shape) > 0)
    if x is None:
        return None
    d = b.dim(x)
    size = b.shape(x)[d]
    i = b.pick(lambda v: v.dtype == torch.int64)
    if i is None:
        i = b.input((b.size(),), "int64")
    i = b.emit(f"{{0}}.remainder({size})", i)
    texts = (
        f"{{0}}.index_select({d}, {{1}}.reshape(-1))",
        f"torch.take_along_dim({{0}}, {{0}}.argsort({d}), {d})",
    )
    texts += ("F.embedding({1}, {0})", f"torch.gather({{0}}, {d}, {{0}}.argsort({d}))")
    texts += (f"{{0}}.movedim({d}, 0)[{{1}}]",)
    return b.emit(b.dice.choice(texts), x, i)


def changing(b: Builder) -> str | None:
    """An op in place: on a value in between, an input, a view of one, or a buffer."""
    if b.chance(0.25):
        return _buffer(b)
    x = b.pick(lambda v: v.dim() >= 1 and is_float(v) and min(v.shape) > 0)
    if x is None:
        return None
    if b.chance(0.5):
        x = b.emit(b.one("{0}.clone()", "{0} * 1.5", "{0} + 0.0", "{0}.contiguous()"), x)
    if b.chance(0.4):
        x = b.emit(b.one("{0}[..., ::2]", "{0}[0]", "{0}.transpose(0, -1)", "{0}.view(-1)", "{0}[1:]"), x)
    if x is None:
        return None
    y = b.like(x)
    if b.chance(0.2) and y is not None:
        texts = ("{0}.copy_({1})", "{0}.add_({1})", "{0}.mul_({1})", "{0}.sub_({1}, alpha=2)")
        return b.emit(b.dice.choice(texts), x, y, changes=True)
    texts = (
        "{0}.add_(1.0)",
        "{0}.mul_(0.5)",
        "{0}.relu_()",
        "{0}.clamp_(-0.5, 0.5)",
        "{0}.zero_()",
        "{0}.neg_()",
    )
    texts += ("{0}.fill_(0.3)", "{0}.masked_fill_({0} > 0.5, 0.0)", "{0}.div_(3.0)", "{0}.sigmoid_()")
    texts += (
        "{0}.exp_()",
        "{0}.index_fill_(0, torch.tensor([0], device={0}.device), 2.0)",
        "F.relu({0}, inplace=True)",
    )
    return b.emit(b.dice.choice(texts), x, changes=True)


def _buffer(b: Builder) -> str | None:
    x = b.floats(1)
    if x is None:
        return None
    shape = b.shape(x)
    dtype = b.of(x)
    buffer = b.weight(shape[-1:], dtype, buffer=True)
    texts = (
        "{0}.mul_(0.9).add_({1}.detach().reshape(-1, {1}.shape[-1]).mean(0), alpha=0.1)",
        "{0}.copy_({1}.detach().reshape(-1, {1}.shape[-1])[0])",
        "{0}.add_({1}.detach().sum())",
        "{0}.lerp_({1}.detach().reshape(-1, {1}.shape[-1]).amax(0), 0.25)",
    )
    return b.emit(b.dice.choice(texts), buffer, x, changes=True)
