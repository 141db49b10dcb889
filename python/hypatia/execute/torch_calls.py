"""Calls into torch for the steps of a plan that no kernel serves.

A call goes through libtorch's dispatcher by its C functions where these can express its arguments,
otherwise it is a Python function. Everything is decided by schemas; no op is known by name here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch import OpOverload
from ..capture.op_facts import is_structured

LIBTORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
"""The library that has the C functions."""

_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}


class Read:
    """One of the tensors that a step reads."""

    def __init__(self, index: int) -> None:
        self.index = index


class Prepared(NamedTuple):
    """One of them, which another op brings into a form that is read faster, once, if it is a constant."""

    read: Read
    op: OpOverload
    args: tuple[object, ...]
    """What the op is given after the tensor."""


class _InexpressibleError(Exception):
    """An argument that the C functions do not take."""


def call(
    target: object,
    args: Sequence[object],
    kwargs: dict[str, object],
    kept: Sequence[int] | None = None,
    *,
    into: bool = True,
) -> str | Callable[..., object]:
    """A call of a target on arguments among which are :class:`Read`s, for the runtime.

    ``kept`` tells which of its results are written, where not all are. They are written ``into`` their memory
    by torch itself, if it can, or copied there, or stay where torch made them if they have no memory yet: a
    function returns these.
    """
    try:
        if kept:
            raise _InexpressibleError
        return json.dumps(_dispatched(target, args, kwargs, writes=into and kept is None))
    except _InexpressibleError:
        return _python(target, args, kwargs, kept)


def _python(
    target: Any, args: Sequence[object], kwargs: dict[str, object], kept: Sequence[int] | None
) -> Callable[..., object]:
    def run(reads: list[torch.Tensor], writes: list[torch.Tensor | None]) -> list[torch.Tensor]:
        def given(value: object) -> Any:
            if isinstance(value, Prepared):
                value = value.read
            if isinstance(value, Read):
                return reads[value.index]
            if isinstance(value, (list, tuple)):
                return type(value)(given(v) for v in value)
            return value

        results = target(*given(tuple(args)), **{k: given(v) for k, v in kwargs.items()})
        handed: list[torch.Tensor] = []
        if not writes:
            return handed
        if isinstance(results, torch.Tensor):
            results = (results,)
        if kept is not None:
            results = [results[i] for i in kept]
        for write, result in zip(writes, results, strict=True):
            if write is None:
                handed.append(result)
                continue
            if result.device != write.device:
                # Fake tensors do not tell where random states lie.
                raise RuntimeError(f"a result of {target} is on {result.device}, not on {write.device}")
            write.copy_(result)
        return handed

    return run


def _dispatched(
    target: object, args: Sequence[object], kwargs: dict[str, object], *, writes: bool
) -> dict[str, object]:
    if not isinstance(target, OpOverload) or not LIBTORCH.exists():
        raise _InexpressibleError
    schema = target._schema
    values = list(args)
    values += [kwargs.get(a.name, a.default_value) for a in schema.arguments[len(values) :]]
    arguments = [_changed(v, a) for v, a in zip(values, schema.arguments, strict=True)]
    returns = [r.type.kind() for r in schema.returns]
    if set(returns) - {"TensorType"}:
        raise _InexpressibleError
    overload = _writing(target) if writes else None
    if overload is not None:
        arguments += [{"out": i} for i in range(len(returns))]
    return {
        "op": schema.name,
        "overload": (overload or target)._schema.overload_name,
        "arguments": arguments,
        "returns": len(returns),
    }


@functools.lru_cache(1024)
def _writing(target: OpOverload) -> OpOverload | None:
    """The overload that writes its results into given tensors, if there is one that is alike otherwise.

    Not one that torch generates: it calls the op and copies what that returns, which may stay where it is.
    Of several results only where torch checks them before its kernel runs: some kernels that are written by
    hand, such as ``cudnn_batch_norm.out``, return what they do not own, and that corrupts the heap.
    """
    if len(target._schema.returns) > 1 and not is_structured(target):
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        arguments = overload._schema.arguments
        given, out = arguments[: len(wanted)], arguments[len(wanted) :]
        if torch.Tag.generated in overload.tags:
            continue
        if (
            [(a.name, str(a.type)) for a in given] == wanted
            and len(out) == len(target._schema.returns)
            and all(a.is_out and a.type.kind() == "TensorType" for a in out)
        ):
            return overload
    return None


def _changed(value: object, argument: Any) -> object:
    """An argument, which the call may change."""
    described = _argument(value, argument.type, argument.N)
    if argument.alias_info is None or not argument.alias_info.is_write:
        return described
    if not isinstance(value, Read) or argument.type.kind() != "TensorType":
        raise _InexpressibleError
    return {"changed": value.index}


def _argument(value: object, kind: Any, count: int | None) -> object:
    name = kind.kind()
    if name == "OptionalType":
        return "none" if value is None else {"some": _argument(value, kind.getElementType(), count)}
    if name == "TensorType" and isinstance(value, Read):
        return {"tensor": value.index}
    if name == "TensorType" and isinstance(value, Prepared):
        made = _dispatched(value.op, (Read(0), *value.args), {}, writes=False)
        return {"prepared": {"tensor": value.read.index, **made}}
    if name == "StringType" and isinstance(value, str):
        return {"str": value}
    if name == "ListType":
        if count is not None and not isinstance(value, (list, tuple)):
            value = [value] * count
        if isinstance(value, (list, tuple)):
            return {"list": [_argument(v, kind.getElementType(), None) for v in value]}
    if name == "BoolType" and isinstance(value, bool):
        return {"bool": value}
    if name == "FloatType" and isinstance(value, (int, float)):
        return {"float": repr(float(value))}
    if name in ("IntType", "SymIntType"):
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"int": _MEMORY_FORMATS.get(value, 0)}
        if isinstance(value, int):
            return {"int": int(value)}
    raise _InexpressibleError


def captured_call(node: fx.Node, operands: Sequence[Any]) -> tuple[Any, tuple[object, ...], dict[str, Any]]:
    """A captured call on other operands, in the order in which it reads them."""
    given = dict(zip(node.all_input_nodes, operands, strict=True))
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda a: given[a] if isinstance(a, fx.Node) else a
    )
    return node.target, args, kwargs
