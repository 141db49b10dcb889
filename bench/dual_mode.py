"""The dual-mode safety check: planted faults under the three modes of verification.

    .venv/bin/python bench/dual_mode.py [--device cpu] [--json FILE|-]

Strict returns the right answer and names the culprit in a warning; soft warns and returns what was computed;
off returns it silently. Without a fault all three are right and silent. After a roll-back, later calls are
not slower than eager's.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from diagnostic import Diagnostic, add_device_options, parser, prepare
from torch import nn

from hypatia import VerificationWarning, faults
from hypatia.tools.measure import compare

MODES = ("strict", "soft", "off")

FAULTS: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
    ("none", contextlib.nullcontext),
    ("wrong rule", faults.wrong_rule),
    ("wrong kernel", faults.wrong_kernel),
]

EXPECTED = {
    "strict": ("right", "names the culprit"),
    "soft": ("wrong", "warns"),
    "off": ("wrong", "silent"),
}
"""Answer and warning of each mode when a fault is planted."""

TOLERANCE = 1e-5
SLOWER = 0.9
"""Eager's time over the compiled model's, below which later calls count as slower."""


def observe(
    fault: Callable[[], AbstractContextManager[Any]], mode: str, device: str
) -> tuple[str, str, str, float]:
    """Answer, kind of warning, its text, and the speed of later calls, of a model compiled with a fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device).eval()
    x = torch.randn(256, 1024).to(device)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught, fault() as name:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="hypatia", options={"verify": mode})
        answers = [compiled(x), compiled(x)]
        eager = model(x)
        # A noisy machine is given three chances.
        ratio = next((r for r in (_ratio(model, compiled, x) for _ in range(3)) if r >= SLOWER), 0.0)
    torch._dynamo.reset()
    limit = TOLERANCE * float(eager.abs().max())
    right = all(float((y - eager).abs().max()) <= limit for y in answers)
    texts = [str(w.message) for w in caught if issubclass(w.category, VerificationWarning)]
    named = [text for text in texts if name and name in text]
    warned = "names the culprit" if named else "warns" if texts else "silent"
    return "right" if right else "wrong", warned, " ".join((named or texts or [""])[0].split()), ratio


def _ratio(eager: Callable[..., Any], compiled: Callable[..., Any], x: torch.Tensor) -> float:
    """Eager's time over the compiled model's, in turns of some calls each: threads of the one that ran before
    spin for a moment."""
    times = compare({"eager": lambda: eager(x), "compiled": lambda: compiled(x)}, x.device)
    return times["eager"] / times["compiled"]


def _short(as_expected: bool, fast: bool) -> str:
    if not as_expected:
        return "not as expected"
    return "" if fast else "later calls are slower than eager"


def main() -> int:
    """Every fault under every mode; the exit code."""
    made = parser(__doc__)
    add_device_options(made)
    arguments = made.parse_args()
    columns = ("fault", "mode", "expected", "seen", ">later calls", "warning")
    diagnostic = Diagnostic("Verification against planted faults", columns, arguments)
    device = prepare(arguments, diagnostic)
    for name, fault in FAULTS:
        for mode in MODES:
            with diagnostic.console.status(f"{name}, {mode}"):
                answer, warned, text, ratio = observe(fault, mode, device)
            expected = EXPECTED[mode] if name != "none" else ("right", "silent")
            # A warning that also names the culprit is a warning.
            enough = warned == expected[1] or (expected[1], warned) == ("warns", "names the culprit")
            diagnostic.add(
                name,
                mode,
                ", ".join(expected),
                f"{answer}, {warned}",
                f"{ratio:.2f}x",
                text if len(text) < 70 else text[:67] + "...",
                short=_short(answer == expected[0] and enough, mode != "strict" or ratio >= SLOWER),
                fault=name,
                mode=mode,
                expected=expected,
                seen=(answer, warned),
                warning=text,
                ratio=ratio,
            )
    return diagnostic.finish()


if __name__ == "__main__":
    sys.exit(main())
