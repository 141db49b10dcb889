"""Hypatia: an equality-saturation compiler for PyTorch models.

``torch.compile(model, backend="hypatia")`` needs no import of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._native import HypatiaError, __version__

if TYPE_CHECKING:
    from . import nn
    from .api import optimize
    from .backend import compile_count, reports
    from .compiling import compile
    from .errors import InputError, PrecisionWarning, VerificationWarning
    from .explaining import explain
    from .options import OptionError, Options
    from .verification import Verification, verify

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
    "Verification": "verification",
    "VerificationWarning": "errors",
    "compile": "compiling",
    "compile_count": "backend",
    "explain": "explaining",
    "optimize": "api",
    "reports": "backend",
    "verify": "verification",
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
