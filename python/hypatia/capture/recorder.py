"""A graph by running the model once: every op that it calls is noted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from .. import _torch
from .._torch import FakeTensorMode, PyTreeCodeGen, PyTreeInfo, TorchDispatchMode, make_graph_module, pytree
from .constant_values import LIFTS, computed, constants_of, remember_number
from .fake_tensors import fakes_of, kind_of, storage_of
from .op_facts import (
    changes,
    functional_form,
    is_best_whole,
    is_composite,
    makes_new_memory,
    makes_views,
    name_of,
)
from .rewritten import copied, windows
from .source_names import Places
from .stride_changes import SharedMemory

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Ops that do nothing but for autograd."""
SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
"""Views of parts, and the ops that put such a part into a whole."""


class UnservedError(Exception):
    """The model needs torch.export."""


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones under all of their names; a module of several names has one here."""
    found: dict[str, torch.Tensor] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, module in model.named_modules():
            own = vars(module)[kind].items()
            found |= {f"{prefix}.{n}".lstrip("."): t for n, t in own if t is not None}
    return found


def recorded(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[fx.GraphModule, bool]:
    """The graph of one run on fake tensors, and whether strides of inputs decide what is changed in place.

    Raises:
        UnservedError: the run has what a list of functional ops cannot say.
    """
    from .._torch import compiling_state_context, reparametrize_module

    leaves, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    state = _state(model)
    plain = (torch.Tensor, nn.Parameter, nn.Buffer)
    if any(type(t) not in plain for t in (*leaves, *state.values())):
        raise UnservedError("an input is no tensor, or a tensor is of a class of its own")
    weights = {id(t): name for name, t in reversed(state.items())}
    places = Counter(_memory(t) for t in (*leaves, *(state[name] for name in weights.values())))
    shared = {place for place, times in places.items() if times > 1}
    recorder = _Recorder(shared, Places(model, recorded.__code__))
    names = list(_names(model, args, kwargs))
    inputs = [recorder.given("placeholder", n, t) for n, t in zip(names, leaves, strict=True)]
    fakes = {key: recorder.given("get_attr", n, state[n]) for key, n in reversed(weights.items())}
    fake_args, fake_kwargs = pytree.tree_unflatten(inputs, in_spec)
    # Below autograd, composite ops arrive whole.
    with (
        compiling_state_context(),
        _without_mha_fastpath(),
        reparametrize_module(model, {name: fakes[id(t)] for name, t in state.items()}),
        _torch.below_autograd(),
        recorder.mode,
        recorder,
    ):
        results = model(*fake_args, **fake_kwargs)
        if any(operator.attrgetter(name)(model) is not fakes[id(t)] for name, t in state.items()):
            raise UnservedError("a buffer or a parameter is replaced")
    flat, out_spec = pytree.tree_flatten(results)
    nodes = [recorder.result(t) for t in flat]
    graph = recorder.graph
    graph.output(tuple(nodes))
    graph.eliminate_dead_code()
    called = [f"arg_{i}" for i in range(len(args))] + list(kwargs)
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(called, in_spec, out_spec)))
    gm = make_graph_module(_attributes(model, graph, recorder.constants), graph)
    gm.train(model.training)
    return gm, recorder.memory.strides_decide


def _attributes(
    model: nn.Module, graph: fx.Graph, constants: dict[str, torch.Tensor]
) -> nn.Module | dict[str, torch.Tensor]:
    """What holds the attributes of a graph: the model, and what its code writes as tensors."""
    if not constants:
        return model
    targets = {str(n.target) for n in graph.find_nodes(op="get_attr")} - constants.keys()
    return {name: operator.attrgetter(name)(model) for name in targets} | constants


@contextlib.contextmanager
def _without_mha_fastpath() -> Iterator[None]:
    """Torch's layers of transformers run as their parts, not as one op that nothing is known about."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _names(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[str]:
    """Names of the inputs, one after the other: what the model calls them, with numbers for parts."""
    bound = inspect.signature(model.forward).bind_partial(*args)
    for name, value in (*bound.arguments.items(), *kwargs.items()):
        for path, _ in pytree.tree_leaves_with_path(value):
            parts = (re.sub(r"\W+", "", str(pytree.keystr((key,)))) for key in path)
            yield "_".join((name, *parts))


