"""Plans on a GPU: right beside float64, on any stream, inside a user's recording, after errors."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from typing import Any
from unittest import mock

import torch
from forms import winning
from torch import nn
from torch.nn import functional as F

import hypatia
from hypatia.compiler import pipeline
from hypatia.execute import native
from hypatia.frontend.dynamo import collecting
from hypatia.tools.workloads import NINE_MLPS, WORKLOADS


def _compiled(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    """The model by its plan, whether that is faster or not; a failing plan is an error, and so is all that
    the compiler would pass over."""

    def failed(self: native.NativeGraph, error: Exception, args: Any) -> Any:
        raise error

    with (
        winning("plan"),
        mock.patch.object(pipeline, "raise_errors", True),
        mock.patch.object(native.NativeGraph, "_failed", failed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", hypatia.VerificationWarning)
        compiled = hypatia.compile(model, *inputs, **options)
    last = compiled._last
    assert last.native is not None, f"there is no plan: {_said(last.report)}"
    assert last.native.__self__.native, f"the plan failed: {_said(last.report)}"
    return compiled


def _said(report: Any) -> str:
    """Why a model has no plan."""
    return "the model was not compiled" if report is None else f"{report.no_plan or report.kept}\n{report}"


def _assert_right(result: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> None:
    """As close to float64 as eager is: at most twice its error, plus a few roundings."""
    with torch.no_grad():
        eager = model(*inputs)
        wide = copy.deepcopy(model).double()(*[x.double() if x.is_floating_point() else x for x in inputs])
    assert (result.shape, result.dtype, result.stride()) == (eager.shape, eager.dtype, eager.stride())
    if not eager.numel():
        return
    scale, eps = wide.abs().max().item(), torch.finfo(eager.dtype).eps
    allowed = 2 * (eager.double() - wide).abs().max().item() + 4 * eps * scale
    error = (result.double() - wide).abs().max().item()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def _assert_calls_right(what: str, model: nn.Module, *inputs: torch.Tensor) -> Any:
    """The model by its plan, whose first calls are right; an error says of what it is."""
    try:
        compiled = _compiled(model, *inputs)
        with torch.no_grad():
            for _ in range(4):
                _assert_right(compiled(*inputs), model, *inputs)
    except Exception as error:
        raise AssertionError(what) from error
    return compiled


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, as they are usually written."""
    left, right = x.chunk(2, -1)
    return x * x.cos() + torch.cat([-right, left], -1) * x.sin()


class Layers(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Any, width: int = 48) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, 16)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


BETWEEN: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "residual": lambda x: x + F.relu(x) * 0.5,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (48,)),
    "rms_norm": lambda x: F.rms_norm(x, (48,), eps=1e-6),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "permuted": lambda x: x.T.contiguous().T.exp().clamp(max=3.0),
    "rotated": lambda x: _rotated(x.view(-1, 4, 3, 16).transpose(1, 2)).transpose(1, 2).reshape(-1, 48),
    "put together": lambda x: torch.cat([x[:, 24:].exp(), -x[:, :24]], -1) * 2 + x,
    "one row for all": lambda x: x[:1].exp().expand(8, 48),
    "softmax over rows": lambda x: x.softmax(0),
    "rotated attention": lambda x: (
        F.scaled_dot_product_attention(
            *[_rotated(x.view(-1, 4, 3, 16).transpose(1, 2))] * 2, x.view(-1, 4, 3, 16).transpose(1, 2)
        )
        .transpose(1, 2)
        .reshape(-1, 48)
    ),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.view(-1, 4, 3, 16).transpose(1, 2)] * 3)
        .transpose(1, 2)
        .reshape(-1, 48)
    ),
}


def check_layers() -> str:
    """Layers with something between them, in three dtypes."""
    for name, between in BETWEEN.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            model, x = Layers(between).cuda().to(dtype).eval(), torch.randn(8, 32, device="cuda").to(dtype)
            _assert_calls_right(f"{name} in {dtype}", model, x)
    return f"{3 * len(BETWEEN)} cases"


