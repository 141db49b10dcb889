"""Graphs that run by torch's ops, recorded as CUDA graphs: one launch instead of one for each op.

A recording is for one kind of arguments: sizes, strides, dtypes, and addresses of weights and of what the
graph changes. Other arguments are copied in, results are copied out, so that nobody's memory is written to
later.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch
from .._torch import pytree
from ..capture.op_facts import changed_inputs, changes_inputs, draws_at, is_torchs, waits_for_values
from ..capture.records import module_of, path_of, value_of
from ..kernels import FusedCall
from .agreement import agree
from .changes import State, fits, note_changes
from .cuda_graph import (
    EVICTED,
    CopiesOut,
    CudaGraph,
    RecordingCache,
    Room,
    bytes_of,
    copied,
    is_recordable_here,
)
from .folding import FoldedWeights

log = logging.getLogger(__name__)

SEEN = 3
"""A kind of arguments is recorded when it comes so many times."""

Run = Callable[[list[object]], object]
"""Runs a graph on a list of arguments, which it may empty."""


class Recordings:
    """The recordings of a graph, by kinds of arguments. Where there is none, the graph runs."""

    def __init__(
        self, gm: fx.GraphModule, run: Run, device: torch.device, weights: Collection[int] = ()
    ) -> None:
        """``weights`` are the arguments that stay where they are."""
        self._run = run
        self._device = device
        self._index = device.index or 0
        placeholders = gm.graph.find_nodes(op="placeholder")
        position = {n: i for i, n in enumerate(placeholders)}
        changed = changed_inputs(gm)
        self._changed = [position[n] for n in changed if n in position]
        fixed = {*weights, *self._changed}
        self._pinned = [*sorted(weights), *self._changed]
        """Arguments that lie where they lie when they are recorded."""
        self._others = [i for i in range(len(placeholders)) if i not in fixed]
        attributes = gm.graph.find_nodes(op="get_attr")
        self._attributes = [operator.attrgetter(path_of(n))(gm) for n in attributes]
        held = dict(zip(attributes, self._attributes, strict=True))
        self._changed_parts = [held[n] for n in changed if n in held]
        self._folded = [
            (module_of(n), [position.get(a, held.get(a)) for a in n.args])
            for n in gm.graph.find_nodes(op="call_module")
            if isinstance(module_of(n), FoldedWeights)
        ]
        self._cache: RecordingCache[Recording] = RecordingCache(Room(self._index))
        self._lock = threading.Lock()

    def __call__(self, args: list[object]) -> object:
        """The results of the graph."""
        results = self.direct(args)
        return self._run(args) if results is None else results

    def direct(self, args: Sequence[Any]) -> list[object] | None:
        """The results of a recording; none if the graph is to run."""
        if not is_recordable_here(self._index):
            return None
        key = self._key(args)
        if key is None:
            return None
        with self._lock:
            known = self._cache.get(key) or self._made(key, args)
            if known is None:
                return None
            if not self._is_current(known, args):
                self._cache.drop(key)
                return None
            self._cache.use(key)
            results = known(args)
        note_changes([*(args[i] for i in self._changed), *self._changed_parts])
        return results

    def try_on(self, args: Sequence[object]) -> Callable[[], object] | None:
        """Records for these arguments at once; a call of that, if it computes what the graph does."""
        key = self._key(args)
        if key is None or not is_recordable_here(self._index):
            return None
        self._cache.count(key, SEEN)
        results = self.direct(args)
        return None if results is None else lambda: self.direct(args)

    def _key(self, args: Sequence[Any]) -> Hashable | None:
        """What a recording is for; none if there can be none."""
        found: list[object] = [_torch.cuda_stream(self._index), _settings()]
        for i in (*self._others, *self._changed):
            a = args[i]
            if not isinstance(a, torch.Tensor):
                found.append((type(a), a))
            elif type(a) not in _PLAIN or a.layout is not torch.strided or a.device != self._device:
                return None
            else:
                found.append((a.shape, a.stride(), a.dtype))
        # A model may have thousands of weights.
        found += map(torch.Tensor.data_ptr, map(args.__getitem__, self._pinned))
        found += map(torch.Tensor.data_ptr, self._attributes)
        try:
            hash(key := tuple(found))
        except TypeError:
            return None
        return key

    def _made(self, key: Hashable, args: Sequence[object]) -> Recording | None:
        cache = self._cache
        if cache.evicted >= EVICTED or cache.count(key) < SEEN or not cache.make_room(least=2):
            return None
        made = self._record(args)
        if made is None or not cache.put(key, made):
            # Nor will it be the next time.
            cache.evicted = EVICTED if made is None else cache.evicted + 1
            return None
        return made

    def _record(self, args: Sequence[object]) -> Recording | None:
        changed = [*(args[i] for i in self._changed), *self._changed_parts]
        if not fits(changed, self._index):
            return None
        before = State(changed, self._device)
        try:
            return Recording(self._run, args, self._others, self._attributes, self._folds(args), before)
        except (RuntimeError, ValueError) as e:
            log.info("the graph is not recorded as a CUDA graph: %s", e)
            return None
        finally:
            before.restore()

    def _folds(self, args: Sequence[object]) -> list[object]:
        """Weights that were folded, as they are now."""
        return [m(*[args[s] if isinstance(s, int) else s for s in sources]) for m, sources in self._folded]

    def _is_current(self, known: Recording, args: Sequence[object]) -> bool:
        now = self._folds(args)
        return all(a is b for a, b in zip(now, known.folded, strict=True))


class Recording:
    """A graph that was recorded: inputs are copied in, results out."""

    def __init__(
        self,
        run: Run,
        args: Sequence[Any],
        others: Sequence[int],
        attributes: Sequence[object],
        folded: Sequence[object],
        before: State,
    ) -> None:
        """What the graph changes is as it was ``before``, and somebody makes it so again."""
        self.folded = folded
        index = before.device.index or 0
        with torch.inference_mode(False), torch.no_grad():
            given = list(args)
            self._places = [i for i in others if isinstance(args[i], torch.Tensor)]
            for i in self._places:
                given[i] = copied(args[i])
            self._inputs = [given[i] for i in self._places]
            expected = pytree.tree_leaves(run(list(given)))
            after = State(before.tensors, before.device)
            before.restore()
            reserved = torch.cuda.memory_reserved(index)
            self._graph = CudaGraph(
                index,
                lambda: run(list(given)),
                warm=before.counts.before(lambda: run(list(given))),
                draws=False,
            )
            self.bytes = max(0, torch.cuda.memory_reserved(index) - reserved)
            self.bytes += bytes_of(self._inputs)
            results = pytree.tree_leaves(self._graph.results)
            theirs = {_storage(t) for t in (*given, *attributes) if isinstance(t, torch.Tensor)}
            if any(isinstance(r, torch.Tensor) and _storage(r) in theirs for r in results):
                raise ValueError("a result shares memory with an input")
            self._results = CopiesOut(results)
            before.restore()
            for ours, wanted in zip(self(args), expected, strict=True):
                if isinstance(wanted, torch.Tensor):
                    if not isinstance(ours, torch.Tensor) or not agree(ours, wanted):
                        raise ValueError("recorded, it computes something else")
                elif ours != wanted:
                    raise ValueError("recorded, it returns something else")
            if not after.is_now():
                raise ValueError("recorded, it changes tensors otherwise")

    def __call__(self, args: Sequence[object]) -> list[object]:
        """The results, in memory of their own."""
        with torch.no_grad():
            if self._places:
                _torch.foreach_copy(self._inputs, [args[i] for i in self._places])
            self._graph.replay()
            return self._results.make()


def why_not(gm: fx.GraphModule, device: torch.device) -> str:
    """Why a graph cannot be recorded; empty if nothing speaks against it."""
    fixed = {n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    changed = set(changed_inputs(gm))
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = module_of(node)
            if isinstance(module, FoldedWeights):
                if not fixed.issuperset(node.all_input_nodes):
                    return "what is folded is not made of weights alone"
            elif not isinstance(module, (FusedCall, fx.GraphModule)):
                return f"nothing is known of {node.target}"
        elif node.op == "call_function":
            if not is_torchs(node.target):
                return f"nothing is known of {node.target}"
            if changes_inputs(node) and not changed <= fixed:
                return f"{node.target} changes tensors in place"
            if draws_at(node):
                return f"{node.target} draws random numbers"
            if waits_for_values(node.target):
                return f"the host waits for the values of {node.target}"
        for value in pytree.tree_leaves(value_of(node)) if node.op != "output" else ():
            if isinstance(value, torch.Tensor) and value.device != device:
                return f"{node.name} is on {value.device}"
    return ""


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _settings() -> tuple[bool, ...]:
    """What decides which kernels torch launches."""
    return (
        _torch.cublas_allows_tf32(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )
