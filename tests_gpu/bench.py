"""Times of single products beside torch's, in one table; ratios are of one run, times are medians."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

SHAPES = [
    (64, 784, 256),
    (256, 256, 512),
    (256, 1024, 512),
    (1024, 784, 2048),
    (512, 4096, 4096),
    (8192, 4096, 4096),
]


def main() -> int:
    """Prints the table."""
    import torch
    from torch.nn import functional as F

    from hypatia import cuda

    if reason := cuda.available():
        print(f"no GPU benchmark: {reason}")
        return 0

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

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("Linear + ReLU, microseconds of kernels (8 calls in a CUDA graph, median of 15)\n")
    print(
        "| M x K -> N | dtype | bare product, torch | linear + relu, torch | tuned bare product "
        "| tuned with bias and ReLU | the same, 32 algorithms | the same, alignment 16 | tuning both, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (m, k, n), dtype in ((shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        w = torch.randn(n, k, device="cuda", dtype=dtype)
        b = torch.randn(n, device="cuda", dtype=dtype)
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        start = time.perf_counter()
        fused = cuda.Product(x, w.T, epilogue="relu_bias", alignment=256)
        fused.tune()
        bare = cuda.Product(x, w.T, alignment=256)
        bare.tune()
        seconds = time.perf_counter() - start
        many = cuda.Product(x, w.T, epilogue="relu_bias", alignment=256, candidates=32, deadline_ms=2000)
        many.tune()
        careful = cuda.Product(x, w.T, epilogue="relu_bias", alignment=16)
        careful.tune()
        row = medians(
            lambda x=x, w=w: x @ w.T,
            lambda x=x, w=w, b=b: F.linear(x, w, b).relu(),
            lambda x=x, w=w, out=out, bare=bare: bare(x, w.T, out),
            *(
                lambda x=x, w=w, b=b, out=out, product=product: product(x, w.T, out, bias=b)
                for product in (fused, many, careful)
            ),
        )
        cells = " | ".join(f"{us:.1f}" for us in row)
        print(f"| {m} x {k} -> {n} | {str(dtype)[6:]} | {cells} | {seconds:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
