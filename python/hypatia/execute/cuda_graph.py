"""Plans on a GPU that call torch: recorded once as a CUDA graph, with inputs and results of its own.

Plans of own kernels alone are recorded by the runtime, on the caller's addresses. Torch's ops allocate while
they run, so that torch has to record them.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .. import _native, _torch
from ..capture.layout import same_strides

log = logging.getLogger(__name__)

_recording = threading.Lock()

_TRIES = 3
"""How often a recording is begun that another thread ends."""


@functools.cache
def side_stream(index: int) -> torch.cuda.Stream:
    """Where recordings are made, one for all: torch keeps 32 MiB for products on each stream."""
    return torch.cuda.Stream(index)


_T = TypeVar("_T")


class CudaGraph(Generic[_T]):
    """Calls of torch's ops and of plans, recorded as a CUDA graph in memory of its own.

    Other threads go on meanwhile. Torch's own recordings stop them from drawing random numbers, so these are
    made for calls alone that draw some.
    """

    def __init__(
        self, index: int, run: Callable[[], _T], *, warm: Callable[[], object] | None = None
    ) -> None:
        self._index = index
        side = side_stream(index)
        with _recording:
            side.wait_stream(torch.cuda.current_stream(index))
            with torch.cuda.stream(side), torch.no_grad():
                # Kernels are loaded and torch's libraries set up before anything is recorded.
                if warm is not None:
                    warm()
                    warm()
                side.synchronize()
                self._record(side, run)
            torch.cuda.current_stream(index).wait_stream(side)

    def _record(self, side: torch.cuda.Stream, run: Callable[[], _T]) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._record_unnoticed(side, run)
                return
            except RuntimeError as e:
                if any(word in str(e) for word in ("generator", "Offset increment", "Philox")):
                    log.debug("torch records a CUDA graph that draws random numbers: %s", e)
                    self._record_by_torch(side, run)
                    return
                # Another thread that waits for the whole device ends every recording there.
                if not left:
                    raise

    def _record_unnoticed(self, side: torch.cuda.Stream, run: Callable[[], _T]) -> None:
        pool = torch.cuda.graph_pool_handle()
        _torch.begin_allocating_to_pool(self._index, pool)
        try:
            recording, self.results = _native.cuda.record(self._index, side.cuda_stream, run)
        except BaseException:
            _torch.end_allocating_to_pool(self._index, pool)
            _torch.release_pool(self._index, pool)
            raise
        _torch.end_allocating_to_pool(self._index, pool)
        # The memory goes back to torch when nobody can run the recording any more.
        weakref.finalize(self, _torch.release_pool, self._index, pool).atexit = False
        index = self._index
        self.replay: Callable[[], None] = lambda: recording.launch(_torch.cuda_stream(index))

    def _record_by_torch(self, side: torch.cuda.Stream, run: Callable[[], _T]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self.results = run()
        self.replay = graph.replay


class Recorded:
    """A bound plan as a CUDA graph: inputs are copied in, results out."""

    def __init__(self, bound: _native.BoundCudaPlan, index: int, inputs: tuple[torch.Tensor, ...]) -> None:
        self.bound = bound
        self.index = index
        self._lock = threading.Lock()
        self._stream = _torch.cuda_stream(index)
        self._inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in inputs
        ]

        def run() -> tuple[torch.Tensor, ...]:
            results = bound(_torch.cuda_stream(index), *self._inputs)
            if results is None:
                raise RuntimeError(f"the plan does not run: {bound.refusal(*self._inputs)}")
            return results

        self._graph = CudaGraph(index, run, warm=run)

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
            return tuple(r.clone() for r in self._graph.results)

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
