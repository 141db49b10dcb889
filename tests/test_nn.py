"""The fused modules are drop-in replacements of what they fuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypatia
import hypatia_core.fused_modules
from hypatia.nn import (
    FusedLinearGELU,
    FusedLinearReLU,
    FusedLinearSiLU,
    FusedMLP,
    create_fused_linear_relu_from_tensors,
    create_fused_mlp_from_tensors,
)

LAYERS = [
    (FusedLinearReLU, {}, nn.ReLU()),
    (FusedLinearGELU, {}, nn.GELU()),
    (FusedLinearGELU, {"approximate": "tanh"}, nn.GELU(approximate="tanh")),
    (FusedLinearSiLU, {}, nn.SiLU()),
]
layers = pytest.mark.parametrize(("kind", "kwargs", "act"), LAYERS, ids=["relu", "gelu", "gelu_tanh", "silu"])


@layers
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (0, 6), (2, 0, 6)], ids=str)
def test_layer_is_linear_and_activation(
    kind: type, kwargs: dict, act: nn.Module, bias: bool, shape: tuple
) -> None:
    plain = nn.Linear(6, 5, bias=bias)
    fused = kind(6, 5, bias=bias, **kwargs)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(shape, requires_grad=True)
    got, want = fused(x), act(plain(x))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(got.sum(), [x, *fused.parameters()])
    for a, b in zip(grads, torch.autograd.grad(want.sum(), [x, *plain.parameters()]), strict=True):
        torch.testing.assert_close(a, b)


@layers
def test_second_order_gradients(kind: type, kwargs: dict, act: nn.Module) -> None:
    layer = kind(3, 2, dtype=torch.float64, **kwargs)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


@layers
def test_layer_copies_pickles_compiles_and_exports(kind: type, kwargs: dict, act: nn.Module) -> None:
    layer, x = kind(6, 5, **kwargs), torch.randn(4, 6)
    want = layer(x)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.compile(layer, backend="hypatia"),
        torch.export.export(layer, (x,)).module(),
        kind.from_linear(layer, **kwargs),
    ):
        torch.testing.assert_close(other(x), want)
    assert kind.__name__ in repr(layer)
    assert "in_features=6, out_features=5" in repr(layer)
    assert layer.to(torch.float64)(x.double()).dtype == torch.float64


def test_shared_parameters_stay_the_same() -> None:
    linear = nn.Linear(4, 3)
    assert FusedLinearReLU.from_linear(linear).weight is linear.weight
    layer = create_fused_linear_relu_from_tensors(linear.weight, linear.bias)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    plain = torch.randn(3, 4)
    assert create_fused_linear_relu_from_tensors(plain).weight.data_ptr() == plain.data_ptr()


@pytest.mark.parametrize("sizes", [(6, 5, 4), (6, 5, 4, 3), (6, 5, 5, 5, 5, 5, 2)], ids=len)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"])
def test_mlp_is_the_sequential_of_its_layers(sizes: tuple, activation: str) -> None:
    mlp = FusedMLP(*sizes, activation=activation)
    plain = nn.Sequential(*copy.deepcopy(list(mlp)))
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(mlp(x), plain(x), rtol=0, atol=0)
    linears = mlp.linears
    again = create_fused_mlp_from_tensors([m.weight for m in linears], [m.bias for m in linears], activation)
    torch.testing.assert_close(again(x), mlp(x), rtol=0, atol=0)
    assert again.linears[0].weight is linears[0].weight


def test_mlp_compiles_to_one_op() -> None:
    mlp, x = FusedMLP(6, 5, 4, 3), torch.randn(7, 6)
    graph = hypatia.optimize(mlp, x)
    assert [n.name for n in graph.graph.nodes if n.op == "call_module"] == ["fused_mlp_0"]
    torch.testing.assert_close(graph(x), mlp(x))


def test_first_names_work() -> None:
    from hypatia_core.fused_modules import HypatiaFusedLinearReLU

    fused_layer = HypatiaFusedLinearReLU(in_features=512, out_features=256, bias=True, device="cpu")
    assert fused_layer(torch.randn(3, 512)).shape == (3, 256)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FusedLinearReLU(6, 5)(torch.randn(2, 7)), "2x7 and 6x5"),
        (lambda: FusedLinearReLU(6, 5)(torch.randn(2, 6).double()), "dtype"),
        (lambda: FusedLinearGELU(6, 5, approximate="erf"), "'none' or 'tanh', not 'erf'"),
        (lambda: FusedMLP(6, 5), "at least two layers"),
        (lambda: FusedMLP(6, 5, 4, activation="swish"), "no activation 'swish'"),
        (lambda: create_fused_linear_relu_from_tensors(torch.randn(3)), "must be a matrix"),
        (lambda: create_fused_linear_relu_from_tensors(torch.randn(3, 4), torch.randn(4)), r"wants \(3,\)"),
        (lambda: create_fused_mlp_from_tensors([torch.randn(3, 4), torch.randn(2, 5)]), "takes 5 features"),
        (lambda: create_fused_mlp_from_tensors([torch.randn(3, 4)] * 2, [None]), "2 weights and 1 biases"),
    ],
)
def test_errors_name_what_does_not_fit(call: object, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_an_mlp_of_tensors_given_as_lists_or_in_turn() -> None:
    w1, b1, w2, b2 = torch.randn(8, 4), torch.randn(8), torch.randn(3, 8), torch.randn(3)
    x = torch.randn(2, 4)
    expected = F.linear(F.linear(x, w1, b1).relu(), w2, b2)
    for mlp in (
        hypatia_core.fused_modules.create_fused_mlp_from_tensors(w1, b1, w2, b2),
        hypatia_core.fused_modules.create_fused_mlp_from_tensors([w1, w2], [b1, b2]),
        hypatia_core.fused_modules.create_fused_mlp_from_tensors([w1, w2], [b1, b2], "relu"),
    ):
        torch.testing.assert_close(mlp(x), expected)
    without = hypatia_core.fused_modules.create_fused_mlp_from_tensors(w1, None, w2)
    torch.testing.assert_close(without(x), F.linear(F.linear(x, w1).relu(), w2))
    with pytest.raises(TypeError, match="in turn"):
        hypatia_core.fused_modules.create_fused_mlp_from_tensors(w1, b1, None, b2)
