"""Plans with calls into torch, recorded as CUDA graphs.

Inputs are copied in and results out, but for large ones: the last steps of a plan, which write those, follow
the recording and write into new memory. What a plan changes is used where the caller has it, so that a
recording is for these addresses; at others the plan runs, until these come again and again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from .. import _native, _torch
from ..capture.layout import same_strides
from ..devices.bound import Recordable, Rest
from .agreement import agree
from .changes import Counts, State, fits
from .cuda_graph import EVICTED, CudaGraph, RecordingCache, Room, bytes_of, copied

log = logging.getLogger(__name__)

AFTER = 3
"""At which call a plan is recorded, at other sizes than the first or at new addresses of what it changes."""

Tensors = tuple[torch.Tensor, ...]
Addresses = tuple[int, ...]

MakeResults = Callable[[Sequence[object], Sequence[object]], Sequence[object]]
"""Takes outputs of a plan and its inputs."""


class Recorded:
    """A bound plan and its recordings, by the addresses of what it changes."""

    def __init__(
        self,
        bound: Recordable,
        device: torch.device,
        inputs: Tensors,
        room: Room,
        changes: Sequence[int] = (),
        results: MakeResults = lambda outputs, _: outputs,
    ) -> None:
        """Its memory counts in the ``room`` of all plans of the graph; the first is recorded at once, unless
        it ``changes`` some of its inputs: a first call is checked on copies of those. ``results`` makes the
        graph's results of what the plan returns: between their elements may be memory that nobody wrote."""
        self.bound = bound
        self._results = results
        self.device = device
        self.index = index = device.index or 0
        self._changes = tuple(changes)
        self._lock = threading.Lock()
        self._stream = _torch.cuda_stream(index)
        self._cache: RecordingCache[_Recording] = RecordingCache(room)
        if room.is_empty() and not changes:
            self._record((), inputs, Counts())

    def __call__(self, stream: int, *inputs: torch.Tensor) -> Tensors | None:
        """The results; none if the plan is not for these inputs."""
        if stream != self._stream or torch.cuda.is_current_stream_capturing():
            return self.bound(stream, *inputs)
        try:
            key = tuple([inputs[i].data_ptr() for i in self._changes]) if self._changes else ()
        except AttributeError:
            # A caller that asks all plans in turn may give None in the place of a tensor.
            return None
        known = self._cache.get(key)
        if known is None:
            return self._run_and_record(key, stream, inputs)
        if not self.bound.current() or not known.accepts(inputs):
            return None
        with self._lock, torch.no_grad():
            return known(stream, inputs)

    def _run_and_record(self, key: Addresses, stream: int, inputs: Tensors) -> Tensors | None:
        """Runs the plan, and records it where it was called so often before."""
        with self._lock:
            seen = self._cache.count(key)
            changed = [inputs[i] for i in self._changes]
            if seen != AFTER or self._cache.evicted > EVICTED or not fits(changed, self.index):
                return self.bound(stream, *inputs)
            before = State(changed, self.device)
            results = self.bound(stream, *inputs)
            if results is None:
                return None
            after = State(changed, self.device)
            # Runs before a recording change what the plan changes, and draw random numbers.
            before.restore()
            recording = self._record(key, inputs, before.counts)
            before.restore()
            if recording is not None and not self._is_right(recording, inputs, results, after):
                log.warning("a recorded plan computes something else than the plan; it is not used")
                self._cache.drop(key)
            after.restore()
            return results

    def _is_right(self, recording: _Recording, inputs: Tensors, expected: Tensors, after: State) -> bool:
        with torch.no_grad():
            found = self._results(recording(self._stream, inputs), inputs)
            pairs = zip(found, self._results(expected, inputs), strict=True)
            tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
        return after.is_now() and all(isinstance(b, torch.Tensor) and agree(a, b) for a, b in tensors)

    def _record(self, key: Addresses, inputs: Tensors, counts: Counts) -> _Recording | None:
        if not self._cache.make_room(least=1):
            return None
        try:
            made = _Recording(self.bound, self.device, inputs, self._changes, counts)
        except (RuntimeError, _native.HypatiaError) as e:
            log.info("the plan is not recorded as a CUDA graph: %s", e)
            return None
        return made if self._cache.put(key, made) else None

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


class _Recording:
    """A plan as a CUDA graph."""

    def __init__(
        self,
        bound: Recordable,
        device: torch.device,
        inputs: Tensors,
        changes: Sequence[int],
        counts: Counts,
    ) -> None:
        index = device.index or 0
        self._kinds = [(t.shape, t.dtype, t.device) for t in inputs]
        self._places = [i for i in range(len(inputs)) if i not in changes]
        self._like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
        # Nothing here keeps the memory of what is changed: its owner gives it at every call.
        given = list(inputs)

        def run() -> Rest:
            rest = bound.begin(_torch.cuda_stream(index), *given)
            if rest is None:
                raise RuntimeError(f"the plan does not run: {bound.refusal(*given)}")
            return rest

        def warm() -> None:
            run()(_torch.cuda_stream(index))

        with torch.inference_mode(False), torch.no_grad():
            for i in self._places:
                given[i] = copied(inputs[i])
            self._inputs = [given[i] for i in self._places]
            before = torch.cuda.memory_reserved(index)
            self._graph = CudaGraph(index, run, warm=counts.before(warm))
        self._early = self._graph.results.early
        self._has_late = None in self._early
        self.bytes = bytes_of(self._inputs)
        self.bytes += max(0, torch.cuda.memory_reserved(index) - before)

    def accepts(self, inputs: Tensors) -> bool:
        """Whether these inputs are like those that it was recorded for."""
        try:
            kinds = [(t.shape, t.dtype, t.device) for t in inputs]
        except AttributeError:
            return False
        return kinds == self._kinds and all(
            like.stride() == given.stride() or same_strides(given, like)
            for like, given in zip(self._like, inputs, strict=True)
        )

    def __call__(self, stream: int, inputs: Tensors) -> Tensors:
        """The results, in memory of their own; the stream is the current one."""
        for kept, i in zip(self._inputs, self._places, strict=True):
            kept.copy_(inputs[i])
        self._graph.replay()
        late = iter(self._graph.results(stream) if self._has_late else ())
        return tuple(next(late) if r is None else r.clone() for r in self._early)
