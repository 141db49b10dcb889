"""Paddings, rolls and gathers on a GPU: they are read by what follows, with eager's bits and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from test_depthwise import _steps
from test_plans import _assert_calls_right, _compiled
from torch import nn
from torch.nn import functional as F

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Model(nn.Module):
    """A function as a model."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.f(*inputs)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _assert_same(what: str, f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Calls have eager's bits and strides, and none is torch's."""
    model = Model(f)
    try:
        with torch.no_grad():
            eager = model(*inputs)
            compiled = _compiled(model, *inputs)
            for _ in range(4):
                result = compiled(*inputs)
                assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
                assert result.stride() == eager.stride(), (result.stride(), eager.stride())
                assert torch.equal(_bytes(result), _bytes(eager))
        calls = [name for name in _steps(compiled) if "aten" in name]
        assert not calls, calls
    except Exception as error:
        raise AssertionError(what) from error


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda").to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, device="cuda").to(dtype)


# Sizes, and pads from the last dimension on; some of them crop.
PADS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((7,), (2, 3)),
    ((64,), (0, 8)),
    ((5, 64), (0, 0, 1, 2)),
    ((5, 33), (3, 0, 0, 1)),
    ((5, 33), (-3, 2, 1, -1)),
    ((2, 8, 16, 16), (0, 1, 0, 1)),
    ((3, 5, 7, 9), (1, 2, 3, 0)),
    ((2, 16, 9, 1), (1, 1, 1, 1)),
    ((2, 3, 4, 6), (1, 0, 0, 2, 3, 1, 1, 1)),
    ((2, 8, 9, 9), (-1, -2, -1, 3)),
)


# Sizes, shifts and dimensions.
ROLLS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ((7,), (2,), (0,)),
    ((64,), (-9,), (0,)),
    ((5, 64), (3,), (0,)),
    ((5, 33), (4, -40), (0, 1)),
    ((2, 14, 14, 32), (-3, -3), (1, 2)),
    ((3, 5, 7, 9), (1, 2, 3), (3, 1, 3)),
    ((1, 8, 1, 16), (0, 5), (1, 2)),
)


def check_rolls() -> str:
    """All dtypes and sizes, alone, permuted, and with what follows and what is before."""
    torch.manual_seed(0)
    count = 0
    for dtype, (shape, shifts, dims) in itertools.product((*FLOATS, *WHOLE), ROLLS):
        x, what = _random(shape, dtype), f"{dtype} {shape} {shifts} {dims}"
        rolled = lambda x, shifts=shifts, dims=dims: torch.roll(x, shifts, dims)  # noqa: E731
        _assert_same(what, rolled, x)
        count += 1
        if not dtype.is_floating_point:
            continue
        y = torch.randn_like(x)
        _assert_same(what, lambda x, y, f=rolled: (f(x * 2) + y).relu(), x, y)
        _assert_same(what, lambda x, f=rolled: (f(x).T if x.dim() == 2 else f(x)).exp(), x)
        count += 2
    return f"{count} cases"


PARTS = [
    ((3, 5), (3, 4)),
    ((2, 64, 9, 9), (2, 16, 9, 9), (2, 8, 9, 9)),
    ((2, 10, 7, 8), (2, 3, 7, 8), (2, 20, 7, 8), (2, 1, 7, 8)),
    ((4, 1, 96), (4, 196, 96)),
    ((2, 3, 5), (2, 4, 5), (2, 3, 5), (2, 3, 5), (2, 1, 5), (2, 2, 5)),
]
"""Shapes of parts that differ along the second dimension."""


def check_parts() -> str:
    """Parts of different sizes put together: dtypes, layouts, what follows, repeated and sliced parts."""
    torch.manual_seed(0)
    count = 0
    for dtype, shapes in itertools.product((*FLOATS, *WHOLE), PARTS):
        parts = [_random(shape, dtype) for shape in shapes]
        what = f"{dtype} {shapes}"
        put = lambda *parts: torch.cat(parts, 1)  # noqa: E731
        _assert_same(what, put, *parts)
        # Along the last dimension, which lies side by side, and of what lies otherwise.
        _assert_same(what + " last", lambda *p: torch.cat([x.transpose(1, -1) for x in p], -1), *parts)
        turned = [x.transpose(1, -1).contiguous() for x in parts]
        _assert_same(what + " turned", lambda *p: torch.cat(p, -1), *turned)
        count += 3
        if not dtype.is_floating_point:
            continue
        y = torch.randn_like(put(*parts))
        _assert_same(what + " add", lambda y, *p: (torch.cat([x * 2 for x in p], 1) + y).relu(), y, *parts)
        wide = [torch.cat([x, x], -1) for x in parts]
        _assert_same(what + " sliced", lambda *p: torch.cat([x[..., 1:-2] for x in p], 1).exp(), *wide)
        first = parts[0][:1]
        rest = parts[1:]
        f = lambda x, *p: torch.cat([x.expand(p[0].shape[0], *x.shape[1:]), *p], 1) * 0.5  # noqa: E731
        _assert_same(what + " expanded", f, first, *rest)
        count += 3
        if len(shapes[0]) == 4:
            last = [x.contiguous(memory_format=torch.channels_last) for x in parts]
            _assert_same(what + " channels last", lambda *p: torch.cat(p, 1).relu(), *last)
            count += 1
    return f"{count} cases"


