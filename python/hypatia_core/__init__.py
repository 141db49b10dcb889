"""Alias of :mod:`hypatia` under its first name."""

from hypatia import __version__

__all__ = ["__version__"]
