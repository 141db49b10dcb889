"""Both passes of a training step as CUDA graphs, which torch records and replays.

What lies between the passes stays in the graphs' memory, so that a second forward pass before the backward
pass of the first runs without the graphs. Gradients are lent: users get the graph's own memory, as long as
they give it back before the next backward pass. Once they did not, gradients are copied out instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _torch
from ..devices import table
from .changes import Counts, note_changes
from .cuda_graph import CopiesOut, CudaGraph

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
GivenTangents = Sequence[torch.Tensor | None]
"""None: a result that nobody differentiates, and the backward pass does not read it."""

Forward = Callable[[list[torch.Tensor]], tuple[Tensors, Tensors, object]]
"""Takes what the graph takes; returns results, what autograd keeps for it, and what it keeps besides."""

Backward = Callable[[Tensors, Any, GivenTangents], Gradients]
"""Takes what was kept, and tangents; returns gradients."""


class _Turn:
    """A forward pass whose values are in the graphs' memory."""

    def __init__(self) -> None:
        self.done = False


class RecordedStep:
    """The passes, recorded for parameters where they are and for inputs like these."""

    def __init__(
        self,
        forward: Forward,
        backward: Backward,
        primals: Sequence[torch.Tensor],
        steady: Sequence[int],
        tangents: GivenTangents,
        changed: Sequence[int] = (),
    ) -> None:
        """``steady`` are the places of the parameters among the primals, ``changed`` of those that a forward
        pass changes, all of them parameters. They are changed here, too."""
        self._changed = changed
        self._plain = (forward, backward)
        self._steady = list(steady)
        self._open = sorted({*range(len(primals))} - {*steady})
        self._addresses = [primals[i].data_ptr() for i in steady]
        self._index = next(t for t in primals if table.of(t.device).records).device.index
        self._stream = _torch.cuda_stream(self._index)
        self._lock = threading.Lock()
        self._turn: Callable[[], _Turn | None] = lambda: None
        self._inputs = [primals[i].clone() for i in self._open]
        self._tangents = [None if t is None else t.clone() for t in tangents]
        given = list(primals)
        for i, own in zip(self._open, self._inputs, strict=True):
            given[i] = own

        def both() -> None:
            _, saved, besides = forward(list(given))
            backward(saved, besides, list(self._tangents))

        counts = Counts([primals[i] for i in changed], [primals[i].clone() for i in changed])
        self._forward = CudaGraph(self._index, lambda: forward(list(given)), warm=counts.before(both))
        self._results, self._saved, self._besides = self._forward.results
        self._record_backward()
        self._copies = CopiesOut(self._results)
        # What a forward pass writes cannot be lent.
        others = {t.untyped_storage()._cdata for t in (*given, *self._saved, *self._results)}
        self._lends = _torch.optional("storage_use_count") is not None and others.isdisjoint(self._storages)
        kept = {t.data_ptr() for t in self._saved}
        self._watched = [i for i, at in zip(steady, self._addresses, strict=True) if at in kept]
        """Parameters that the backward pass reads: autograd notices if they are changed before it."""

    def _record_backward(self) -> None:
        # Memory of its own: a forward pass must not write where gradients are that are still in use.
        self._backward = CudaGraph(
            self._index, lambda: self._plain[1](self._saved, self._besides, list(self._tangents))
        )
        self._gradients = self._backward.results
        storages = [g.untyped_storage()._cdata for g in self._gradients if g is not None]
        self._storages = list(dict.fromkeys(storages))
        self._owners = self._holders()
        self._missing = False
        """Users keep the memory of the gradients: it is theirs now."""

    def _holders(self) -> list[int]:
        """How many hold the memory of each gradient."""
        count = _torch.optional("storage_use_count") or (lambda _: 0)
        return [count(storage) for storage in self._storages]

    def _free(self, args: list[torch.Tensor]) -> bool:
        turn = self._turn()
        return (
            (turn is None or turn.done)
            and _torch.cuda_stream(self._index) == self._stream
            and not _torch.dispatch_mode_count()
            # A checkpoint runs the pass again later, and counts what is kept both times.
            and not _torch.saved_tensors_are_seen()
            and not torch.cuda.is_current_stream_capturing()
            and [args[i].data_ptr() for i in self._steady] == self._addresses
        )

    def forward(self, args: list[torch.Tensor]) -> tuple[Tensors, Tensors, object]:
        """Results, what autograd keeps, and the turn."""
        with self._lock:
            if self._free(args):
                if self._missing:
                    self._record_backward()
                for i, place in zip(self._open, self._inputs, strict=True):
                    place.copy_(args[i])
                self._forward.replay()
                note_changes([args[i] for i in self._changed])
                turn = _Turn()
                self._turn = weakref.ref(turn)
                return self._copies.make(), [args[i] for i in self._watched], turn
        results, saved, besides = self._plain[0](args)
        return results, saved, (besides,)

    def backward(self, saved: Tensors, besides: Any, tangents: GivenTangents) -> Gradients:
        """Gradients, in memory of their own."""
        if not isinstance(besides, _Turn):
            return self._plain[1](saved, besides[0], tangents)
        # A backward pass that keeps its graph may come again.
        besides.done = not _keeps_graph()
        if self._missing or (self._lends and self._holders() != self._owners):
            self._lends, self._missing = False, True
            return self._plain[1](self._saved, self._besides, tangents)
        if any(
            (place is None) != (given is None) for place, given in zip(self._tangents, tangents, strict=True)
        ):
            # Others than those that the step was recorded with.
            return self._plain[1](self._saved, self._besides, tangents)
        for place, given in zip(self._tangents, tangents, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        self._backward.replay()
        if self._lends:
            return [None if g is None else g.detach() for g in self._gradients]
        fresh = [None if g is None else torch.empty_like(g) for g in self._gradients]
        theirs = [g for g in self._gradients if g is not None]
        _torch.foreach_copy([f for f in fresh if f is not None], theirs)
        return fresh


def _keeps_graph() -> bool:
    ask = getattr(_torch.autograd, "_get_current_graph_task_keep_graph", None)
    if ask is None or _torch.current_graph_task() < 0:
        # Unknown, or called by hand.
        return ask is None
    return ask()
