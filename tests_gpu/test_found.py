"""Cases that the fuzzer found on a GPU and that are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
FOUND = (
    "582631",
    "581454",
    "580739",
    "580688",
    "581077",
    "590158",
    "700457",
    "700721",
    "700756",
    "700951",
    "701044",
    "820008",
    "820852",
    "822273",
)
"""Seeds whose faults a CPU does not show."""


def check_what_the_fuzzer_found() -> str:
    """Each by itself, as `python fuzz/found/NAME.py cuda` runs it."""
    sys.path.insert(0, str(ROOT))
    from fuzz import keep

    wrong: list[str] = []
    before = torch.backends.cudnn.allow_tf32
    # Eager's digits are to be fp32's.
    torch.backends.cudnn.allow_tf32 = False
    try:
        for seed in FOUND:
            (path,) = keep.FOLDER.glob(f"*_{seed}_*.py")
            module = keep.load(path)
            outcome = keep.check(module.Model, module.ENTRY, module.CALLS, "cuda")
            if outcome.kind != "ok":
                wrong.append(f"{path.stem}: {outcome.kind}: {outcome.message}")
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert not wrong, "\n".join(wrong)
    return ", ".join(FOUND)
