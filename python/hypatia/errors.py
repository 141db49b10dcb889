"""Errors of the package."""

from __future__ import annotations

from ._native import HypatiaError


class UnsupportedError(HypatiaError):
    """A graph that is left as it is; the reason is the message."""


class InputError(HypatiaError):
    """A graph was called with inputs that it was not made for."""


class VerificationWarning(UserWarning):
    """A compiled graph did not compute what the original does."""


class PrecisionWarning(VerificationWarning):
    """A compiled graph is as close to float64 as eager is, but not to eager: further than 1e-5 in fp32, or
    eager overflowed."""
