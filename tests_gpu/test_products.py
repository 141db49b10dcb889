"""Matrix products with epilogues beside float64, with eager's own error as the measure."""

from __future__ import annotations

import collections
import copy
import itertools
from typing import Any

import torch
from test_plans import _compiled
from torch import nn
from torch.nn import functional as F

from hypatia import _native
from hypatia.devices import cuda

DTYPES = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SIZES = [(64, 256, 784), (33, 65, 17), (1, 100, 256), (130, 1000, 72)]
LAYOUTS = [(False, True), (False, False), (True, False)]


def _matrix(rows: int, columns: int, transposed: bool, dtype: torch.dtype, *batch: int) -> torch.Tensor:
    shape = (*batch, columns, rows) if transposed else (*batch, rows, columns)
    made = torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)
    return made.mT if transposed else made


def _bits(mask: torch.Tensor, ld: int) -> torch.Tensor:
    padded = torch.zeros(mask.shape[0], ld, dtype=torch.uint8, device="cuda")
    padded[:, : mask.shape[1]] = mask
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device="cuda")
    return (padded.view(mask.shape[0], ld // 8, 8) * weights).sum(-1, dtype=torch.uint8).contiguous()


def _slope(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)
    return slope


def _epilogue(
    name: str, v: torch.Tensor, left: torch.Tensor, right: torch.Tensor, extra: dict[str, Any]
) -> Any:
    """The result, the sums, and what is kept, in the arithmetic of the operands."""
    if "bias" in name:
        v = v + extra["bias"].to(v.dtype)
    sums = kept = None
    if name in ("drelu", "drelu_sum"):
        v = torch.where(extra["mask"], v, torch.zeros_like(v))
        sums = v.sum(0) if name == "drelu_sum" else None
    elif name == "dgelu_sum":
        v = v * _slope(extra["before"].to(v.dtype))
        sums = v.sum(0)
    elif name == "sum_left":
        sums = left.sum(1)
    elif name == "sum_right":
        sums = right.sum(0)
    elif name == "gelu_aux_bias":
        kept = v
    elif name == "relu_aux_bias":
        kept = v > 0
    if name.startswith("relu"):
        v = v.relu()
    if name.startswith("gelu"):
        v = F.gelu(v, approximate="tanh")
    return v, sums, kept


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def _unit(kind: str, name: str) -> float:
    """The rounding that is allowed for; the library's gelu is an approximation that f32 shows."""
    return 2.0**-18 if kind == "float32" and "gelu" in name else DTYPES[kind]


def _judge(what: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, unit: float) -> None:
    ours, theirs = _error(got, exact), _error(eager, exact)
    assert ours <= 2 * theirs + 4 * unit, f"{what}: error {ours:.2e}, eager's {theirs:.2e}"


def _case(
    name: str, kind: str, layout: tuple[bool, bool], size: tuple[int, int, int], residual: bool
) -> None:
    torch.manual_seed(0)
    m, n, k = size
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    left, right = _matrix(m, k, layout[0], dtype), _matrix(k, n, layout[1], dtype)
    added = torch.randn(m, n, device="cuda").to(dtype)
    # Random bits and values from a forward pass, which is not run here.
    extra = {
        "bias": torch.randn(n, device="cuda").to(dtype),
        "mask": torch.rand(m, n, device="cuda") > 0.5,
        "before": torch.randn(m, n, device="cuda").to(dtype),
    }
    product = cuda.Product(left, right, epilogue=name, tf32=kind == "tf32", residual=residual, candidates=3)
    product.tune()
    out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
    aux, ld = product.aux(), product.gemm.aux[1]
    bias = extra["bias"]
    if name in ("drelu", "drelu_sum"):
        aux = _bits(extra["mask"], ld)
    if name == "dgelu_sum":
        aux = torch.zeros(m, ld, device="cuda", dtype=dtype)
        aux[:, :n] = extra["before"]
    if "sum" in name:
        bias = torch.full((m if name == "sum_left" else n,), torch.nan, device="cuda", dtype=dtype)
    product(left, right, out, residual=added if residual else None, bias=bias, aux=aux)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    results = []
    for to in (dtype, torch.float64):
        wide = [t.to(to) for t in (left, right, added)]
        v = wide[0] @ wide[1]
        results.append(_epilogue(name, v + wide[2] if residual else v, wide[0], wide[1], extra))
    torch.backends.cuda.matmul.allow_tf32 = False
    (eager, eager_sums, _), (exact, exact_sums, exact_kept) = results
    what = f"{product.gemm.key}"
    _judge(what, out, eager, exact, _unit(kind, name))
    if exact_sums is not None:
        _judge(f"{what}, sums", bias, eager_sums, exact_sums, _unit(kind, name))
    if name == "gelu_aux_bias":
        kept = aux.view(dtype).view(m, ld)[:, :n]
        assert _error(kept, exact_kept) <= 8 * DTYPES[kind], f"{what}, kept"
    if name == "relu_aux_bias":
        places = torch.arange(8, device="cuda", dtype=torch.uint8)
        kept = (aux.view(m, ld // 8, 1) >> places & 1).view(m, ld)[:, :n].bool()
        # Where the exact value is nearly zero, rounding decides.
        share = float((kept != exact_kept).float().mean())
        assert share < 1e-2, f"{what}, {share:.1%} of the mask differ"


def _aligned(kind: str, layout: tuple[bool, bool], size: tuple[int, int, int]) -> bool:
    """Whether rows begin at multiples of 16 bytes; else 16-bit sums are rounded before the bias is added."""
    m, n, k = size
    rows = (m if layout[0] else k, k if layout[1] else n, n)
    return all(row * (4 if "32" in kind else 2) % 16 == 0 for row in rows)


def check_every_epilogue() -> str:
    """Every epilogue, type, layout and size; what the library refuses is counted and named."""
    done, refused, wrong = 0, [], []
    for name, kind, layout, size in itertools.product(_native.cuda.epilogues, DTYPES, LAYOUTS, SIZES):
        try:
            _case(name, kind, layout, size, residual=False)
            done += 1
        except AssertionError as e:
            wrong.append(str(e))
        except _native.HypatiaError as e:
            rejected = "is right" in str(e) and not _aligned(kind, layout, size)
            if rejected or "has no algorithm" in str(e):
                refused.append(f"{name} {kind}")
            else:
                wrong.append(str(e))
    counts = ", ".join(f"{count} {what}" for what, count in sorted(collections.Counter(refused).items()))
    assert not wrong, "\n".join(wrong)
    assert done > 450, counts
    return f"{done} right; cuBLASLt has no algorithm, or none that is right, for {len(refused)}: {counts}"


def check_residuals() -> str:
    """A residual with and without bias and activation."""
    done = 0
    for name, kind in itertools.product(("none", "bias", "relu_bias", "gelu_bias"), DTYPES):
        _case(name, kind, (False, True), (64, 256, 784), residual=True)
        done += 1
    return f"{done} right"


def check_odd_columns() -> str:
    """Rows that are no multiple of 16 bytes, of sequences, with a bias and without; parts have fewer rows."""
    kinds: collections.Counter[str] = collections.Counter()
    columns, rows = (1030, 2047, 4099, 30522, 30527), ((2, 256), (3, 171), (512,))
    for dtype, n, shape, bias in itertools.product(
        (torch.bfloat16, torch.float16), columns, rows, (True, False)
    ):
        torch.manual_seed(0)
        model = nn.Linear(512, n, bias=bias).cuda().to(dtype).eval()
        x = torch.randn(*shape, 512, device="cuda").to(dtype)
        compiled = _compiled(model, x)
        kinds.update(compiled._last.native.__self__.binding.kinds)
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(x.double())
            for _ in range(3):
                out = compiled(x)
                assert out.is_contiguous()
                unit = DTYPES[str(dtype).removeprefix("torch.")]
                _judge(f"{n} columns, {shape}, {dtype}, bias {bias}", out, model(x), exact, unit)
                worst = (out.double() - exact).abs().max() / exact.abs().max()
                assert worst < 4 * unit, f"{n} columns, {shape}, {dtype}, bias {bias}: {worst:.1e}"
    # Which of them was used, the fastest one, is only said.
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def check_unaligned_rows() -> str:
    """The kernel for rows that begin anywhere: sizes around those of its tiles, and of its sums."""
    kinds: collections.Counter[str] = collections.Counter()
    sizes = (
        (512, 768, 50257),
        (4096, 768, 30522),
        (1000, 1032, 8193),
        (1536, 512, 2047),
        (385, 1064, 4099),
        (2047, 264, 1023),
        (512, 2056, 257),
        (511, 520, 30525),
    )
    for dtype, (rows, features, n), bias in itertools.product(
        (torch.bfloat16, torch.float16), sizes, (True, False)
    ):
        torch.manual_seed(0)
        what = f"{rows} x {features} -> {n}, {dtype}, bias {bias}"
        model = nn.Linear(features, n, bias=bias).cuda().to(dtype).eval()
        x = torch.randn(rows, features, device="cuda").to(dtype)
        compiled = _compiled(model, x)
        kinds.update(compiled._last.native.__self__.binding.kinds)
        with torch.no_grad():
            out, eager = compiled(x), model(x)
            weight, unit = model.weight.double(), DTYPES[str(dtype).removeprefix("torch.")]
            for at in range(0, rows, 512):
                exact = F.linear(x[at : at + 512].double(), weight, model.bias.double() if bias else None)
                _judge(what, out[at : at + 512], eager[at : at + 512], exact, unit)
                worst = (out[at : at + 512].double() - exact).abs().max() / exact.abs().max()
                assert worst < 4 * unit, f"{what}: {worst:.1e}"
            # The memory around a result is its neighbours', and every call gives the same.
            for _ in range(300):
                assert torch.equal(compiled(x), out), what
    assert kinds["unaligned"] >= 20, kinds
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def check_batches() -> str:
    """Several matrices at a time, in all layouts."""
    done = 0
    for kind, layout in itertools.product(("float32", "bfloat16", "float16"), LAYOUTS):
        dtype = getattr(torch, kind)
        left, right = _matrix(40, 64, layout[0], dtype, 6), _matrix(64, 24, layout[1], dtype, 6)
        product = cuda.Product(left, right)
        product.tune()
        out = torch.full((6, 40, 24), torch.nan, device="cuda", dtype=dtype)
        product(left, right, out)
        _judge(product.gemm.key, out, left @ right, left.double() @ right.double(), DTYPES[kind])
        done += 1
    return f"{done} right"


def check_wide_results() -> str:
    """Products of 16-bit factors with a result of f32."""
    for kind in ("bfloat16", "float16"):
        dtype = getattr(torch, kind)
        left, right = _matrix(64, 512, False, dtype), _matrix(512, 128, True, dtype)
        product = cuda.Product(left, right, output="float32")
        product.tune()
        out = torch.empty(64, 128, device="cuda")
        product(left, right, out)
        assert _error(out, left.double() @ right.double()) < 1e-6
    return "2 right"


def check_wrong_algorithms_are_rejected() -> str:
    """An algorithm was seen to be wrong at this size; all verdicts are checked."""
    m, n, k = 8192, 4096, 4096
    mask = torch.rand(m, n, device="cuda") > 0.5
    tried = wrong = 0
    for layout in ((False, False), (False, True)):
        left, right = _matrix(m, k, layout[0], torch.float32), _matrix(k, n, layout[1], torch.float32)
        exact = torch.where(mask, left.double() @ right.double(), 0.0)
        out, sums = torch.empty(m, n, device="cuda"), torch.empty(n, device="cuda")
        for alignment in (16, 256):
            options = {"candidates": 64, "deadline_ms": 20_000, "alignment": alignment}
            product = cuda.Product(left, right, epilogue="drelu_sum", **options)
            aux = _bits(mask, product.gemm.aux[1])
            for trial in product.tune()["trials"]:
                verdict = trial["verdict"]
                if "Failed" in verdict:
                    continue
                tuned = {
                    "algorithm": trial["algorithm"],
                    "workspace": trial["workspace"],
                    "microseconds": 0.0,
                }
                product.use(tuned)
                out.fill_(torch.nan)
                product(left, right, out, bias=sums, aux=aux)
                error = max(_error(out, exact), _error(sums, exact.sum(0)))
                assert ("Right" in verdict) == (error < 1e-4), f"{verdict}, but the error is {error:.1e}"
                wrong += "Wrong" in verdict
                tried += 1
    return f"{tried} algorithms, {wrong} of them wrong and rejected"


def check_streams_and_capture() -> str:
    """On a stream of the user's, and inside the user's own graph."""
    left, right = _matrix(64, 784, False, torch.bfloat16), _matrix(784, 256, True, torch.bfloat16)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
    product = cuda.Product(left, right, epilogue="relu_bias")
    product.tune()
    product(left, right, out, bias=bias)
    expected = out.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.fill_(torch.nan)
        product(left, right, out, bias=bias)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(left, right, out, bias=bias)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    return ""


def check_mistakes() -> str:
    """What cannot be is an exception, not a crash."""
    left, right = _matrix(8, 8, False, torch.float32), _matrix(8, 8, True, torch.float32)
    product = cuda.Product(left, right)
    for call in (
        lambda: product.gemm.workspace,
        lambda: product.gemm.tune(0, 0, 16),
        lambda: cuda.Product(left.double(), right.double()).tune(),
        lambda: cuda.Product(left, right, epilogue="erf"),
        lambda: _native.cuda.Gemm(99, "float32", [8, 8, 8]).tune(0, 0, 1 << 30),
    ):
        try:
            call()
        except (ValueError, RuntimeError):
            continue
        raise AssertionError("no exception")
    return ""