def check_paddings() -> str:
    """All dtypes and sizes, alone and with what follows and what is before."""
    torch.manual_seed(0)
    count = 0
    values = itertools.cycle((0.0, -0.0, 0.7, float("-inf"), -3))
    for dtype, (shape, pads) in itertools.product((*FLOATS, *WHOLE), PADS):
        x = _random(shape, dtype)
        _assert_same(f"{dtype} {shape} {pads}", lambda x, pads=pads: F.pad(x, pads), x)
        count += 1
        if not dtype.is_floating_point:
            continue
        y = F.pad(x, pads) * 0.5
        value = next(values)
        f = lambda x, y, pads=pads, value=value: (F.pad(x * 2, pads, value=value) + y).relu()  # noqa: E731
        _assert_same(f"{dtype} {shape} {pads} {value}", f, x, y)
        count += 1
    return f"{count} cases"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3),
    "sliced": lambda x: x[:, 1:, ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


def check_layouts_of_paddings() -> str:
    """Images with channels last stay so; views are read where they lie."""
    torch.manual_seed(1)
    forms = (torch.contiguous_format, torch.channels_last)
    cases = list(itertools.product(FLOATS, VIEWS, forms))
    for dtype, name, form in cases:
        x = _random((2, 6 if dtype == torch.float16 else 32, 11, 10), dtype).to(memory_format=form)
        view = VIEWS[name]
        f = lambda x, view=view: F.pad(view(x), (0, 1, 2, 1), value=1.5)  # noqa: E731
        _assert_same(f"{dtype} {name} {form}", f, x)
        _assert_same(f"{dtype} {name} {form}, more", lambda x, f=f: (f(x) * 2).abs(), x)
    return f"{2 * len(cases)} cases"


class Same(nn.Module):
    """Convolutions whose padding is not the same on both sides, as TensorFlow has it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.stem = nn.Conv2d(3, 32, 3, stride=2, bias=False)
        self.deep = nn.Conv2d(32, 32, 5, stride=2, groups=32)
        self.last = nn.Conv2d(32, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.stem(F.pad(x, (0, 1, 0, 1), value=self.value)))
        x = F.silu(self.deep(F.pad(x, (1, 2, 2, 1), value=self.value)))
        return self.last(F.pad(x, (2, 0, 0, 1), value=self.value))


def check_convolutions() -> str:
    """Padded images before convolutions, those of each channel by itself among them."""
    cases = list(
        itertools.product(FLOATS[:3], (0.0, 0.5), (torch.contiguous_format, torch.channels_last), (17, 32))
    )
    for dtype, value, form, size in cases:
        torch.manual_seed(2)
        model = Same(value).cuda().to(dtype).eval()
        x = torch.randn(2, 3, size, size + 2, device="cuda").to(dtype).to(memory_format=form)
        compiled = _assert_calls_right(f"{dtype} {value} {form} {size}", model, x)
        names = _steps(compiled)
        assert not any("pad" in name for name in names), names
    return f"{len(cases)} cases"


def _biased(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Scores by distance, as DeBERTa has them."""
    index = i.expand(x.shape[0], *i.shape)
    return torch.gather(x, -1, index) / 4 + torch.gather(y, -1, index).transpose(-1, -2) / 8


GATHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "alone": lambda x, i: torch.gather(x, -1, i),
    "what follows": lambda x, i: torch.gather(x * 2, -1, i).relu() + 0.5,
    "turned": lambda x, i: torch.gather(x, -1, i).transpose(1, 2) * 2,
    "another dimension": lambda x, i: torch.gather(x, 1, i[:, :, : x.shape[2]]) * 2,
    "computed index": lambda x, i: torch.gather(x, -1, (i - 1).abs()) * 2,
}


def check_gathers() -> str:
    """Odd sizes and layouts; indices that are expanded, computed, or of other sizes than the tensor."""
    torch.manual_seed(3)
    count = 0
    for dtype, (rows, size, taken) in itertools.product(FLOATS, ((16, 32, 16), (5, 7, 12), (64, 9, 33))):
        x, y = _random((6, rows, size), dtype), _random((6, rows, size), dtype)
        i = torch.randint(0, size, (6, rows, taken), device="cuda")
        low = i.clamp(max=min(rows, size) - 1)
        for name, f in GATHERS.items():
            for form in ("dense", "turned"):
                turned = x if form == "dense" else x.transpose(1, 2).contiguous().transpose(1, 2)
                _assert_same(f"{dtype} {rows} {size} {taken} {name} {form}", f, turned, low)
                count += 1
        if rows == taken:
            _assert_same(f"{dtype} {rows} {size} biased", _biased, x, y, i[0])
            count += 1
    return f"{count} cases"


class ByDistance(nn.Module):
    """An index that depends on no input, expanded to the batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        index = (places[:, None] - places[None, :] + x.shape[1]).clamp(0, x.shape[2] - 1)
        return _biased(x, y, index)


def check_indices_of_no_input() -> str:
    """What was folded is bound before it is expanded."""
    torch.manual_seed(4)
    model = ByDistance()
    for dtype, rows in itertools.product(FLOATS, (16, 33)):
        x, y = _random((6, rows, 2 * rows), dtype), _random((6, rows, 2 * rows), dtype)
        _assert_same(f"{dtype} {rows}", model, x, y)
    return f"{2 * len(FLOATS)} cases"
