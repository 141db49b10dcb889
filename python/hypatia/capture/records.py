"""From an FX graph to flat records: target, arguments, type. No op is known by name here."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import sympy
import torch
from torch import fx, nn

from .. import _torch
from .._torch import OpOverload
from ..errors import UnsupportedError
from .arguments import Arg, Dim, Record, Terms
from .op_facts import changes, draws, says_types

_NAMESPACES = ("aten", "prims")


@dataclasses.dataclass
class Captured:
    """A captured graph: its records as JSON, and the FX nodes that they stand for."""

    nodes: list[fx.Node]
    output: fx.Node
    text: str
    device: torch.device
    hints: dict[str, int]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that are results, as often as they are."""
        return list(_leaves(self.output.args))


def capture(gm: fx.GraphModule, weights: Collection[str] = (), *, autograd: bool = False) -> Captured:
    """Records of a graph; ``weights`` names the placeholders and attributes that are frozen."""
    nodes = [n for n in gm.graph.nodes if n.op != "output" and not says_types(n.target)]
    (output,) = gm.graph.find_nodes(op="output")
    index = {node: i for i, node in enumerate(nodes)}
    hints: dict[str, int] = {}
    wrong = next((n for n in nodes if _has_wrong_meta(n)), None)
    if wrong is not None:
        raise UnsupportedError(f"torch has a wrong meta kernel for {wrong.name}")
    records = [_record(node, index, node.name in weights, hints) for node in nodes]
    if not any(r["mutates"] for r in records[: _last_pure(records)]):
        text = json.dumps(
            {
                "records": records,
                "outputs": [index[n] for n in _leaves(output.args)],
                "hints": hints,
                "autograd": autograd,
            }
        )
        return Captured(nodes, output, text, _device(nodes), hints)
    raise UnsupportedError("an input is changed before the end of the graph")


_WRONG_META_STRIDES = (
    torch.ops.aten.log_sigmoid_forward.default,
    torch.ops.aten.log_sigmoid.default,
)
"""Ops that return contiguous tensors, and fake ones with the strides of what they read."""


def _has_wrong_meta(node: fx.Node) -> bool:
    """Whether torch's value of a node has another shape or other strides than a run has: torch 2.11 keeps
    a dimension of a norm that has one element."""
    if node.target in _WRONG_META_STRIDES:
        read = value_of(_first_operand(node))
        return read is not None and not read.is_contiguous()
    if node.target is not torch.ops.aten.linalg_vector_norm.default or len(node.args) > 3:
        return False
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    value, read = value_of(node), value_of(_first_operand(node))
    kept = node.kwargs.get("keepdim", False)
    if kept or not isinstance(value, torch.Tensor):
        return False
    reduced = dims if isinstance(dims, (list, tuple)) and dims else read.shape
    return value.dim() != read.dim() - len(reduced)


def _first_operand(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def path_of(node: fx.Node) -> str:
    """The name of the attribute, module or method that a node is for."""
    assert isinstance(node.target, str)
    return node.target


def function_of(node: fx.Node) -> Callable[..., object]:
    """The function that a node calls."""
    assert not isinstance(node.target, str)
    return node.target


def module_of(node: fx.Node) -> nn.Module:
    """The module that a node calls."""
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(path_of(node))


def value_of(node: fx.Node) -> Any:
    """What tracing recorded as the value of a node."""
    return node.meta.get("val", node.meta.get("example_value"))


def _leaves(args: fx.node.Argument) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, lambda n: found.append(n))
    return iter(found)


def _last_pure(records: list[Record]) -> int:
    """Where the trailing run of changes to inputs starts."""
    end = len(records)
    while end > 0 and records[end - 1]["mutates"]:
        end -= 1
    return end


def _device(nodes: list[fx.Node]) -> torch.device:
    for node in nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def _record(node: fx.Node, index: dict[fx.Node, int], weight: bool, hints: dict[str, int]) -> Record:
    is_input = node.op in ("placeholder", "get_attr")
    effect, random, mutates = _effects(node)
    return {
        "name": node.name,
        "target": "" if is_input else target_name(node.target),
        "args": None if is_input else _arguments(node, index, hints),
        "reads": [index[n] for n in node.all_input_nodes],
        "ty": _type(value_of(node), hints),
        "input": is_input,
        "weight": weight and is_input,
        "effect": effect,
        "random": random,
        "mutates": mutates,
        "changes": _changed(node) if mutates else [],
    }


def target_name(target: object) -> str:
    """The name under which a call target is known: ``aten.relu.default``."""
    if isinstance(target, OpOverload):
        return str(target)
    if callable(target):
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    return str(target)


def _effects(node: fx.Node) -> tuple[bool, bool, bool]:
    """Whether a call must run exactly once in its place, and if so whether only because it may
    draw random numbers, or because it changes an input."""
    if node.op in ("placeholder", "get_attr"):
        return False, False, False
    target = node.target
    if isinstance(target, OpOverload):
        mutates = changes(target)
        listed = target in _torch.side_effectful_functions
        random = draws(target) and not _drops_nothing(node, target)
        return mutates or listed or random, random and not (mutates or listed), mutates
    pure = getattr(target, "__module__", "") in ("_operator", "math", "torch") and callable(target)
    return not pure or target in _torch.side_effectful_functions, False, False


