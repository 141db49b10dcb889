"""What the calls of a graph of Dynamo's or of torch.export's are made of: torch's own ops.

Such graphs have functions, methods and composite ops, of which there are many for the same thing. Each call
is run on the fake tensors that are known of it, and what it does is written down, in a graph beside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from .. import _torch
from .._torch import OpOverload, TorchDispatchMode, pytree
from .constant_values import LIFTS, is_number, remember_number
from .graph_writer import Writer, mode_of
from .op_facts import changes, is_best_whole, is_composite
from .records import value_of


class UnknownError(Exception):
    """A graph, or what a value is made of, cannot be told in ops."""


class Parts:
    """The ops of a graph, and which of them belong to which call."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """Raises `UnknownError` if something is changed in place."""
        self._of = gm
        self.graph = fx.Graph()
        self.holder = fx.GraphModule(nn.Module(), self.graph)
        """Has tensors that are written in the model's code."""
        self.graph = self.holder.graph
        self.calls: dict[fx.Node, fx.Node] = {}
        """The call that an op is part of."""
        self.results: dict[fx.Node, fx.Node] = {}
        """The op whose value a call returns."""
        self._origins: dict[fx.Node, fx.Node] = {}
        """The first call or input that has the value of an op."""
        self._values: dict[fx.Node, Any] = {}
        self.nodes: dict[int, fx.Node] = {}
        """By the address of a fake tensor, which its node keeps alive."""
        mode = mode_of([value_of(n) for n in gm.graph.nodes])
        if mode is None:
            raise UnknownError
        recorder = _Recorder(self)
        with torch.no_grad(), _torch.below_autograd(), mode:
            for node in gm.graph.nodes:
                if node.op not in ("call_function", "call_method") or not self._run(node, recorder):
                    self._given(node, mode)

    def _run(self, node: fx.Node, recorder: _Recorder) -> bool:
        """Writes down what a call does, if that is known."""
        recorder.call = node
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
            with recorder:
                if node.op == "call_method":
                    out = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    out = node.target(*args, **kwargs)  # type: ignore[operator]
        except _ChangesError:
            raise UnknownError from None
        except Exception:
            # A call with a graph inside, or one that fake tensors do not know.
            return False
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if any(id(t) not in self.nodes for t in tensors):
            return False
        self._values[node] = out
        if isinstance(out, torch.Tensor):
            self.results[node] = self.nodes[id(out)]
            self._origins.setdefault(self.nodes[id(out)], node)
        return True

    def _given(self, node: fx.Node, mode: _torch.FakeTensorMode) -> None:
        """An input, or a call that nothing is known about but its value."""
        reads = [self.nodes.get(id(self._values.get(n))) for n in node.all_input_nodes]
        if reads:
            # Tensors that it reads are read.
            self.graph.call_function(_anything, tuple(n for n in reads if n is not None))
        value = value_of(node)
        if value is None and node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._of)
            if isinstance(value, torch.Tensor):
                value = mode.from_tensor(value, static_shapes=True)
        self._values[node] = value
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.nodes:
                number = operator.attrgetter(str(node.target))(self._of) if is_number(node) else None
                made = self.graph.placeholder(node.name) if number is None else self.written(number)
                made.meta["val"] = tensor
                self.nodes[id(tensor)] = made
        if isinstance(value, torch.Tensor):
            self._origins.setdefault(self.nodes[id(value)], node)

    def written(self, held: torch.Tensor) -> fx.Node:
        """A tensor that is written in the model's code."""
        name = f"written_tensor_{len(self.nodes)}"
        self.holder.register_buffer(name, held)
        return self.graph.create_node("get_attr", name)

    def is_trained(self, node: fx.Node) -> bool:
        """Whether a value may have a gradient."""
        origin = self._origins.get(node)
        if origin is not None:
            value = value_of(origin)
            if value is None:
                value = operator.attrgetter(str(origin.target))(self._of)
            return bool(value.requires_grad)
        return any(map(self.is_trained, node.all_input_nodes))

    def replace(self, call: fx.Node, by: fx.Node) -> None:
        """Writes the ops that a call is made of now into its place; ``by`` is its result.

        Raises:
            UnknownError: a part of it cannot be written.
        """
        write = Writer(self._of.graph, call)
        known: dict[fx.Node, fx.Node] = {}

        def written(node: fx.Node) -> fx.Node:
            origin = self._origins.get(node)
            if origin is not None and origin is not call:
                return origin
            if node not in known:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), written)
                sizes = pytree.tree_leaves((args, kwargs))
                if node.op != "call_function" or any(isinstance(n, torch.SymInt) for n in sizes):
                    raise UnknownError
                known[node] = write(node.target, *args, **kwargs)  # type: ignore[arg-type]
            return known[node]

        made = written(by)
        call.replace_all_uses_with(made)
        self._origins = {n: made if o is call else o for n, o in self._origins.items()} | known | {by: made}


def _anything(*_args: object) -> None:
    """Stands for a call that is not known."""


class _ChangesError(Exception):
    """A call changes something."""


class _Recorder(TorchDispatchMode):
    """Writes down the ops that reach it; composite ones stay whole where the op table knows them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self.call: fx.Node | None = None
        """The call that is run."""

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op on fake tensors, and writes it down."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)  # type: ignore[operator]
        whole = is_best_whole(func) if is_composite(func) else True
        if not whole:
            with self:
                return func.decompose(*args, **kwargs)
        if func in LIFTS and type(args[0]) is torch.Tensor:
            out = func(*args, **kwargs)
            with _torch.disable_current_modes():
                held = args[0].detach().clone()
            remember_number(held)
            self._known(out, self._parts.written(held))
            return out
        if func is torch.ops.aten.detach_.default:
            source = self._parts.nodes[id(args[0])]
            if source.op == "get_attr" or source.target in LIFTS:
                # A tensor that is written in the model's code has nothing to be detached from.
                return args[0]
        if changes(func):
            raise _ChangesError
        out = func.decompose(*args, **kwargs) if is_composite(func) else func(*args, **kwargs)
        given = pytree.tree_map_only(torch.Tensor, lambda t: self._parts.nodes[id(t)], (args, kwargs))
        node = self._parts.graph.call_function(func, *given)
        if isinstance(out, torch.Tensor):
            self._known(out, node)
        elif isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for i, each in enumerate(out):
                if isinstance(each, torch.Tensor):
                    self._known(each, self._parts.graph.call_function(operator.getitem, (node, i)))
        return out

    def _known(self, value: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = value
        if self.call is not None:
            self._parts.calls[node] = self.call
        self._parts.nodes.setdefault(id(value), node)
