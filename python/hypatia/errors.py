"""Errors of the package."""

from __future__ import annotations

from ._native import HypatiaError


class UnsupportedError(HypatiaError):
    """A graph that is left as it is; the reason is the message."""
