"""CUDA graphs: what records calls of torch's ops, where their memory is, and how results get out of it.

Nothing else records any, but for plans without calls into torch: those the runtime records, on the caller's
addresses. Torch's ops allocate while they run, and get memory that belongs to the graph.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from .. import _native, _torch
from ..capture.layout import layout_of

log = logging.getLogger(__name__)

_recording = threading.Lock()

_OF_LIBRARIES = ("_pin_memory_loop", "InductorSubproc", "subproc_worker_timer")
"""In the names of threads that run no ops of torch's."""

_QUIET = (
    *("torch._inductor", "torch.utils.data", "multiprocessing.queues", "logging", "tqdm", "tensorboard"),
    *("tensorboardX", "wandb", "mlflow", "zmq", "IPython.core.history"),
    *("ipykernel.iostream", "ipykernel.heartbeat", "ipykernel.control", "ipykernel.parentpoller"),
)
"""Modules whose threads load data, compile, write logs or keep a notebook alive, and run no ops either."""

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
    made for calls alone that draw some, and only where nobody else can.
    """

    def __init__(
        self,
        index: int,
        run: Callable[[], _T],
        *,
        warm: Callable[[], object] | None = None,
        draws: bool = True,
    ) -> None:
        """Calls that ``draws`` does not allow to draw random numbers are an error if they do."""
        self._index = index
        self._draws = draws
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
                    if not self._draws or not _is_alone():
                        raise
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
        generator = torch.cuda.default_generators[self._index]
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.results = run()
        except BaseException:
            # Torch leaves it in the state of a recording, in which nobody can draw any more.
            generator.graphsafe_set_state(generator.clone_state())
            raise
        self.replay = graph.replay


def _is_alone() -> bool:
    """Whether no other thread can draw random numbers on a GPU."""
    own = threading.current_thread()
    others = [t.name for t in threading.enumerate() if t is not own and not _never_draws(t)]
    if others:
        log.info("not recorded: threads that may draw random numbers meanwhile: %s", ", ".join(others))
    return not others


_of_autograd: set[int] = set()
"""Threads in which autograd runs backward passes, by number. They work only while another one waits."""


def note_thread_of_autograd() -> None:
    """Says that this thread is one of autograd's."""
    _of_autograd.add(threading.get_ident())


def _never_draws(thread: threading.Thread) -> bool:
    """Whether a thread loads data, shows progress, or waits for Inductor's compilers or a backward pass."""
    if type(thread).__name__ == "_DummyThread" and thread.ident in _of_autograd:
        return True
    made_by = (type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or "")
    if any(module == quiet or module.startswith(f"{quiet}.") for module in made_by for quiet in _QUIET):
        return True
    if any(name in thread.name for name in _OF_LIBRARIES):
        return True
    given: tuple[object, ...] = getattr(thread, "_args", ())
    pool = given[0]() if given and isinstance(given[0], weakref.ref) else None
    return pool is not None and any(pool is known for known in _torch.inductor_pools())


def is_recordable_here(index: int) -> bool:
    """Whether a call may be replaced by a recording of it: no mode is to see its ops, and nobody records."""
    return not (
        _torch.dispatch_mode_count()
        or _torch.any_autocast()
        or _torch.functorch_active()
        or torch.cuda.current_device() != index
        or torch.cuda.is_current_stream_capturing()
    )


MOST = 8
"""Recordings of one graph."""

EVICTED = 8
"""Recordings that gave way to others, or were of weights that changed, until no more are made."""

HELD, SHARE = 1 << 30, 0.25
"""Bytes that those beyond the first may hold, and the share of free memory that one may take."""


class Room:
    """How many recordings a graph may have, and how much memory they may hold."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._held: dict[object, int] = {}

    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._held

    def has(self) -> bool:
        """Whether there is room for one more."""
        return len(self._held) < MOST and sum([*self._held.values()][1:]) < HELD

    def take(self, key: object, size: int) -> bool:
        """Whether a recording of this size may stay, and counts from now on."""
        free, _ = torch.cuda.mem_get_info(self._index)
        beyond = sum([*self._held.values(), size][1:])
        if size > SHARE * (free + size) or beyond > HELD:
            return False
        self._held[key] = size
        return True

    def leave(self, key: object) -> None:
        """A recording is gone."""
        self._held.pop(key, None)


class _Recording(Protocol):
    """A CUDA graph with its memory."""

    bytes: int


_R = TypeVar("_R", bound=_Recording)


class RecordingCache(Generic[_R]):
    """Recordings by what they are for, as many as there is room for; the one used last comes last."""

    def __init__(self, room: Room) -> None:
        self.evicted = 0
        """Recordings that gave way to others, or are of no use any more."""
        self._room = room
        self._known: OrderedDict[Hashable, _R] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        weakref.finalize(self, _leave_all, room, id(self), self._known).atexit = False

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable) -> _R | None:
        """The recording for the key, if there is one."""
        return self._known.get(key)

    def use(self, key: Hashable) -> None:
        """The recording for the key is used now."""
        self._known.move_to_end(key)

    def count(self, key: Hashable, calls: int = 1) -> int:
        """How many calls there were for the key that no recording served, with these."""
        if len(self._seen) > 1024:
            self._seen.clear()
        self._seen[key] += calls
        return self._seen[key]

    def make_room(self, least: int) -> bool:
        """Whether there is room for one more; the oldest gives way if there are at least so many."""
        if self._room.has():
            return True
        if len(self._known) < least:
            return False
        self.drop(next(iter(self._known)))
        return True

    def put(self, key: Hashable, made: _R) -> bool:
        """Keeps a recording, if its memory fits."""
        if not self._room.take((id(self), key), made.bytes):
            return False
        self._known[key] = made
        return True

    def drop(self, key: Hashable) -> None:
        """Forgets a recording."""
        self._known.pop(key, None)
        self._room.leave((id(self), key))
        self._seen.pop(key, None)
        self.evicted += 1


def _leave_all(room: Room, owner: int, known: Iterable[Hashable]) -> None:
    for key in known:
        room.leave((owner, key))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, in memory that a recording reads."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


class CopiesOut:
    """Copies of results in memory of their own, where each has its strides, and some may share it."""

    def __init__(self, results: Sequence[object]) -> None:
        groups: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}
        for i, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                key = (result.untyped_storage()._cdata, result.dtype)
                groups.setdefault(key, {})[i] = result
        self._groups = [_Copies(group) for group in groups.values()]
        self._results = [None if isinstance(r, torch.Tensor) else r for r in results]

    def make(self) -> list[Any]:
        """The results."""
        found = list(self._results)
        for group in self._groups:
            for i, copy in group.make().items():
                found[i] = copy
        return found


class _Copies:
    """Makes copies of results that are in one memory."""

    def __init__(self, group: dict[int, torch.Tensor]) -> None:
        self._group = group
        self._place, first = next(iter(group.items()))
        self._alone = len(group) == 1 and layout_of(first) != (None, None)
        self._begin = min(t.storage_offset() for t in group.values())
        ends = [
            t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
            for t in group.values()
            if t.numel()
        ]
        extent = max(ends, default=self._begin) - self._begin
        self._whole = first.as_strided((extent,), (1,), self._begin)

    def make(self) -> dict[int, torch.Tensor]:
        """The copies by their places."""
        if self._alone:
            return {self._place: self._group[self._place].clone()}
        memory = self._whole.clone().untyped_storage()
        return {
            i: torch.empty(0, dtype=t.dtype, device=t.device).set_(
                memory, t.storage_offset() - self._begin, t.shape, t.stride()
            )
            for i, t in self._group.items()
        }
