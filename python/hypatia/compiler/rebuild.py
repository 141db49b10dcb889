"""From the optimized program back to an FX graph.

Every new node is run on fake tensors, which gives its metadata and catches a wrong shape or
dtype before anything runs. Results and the inputs of opaque calls get eager's strides, and a
result shares memory exactly where eager's does.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _torch, kernels
from .._torch import OpOverload
from ..capture.arguments import Arg, Terms
from ..capture.fake_tensors import fakes_of
from ..capture.layout import check_same_type
from ..capture.op_facts import changes_inputs
from ..capture.records import Captured, by_schema, function_of, path_of, resolve, target_name, terms, value_of
from ..errors import UnsupportedError
from ..execute.folding import FoldedWeights
from .emission import (
    Emission,
    Emitted,
    body_of,
    closure,
    faked,
    has_open_sizes,
    kernels_choose,
    needed_by,
    open_sizes,
    operands_of,
    reads_of,
)
from .relayout import Aliases, like_eager, rows_like_eager

_CLONE = torch.ops.aten.clone.default


class Rebuilt(NamedTuple):
    """The graph of an optimized program."""

    module: fx.GraphModule
    names: dict[int, str]
    """Names of its nodes by their number in the program."""
    origins: dict[fx.Node, int]
    """The places of captured nodes that its nodes stand for."""


def rebuild(
    gm: fx.GraphModule, captured: Captured, emission: Emission, disabled_kernels: Collection[str] = ()
) -> Rebuilt:
    """The graph of an emission, with the parameters, names and metadata of the original."""
    # Runs on fake tensors are no work of the user's: a mode that counts or logs ops does not see them.
    with _torch.disable_current_modes():
        rebuilt = _Rebuilder(gm, captured, disabled_kernels).build(emission)
    known = set(captured.hints)
    if known and not known <= open_sizes(gm):
        raise UnsupportedError("a size that is open was fixed when the graph was rebuilt")
    return rebuilt


def rebuild_values(gm: fx.GraphModule, captured: Captured, emission: Emission) -> fx.GraphModule:
    """A graph of the values of an emission as they are, computed without kernels of ours."""
    with _torch.disable_current_modes():
        return _Rebuilder(gm, captured, kernels.names()).build_values(emission)


class _Rebuilder:
    def __init__(
        self, gm: fx.GraphModule, captured: Captured, disabled_kernels: Collection[str] = ()
    ) -> None:
        self.gm = gm
        self.disabled_kernels = disabled_kernels
        self.old = captured.nodes
        self.captured = captured
        self.graph = fx.Graph()
        self.modules: dict[str, torch.nn.Module] = {}
        self.bodies: dict[str, fx.GraphModule] = {}
        self.counts: Counter[str] = Counter()
        self.env: dict[int, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.symbols: dict[str, fx.Node] = {}
        values = [value_of(n) for n in self.old]
        self.fake_mode = _torch.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
        self.dispatcher = _torch.enable_python_dispatcher if captured.hints else contextlib.nullcontext

    def build(self, emission: Emission) -> Rebuilt:
        for node in self.old:
            if node.op == "placeholder":
                self._copied(node, {})
        nodes = emission["nodes"]
        folded = self._fold(nodes, emission["outputs"])
        for number, item in enumerate(nodes):
            if number not in folded:
                self.env[number] = self._node(item, self.env)
        found = [self.env[n] for n in emission["outputs"]]
        results = iter(Aliases(self, list(zip(self.captured.results, found, strict=True))).results())
        output = fx.node.map_arg(self.captured.output.args, lambda _: next(results))
        out = self.graph.output(output[0])
        out.meta = dict(self.captured.output.meta)
        self._changes_last(out)
        root = _torch.make_graph_module(self._attributes(), self.graph, self.gm.__class__.__name__)
        root.meta = dict(self.gm.meta)
        places = {self.env[i]: item["origin"] for i, item in enumerate(nodes) if i in self.env}
        origins = {node: place for node, place in places.items() if place is not None}
        return Rebuilt(root, {nodes[i]["id"]: node.name for i, node in self.env.items()}, origins)

    def build_values(self, emission: Emission) -> fx.GraphModule:
        for node in self.old:
            if node.op == "placeholder":
                self._copied(node, {})
        for number, item in enumerate(emission["nodes"]):
            self.env[number] = self._node(item, self.env)
        self.graph.output(tuple(self.env[n] for n in emission["outputs"]))
        return fx.GraphModule(self._attributes(), self.graph, "values")

    def _changes_last(self, out: fx.Node) -> None:
        """Changes of inputs come after the copies that results may need."""
        for node in [n for n in self.graph.nodes if changes_inputs(n)]:
            out.prepend(node)

    def _attributes(self) -> dict[str, object]:
        attributes: dict[str, object] = dict(self.modules)
        for node in self.graph.nodes:
            if node.op in ("get_attr", "call_module") and node.target not in attributes:
                attributes[node.target] = operator.attrgetter(node.target)(self.gm)
        return attributes

    def _copied(self, old: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        new = self.graph.node_copy(old, lambda n: env[n])
        new._rename(old.name)
        new.meta = dict(old.meta)
        self._note_symbols(new)
        self.copies[old] = new
        return new

    def _copied_call(self, old: fx.Node, inputs: list[fx.Node]) -> fx.Node:
        """A call as it was, on inputs that lie in memory as eager's do: calls that the op table
        does not know may read memory in its order."""
        reads = old.all_input_nodes
        alike = [like_eager(self, new, value_of(read)) for read, new in zip(reads, inputs, strict=True)]
        new = self._copied(old, dict(zip(reads, alike, strict=True)))
        view = old.target is operator.getitem or getattr(old.target, "is_view", False)
        if view and reads:
            # It is in the memory of what it reads here.
            new.meta["val"] = self._run_fake(new)
        return new

    def _note_symbols(self, node: fx.Node) -> None:
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            self.symbols.setdefault(str(value.node.expr), node)

    def _node(self, item: Emitted, env: dict[int, fx.Node]) -> fx.Node:
        kind = item["kind"]
        old = None if item["origin"] is None else self.old[item["origin"]]
        if kind == "input":
            assert old is not None
            known = self.copies.get(old)
            return known if known is not None else self._copied(old, {})
        if kind == "copy":
            assert old is not None
            return self._copied_call(old, [env[i] for i in operands_of(item)])
        if kind == "call":
            return self._call(item, old, env)
        return self._fused(item, old, env)

    def _call(self, item: Emitted, old: fx.Node | None, env: dict[int, fx.Node]) -> fx.Node:
        target = resolve(item["target"])
        values = [self._argument(a, env) for a in item["args"]]
        same = None
        if old is not None and old.op == "call_function" and target_name(old.target) == item["target"]:
            same = old
        if item["keeps_layout"]:
            assert isinstance(target, OpOverload)
            values = rows_like_eager(self, target, values, same)
        args, kwargs = by_schema(target, values)
        node = self.graph.call_function(target, args, kwargs)
        name = same.name if same is not None else item["op"].replace("-", "_")
        return self._finish(node, old, name)

    def _fused(self, item: Emitted, old: fx.Node | None, env: dict[int, fx.Node]) -> fx.Node:
        family = item["op"].replace("-", "_")
        name = f"{family}_{self.counts[family]}"
        self.counts[family] += 1
        operands = [env[i] for i in operands_of(item)]
        emitted = item["body"]
        assert emitted is not None
        if has_open_sizes(emitted):
            return self._inlined(emitted, operands)
        key = json.dumps(emitted)
        if key not in self.bodies:
            self.bodies[key] = body_of(emitted, family, self._constant)
        body = self.bodies[key]
        kernel = kernels.find(item["op"], [value_of(n) for n in operands], self.disabled_kernels)
        self.modules[name] = body if kernel is None else kernels.FusedCall(body, kernel)
        node = self.graph.call_module(name, tuple(operands))
        return self._finish(node, old, name)

    def _inlined(self, body: Emission, operands: list[fx.Node]) -> fx.Node:
        """A fused op as its parts: sizes that are left open are values of the graph around it."""
        inside: dict[int, fx.Node] = {}
        for number, part in enumerate(body["nodes"]):
            if part["kind"] == "input":
                assert part["origin"] is not None
                inside[number] = operands[part["origin"]]
                continue
            target = resolve(part["target"])
            args, kwargs = by_schema(target, [self._argument(a, inside) for a in part["args"]])
            node = self.graph.call_function(target, args, kwargs)
            inside[number] = self._finish(node, None, part["op"].replace("-", "_"))
        return inside[body["outputs"][0]]

    def _finish(self, node: fx.Node, old: fx.Node | None, name: str) -> fx.Node:
        """Name, metadata and a value from running the node on fake tensors."""
        if old is not None:
            node.meta = {
                k: v for k, v in old.meta.items() if k not in ("val", "tensor_meta", "example_value")
            }
            node.meta.setdefault("from_node_name", old.name)
        node._rename(name)
        value = self._run_fake(node)
        node.meta["val"] = value
        if old is not None:
            check_same_type(name, value, value_of(old))
        self._note_symbols(node)
        return node

    def _run_fake(self, node: fx.Node) -> object:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        called = self.modules[path_of(node)] if node.op == "call_module" else None
        function = function_of(node) if called is None else called
        if isinstance(function, (FoldedWeights, kernels.FusedCall)):
            function = function.body
        try:
            # With open sizes torch must put some ops together in Python: in C++ it would fix the sizes.
            with self.fake_mode or contextlib.nullcontext(), torch.no_grad(), self.dispatcher():
                if self.fake_mode is None:
                    return function(*args, **kwargs)
                return faked(fakes_of(self.fake_mode), function, args, kwargs)
        except RuntimeError as error:
            if "symbolic sizes/strides" in str(error):
                raise UnsupportedError(f"torch has no {node.target} of open sizes") from None
            raise

    def helper(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node that no captured one stands for."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._run_fake(node)
        return node

    def size(self, value: int | torch.SymInt) -> fx.Node | int:
        """A size as an argument."""
        return value if isinstance(value, int) else self._symbolic(terms(value.node.expr))

    def _argument(self, arg: Arg, env: dict[int, fx.Node]) -> object:
        if isinstance(arg, dict) and "node" in arg:
            return env[arg["node"]]
        if isinstance(arg, dict) and "list" in arg:
            return [self._argument(a, env) for a in arg["list"]]
        return self._constant(arg)

    def _constant(self, arg: Arg) -> object:
        if arg == "none":
            return None
        assert isinstance(arg, dict)
        if "float" in arg:
            return float(arg["float"])
        if "dtype" in arg:
            return getattr(torch, arg["dtype"])
        if "int" in arg:
            return arg["int"] if isinstance(arg["int"], int) else self._symbolic(arg["int"])
        if "list" in arg:
            return [self._constant(a) for a in arg["list"]]
        ((_, value),) = arg.items()
        return value

    def _symbolic(self, sizes: Terms) -> fx.Node | int:
        """A node for a sum of products of symbols."""
        total: fx.Node | int | None = None
        for coefficient, atoms in sizes:
            product: fx.Node | int = coefficient
            for atom in atoms:
                symbol = self._symbol(atom)
                product = symbol if product == 1 else self._arithmetic(operator.mul, product, symbol)
            total = product if total is None else self._arithmetic(operator.add, total, product)
        return 0 if total is None else total

    def _arithmetic(self, op: Callable[..., object], a: fx.Node | int, b: fx.Node | int) -> fx.Node:
        node = self.graph.call_function(op, (a, b))
        node.meta["val"] = op(*(value_of(x) if isinstance(x, fx.Node) else x for x in (a, b)))
        return node

    def _symbol(self, atom: str) -> fx.Node:
        if atom in self.symbols:
            return self.symbols[atom]
        for node in self.graph.nodes:
            value = value_of(node)
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            for i, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and terms(size.node.expr) == [(1, [atom])]:
                    symbol = self.graph.call_function(torch.ops.aten.sym_size.int, (node, i))
                    symbol.meta["val"] = size
                    self.symbols[atom] = symbol
                    return symbol
        raise UnsupportedError(f"the size {atom} is not at hand where it is needed")

    def _fold(self, nodes: list[Emitted], outputs: list[int]) -> set[int]:
        """Puts nodes made of frozen weights into one module that remembers its results."""
        folded = {i for i, item in enumerate(nodes) if item["folded"]} - needed_by(nodes, outputs)
        if not folded:
            return set()
        live = [item for i, item in enumerate(nodes) if i not in folded]
        wanted = sorted({read for item in live for read in reads_of(item["args"])} & folded)
        inside = closure(nodes, wanted)
        sources = [i for i in sorted(inside) if nodes[i]["kind"] == "input"]
        for i in sources:
            self.env[i] = self._node(nodes[i], self.env)
        inner = _Rebuilder(self.gm, self.captured, self.disabled_kernels)
        env: dict[int, fx.Node] = {}
        for i in sources:
            placeholder = inner.graph.placeholder(self.env[i].name)
            placeholder.meta = dict(self.env[i].meta)
            env[i] = placeholder
        for i in sorted(inside - set(sources)):
            env[i] = inner._node(nodes[i], env)
        # What kernels want without gaps is copied here, once, and not before every call.
        for i in kernels_choose(nodes, folded) & set(wanted) - set(sources):
            if not value_of(env[i]).is_contiguous():
                env[i] = inner.helper(_CLONE, env[i], memory_format=torch.contiguous_format)
        inner.graph.output(tuple(env[i] for i in wanted))
        body = fx.GraphModule(inner._attributes(), inner.graph, "folded_weights")
        self.modules["folded_weights"] = FoldedWeights(body)
        call = self.graph.call_module("folded_weights", tuple(self.env[i] for i in sources))
        call.meta["val"] = tuple(value_of(env[i]) for i in wanted)
        for position, i in enumerate(wanted):
            item = self.graph.call_function(operator.getitem, (call, position))
            item.meta = {**env[i].meta, "folded": True}
            item._rename(f"folded_{env[i].name}")
            self.env[i] = item
        return folded
