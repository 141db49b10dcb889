"""Native plans of a graph: which graphs have one, and what their calls into torch are."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from .. import _native, _torch
from .._torch import OpOverload, pytree
from ..capture import graph_layouts
from ..capture.arguments import Arg
from ..capture.op_facts import changes_inputs, ignores_strides, in_place_form, is_composite
from ..capture.records import Captured, by_schema, resolve, value_of
from ..devices import table
from ..kernels import FusedCall
from ..options import Options
from . import torch_calls
from .described import TorchCall, described

KERNEL = "native plan"
TF32 = "TF32 in convolutions"
"""The name under which a plan can be left out of a compilation."""


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.cudnn_convolution.default)


class Program(Protocol):
    """An optimized program."""

    def plan(self, wish: str) -> _native.NativePlan:
        """The program as a native plan for what is asked, as JSON."""


class Planner:
    """Makes the native plans of a graph: one for each set of sizes."""

    def __init__(
        self,
        gm: fx.GraphModule,
        names: Mapping[int, str],
        optimization: Program,
        captured: Captured,
        options: Options,
        plain: int | None = None,
        *,
        tf32: bool = True,
    ) -> None:
        saved = plain is not None
        self.tf32 = tf32
        """Convolutions may use TF32 where torch's settings allow it."""
        self.names = names
        """Names of the graph's nodes by their number in the program."""
        self.most = options.weight_copies
        # In training a ReLU is on or off by the last digit, and gradients show that.
        self.split = options.fp32_products == "auto" and not saved
        self.saved = saved
        """It is a pass of a training step."""
        self.plain = plain
        """So many first results of a training step are not kept for later."""
        self.optimization = optimization
        self.captured = captured
        self.hints = captured.hints
        self.device = captured.device
        forms = {n.name: in_place_form(n) for n in captured.nodes}
        self._in_place = {name: form for name, form in forms.items() if form is not None}
        """By name, calls that could change their first operand, and what is called then."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.symbols = _symbols(placeholders)
        self._layouts = graph_layouts.GraphLayouts(captured, plain)
        self._first = self._plan(self.hints)

    def _plan(
        self, sizes: dict[str, int], keep: Sequence[int] = (), masked: Sequence[int] = ()
    ) -> _native.NativePlan:
        layouts = self._layouts.at(sizes)
        wish = {"sizes": sizes, "saved": self.saved, "layouts": layouts, "in_place": list(self._in_place)}
        wish["images"] = any(map(_has_channels_last, self.captured.nodes))
        return self.optimization.plan(json.dumps({**wish, "keep": keep, "masked": masked}))

    def with_masks(self, keep: Sequence[int] = (), masked: Sequence[int] = ()) -> _native.NativePlan:
        """The plan that keeps masks beside these outputs, or takes them beside these inputs."""
        return self._plan(self.hints, keep, masked)

    def at(self, sizes: dict[str, int]) -> _native.NativePlan:
        """The plan for these values of the symbols."""
        return self._first if sizes == self.hints else self._plan(sizes)

    @property
    def may_use_tf32(self) -> bool:
        """Whether some convolution may use TF32; cuDNN chooses, and not alike for all layouts of images."""
        return self.tf32 and cudnn_settings()[-1] and self.asks_cudnn(described(self._first)["calls"])

    def asks_cudnn(self, calls: Sequence[TorchCall]) -> bool:
        """Whether some call depends on torch's settings for cuDNN."""
        if self.captured.device.type != "cuda":
            return False
        nodes = self.captured.nodes
        targets = (resolve(c["target"]) if c["origin"] is None else nodes[c["origin"]].target for c in calls)
        return any(target in _CONVOLUTIONS for target in targets)

    def changes_by(self, message: str) -> bool:
        """Whether an error comes from a step that changes inputs."""
        changing = (n.target for n in self.captured.nodes if changes_inputs(n))
        return any(f"({target})" in message for target in changing)

    def calls(self, described: Sequence[TorchCall]) -> list[str | Callable[..., object]]:
        """The calls into torch that a plan's steps make."""
        found: list[str | Callable[..., object]] = []
        for each in described:
            target, args, kwargs = self._call(each)
            into = not (each["is_vector"] and _resizes(target)) and not ignores_strides(target)
            found.append(torch_calls.call(target, args, kwargs, each["kept"], into=into))
        return found

    def _call(
        self, described: TorchCall
    ) -> tuple[Callable[..., object], Sequence[object], dict[str, object]]:
        operands = [
            o if o == "attr" else torch_calls.Read(o["tensor"]) if "tensor" in o else o["int"]
            for o in described["operands"]
        ]
        if described["origin"] is not None:
            node = self.captured.nodes[described["origin"]]
            target, args, kwargs = torch_calls.captured_call(node, operands)
            if self._must_be_exact(target) and not kwargs:
                return _exact_convolution(args)
            return self._in_place[node.name] if described["in_place"] else target, args, kwargs
        target = resolve(described["target"])
        args, kwargs = by_schema(target, [_given(a, operands) for a in described["args"]])
        if target is torch.ops.aten.cudnn_convolution.default:
            return _convolution(args, tf32=self.tf32)
        if self._must_be_exact(target):
            return _exact_convolution(args)
        if described["onednn"] is not None and _onednn_serves(described["onednn"]):
            return _onednn_convolution(args)
        return target, args, kwargs

    def _must_be_exact(self, target: object) -> bool:
        """Whether an op is a convolution that must not use TF32, and cuDNN may compute it."""
        convolution = target is torch.ops.aten.convolution.default
        return convolution and not self.tf32 and self.captured.device.type == "cuda" and cudnn_settings()[0]


