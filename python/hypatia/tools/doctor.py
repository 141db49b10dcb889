"""What was found on a machine: versions, processor, GPU, libraries, caches, environment, a self-check."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["Finding", "examine"]

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_LOGS",
    "TORCHDYNAMO_DISABLE",
)
"""Environment variables of others that change what Hypatia does; its own start with HYPATIA_."""

CPU_FLAGS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f", "avx512bw"),
    "bf16 (AVX-512)": ("avx512_bf16",),
    "AMX bf16": ("amx_tile", "amx_bf16"),
    "NEON": ("asimd",),
}
"""Features by the flags of /proc/cpuinfo."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: a thing, whether it is as it should be, and what to do if not."""

    topic: str
    name: str
    state: str
    found: str
    advice: str = ""
    fatal: bool = False


def examine(*, self_check: bool = True) -> list[Finding]:
    """All findings; none of the parts can make the others fail."""
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", _versions),
        ("processor", _processor),
        ("GPU", _gpu),
        ("CUDA libraries", _libraries),
        ("backend", _backend),
        ("cache", _cache),
        ("environment", _environment),
    ]
    if self_check:
        parts.append(("self-check", _self_check))
    found: list[Finding] = []
    for topic, part in parts:
        try:
            found += part()
        except Exception as e:
            found.append(
                Finding(topic, "examination", "warning", f"failed: {type(e).__name__}: {e}", "report this")
            )
    return found


def _versions() -> Iterable[Finding]:
    topic = "versions"
    advice = "" if sys.version_info >= (3, 10) else "use Python 3.10 or newer"
    state = "missing" if advice else "ok"
    yield Finding(topic, "Python", state, platform.python_version(), advice, fatal=bool(advice))
    home = Path(__file__).parent.parent
    try:
        version = importlib.metadata.version("hypatia")
        yield Finding(topic, "Hypatia", "ok", f"{version} in {home}")
    except importlib.metadata.PackageNotFoundError:
        advice = "install it (pip install ., or make build); the backend is found by its entry point"
        yield Finding(
            topic, "Hypatia", "warning", f"not installed, run from {Path(__file__).parent.parent}", advice
        )
    try:
        from hypatia import _native

        yield Finding(topic, "extension", "ok", _native.__version__)
    except ImportError as e:
        yield Finding(topic, "extension", "missing", str(e), "build it: make build", fatal=True)
    try:
        import torch
    except Exception as e:
        yield Finding(topic, "torch", "missing", f"{type(e).__name__}: {e}", "pip install torch", fatal=True)
        return
    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2] if n.isdigit())
    old = numbers < (2, 11)
    built = f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"
    state, advice = ("warning", "torch 2.11 and newer are supported") if old else ("ok", "")
    yield Finding(topic, "torch", state, torch.__version__ + built, advice)


def _processor() -> Iterable[Finding]:
    import torch

    from ..devices import machine

    topic = "processor"
    fields = machine.cpu_fields()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(topic, "CPU", "ok", f"{machine.cpu_name()}, {usable} of {os.cpu_count()} cores usable")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    has = [feature for feature, names in CPU_FLAGS.items() if flags.issuperset(names)]
    yield Finding(topic, "features", "ok", ", ".join(has) or "none of those that matter")
    capability = torch.backends.cpu.get_cpu_capability()
    slow = capability in ("DEFAULT", "NO AVX")
    advice = "torch uses its slowest kernels; unset ATEN_CPU_CAPABILITY" if slow else ""
    yield Finding(topic, "torch kernels", "warning" if slow else "ok", capability, advice)
    threads = torch.get_num_threads()
    advice = f"more threads than cores: set OMP_NUM_THREADS={usable}" if threads > usable else ""
    yield Finding(topic, "threads", "warning" if advice else "ok", str(threads), advice)
    libraries = {"oneDNN": torch.backends.mkldnn.is_available(), "MKL": torch.backends.mkl.is_available()}
    there = ", ".join(library for library, present in libraries.items() if present) or "none"
    yield Finding(topic, "libraries", "ok", there)


def _gpu() -> Iterable[Finding]:
    import torch

    if not torch.cuda.is_available():
        advice = "nothing, if this machine has none; else install the driver and a CUDA build of torch"
        yield Finding("GPU", "devices", "warning", "no GPU found", advice)
        return
    yield Finding("GPU", "driver", "ok", _driver())
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found = f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        old = (p.major, p.minor) < (8, 0)
        advice = "older than Ampere: not tested" if old else ""
        yield Finding("GPU", f"cuda:{i}", "warning" if old else "ok", found, advice)


