"""Cases that the fuzzer found on a GPU and that are kept."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOUND = ("582631", "581454", "580739", "581077")
"""Seeds whose faults a CPU does not show."""


def check_what_the_fuzzer_found() -> str:
    """Each by itself, as `python fuzz/found/NAME.py cuda` runs it."""
    sys.path.insert(0, str(ROOT))
    from fuzz import keep

    for seed in FOUND:
        (path,) = keep.FOLDER.glob(f"*_{seed}_*.py")
        module = keep.load(path)
        outcome = keep.check(module.Model, module.ENTRY, module.CALLS, "cuda")
        assert not outcome.found, f"{path.stem}: {outcome.kind}: {outcome.message}"
        assert outcome.kind != "invalid", f"{path.stem}: {outcome.message}"
    return ", ".join(FOUND)