def _has_channels_last(node: fx.Node) -> bool:
    """Whether a node is a convolution, or its gradient, whose image was traced with channels last."""
    if node.target is torch.ops.aten.convolution_backward.default:
        image = value_of(node.all_input_nodes[1])
    elif node.target is torch.ops.aten.convolution.default:
        image = value_of(node)
    else:
        return False
    return image.dim() == 4 and not image.is_contiguous() and image.stride()[1] == 1


def _resizes(target: object) -> bool:
    """Whether torch, asked to write a vector into given memory, gives that another shape on the way, and
    warns: a composite may compute it as a row of a matrix."""
    return isinstance(target, OpOverload) and is_composite(target)


def planner_of(
    gm: fx.GraphModule,
    names: Mapping[int, str],
    optimization: Program,
    captured: Captured,
    options: Options,
    plain: int | None = None,
    *,
    tf32: bool = True,
) -> Planner | str:
    """What makes the native plans of a graph; the reason if it has none.

    In a graph of a training step so many first results are ``plain``, and the others are kept for later. With
    ``tf32`` convolutions may use it where torch's settings allow that.
    """
    if any(isinstance(m, FusedCall) for m in gm.children()):
        return "a fused op has a kernel of its own"
    (output,) = gm.graph.find_nodes(op="output")
    results = [n for n in pytree.arg_tree_leaves(*output.args) if isinstance(n, fx.Node)]
    values = [value_of(n) for n in results[:plain]]
    if not all(graph_layouts.is_plain(v) or isinstance(v, (int, torch.SymInt)) for v in values):
        return "a result is no plain tensor"
    try:
        planner = Planner(gm, names, optimization, captured, options, plain, tf32=tf32)
        about = described(planner.at(captured.hints))
    except _native.HypatiaError as e:
        return str(e).removeprefix("no native plan: ")
    if plain is not None and planner.symbols:
        return "a training step with open sizes"
    if plain is not None and any(result["given"] for result in about["results"][:plain]):
        return "a result is a view of an input, of which autograd has to know"
    # A GPU records torch's calls, too.
    if len(about["calls"]) == len(about["steps"]) and not (
        about["steps"] and table.of(captured.device).records
    ):
        return "no step has a kernel"
    return planner


