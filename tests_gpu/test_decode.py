"""Decoding with a static cache on a GPU: written in place, recorded where the cache lies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from forms import described, recorded, winning
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.execute import cuda_graph, recorded_plan
from hypatia.frontend.dynamo import collecting

STEPS, ROOM = 8, 16
"""Tokens that are decoded, and places in a cache."""


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Gets an item for each replay of a plan."""
    replays: list[int] = []
    replay = recorded_plan._Recording.__call__

    def noted(*args: Any) -> Any:
        replays.append(1)
        return replay(*args)

    with mock.patch.object(recorded_plan._Recording, "__call__", noted):
        yield replays


class Layer(nn.Module):
    """A layer like Llama's, with a cache of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.last = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        seen = torch.arange(ROOM, device=x.device) <= at
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.last(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Two layers, whose caches are inputs or buffers."""

    def __init__(self, dtype: torch.dtype, *, buffers: bool, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.size = (2, heads, ROOM, width // heads)
        for i in range(4 if buffers else 0):
            self.register_buffer(f"cache{i}", torch.zeros(self.size))
        self.to("cuda", dtype).eval()

    def caches(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(self.size, device="cuda", dtype=dtype) for _ in range(4)]

    def forward(self, x: torch.Tensor, at: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        caches = given or [getattr(self, f"cache{i}") for i in range(4)]
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[2 * i], caches[2 * i + 1])
        return x


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    unit = torch.finfo(theirs.dtype).eps
    apart = (ours.float() - theirs.float()).abs().max().item()
    assert apart <= 64 * unit * max(1.0, theirs.float().abs().max().item()), f"apart by {apart}"


def _decode(call: Any, twin: nn.Module, ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    """Tokens one after the other: results and caches are eager's after each."""
    with torch.no_grad():
        for i in range(STEPS):
            x = torch.randn(2, 1, 64, device="cuda", dtype=dtype)
            at = torch.tensor([i], device="cuda")
            _assert_close(call(x, at, *ours), twin(x, at, *theirs))
            mine = ours or call_buffers(call)
            for a, b in zip(mine, theirs or list(twin.buffers()), strict=True):
                _assert_close(a, b)


def call_buffers(call: Any) -> list[torch.Tensor]:
    """The buffers of what was compiled."""
    return list(getattr(call, "_orig_mod", getattr(call, "model", call)).buffers())


def check_plans() -> str:
    """A plan writes the caches in place. With calls of torch's it is replayed from the third call at their
    addresses on; one without, as in bf16, records itself."""
    done = 0
    for buffers in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            torch.compiler.reset()
            model = Decoder(dtype, buffers=buffers)
            twin = copy.deepcopy(model)
            call = torch.compile(model, backend="hypatia")
            with winning(), collecting() as reports, counted() as replays:
                for turn in range(3):
                    # Each time with caches elsewhere, which begin anew.
                    ours, theirs = ([] if buffers else model.caches(dtype) for _ in range(2))
                    replays.clear()
                    _decode(call, twin, ours, theirs, dtype)
                    least = 0 if dtype == torch.bfloat16 else STEPS - recorded_plan.AFTER
                    assert len(replays) >= least, (buffers, dtype, turn, len(replays))
            assert [r.no_plan for r in reports] == [""], [r.no_plan for r in reports]
            done += 1
    return f"{done} cases"


def check_steps() -> str:
    """No cache is copied: a kernel for each layer writes into both."""
    torch.compiler.reset()
    model = Decoder(torch.bfloat16, buffers=False)
    with torch.no_grad(), winning(), described() as found:
        call = torch.compile(model, backend="hypatia")
        x = torch.randn(2, 1, 64, device="cuda", dtype=torch.bfloat16)
        call(x, torch.tensor([0], device="cuda"), *model.caches(torch.bfloat16))
    (steps,) = found[:1]
    assert sum(s == "pointwise over [2, 4, 1, 16]" for s in steps) == 2, steps
    assert not any("copy" in s for s in steps), steps
    return f"{len(steps)} steps"


def check_graphs() -> str:
    """The same by torch's ops."""
    for buffers in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Decoder(torch.float32, buffers=buffers)
        twin = copy.deepcopy(model)
        call = torch.compile(model, backend="hypatia")
        with recorded(), collecting() as reports:
            for _ in range(3):
                ours, theirs = ([] if buffers else model.caches(torch.float32) for _ in range(2))
                _decode(call, twin, ours, theirs, torch.float32)
        assert [r.kept for r in reports] == ["recording"], [str(r) for r in reports]
    return "2 cases"


def check_direct() -> str:
    """hypatia.compile, with caches that are buffers."""
    for form in (winning, recorded):
        torch.manual_seed(0)
        model = Decoder(torch.float32, buffers=True)
        twin = copy.deepcopy(model)
        with form():
            x, at = torch.randn(2, 1, 64, device="cuda"), torch.tensor([0], device="cuda")
            with torch.no_grad():
                call = hypatia.compile(model, x, at)
            for b in model.buffers():
                assert not b.any(), "compiling changed a cache"
            with torch.no_grad():
                for i in range(STEPS):
                    x, at = torch.randn(2, 1, 64, device="cuda"), torch.tensor([i], device="cuda")
                    _assert_close(call(x, at), twin(x, at))
                    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
                        _assert_close(a, b)
    return f"kept {call.reports[0].kept}"


def check_addresses_in_turns() -> str:
    """Many caches in turns: recordings are bounded, and all is right."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Decoder(torch.float32, buffers=False)
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="hypatia")
    pairs = [(model.caches(torch.float32), model.caches(torch.float32)) for _ in range(20)]
    with winning(), torch.no_grad():
        for i in range(STEPS):
            for ours, theirs in pairs:
                x, at = torch.randn(2, 1, 64, device="cuda"), torch.tensor([i], device="cuda")
                _assert_close(call(x, at, *ours), twin(x, at, *theirs))
    for ours, theirs in pairs:
        for a, b in zip(ours, theirs, strict=True):
            _assert_close(a, b)
    return f"at most {cuda_graph.MOST} recordings"


class Counted(nn.Module):
    """Writes each input to the next place of a cache, and counts them on the device."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(ROOM, width))
        self.register_buffer("end", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).relu()
        self.cache.index_copy_(0, self.end, y)
        self.end.add_(1)
        return torch.softmax(y @ self.cache.t(), -1) @ self.cache + self.layer(y)


def check_caches_filled_to_the_end() -> str:
    """Calls that are tried or recorded never write past the end of a cache: the GPU would be lost."""
    for start in (0, ROOM - 3, ROOM - 1):
        for compiled in (hypatia.compile, lambda m: torch.compile(m, backend="hypatia")):
            torch.manual_seed(0)
            torch.compiler.reset()
            model = Counted().cuda().eval()
            twin = copy.deepcopy(model)
            call = compiled(model)
            with torch.no_grad():
                for _ in range(2):
                    for each in (model, twin):
                        each.end.fill_(start)
                    for _ in range(ROOM - start):
                        x = torch.randn(1, 64, device="cuda")
                        _assert_close(call(x), twin(x))
                        _assert_close(model.cache, twin.cache)
                        assert int(model.end) == int(twin.end)
    return "6 cases"


class Placing(nn.Module):
    """Writes a row into a tensor, at the place that another one says."""

    def __init__(self, dim: int, source: str) -> None:
        super().__init__()
        self.dim, self.source = dim, source

    def forward(
        self, cache: torch.Tensor, other: torch.Tensor, at: torch.Tensor, row: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = row.clone()
        if self.source == "computed":
            made = row.neg() + 1 if row.dtype.is_floating_point else row * 3 + 1
        elif self.source == "turned":
            made = (row.transpose(0, -1).contiguous() * 2).transpose(0, -1)
        elif self.source == "read twice":
            made = row * 2
        cache.index_copy_(self.dim, at, made)
        other.index_copy_(self.dim, at, row)
        read = (cache.float() + other.float()).sum(self.dim)
        return (read, made) if self.source == "read twice" else (read,)


def check_rows_that_are_written_where_a_tensor_says() -> str:
    """By a kernel of ours: dtypes, dimensions, strides, and where the row comes from."""
    torch.manual_seed(0)
    size, count, kernels = (3, 5, 4, 8), 0, 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for dim in range(4):
            for source in ("given", "computed", "turned", "read twice"):
                for lying in (None, (0, 2, 1, 3), (3, 2, 1, 0)):
                    model = Placing(dim, source)
                    row_size = [1 if d == dim else n for d, n in enumerate(size)]
                    row = torch.randint(0, 9, row_size, device="cuda").to(dtype)
                    ours, eagers = [], []
                    for caches in (ours, eagers):
                        for _ in range(2):
                            cache = torch.zeros(size, device="cuda", dtype=dtype)
                            if lying is not None:
                                back = [lying.index(d) for d in range(4)]
                                cache = cache.permute(lying).contiguous().permute(back)
                            caches.append(cache)
                    with torch.no_grad(), winning(), described() as plans:
                        places = [torch.tensor([n], device="cuda") for n in (0, size[dim] - 1, 1)]
                        compiled = hypatia.compile(model, *(c.clone() for c in ours), places[0], row)
                        for place in places:
                            found, expected = compiled(*ours, place, row), model(*eagers, place, row)
                            for a, b in zip((*found, *ours), (*expected, *eagers), strict=True):
                                torch.testing.assert_close(a, b, rtol=0, atol=0)
                            row = row + 1
                            count += 1
                    kernels += bool(plans) and not any("index_copy" in s for steps in plans for s in steps)
    assert kernels > 200, kernels
    return f"{count} calls, {kernels} of 240 plans without torch's kernel"
