"""How the tensors of a captured graph lie in memory, at given sizes: what a plan has to keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypedDict, TypeGuard

import sympy
import torch
from torch import fx

from .. import _native
from .layout import storage_of
from .records import Captured, value_of

Sizes = Mapping[str, int]


class Layouts(TypedDict):
    """Strides by the names of nodes, of what they are and of what they read; how results lie."""

    results: dict[str, list[list[int] | None]]
    reads: dict[str, list[list[int] | None]]
    outputs: list[dict[str, object]]


class UnknownSizeError(_native.HypatiaError):
    """A size or a stride that the sizes of the inputs do not tell."""


Value: TypeAlias = int | sympy.Expr
"""A size or a stride, known or of symbols."""


class _Shaped(NamedTuple):
    """The sizes and strides of a tensor, some of which are left open."""

    shape: tuple[Value, ...]
    strides: tuple[Value, ...]

    def unusual(self, sizes: _Known) -> list[int] | None:
        """Strides of a tensor whose elements do not lie one after the other."""
        strides = sizes.numbers(self.strides)
        return None if follows(sizes.numbers(self.shape), strides) else strides


class _Result(NamedTuple):
    """How a result lies: its strides, where it begins, and whose memory it is in."""

    strides: tuple[Value, ...]
    offset: Value
    first: Value
    """Where the input begins that it is a view of."""
    memory: dict[str, object]
    whole: tuple[Value, Value] | None
    """Bytes of its memory and of itself, if that is its own."""

    def at(self, sizes: _Known) -> dict[str, object]:
        offset, first = sizes.numbers((self.offset, self.first))
        found = {"strides": sizes.numbers(self.strides), "offset": offset - first, "memory": self.memory}
        if self.whole is not None:
            held, used = sizes.numbers(self.whole)
            found["whole"] = held == used
        return found


class GraphLayouts:
    """How results lie, and by node: what it is and what it reads, where elements do not follow each other.

    In a graph of a training step so many first results are ``plain``; the others are kept for a backward
    pass, which has views of them, or are gradients, for which it is all the same. What symbols have to say is
    looked for once: a graph may be asked at other sizes with every call.
    """

    def __init__(self, captured: Captured, plain: int | None) -> None:
        self._nodes: list[tuple[str, list[_Shaped | None], list[_Shaped | None]]] = []
        """Results and reads of nodes where one does not, or may not, lie one after the other."""
        shaped: dict[fx.Node, list[_Shaped | None]] = {}
        for node in captured.nodes:
            value = value_of(node)
            shaped[node] = [_shaped(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
            reads = [_read(n, shaped) for n in node.all_input_nodes]
            if any(s is not None for s in (*shaped[node], *reads)):
                self._nodes.append((node.name, shaped[node], reads))
        owners: dict[int | None, int] = {}
        self._outputs: list[_Result | tuple[Value, ...] | str | None] = []
        for place, node in enumerate(captured.results):
            value = value_of(node)
            if isinstance(value, (int, torch.SymInt)):
                self._outputs.append("number")
            elif not isinstance(value, torch.Tensor):
                raise UnknownSizeError(f"{node.name} is no tensor")
            elif plain is None or place < plain:
                self._outputs.append(_wanted(node, owners))
            else:
                self._outputs.append(_values(value.stride()) if plain else None)

    def at(self, sizes: Sizes) -> Layouts:
        """With values for symbols.

        Raises:
            UnknownSizeError: a size or a stride is left that these do not tell.
        """
        known = _Known(sizes)
        found: Layouts = {"results": {}, "reads": {}, "outputs": []}
        for name, results, reads in self._nodes:
            for part, shaped in ((found["results"], results), (found["reads"], reads)):
                listed = [None if s is None else s.unusual(known) for s in shaped]
                if any(s is not None for s in listed):
                    part[name] = listed
        for output in self._outputs:
            if output == "number":
                found["outputs"].append({})
            elif isinstance(output, _Result):
                found["outputs"].append(output.at(known))
            else:
                strides = None if output is None else known.numbers(output)
                found["outputs"].append({"strides": strides, "memory": "any"})
        return found


def _wanted(node: fx.Node, owners: dict[int | None, int]) -> _Result:
    value, root = value_of(node), _root(node)
    strides, (offset,) = _values(value.stride()), _values([value.storage_offset()])
    if root.op in ("placeholder", "get_attr"):
        (first,) = _values([value_of(root).storage_offset()])
        return _Result(strides, offset, first, {"input": root.name}, None)
    held, used = _values([value.untyped_storage().nbytes(), value.numel() * value.element_size()])
    own = owners.setdefault(storage_of(node), len(owners))
    return _Result(strides, offset, 0, {"own": own}, (held, used))


def _root(node: fx.Node) -> fx.Node:
    """Whose memory a value is in: what it is a view of, or itself."""
    memory = storage_of(node)
    while memory is not None:
        views = [n for n in node.all_input_nodes if _shares(n, memory)]
        if not views:
            break
        node = views[0]
    return node


def _shares(node: fx.Node, memory: int) -> bool:
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == memory for v in value)
    return storage_of(node) == memory


def _shaped(value: object) -> _Shaped | None:
    """How a tensor lies; none if its elements lie one after the other, whatever symbols are."""
    if not is_plain(value):
        return None
    shape, strides = _values(value.shape), _values(value.stride())
    known = all(isinstance(v, int) for v in (*shape, *strides))
    return None if known and follows(shape, strides) else _Shaped(shape, strides)


def _read(node: fx.Node, shaped: Mapping[fx.Node, list[_Shaped | None]]) -> _Shaped | None:
    several = isinstance(value_of(node), (list, tuple))
    return None if several else shaped[node][0] if node in shaped else _shaped(value_of(node))


def follows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after the other."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor whose elements are in memory as they are."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def _values(values: Sequence[int | torch.SymInt]) -> tuple[Value, ...]:
    """Sizes or strides: numbers, or expressions of symbols."""
    return tuple([v if isinstance(v, int) else _simple(v.node.expr) for v in values])


def _simple(expression: sympy.Expr) -> Value:
    return int(expression) if expression.is_Integer else expression


class _Known:
    """Values of symbols, and of the expressions that were asked for."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._found: dict[sympy.Expr, int] = {}

    def numbers(self, values: Sequence[Value]) -> list[int]:
        """Sizes or strides with values for their symbols."""
        return [v if isinstance(v, int) else self._number(v) for v in values]

    def _number(self, expression: sympy.Expr) -> int:
        if (number := self._found.get(expression)) is not None:
            return number
        sizes = self._sizes
        known = {s: sympy.Integer(sizes[str(s)]) for s in expression.free_symbols if str(s) in sizes}
        found = expression.xreplace(known)
        if not found.is_Integer:
            raise UnknownSizeError(f"no native plan: the size {expression} is not known")
        number = self._found[expression] = int(found)
        return number