def check_workloads() -> str:
    """The nine MLPs in three dtypes, and transformers in two."""
    shapes = [(s.workload(), d) for s in NINE_MLPS for d in (torch.float32, torch.bfloat16, torch.float16)]
    known = WORKLOADS.values() if isinstance(WORKLOADS, dict) else WORKLOADS
    names = ("bert-base", "gpt2", "llama-decode", "lora")
    shapes += [(w, d) for w in known if w.name in names for d in (torch.float32, torch.bfloat16)]
    for workload, dtype in shapes:
        model, inputs = workload.build(dtype, "cuda")
        compiled = _assert_calls_right(f"{workload.name} in {dtype}", model, *inputs)
        assert all(r.check.status == "passed" for r in compiled.reports), workload.name
        del model, compiled
        torch.cuda.empty_cache()
    return f"{len(shapes)} cases"


def check_products_that_are_refused() -> str:
    """What the library does not do as one is done in parts, and by torch where it does none of it."""
    for dtype in (torch.bfloat16, torch.float16):
        for sizes in ((33, 35, 9), (31, 64, 1), (64, 7, 5)):
            torch.manual_seed(0)
            into, out, rows = sizes
            model = nn.Sequential(nn.Linear(into, out), nn.GELU("tanh"), nn.Linear(out, 24))
            model, x = model.cuda().to(dtype).eval(), torch.randn(rows, into, device="cuda").to(dtype)
            compiled = _compiled(model, x)
            with torch.no_grad():
                for _ in range(4):
                    _assert_right(compiled(x), model, x)
    return "6 cases"


def check_streams() -> str:
    """Calls on several streams and from several threads do not disturb each other."""
    model = Layers(F.relu, 512).cuda().eval()
    inputs = [torch.randn(64, 32, device="cuda") for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    compiled = _compiled(model, inputs[0])
    wrong = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(200):
                result = compiled(inputs[i])
                if not torch.allclose(result, expected[i], rtol=1e-4, atol=1e-5):
                    wrong.append(i)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    return "8 threads, 8 streams"


class OddlyPlaced(nn.Module):
    """Queries, keys and values that a merged product puts at places which attention cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.qkv = nn.Linear(8, 1, bias=False), nn.Linear(8, 48, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A row of four heads, and a gate."""
        parts = [p.reshape(1, 1, 4, 4).transpose(1, 2) for p in self.qkv(x).split(16, -1)]
        return F.scaled_dot_product_attention(*parts, is_causal=True), self.gate(x)


def check_attention_at_odd_places() -> None:
    """Rows that begin between multiples of 16 bytes are copied before torch's kernels read them."""
    model, x = OddlyPlaced().cuda().eval(), torch.randn(1, 1, 8, device="cuda")
    compiled = _compiled(model, x)
    with torch.no_grad():
        for ours, theirs in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs)


