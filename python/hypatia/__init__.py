"""Hypatia: an equality-saturation compiler for PyTorch models.

``torch.compile(model, backend="hypatia")`` needs no import of this package.
"""

from . import nn
from ._native import HypatiaError, __version__
from .api import optimize
from .backend import compile_count, reports
from .errors import VerificationWarning
from .options import OptionError, Options
from .verification import Verification, verify

__all__ = [
    "HypatiaError",
    "OptionError",
    "Options",
    "Verification",
    "VerificationWarning",
    "__version__",
    "compile_count",
    "nn",
    "optimize",
    "reports",
    "verify",
]
