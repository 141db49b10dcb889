"""Kept cases: files of Python that show a fault by themselves."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import textwrap
import types
from pathlib import Path

from torch import nn

from .case import Call, Case, Entry
from .check import Outcome, run

FOLDER = Path(__file__).parent / "found"

_TEMPLATE = '''"""{title}

Found by seed {seed}: {message}
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import Call, Entry
from fuzz.keep import main
from fuzz.tensors import T


{source}

ENTRY = {entry!r}

CALLS = [
{calls}
]

if __name__ == "__main__":
    main(Model, ENTRY, CALLS)
'''


def snippet(case: Case, outcome: Outcome) -> str:
    """A file that shows what was found."""
    source = case.program.source().rstrip() + "\n"
    calls = "\n".join(f"    {call!r}," for call in case.calls())
    message = textwrap.shorten(outcome.message.replace("\\", "/"), 300)
    return _TEMPLATE.format(
        title=f"{outcome.kind}, by {_entry(case.entry)}.",
        seed=case.seed,
        message=message,
        source=source,
        entry=case.entry,
        calls=calls,
    )


def _entry(entry: Entry) -> str:
    names = {
        "direct": "hypatia.compile",
        "optimize": "hypatia.optimize",
        "torch": "torch.compile",
        "step": "step()",
    }
    return f"{names[entry.name]} in {'training' if entry.training else 'inference'}"


def kept(case: Case, outcome: Outcome, folder: Path) -> Path:
    """Writes a case down; its name says what it shows."""
    text = snippet(case, outcome)
    digest = hashlib.sha256(case.program.source().encode()).hexdigest()[:6]
    kind = outcome.kind.replace(" ", "_")
    path = folder / f"{kind}_{case.entry.name}_{case.seed}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(path: Path) -> types.ModuleType:
    """A kept case."""
    name = f"fuzz.found.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check(model: type[nn.Module], entry: Entry, calls: list[Call], device: str = "cpu") -> Outcome:
    """What a kept case shows now."""
    return run(textwrap.dedent(inspect.getsource(model)), entry, calls, device)


def main(model: type[nn.Module], entry: Entry, calls: list[Call]) -> None:
    """Runs a kept case from the command line; the exit code tells whether the fault is there."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    outcome = check(model, entry, calls, device)
    print(f"{outcome.kind}: {outcome.message}" if outcome.message else outcome.kind)
    sys.exit(int(outcome.found))
