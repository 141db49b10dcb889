"""The fused modules under their first names."""

from hypatia.nn import FusedLinearReLU as HypatiaFusedLinearReLU
from hypatia.nn import FusedMLP as HypatiaFusedMLP
from hypatia.nn import create_fused_linear_relu_from_tensors, create_fused_mlp_from_tensors

__all__ = [
    "HypatiaFusedLinearReLU",
    "HypatiaFusedMLP",
    "create_fused_linear_relu_from_tensors",
    "create_fused_mlp_from_tensors",
]
