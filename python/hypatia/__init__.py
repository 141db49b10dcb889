"""Hypatia: an equality-saturation compiler for PyTorch models.

``torch.compile(model, backend="hypatia")`` needs no import of this package.
"""

from ._native import HypatiaError, __version__
from .api import optimize
from .backend import compile_count, reports
from .options import OptionError, Options

__all__ = ["HypatiaError", "OptionError", "Options", "__version__", "compile_count", "optimize", "reports"]
