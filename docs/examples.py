"""What examples of the pages print, made anew: the demo of the README and the warning of verification.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

WIDTH = 115
"""Columns of a page."""

DEMO = r"transformer block on cpu: .*?(?=\n```)"
WARNING = r"hypatia: the compiled inference graph is wrong.*?(?=\n```)"

_WARN = """
import itertools, warnings, torch
from hypatia import VerificationWarning, faults
torch.manual_seed(0)
sizes = (784, 256, 256, 10)
layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(sizes)]
model, x = torch.nn.Sequential(*layers[:-1], layers[-1][0]).eval(), torch.randn(64, 784)
with faults.wrong_rule(), torch.no_grad(), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    torch.compile(model, backend="hypatia")(x)
print(*(w.message for w in said if w.category is VerificationWarning))
"""


def demo() -> str:
    """What `make demo` says of its second model on a CPU."""
    text = printed("-m", "hypatia.tools.demo", env=_environment())
    return text[text.index("transformer block on cpu") :].rstrip()


def warning() -> str:
    """What is said of an MLP and a wrong rule."""
    said = " ".join(printed("-c", _WARN, env=_environment()).split())
    return textwrap.fill(said, WIDTH, break_long_words=False, break_on_hyphens=False)


def printed(*arguments: str, env: dict[str, str]) -> str:
    """What Python prints that is called so, in a process of its own."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "HYPATIA_CACHE": "off", "CUDA_VISIBLE_DEVICES": ""}


def masked(text: str) -> str:
    """Without times, what follows from them, and errors: those are of the machine and of the run."""
    text = re.sub(r"\d+(\.\d+)? (s|ms|us)\b", r"0 \2", text)
    text = re.sub(r"\b\d(\.\d+)?e[+-]\d+", "0e0", text)
    # Torch's ops are not timed where eager takes twice as long as the plan.
    text = re.sub(r"native plan 0 .* kept", "native plan 0", text)
    return " ".join(text.split())


def renewed(page: str, pattern: str, printed: str) -> str:
    """A page with an example as it is printed now; lines that differ by times and errors alone stay."""
    found = re.search(pattern, page, re.DOTALL)
    assert found, f"there is no example like {pattern}"
    if masked(found[0]) == masked(printed):
        return page
    before, now = found[0].split("\n"), printed.split("\n")
    if len(before) == len(now):
        pairs = zip(before, now, strict=True)
        printed = "\n".join(old if masked(old) == masked(new) else new for old, new in pairs)
    return page[: found.start()] + printed + page[found.end() :]
