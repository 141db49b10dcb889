"""Hypatia: an equality-saturation compiler for PyTorch models.

``torch.compile(model, backend="hypatia")`` needs no import of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._native import HypatiaError, __version__

if TYPE_CHECKING:
    from . import nn
    from .errors import InputError, PrecisionWarning, VerificationWarning
    from .frontend.direct import compile
    from .frontend.dynamo import compile_count, reports
    from .frontend.optimize import optimize
    from .options import OptionError, Options
    from .tools.explain import explain
    from .verifier.verify import Verification, verify

__all__ = [
    "HypatiaError",
    "InputError",
    "OptionError",
    "Options",
    "PrecisionWarning",
    "Verification",
    "VerificationWarning",
    "__version__",
    "compile",
    "compile_count",
    "explain",
    "nn",
    "optimize",
    "reports",
    "verify",
]

_HOMES = {
    "InputError": "errors",
    "OptionError": "options",
    "Options": "options",
    "PrecisionWarning": "errors",
    "Verification": "verifier.verify",
    "VerificationWarning": "errors",
    "compile": "frontend.direct",
    "compile_count": "frontend.dynamo",
    "explain": "tools.explain",
    "optimize": "frontend.optimize",
    "reports": "frontend.dynamo",
    "verify": "verifier.verify",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for at its first use: torch takes seconds, and `hypatia --help` needs none."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in __all__:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