class _Recorder(TorchDispatchMode):
    """Writes down the ops that reach it; composite ones stay whole where the op table knows them."""

    def __init__(self, shared: set[int | None], places: Places) -> None:
        super().__init__()
        self._places = places
        self._shared = shared
        """Where tensors lie that lie in the same memory."""
        self.mode = FakeTensorMode()
        self._fakes = fakes_of(self.mode)
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        """By the address of a fake tensor, which its node keeps alive."""
        self._held: list[torch.Tensor] = []
        """Fake tensors that have no node of their own."""
        self._given: set[fx.Node] = set()
        self._lying: defaultdict[int | None, list[torch.Tensor]] = defaultdict(list)
        """The known tensors that lie in a storage."""
        self._part_of: dict[int, tuple[_torch.OpOverload, tuple[Any, ...]]] = {}
        """By the address of a fake tensor: the view that makes it, and of what."""
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that are written in the model's code, by their names in the graph."""
        self.memory = SharedMemory()

    def given(self, op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of an input or a weight."""
        fake = self._fake(tensor)
        node = self.graph.create_node(op, name, name=name.replace(".", "_"))
        self._known(fake, node)
        self._given.add(node)
        return fake

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory(tensor)
        if memory is None or memory in self._shared or tensor.storage_offset():
            return self.mode.from_tensor(tensor, static_shapes=True)
        # The same in a quarter of the time.
        fake = self._fakes.like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return fake.requires_grad_(tensor.requires_grad)

    def result(self, value: object) -> fx.Node | int | float | str | None:
        """The node of a result of the model, or what it is for every call of this graph."""
        if value is None or isinstance(value, (int, float, str)):
            return value
        node = self._nodes.get(id(value))
        if node is None or node in self._given:
            raise UnservedError("a result is an input, a weight or neither a tensor nor a number")
        return node

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op on fake tensors, and writes it down."""
        kwargs = kwargs or {}
        if not isinstance(func, _torch.OpOverload):
            raise UnservedError(f"{func} is no op of torch's")
        if func.namespace == "prim":
            # What kind of tensor it is: that is the same for every call of this graph.
            return func(*args, **kwargs)
        composite, whole, views = _traits(func)
        if composite and not whole:
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten.detach_.default:
            return args[0]
        if name_of(func) == "_local_scalar_dense":
            return self._number(args[0])
        if changes(func):
            return self._changed(func, args, kwargs)
        if func in LIFTS and type(args[0]) is torch.Tensor:
            out = func(*args, **kwargs)
            self._constant(args[0], out)
            return out
        if func is torch.ops.aten.im2col.default:
            with self:
                return windows(*args)
        if whole:
            run = func.decompose if composite else func
            out = self._fakes.call(func, run, args, kwargs)
        else:
            out = self._fakes.view(func, args, kwargs) if views else func(*args, **kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _constant(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Keeps a tensor that is written in the model's code."""
        with _torch.disable_current_modes():
            held = tensor.detach().clone()
        remember_number(held)
        name = f"written_tensor_{len(self.constants)}"
        self.constants[name] = held
        node = self.graph.create_node("get_attr", name, name=name)
        self._known(fake, node)
        self._given.add(node)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """The graph in a module that has its constants."""
        holder = nn.Module()
        for name, held in self.constants.items():
            holder.register_buffer(name, held)
        self.graph.owning_module = holder  # type: ignore[assignment]
        try:
            yield
        finally:
            self.graph.owning_module = None

    def _number(self, tensor: torch.Tensor) -> int | float | bool:
        """The number that a tensor of one element is in every call of this graph."""
        node = self._nodes.get(id(tensor))
        with self._owned():
            known = computed([node]) if node is not None and node in constants_of(self.graph) else {}
        if node is None or node not in known:
            raise UnservedError("the model asks for a value that depends on its inputs or weights")
        with _torch.disable_current_modes():
            return known[node].item()

    def _changed(self, func: _torch.OpOverload, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Writes down what an op makes of its first operand, which stands for that from now on, as the
        tensors do that it is a part of. What else lies in this memory is not known any more."""
        instead = functional_form(func)
        changed = args[0]
        node = self._nodes.get(id(changed))
        if node is not None:
            self.memory.changed(node)
        lying = self._lying[storage_of(changed)]
        if instead is None or node is None or any(self._nodes.get(id(t)) in self._given for t in lying):
            raise UnservedError(f"{func} changes something")
        out: Any
        if instead is torch.ops.aten.copy.default:
            with self:
                out = copied(*args, **kwargs)
        else:
            out = self._fakes.call(instead, instead, args, kwargs)
            self._record(instead, args, kwargs, out)
        whole, parts = changed, list[torch.Tensor]()
        while id(whole) in self._part_of:
            view, (base, *places) = self._part_of[id(whole)]
            parts.append(whole)
            scatter = SCATTERS[view]
            new = self._fakes.call(scatter, scatter, (base, out, *places), {})
            self._record(scatter, (base, out, *places), {}, new)
            whole, out = base, new
        if kind_of(out) != kind_of(whole):
            raise UnservedError(f"{func} changes how a tensor lies in memory")
        before = self._nodes[id(whole)]
        for other in lying:
            self._nodes.pop(id(other), None)
        self._nodes[id(whole)] = self._nodes[id(out)]
        self.memory.same(self._nodes[id(out)], before)
        self._held.append(whole)
        for part in reversed(parts):
            view, given = self._part_of[id(part)]
            node = self.graph.create_node("call_function", view, self._put(given))
            self.memory.made(node, view, {})
            node.meta["val"] = part
            self._nodes[id(part)] = node
        return changed

    def _record(self, func: Any, args: Any, kwargs: object, out: Any) -> None:
        several = isinstance(out, (tuple, list))
        outs = out if several else (out,)
        if not all(isinstance(t, torch.Tensor) for t in outs):
            raise UnservedError(f"{func} has a result that is no tensor")
        if all(id(t) in self._nodes for t in outs):
            return
        if func in SAME:
            self._held.append(out)
            self._lying[storage_of(out)].append(out)
            self._nodes[id(out)] = self._put(args[0])
            return
        name = func._schema.name.partition("::")[2]
        node = self.graph.create_node("call_function", func, self._put(args), self._put(kwargs), name)
        node.meta.update(self._places.here(), val=out)
        self.memory.made(node, func, node.kwargs)
        if not several:
            self._known(out, node)
            if func in SCATTERS and not kwargs:
                self._part_of[id(out)] = func, tuple(args)
            return
        for i, part in enumerate(out):
            self._known(part, self.graph.call_function(operator.getitem, (node, i)))

    def _known(self, fake: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = fake
        self._lying[storage_of(fake)].append(fake)
        self._nodes[id(fake)] = node

    def _put(self, value: object) -> Any:
        """An argument as a graph has it."""
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            if node is None:
                raise UnservedError("a tensor comes from elsewhere")
            return node
        if isinstance(value, (tuple, list)):
            return type(value)(self._put(v) for v in value)
        if isinstance(value, dict):
            return {k: self._put(v) for k, v in value.items()}
        return value


def _memory(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins, if that says all."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.untyped_storage().data_ptr() or None


@functools.lru_cache(4096)
def _traits(op: _torch.OpOverload) -> tuple[bool, bool, bool]:
    """Whether an op is a composite, whether it stays in one piece with memory of its own, or makes views."""
    composite = is_composite(op)
    whole = is_best_whole(op) if composite else makes_new_memory(op)
    return composite, whole, not composite and makes_views(op)
