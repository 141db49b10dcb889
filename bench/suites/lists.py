"""The suites by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import graphnet, hf, vision
from .rows import Row, Setting

SUITES: dict[str, Callable[[Setting], list[Row]]] = {
    "hf": hf.rows,
    "timm": vision.timm_rows,
    "conv": vision.conv_rows,
    "graphnet": graphnet.rows,
}


def own_dtype(suite: str, device: str) -> str:
    """The dtype of a run that names none: rows of two suites have one of their own."""
    return "own" if suite in ("conv", "graphnet") else "fp32" if device == "cpu" else "bf16"


@functools.cache
def rows(suite: str, setting: Setting) -> list[Row]:
    """The models of a suite."""
    return SUITES[suite](setting)


def row_named(suite: str, name: str, setting: Setting) -> Row:
    """A model of a suite."""
    (row,) = [r for r in rows(suite, setting) if r.name == name]
    return row