def _convolution(
    args: Sequence[object], *, tf32: bool = True
) -> tuple[Callable[..., object], Sequence[object], dict[str, object]]:
    """A convolution under torch's settings of now: cuDNN's, or whichever torch takes without it."""
    aten = torch.ops.aten
    image, kernel, padding, stride, dilation, groups = args[:6]
    enabled, benchmark, deterministic, allowed = cudnn_settings()
    if not enabled:
        rest = (None, stride, padding, dilation, False, [0, 0], groups)
        return aten.convolution.default, (image, kernel, *rest), {}
    return aten.cudnn_convolution.default, (*args[:6], benchmark, deterministic, allowed and tf32), {}


def _exact_convolution(
    args: Sequence[object],
) -> tuple[Callable[..., object], Sequence[object], dict[str, object]]:
    """Any convolution by cuDNN, which may not take TF32 for it."""
    image, kernel, bias, stride, padding, dilation, transposed, more, groups = args
    aten = torch.ops.aten
    target: Callable[..., torch.Tensor] = aten.cudnn_convolution.default
    how = [padding, stride, dilation, groups]
    if transposed:
        target, how = aten.cudnn_convolution_transpose.default, [padding, more, stride, dilation, groups]
    how += [*cudnn_settings()[1:3], False]
    if bias is None:
        return target, (image, kernel, *how), {}
    return functools.partial(_biased, target), (image, kernel, bias, *how), {}


def _biased(
    target: Callable[..., torch.Tensor],
    image: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor,
    *how: object,
) -> torch.Tensor:
    result = target(image, kernel, *how)
    return result.add_(bias.view(-1, *[1] * (result.dim() - 2)))


def _onednn_convolution(
    args: Sequence[Any],
) -> tuple[Callable[..., object], Sequence[object], dict[str, object]]:
    """A convolution by oneDNN, which reads its weight in a form of its own."""
    image, weight, bias, stride, padding, dilation, _, _, groups = args
    how = (padding, stride, dilation, groups)
    onednn = _torch.onednn
    kernel = torch_calls.Prepared(weight, onednn._reorder_convolution_weight.default, how)
    return onednn._convolution_pointwise.default, (image, kernel, bias, *how, "none", [], ""), {}


def _onednn_serves(dtype: str) -> bool:
    """Whether torch has oneDNN, uses it, and has it compute in f32 or bf16 on this machine."""
    settings, onednn = torch.backends.mkldnn, _torch.onednn
    ops = ("_convolution_pointwise", "_reorder_convolution_weight", "_is_mkldnn_bf16_supported")
    if not settings.is_available() or not getattr(settings, "enabled", True):
        return False
    if not all(hasattr(onednn, op) for op in ops):
        return False
    return dtype == "f32" or bool(onednn._is_mkldnn_bf16_supported())


def cudnn_settings() -> tuple[bool, bool, bool, bool]:
    """Whether cuDNN is on, tries algorithms out, takes only those that return the same always, and TF32."""
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return cudnn.enabled, cudnn.benchmark, deterministic, cudnn.allow_tf32


def _symbols(placeholders: Sequence[fx.Node]) -> list[tuple[str, int, int | None]]:
    """Where the values of symbols are among the arguments: an integer, or a dimension of a tensor."""
    found: dict[str, tuple[int, int | None]] = {}
    for position, node in enumerate(placeholders):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value.node.expr), (position, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    found.setdefault(str(size.node.expr), (position, dim))
    return [(symbol, *place) for symbol, place in found.items()]


def _given(arg: Arg, operands: Sequence[object]) -> object:
    """An argument of the compiler's own form as torch takes it."""
    if arg == "none":
        return None
    assert isinstance(arg, dict)
    if "node" in arg:
        return operands[arg["node"]]
    if "float" in arg:
        return float(arg["float"])
    if "dtype" in arg:
        return getattr(torch, arg["dtype"])
    if "list" in arg:
        return [_given(a, operands) for a in arg["list"]]
    ((_, value),) = arg.items()
    return value