def _changed(node: fx.Node) -> list[int]:
    """Which of the nodes that a call reads it changes."""
    found: list[fx.Node] = []
    for argument, value in by_name(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.node.map_arg(value, found.append)
    return [i for i, n in enumerate(node.all_input_nodes) if n in found]


def by_name(node: fx.Node) -> Iterator[tuple[Any, fx.node.Argument]]:
    """The arguments of a call of an op, as its schema has them, and what they are."""
    assert isinstance(node.target, OpOverload)
    for place, argument in enumerate(node.target._schema.arguments):
        default = node.kwargs.get(argument.name, argument.default_value)
        yield argument, node.args[place] if place < len(node.args) else default


def _drops_nothing(node: fx.Node, target: OpOverload) -> bool:
    """Whether a call would draw random numbers for dropout only, and drops nothing."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get(argument.name, argument.default_value)
            return bool((node.args[place] if place < len(node.args) else default) == 0.0)
    return False


def _arguments(node: fx.Node, index: dict[fx.Node, int], hints: dict[str, int]) -> list[Arg] | None:
    """Arguments in schema order without trailing defaults, if the call has a schema."""
    if node.target is operator.getitem:
        return [_argument(a, index, hints) for a in node.args]
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema.arguments
    values: list[object] = list(node.args)
    values += [node.kwargs.get(a.name, a.default_value) for a in schema[len(values) :]]
    while values and schema[len(values) - 1].has_default_value() and _is_default(values, schema):
        values.pop()
    return [_argument(a, index, hints) for a in values]


def _is_default(values: list[Any], schema: Any) -> bool:
    value, default = values[-1], schema[len(values) - 1].default_value
    if isinstance(value, fx.Node):
        return False
    if isinstance(value, (list, tuple)) or isinstance(default, (list, tuple)):
        return default is not None and value is not None and list(value) == list(default)
    return type(value) is type(default) and value == default


def _argument(value: object, index: dict[fx.Node, int], hints: dict[str, int]) -> Arg:
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if value is None:
        return "none"
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, (int, torch.SymInt)):
        return {"int": _dim(value, hints)}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return {"list": [_argument(v, index, hints) for v in value]}
    return "other"


def _type(value: object, hints: dict[str, int]) -> object:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not (
            value.is_quantized or value.is_conj() or value.is_neg()
        )
        if not plain or value.is_nested:
            return "unknown"
        shape = [_dim(s, hints) for s in value.shape]
        return {"tensor": [shape, str(value.dtype).removeprefix("torch."), str(value.device)]}
    if isinstance(value, (list, tuple)):
        return {"tuple": [_type(v, hints) for v in value]}
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return {"int": _dim(value, hints)}
    return "unknown"


def _dim(value: int | torch.SymInt, hints: dict[str, int]) -> Dim:
    """An integer, or the normal form of a symbolic size as coefficients and symbols."""
    if isinstance(value, int):
        return value
    expr = _decided(value)
    if expr.is_Integer:
        return int(expr)
    _note_hints(value, hints)
    return terms(expr)


def _decided(value: torch.SymInt) -> sympy.Expr:
    """A symbolic integer, where the ranges of its symbols say which of several is the greatest or least."""
    expr, env = value.node.expr, value.node.shape_env
    if expr.is_Symbol or expr.is_Integer or env is None:
        return expr

    def decided(choice: sympy.Expr) -> sympy.Expr:
        sign = 1 if type(choice).__name__ == "Max" else -1
        for one in choice.args:
            others = [sign * (one - other) for other in choice.args if other is not one]
            if all(env.bound_sympy(difference).lower >= 0 for difference in others):
                return one
        return choice

    return expr.replace(lambda e: type(e).__name__ in ("Max", "Min"), decided)


def terms(expr: sympy.Expr) -> Terms:
    """A symbolic integer as a sum of products; what is no product of symbols is one symbol."""
    result = []
    for monomial, coefficient in sympy.expand(expr).as_coefficients_dict().items():
        if not coefficient.is_Integer:
            return [(1, [str(expr)])]
        atoms: list[str] = []
        for base, power in monomial.as_powers_dict().items():
            if base == 1:
                continue
            if power.is_Integer and power > 0:
                atoms += [str(base)] * int(power)
            else:
                atoms.append(str(base**power))
        result.append((int(coefficient), sorted(atoms)))
    return result


def _note_hints(value: torch.SymInt, hints: dict[str, int]) -> None:
    """Example sizes, for the cost model only."""
    env = value.node.shape_env
    assert env is not None
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    for symbol in value.node.expr.free_symbols:
        if symbol in known:
            hints.setdefault(str(symbol), int(known[symbol]))


def resolve(name: str) -> Callable[..., object]:
    """The call target of a name: an op of torch's own namespaces, or an item of several results."""
    if name == "_operator.getitem":
        return operator.getitem
    namespace, _, path = name.partition(".")
    op, _, overload = path.partition(".")
    if namespace in _NAMESPACES and op.isidentifier() and overload.isidentifier():
        found = getattr(getattr(getattr(torch.ops, namespace), op, None), overload, None)
        if isinstance(found, OpOverload) and str(found) == name:
            return found
    raise UnsupportedError(f"{name!r} is no op of torch")


def by_schema(target: object, values: list[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments as torch's schema wants them."""
    if not isinstance(target, OpOverload):
        return tuple(values), {}
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for argument, value in zip(target._schema.arguments, values, strict=False):
        if argument.kwarg_only:
            if not (argument.has_default_value() and argument.default_value == value):
                kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs
