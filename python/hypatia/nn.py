"""Fused layers: used like ``nn.Linear``; on a GPU they run by native plans, elsewhere by torch's best ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from . import _torch
from .devices import cuda
from .frontend.direct import CompiledModel

__all__ = [
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearSiLU",
    "FusedMLP",
    "create_fused_linear_relu_from_tensors",
    "create_fused_mlp_from_tensors",
]


def _has_kernels(input: object) -> bool:
    """Whether a layer may run by itself as a plan: not while something else looks at what it does."""
    return (
        type(input) is torch.Tensor
        and input.is_cuda
        and input.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not _torch.functorch_active()
        and not _torch.dispatch_mode_count()
        and cuda.available() is None
    )


_LinearT = TypeVar("_LinearT", bound=nn.Linear)


class _Compiled:
    """A layer that runs compiled on a GPU; what is compiled is made when needed, and no part of its state."""

    _compiled: CompiledModel | None = None
    _made_of: tuple[object, ...] = ()

    def _by_plan(
        self, input: torch.Tensor, parts: tuple[object, ...], make: Callable[[], nn.Module]
    ) -> torch.Tensor:
        known = len(parts) == len(self._made_of) and all(map(operator.is_, parts, self._made_of))
        if self._compiled is None or not known:
            # Past `nn.Module`, for which it would be a part of the layer.
            vars(self).update(_made_of=parts, _compiled=CompiledModel(make()))
        assert self._compiled is not None
        return self._compiled(input)

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_compiled", "_made_of")}


class _FusedLinear(_Compiled, nn.Linear):
    """``act(x @ weight.T + bias)``; parameters, names and arguments are those of ``nn.Linear``."""

    activate: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The activated result, for any leading sizes."""
        if _has_kernels(input):
            return self._by_plan(input, (self.weight, self.bias), lambda: _Layer(self))
        return self.activate(super().forward(input))

    @classmethod
    def from_linear(cls, linear: nn.Linear, **kwargs: object) -> _FusedLinear:
        """A fused layer that shares the parameters of a linear one."""
        return _adopt(
            cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **kwargs),
            linear.weight,
            linear.bias,
        ).train(linear.training)


class _Layer(nn.Module):
    """What a fused layer computes, on its parameters but without its hooks, which have run already."""

    def __init__(self, layer: _FusedLinear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._activate = layer.activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activated result."""
        return self._activate(F.linear(x, self.weight, self.bias))


class FusedLinearReLU(_FusedLinear):
    """``relu(x @ weight.T + bias)``."""

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Rectify."""
        return F.relu(x)


class FusedLinearSiLU(_FusedLinear):
    """``silu(x @ weight.T + bias)``."""

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """``x * sigmoid(x)``."""
        return F.silu(x)


class FusedLinearGELU(_FusedLinear):
    """``gelu(x @ weight.T + bias)``, by the error function or ``approximate="tanh"``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        approximate: str = "none",
    ) -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.approximate = approximate

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The form that was asked for: the two differ by up to 5e-4."""
        return F.gelu(x, approximate=self.approximate)

    def extra_repr(self) -> str:
        """Arguments of the constructor."""
        return f"{super().extra_repr()}, approximate={self.approximate}"


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


class FusedMLP(_Compiled, nn.Sequential):
    """``linear, act, linear, act, …, linear`` through the given sizes.

    Its ``state_dict`` is that of the ``nn.Sequential`` of the same layers.
    """

    def __init__(
        self,
        *sizes: int,
        activation: str = "relu",
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(sizes) < 3:
            raise ValueError(f"an MLP has at least two layers, so three sizes, not {len(sizes)}")
        make = _activation(activation)
        layers: list[nn.Module] = []
        for i in range(len(sizes) - 1):
            layers += [make()] if i else []
            layers.append(nn.Linear(sizes[i], sizes[i + 1], bias, device, dtype))
        super().__init__(*layers)
        self.sizes = sizes
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The result of the last layer."""
        if _has_kernels(input):
            layers = tuple(self)
            return self._by_plan(input, layers, lambda: nn.Sequential(*layers))
        return super().forward(input)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers in order."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]


def create_fused_linear_relu_from_tensors(
    weight: torch.Tensor, bias: torch.Tensor | None = None
) -> FusedLinearReLU:
    """A layer on these tensors, which it shares: parameters stay the same parameters."""
    _check_layer(weight, bias, 0)
    layer = FusedLinearReLU(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return _adopt(layer, weight, bias)


def create_fused_mlp_from_tensors(
    weights: Sequence[torch.Tensor] | torch.Tensor,
    biases: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    *more: torch.Tensor | str | None,
    activation: str = "relu",
) -> FusedMLP:
    """An MLP of any number of layers on these tensors, which it shares.

    Takes a list of weights and one of biases, or weights and biases in turn: ``(w1, b1, w2, b2)``.
    """
    if isinstance(weights, torch.Tensor):
        weights, biases = _in_turn((weights, biases, *more))
    elif more:
        (last,) = more
        activation = str(last)
    biases = [None] * len(weights) if biases is None else list(biases)
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases: give one bias, or None, for each")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check_layer(weight, bias, i)
        if i and weights[i - 1].shape[0] != weight.shape[1]:
            raise ValueError(
                f"layer {i} takes {weight.shape[1]} features, layer {i - 1} gives {weights[i - 1].shape[0]}"
            )
    mlp = FusedMLP(*(w.shape[1] for w in weights), weights[-1].shape[0], activation=activation, device="meta")
    for linear, weight, bias in zip(mlp.linears, weights, biases, strict=True):
        _adopt(linear, weight, bias)
    return mlp


def _in_turn(given: Sequence[object]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Weights and biases of a list of both; the last bias may be left out."""
    weights = [w for w in given[::2] if isinstance(w, torch.Tensor)]
    biases = [b for b in given[1::2] if b is None or isinstance(b, torch.Tensor)]
    if len(weights) + len(biases) < len(given):
        raise TypeError("weights and biases in turn: a weight is a tensor, a bias a tensor or None")
    return weights, [*biases, *[None] * (len(given) % 2)]


def _activation(name: str) -> Callable[[], nn.Module]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"there is no activation {name!r}; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _check_layer(weight: torch.Tensor, bias: torch.Tensor | None, layer: int) -> None:
    if weight.dim() != 2:
        raise ValueError(f"the weight of layer {layer} must be a matrix, not of shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"the bias of layer {layer} has shape {tuple(bias.shape)}, its weight {tuple(weight.shape)} "
            f"wants ({weight.shape[0]},)"
        )


def _adopt(linear: _LinearT, weight: torch.Tensor, bias: torch.Tensor | None) -> _LinearT:
    """Makes a layer use tensors that exist; what is no parameter becomes one over the same memory."""
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    if bias is None:
        linear.register_parameter("bias", None)
    else:
        linear.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
    return linear
