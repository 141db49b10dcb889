"""Memory: activations beside eager's, copies of weights, leaks; and many threads on one compiled model.

Activations are what torch's allocator has given out at the worst moment of a call, by its profiler, results
included; for a plan, which has memory of its own, its results and the block of its values in between are
added. What kernels keep on their stacks or in scratch of their own is in neither.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import hypatia
from hypatia.tools.bench import DTYPES
from hypatia.tools.workloads import NINE_MLPS, BertLayer

from .cases import Case, of
from .overhead import plan_of
from .run import Run

CALLS = 10_000
WINDOWS = 3
THREADS = 8
SECTIONS = ("mlp", "linear", "pointwise", "models", "rewrites")

SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), (4, 32)),
    "BERT layer": (lambda: BertLayer(32, 2, 64), (1, 4, 32)),
}


def memory(run: Run) -> None:
    """All of it."""
    data = run.open("memory")
    rows = data["rows"] = []
    for case in run.each([c for s in SECTIONS for c in of(s, run.quick) if c.dtype in run.dtypes]):
        run.say(f"{case.section}: {case.name} {case.dtype}")
        rows.append(_activations(case))
    data["leaks"] = [_leak(run, name) for name in run.each(list(SMALL))]
    data["threads"] = [_threads(run, name) for name in run.each(["medium3", *SMALL])]


def _activations(case: Case) -> dict[str, Any]:
    model, inputs = case.workload.build(DTYPES[case.dtype])
    with torch.no_grad():
        compiled = hypatia.compile(model, *inputs)
        eager = peak(functools.partial(model, *inputs))
        ours = peak(functools.partial(compiled, *inputs))
        results = pytree.tree_leaves(compiled(*inputs))
    reports = compiled.reports
    by_plan = plan_of(compiled) is not None
    between, packed = (reports[0].memory if reports and by_plan else None) or (0, 0)
    if by_plan:
        ours += between + sum({s.data_ptr(): s.nbytes() for s in map(_storage, results)}.values())
    return {
        "section": case.section,
        "case": case.name,
        "dtype": case.dtype,
        "plan": by_plan,
        "eager_bytes": eager,
        "ours_bytes": ours,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "packed_bytes": packed,
        "folded_bytes": reports[0].folded if reports else 0,
    }


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def peak(call: Callable[[], Any]) -> int:
    """Bytes that torch's allocator gave out during a call, at the worst moment."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        # The results live until after the end.
        results = call()
    del results
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    events = watched.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    live = most = 0
    for _, _, change in changes:
        live += change
        most = max(most, live)
    return most


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _leak(run: Run, name: str) -> dict[str, Any]:
    """How much the process grows over many calls: the least of several times as many, since a leak grows in
    each of them, and the rest of the process only now and then."""
    run.say(f"{CALLS} calls: {name}")
    if not Path("/proc/self/statm").exists():
        return {"case": name, "calls": 0, "grown_bytes": None}
    make, shape = SMALL[name]
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        compiled = hypatia.compile(model, x)
        for _ in range(CALLS // 10):
            compiled(x)
        sizes = [resident()]
        for _ in range(WINDOWS):
            for _ in range(CALLS):
                compiled(x)
            sizes.append(resident())
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    return {"case": name, "calls": CALLS, "grown_bytes": min(grown), "each_bytes": grown}


def _threads(run: Run, name: str) -> dict[str, Any]:
    """Threads that call one compiled model at the same time, each with an input of its own."""
    run.say(f"{THREADS} threads: {name}")
    if name in SMALL:
        make, shape = SMALL[name]
    else:
        mlp = next(m for m in NINE_MLPS if m.name == name)
        make, shape = mlp.build, (mlp.batch, mlp.features)
    model = make().eval()
    inputs = [torch.randn(shape) for _ in range(THREADS)]
    with torch.no_grad():
        compiled = hypatia.compile(model, inputs[0])
        # A call at a time, before any other: what is right for one thread is right for all.
        expected = [compiled(x).clone() for x in inputs]
        right = all(hypatia.verify(model, compiled, x).ok for x in inputs)
    wrong: list[str] = []
    start = threading.Barrier(THREADS)

    def work(i: int) -> None:
        try:
            with torch.no_grad():
                start.wait()
                for _ in range(25):
                    if not torch.equal(compiled(inputs[i]), expected[i]):
                        wrong.append(f"thread {i}: another result")
        except Exception as e:
            wrong.append(f"thread {i}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong or not right:
        run.wrong.append(f"{THREADS} threads on one {name}: {wrong[0] if wrong else 'wrong result'}")
    return {"case": name, "threads": THREADS, "wrong": len(wrong), "right": right}
