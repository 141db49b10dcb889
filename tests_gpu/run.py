"""Runs the checks for a GPU: python3, torch and the built extension are all they need.

``python tests_gpu/run.py [word...]`` runs the checks whose names have one of the words. Each check is a
function ``check_*`` of a module beside this one; it returns a line to show, or raises.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

SLOW = 240
"""Seconds after which a check shows where it is."""

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent)]


def main(words: list[str]) -> int:
    """Runs them; the number of failures decides about the exit code."""
    from hypatia.devices import cuda
    from hypatia.frontend.dynamo import register

    if reason := cuda.available():
        print(f"no GPU checks: {reason}")
        return 0
    # A word of torch's about itself, once a compilation.
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
    register()
    failures = 0
    for name, check in _checks():
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        faulthandler.dump_traceback_later(SLOW)
        try:
            said = check() or ""
        except Exception:
            failures += 1
            taken = time.perf_counter() - start
            print(f"FAILED {name} ({taken:.1f} s)\n{traceback.format_exc()}", flush=True)
            continue
        finally:
            faulthandler.cancel_dump_traceback_later()
        print(f"ok     {name} ({time.perf_counter() - start:.1f} s) {said}", flush=True)
    print(f"{failures} failed" if failures else "all passed", flush=True)
    return int(failures > 0)


def _checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name in sorted(vars(module)):
            if name.startswith("check_"):
                yield f"{path.stem}.{name}", getattr(module, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
