"""The machine that a number was measured on, for the head of a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .._native import __version__

_BUSY = 0.5
"""Share of the cores in use from which on times are not to be trusted."""


def cpu_fields() -> dict[str, str]:
    """What the kernel says of the processor; nothing where it says nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_name() -> str:
    """The processor's name."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """Versions, processor, GPU and load."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hypatia": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": ", ".join(gpus) or "no GPU found",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def busy() -> str:
    """A warning when other work takes the cores; empty when none does."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < _BUSY * cores:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} cores): times are noisy"


def line() -> str:
    """The description in one line."""
    d = describe()
    return (
        f"hypatia {d['hypatia']}, torch {d['torch']}, Python {d['python']}; {d['cpu']}, "
        f"{d['threads']} of {d['cores']} cores; {d['gpu']}"
    )
