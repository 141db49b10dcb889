"""Records of captured calls and their arguments, as JSON has them."""

from __future__ import annotations

import builtins
from typing import Literal, TypedDict

Terms = list[tuple[int, list[str]]]
"""A sum of products of symbols."""

Dim = int | Terms
"""A size."""


class Argument(TypedDict, total=False):
    """An argument under the name of its kind; a float is a text, for JSON has no infinities."""

    node: builtins.int
    bool: builtins.bool
    int: Dim
    float: builtins.str
    str: builtins.str
    dtype: builtins.str
    list: builtins.list[Arg]


Arg = Argument | Literal["none", "other"]


class Record(TypedDict):
    """A node of the captured graph, for the Rust core."""

    name: str
    target: str
    args: list[Arg] | None
    reads: list[int]
    ty: object
    input: bool
    weight: bool
    effect: bool
    random: bool
    mutates: bool
    changes: list[int]