def _driver() -> str:
    """The version of the kernel's driver."""
    place = Path("/proc/driver/nvidia/version")
    words = place.read_text().split() if place.exists() else []
    return next((w for w in words if w[:1].isdigit() and "." in w), "version unknown")


def _libraries() -> Iterable[Finding]:
    from ..devices import cuda_libraries

    needed = _has_gpu()
    for library in cuda_libraries.KNOWN:
        place = cuda_libraries.find(library)
        if place is None:
            advice = library.advice if needed else "nothing: it is needed with a GPU only"
            state = "missing" if needed else "warning"
            yield Finding("CUDA libraries", library.name, state, "not found", advice)
            continue
        version = cuda_libraries.version(library, place)
        found = f"{version or 'version unknown'}, {place.how}: {place.path}"
        yield Finding("CUDA libraries", library.name, "ok", found)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _backend() -> Iterable[Finding]:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    entry = next((p for p in points if p.name == "hypatia"), None)
    if entry is None:
        advice = "install the package: pip install ., or make build"
        yield Finding("backend", "entry point", "missing", "not visible to torch.compile", advice, fatal=True)
        return
    yield Finding("backend", "entry point", "ok", f"{entry.group}: {entry.value}")
    import torch

    from .._torch import dynamo_config

    listed = "hypatia" in torch.compiler.list_backends(exclude_tags=())
    advice = "" if listed else "torch does not list it; see TORCH_LOGS=dynamo"
    yield Finding(
        "backend", "Dynamo", "ok" if listed else "warning", f"{'' if listed else 'not '}listed", advice
    )
    if dynamo_config.disable:
        advice = "unset TORCHDYNAMO_DISABLE: nothing is compiled"
        yield Finding("backend", "Dynamo", "warning", "turned off", advice)


def _cache() -> Iterable[Finding]:
    from .. import store

    if not store.enabled():
        yield Finding(
            "cache", "store", "warning", f"off by {store.SWITCH_VARIABLE}", "unset it to use the store"
        )
        return
    trouble = store.trouble()
    if trouble:
        advice = f"nothing is kept between runs; set {store.FOLDER_VARIABLE} to a folder that can be written"
        yield Finding("cache", "folder", "warning", f"{store.folder()}: {trouble}", advice)
        return
    kept = store.entries()
    mib = sum(e.size for e in kept) / 2**20
    found = f"{store.folder()}, can be written"
    yield Finding("cache", "folder", "ok", found)
    limit = store.size_limit() / 2**20
    yield Finding("cache", "size", "ok", f"{len(kept)} entries, {mib:.1f} of {limit:.0f} MiB")


def _environment() -> Iterable[Finding]:
    names = [name for name in sorted(os.environ) if name.startswith("HYPATIA_") or name in VARIABLES]
    for name in names:
        yield Finding("environment", name, "ok", os.environ[name])
    if not names:
        yield Finding("environment", "variables", "ok", "none set")


def _self_check() -> Iterable[Finding]:
    import torch
    from torch import nn

    import hypatia

    topic = "self-check"
    for device in ["cpu", *(["cuda"] if _has_gpu() else [])]:
        fatal = device == "cpu"
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
                x = torch.randn(8, 32).to(device)
            start = time.perf_counter()
            before = hypatia.compile_count()
            result = hypatia.verify(model, torch.compile(model, backend="hypatia"), x)
            seconds = time.perf_counter() - start
            compiled = hypatia.compile_count() - before
        except Exception as e:
            yield Finding(topic, device, "missing", _first_line(e), "report this with hypatia --debug", fatal)
            continue
        if not result.ok:
            yield Finding(topic, device, "missing", f"wrong result: {result.reason}", "report this", fatal)
        elif not compiled:
            yield Finding(
                topic, device, "warning", "the model ran, but nothing was compiled", "see TORCH_LOGS=+dynamo"
            )
        else:
            worst = max((e.max_abs for e in result.candidate), default=0.0)
            found = f"an MLP compiled and verified in {seconds:.1f} s, error {worst:.1e} to float64"
            yield Finding(topic, device, "ok", found)


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {lines[0]}"