class Relative(nn.Module):
    """Self-attention with a bias that is an embedding of relative positions, as BEiT has it."""

    def __init__(self, tokens: int, heads: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(heads * width, 3 * heads * width)
        self.table = nn.Parameter(torch.randn(2 * tokens - 1, heads))
        places = torch.arange(tokens)
        self.register_buffer("places", (places[:, None] - places + tokens - 1).view(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The bias is made at every call; it lies as attention reads it only once it was copied."""
        b, n, d = x.shape
        bias = self.table[self.places].view(n, n, -1).permute(2, 0, 1).contiguous()
        q, k, v = self.project(x).view(b, n, 3, len(bias), -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return out.transpose(1, 2).reshape(b, n, d)


def check_biases_of_relative_positions() -> str:
    """A folded bias of an odd number of keys lies as torch's kernels need it, by both entries."""
    cases = [*itertools.product((19, 197), (16, 64), (torch.bfloat16, torch.float16, torch.float32))]
    for tokens, width, dtype in cases:
        torch.manual_seed(0)
        model = Relative(tokens, 4, width).cuda().to(dtype).eval()
        x = torch.randn(2, tokens, 4 * width, device="cuda").to(dtype)
        what = f"{tokens} tokens, heads of {width}, {dtype}"
        _assert_calls_right(what, model, x)
        torch._dynamo.reset()
        with torch.no_grad(), winning("plan"), collecting() as reports:
            through = torch.compile(model, backend="hypatia")
            try:
                for _ in range(4):
                    _assert_right(through(x), model, x)
            except Exception as error:
                raise AssertionError(f"{what}, by torch.compile") from error
        assert [r.no_plan for r in reports] == [""], (what, *reports)
    return f"{2 * len(cases)} cases"


class Masked(nn.Module):
    """Self-attention with a mask that is made at every call, as transformers make theirs when traced."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.later = later
        self.project = nn.Linear(256, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four heads."""
        b, n, d = x.shape
        places = torch.arange(n, device=x.device)
        mask = places[None, None, :, None] >= (places[None, None, None, :] if self.later else 0)
        q, k, v = (t.view(b, n, 4, 64).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(b, 1, n, n))
        return out.transpose(1, 2).reshape(b, n, d)


def check_constant_masks() -> str:
    """A mask that says nothing is left out, by both entries, and what attention returns lies as before."""
    told: dict[str, None] = {}
    for later, dtype, n in itertools.product((False, True), (torch.bfloat16, torch.float32), (64, 61)):
        torch.manual_seed(0)
        model = Masked(later).cuda().to(dtype).eval()
        x = torch.randn(2, n, 256, device="cuda").to(dtype)
        compiled = _compiled(model, x)
        torch._dynamo.reset()
        with torch.no_grad(), collecting() as reports:
            through = torch.compile(model, backend="hypatia")
            for call in (compiled, through):
                for _ in range(3):
                    _assert_right(call(x), model, x)
                    assert call(x).stride() == model(x).stride()
        for report in (*compiled.reports, *reports):
            assert report.masks, report
            told.update(dict.fromkeys(report.masks))
    return "; ".join(told)


def check_recording_of_the_users() -> str:
    """A plan can be part of a CUDA graph that the user records, with or without calls into torch."""
    for between in (F.relu, BETWEEN["attention"]):
        model, x = Layers(between).cuda().eval(), torch.randn(8, 32, device="cuda")
        compiled = _compiled(model, x)
        with torch.no_grad():
            compiled(x)
            kept, graph = x.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = compiled(kept)
            for _ in range(3):
                kept.copy_(torch.randn_like(kept))
                compiled(torch.randn_like(kept))
                graph.replay()
                _assert_right(result, model, kept)
    return None


def check_changes() -> None:
    """Weights that change, other batch sizes, and inputs that the plan was not made for."""
    model, x = Layers(F.relu).cuda().eval(), torch.randn(8, 32, device="cuda")
    compiled = _compiled(model, x)
    with torch.no_grad():
        model.first.weight.mul_(1.5)
        _assert_right(compiled(x), model, x)
        for rows in (9, 10, 300, 1, 0, 8):
            other = torch.randn(rows, 32, device="cuda")
            _assert_right(compiled(other), model, other)
        strided = torch.randn(8, 64, device="cuda")[:, ::2]
        _assert_right(compiled(strided), model, strided)
        model.half()
        _assert_right(compiled(x.half()), model, x.half())


def check_out_of_memory() -> None:
    """torch's own error, and everything is usable afterwards."""
    model, x = Layers(F.relu, 4096).cuda().eval(), torch.randn(8192, 32, device="cuda")
    compiled = _compiled(model, x)
    with torch.no_grad():
        compiled(x)
        free, _ = torch.cuda.mem_get_info()
        hog = [torch.empty(max(free - (64 << 20), 1), dtype=torch.uint8, device="cuda")]
        large = torch.empty(0, device="cuda")
        try:
            large = torch.randn(1 << 20, 32, device="cuda")
            compiled(large)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("it had enough memory")
        finally:
            hog.clear()
            del large
            torch.cuda.empty_cache()
        _assert_right(compiled(x), model, x)


def check_through_torch_compile() -> str:
    """The same plans behind ``torch.compile``."""
    torch._dynamo.register_backend(hypatia.frontend.dynamo.hypatia, name="hypatia_plans")
    for dtype in (torch.float32, torch.bfloat16):
        model, x = Layers(F.gelu).cuda().to(dtype).eval(), torch.randn(8, 32, device="cuda").to(dtype)
        compiled = torch.compile(model, backend="hypatia_plans")
        with winning("plan"), torch.no_grad():
            for _ in range(3):
                _assert_right(compiled(x), model, x)
    return None


def check_leaks() -> str:
    """Ten thousand calls leave no memory behind."""
    model, x = Layers(F.relu).cuda().eval(), torch.randn(8, 32, device="cuda")
    compiled = _compiled(model, x)
    with torch.no_grad():
        for _ in range(100):
            compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(10_000):
            compiled(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    return f"{before >> 10} KiB before and after"
