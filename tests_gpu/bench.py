"""Times of single products beside torch's; ratios are of one run, times are medians."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import hypatia
from hypatia.devices import cuda
from hypatia.tools import measure

SHAPES = [
    (64, 784, 256),
    (256, 256, 512),
    (256, 1024, 512),
    (1024, 784, 2048),
    (512, 4096, 4096),
    (8192, 4096, 4096),
]

VOCABULARIES = (30522, 50257, 50265)


def medians(*calls: Callable[[], object]) -> list[float]:
    """Microseconds of each, measured in turns: a chip that grows hot slows all of them."""
    graphs = [torch.cuda.CUDAGraph() for _ in calls]
    for graph, call in zip(graphs, calls, strict=True):
        for _ in range(3):
            call()
        with torch.cuda.graph(graph):
            for _ in range(8):
                call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(15):
        for graph, mine in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) * 1e3 / 8)
    return [sorted(mine)[len(mine) // 2] for mine in times]


def tuned(left: torch.Tensor, right: torch.Tensor, epilogue: str = "none", **options: Any) -> cuda.Product:
    """A product by the best algorithm."""
    product = cuda.Product(left, right, epilogue=epilogue, alignment=256, **options)
    product.tune()
    return product


def inference() -> None:
    """Linear + ReLU."""
    print("\nLinear + ReLU\n")
    print(
        "| M x K -> N | dtype | bare product, torch | linear + relu, torch | tuned bare product "
        "| tuned with bias and ReLU | the same of 32 algorithms | tuning both, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (m, k, n), dtype in ((shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        w = torch.randn(n, k, device="cuda", dtype=dtype)
        b = torch.randn(n, device="cuda", dtype=dtype)
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        start = time.perf_counter()
        fused, bare = tuned(x, w.T, "relu_bias"), tuned(x, w.T)
        seconds = time.perf_counter() - start
        many = tuned(x, w.T, "relu_bias", candidates=32, deadline_ms=2000)
        row = medians(
            lambda x=x, w=w: x @ w.T,
            lambda x=x, w=w, b=b: F.linear(x, w, b).relu(),
            lambda x=x, w=w, out=out, bare=bare: bare(x, w.T, out),
            lambda x=x, w=w, out=out, b=b, fused=fused: fused(x, w.T, out, bias=b),
            lambda x=x, w=w, out=out, b=b, many=many: many(x, w.T, out, bias=b),
        )
        cells = " | ".join(f"{us:.1f}" for us in row)
        print(f"| {m} x {k} -> {n} | {str(dtype)[6:]} | {cells} | {seconds:.2f} |", flush=True)


def training() -> None:
    """What the epilogues of a backward pass gain over torch's kernels."""
    print("\nBackward of linear + ReLU in bf16; torch / tuned with the epilogue\n")
    print(
        "| M x K -> N | forward, mask kept | gradient of x, masked, with column sums | gradient of w and b |"
    )
    print("|---|---|---|---|")
    dtype = torch.bfloat16
    for m, k, n in ((256, 512, 512), (512, 2048, 2048), (512, 4096, 4096), (8192, 4096, 4096)):
        x, g = (torch.randn(m, size, device="cuda", dtype=dtype) for size in (k, n))
        w, b = torch.randn(n, k, device="cuda", dtype=dtype), torch.randn(n, device="cuda", dtype=dtype)
        y, dx, dw = torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)
        db, before = torch.empty_like(b), torch.empty(k, device="cuda", dtype=dtype)
        forward = tuned(x, w.T, "relu_aux_bias")
        backward = tuned(g, w, "drelu_sum")
        weights = tuned(g.T, x, "sum_left")
        # The mask that is taken belongs to the layer before, whose result x is.
        mask, bits = x > 0, forward.aux()
        taken = torch.randint(0, 255, (backward.gemm.aux[0],), device="cuda", dtype=torch.uint8)

        def separately(g: torch.Tensor = g, w: torch.Tensor = w, mask: torch.Tensor = mask) -> torch.Tensor:
            return ((g @ w) * mask).sum(0)

        row = medians(
            lambda x=x, w=w, b=b: F.linear(x, w, b).relu(),
            lambda x=x, w=w, y=y, b=b, aux=bits, run=forward: run(x, w.T, y, bias=b, aux=aux),
            separately,
            lambda g=g, w=w, dx=dx, s=before, aux=taken, run=backward: run(g, w, dx, bias=s, aux=aux),
            lambda g=g, x=x: (g.T @ x, g.sum(0)),
            lambda g=g, x=x, dw=dw, db=db, run=weights: run(g.T, x, dw, bias=db),
        )
        cells = " | ".join(
            f"{a:.1f} / {b:.1f} ({a / b:.2f}x)" for a, b in zip(row[::2], row[1::2], strict=True)
        )
        print(f"| {m} x {k} -> {n} | {cells} |", flush=True)


def vocabularies() -> None:
    """Last layers of language models: columns of real vocabularies beside the next multiple of eight."""
    print("\nLast layers, 768 features, bf16: `hypatia.compile` and torch's linear\n")
    print("| rows | columns | ours | columns | ours | ratio | torch | torch |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rows in (512, 4096):
        for columns in VOCABULARIES:
            calls: dict[str, Callable[[], object]] = {}
            with torch.no_grad():
                for count in (columns, -(-columns // 8) * 8):
                    layer = torch.nn.Linear(768, count, bias=False, device="cuda", dtype=torch.bfloat16)
                    x = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)
                    compiled = hypatia.compile(layer)
                    calls[f"ours {count}"] = lambda f=compiled, x=x: f(x)
                    calls[f"torch {count}"] = lambda f=layer, x=x: f(x)
                taken = {n: 1e6 * t for n, t in measure.compare(calls, "cuda", repeats=9).items()}
            odd, torchs, even, torchs_even = taken.values()
            print(
                f"| {rows} | {columns} | {odd:.0f} | {count} | {even:.0f} | {odd / even:.2f} | {torchs:.0f} "
                f"| {torchs_even:.0f} |",
                flush=True,
            )


def main() -> int:
    """Prints the tables; of those that are named, if any are."""
    if reason := cuda.available():
        print(f"no GPU benchmark: {reason}")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("Microseconds of kernels: 8 calls in a CUDA graph, median of 15, in turns.")
    tables = (inference, training, vocabularies)
    for table in tables:
        if not sys.argv[1:] or table.__name__ in sys.argv[1:]:
            table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
