"""Plans on a GPU that call torch: recorded once as a CUDA graph, with inputs and results of its own.

Plans of own kernels alone are recorded by the runtime, on the caller's addresses. Torch's ops allocate while
they run, so that torch has to record them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from .layout import same_strides


@functools.cache
def side_stream(index: int) -> torch.cuda.Stream:
    """Where calls before a recording run, one for all: torch keeps 32 MiB for products on each stream."""
    return torch.cuda.Stream(index)


class Recorded:
    """A bound plan as a CUDA graph: inputs are copied in, results out."""

    def __init__(self, bound: Any, index: int, inputs: tuple[torch.Tensor, ...]) -> None:
        self.bound = bound
        self.index = index
        self._lock = threading.Lock()
        self._stream = torch._C._cuda_getCurrentRawStream(index)
        self._inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
        ]
        self._graph = torch.cuda.CUDAGraph()
        side = side_stream(index)
        side.wait_stream(torch.cuda.current_stream(index))
        with torch.cuda.stream(side), torch.no_grad():
            for kept, given in zip(self._inputs, inputs, strict=True):
                kept.copy_(given)
            # Kernels are loaded and torch's libraries set up before anything is recorded.
            for _ in range(2):
                if bound(side.cuda_stream, *self._inputs) is None:
                    raise RuntimeError(f"the plan does not run: {bound.refusal(*self._inputs)}")
        torch.cuda.current_stream(index).wait_stream(side)
        with torch.cuda.graph(self._graph), torch.no_grad():
            self._results = bound(torch._C._cuda_getCurrentRawStream(index), *self._inputs)

    def __call__(self, stream: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The results; none if the plan is not for these inputs."""
        if stream != self._stream or torch.cuda.is_current_stream_capturing():
            return self.bound(stream, *inputs)
        if not self.bound.current() or len(inputs) != len(self._inputs):
            return None
        for kept, given in zip(self._inputs, inputs, strict=True):
            if (kept.shape, kept.dtype, kept.device) != (given.shape, given.dtype, given.device):
                return None
            if kept.stride() != given.stride() and not same_strides(given, kept):
                return None
        with self._lock, torch.no_grad():
            for kept, given in zip(self._inputs, inputs, strict=True):
                kept.copy_(given)
            self._graph.replay()
            return tuple(r.clone() for r in self._results)

    def current(self) -> bool:
        """Whether the weights are as they were."""
        return self.bound.current()

    def refusal(self, *inputs: torch.Tensor) -> str:
        """Why the plan does not run on these inputs."""
        return self.bound.refusal(*inputs)

    def bytes(self) -> tuple[int, int]:
        """Bytes of the values in between, and of packed weights."""
        return self.bound.bytes()

    def kinds(self) -> list[str]:
        """How each linear layer is computed."""
        return self.bound.kinds()
