"""What a native plan says about itself, as JSON has it."""

from __future__ import annotations

import builtins
import json
from typing import Literal, TypedDict

from .. import _native
from ..capture.arguments import Arg


class Operand(TypedDict, total=False):
    """An operand of a call: one of the tensors that the step reads, or a size."""

    tensor: int
    int: builtins.int


class TorchCall(TypedDict):
    """A call into torch."""

    origin: int | None
    """The captured call that is made again; none for a call of the op table."""
    target: str
    args: list[Arg]
    """Arguments in the order of the schema; nodes are numbers of operands."""
    operands: list[Operand | Literal["attr"]]
    kept: list[int] | None
    """Which of its results are written, where not all are."""
    in_place: bool
    """It is called in the form that changes its first operand."""
    is_vector: bool
    """Its result is a vector."""
    onednn: str | None
    """It is a convolution of images with channels last, for oneDNN: f32 or bf16."""


class Returned(TypedDict):
    """How a result is seen in an input or an output."""

    given: bool
    at: int
    offset: int
    shape: list[int]
    strides: list[int]
    whole: bool
    number: builtins.int | None
    """The size that it is, where it is no tensor."""


class Described(TypedDict):
    """A plan: nodes of the program by their numbers, steps, calls and results."""

    inputs: list[int]
    constants: list[int]
    orders: list[list[int] | None]
    """The order in which the dimensions of each constant are to lie, where it is not the usual one."""
    steps: list[str]
    moved: list[int]
    """Bytes that each step reads and writes, each value once."""
    multiplications: list[float]
    """Multiplications with additions of each: of matrix products, convolutions and attention."""
    kinds: list[str]
    """The kind of each: linear, region and so on."""
    demands: list[list[float]]
    """Of each: operations on vector units, elements written, rows and runs, elements reached one by one."""
    sizes: list[str]
    """What each reads and writes, in words."""
    calls: list[TorchCall]
    results: list[Returned]
    keeps: list[int]
    masks: list[int]
    changes: list[int]
    """Inputs that it changes."""
    late: int | None
    """The first of the steps that follow a recording of those before, on a GPU."""


def described(plan: _native.NativePlan) -> Described:
    """What a plan says about itself."""
    found: Described = json.loads(plan.describe())
    return found
