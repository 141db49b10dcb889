"""A fixed sample of PyTorch's own op database on a GPU, forward and backward, beside eager and float64."""

from __future__ import annotations

import hashlib
import sys
import types
import unittest
import warnings
from typing import Any

import torch
from forms import winning
from torch.utils import _pytree as pytree

SHARE = 24
"""Every so many ops one is in the sample."""

SAMPLES = 2
UNDEFINED = ("empty", "new_empty")
SEED = 1234


def _database() -> list[Any]:
    """torch's table of ops. Its test utilities import a package that is for other tests."""
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _chosen(device: str) -> list[Any]:
    def listed(op: Any) -> bool:
        number = int(hashlib.sha256(op.formatted_name.encode()).hexdigest(), 16)
        defined = not op.name.startswith((*UNDEFINED, "jiterator"))
        return number % SHARE == 0 and defined and torch.float32 in op.supported_dtypes(device)

    return [op for op in _database() if listed(op)]


def _copied(value: Any, dtype: torch.dtype | None) -> Any:
    """Arguments of their own, in another precision if one is given."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fresh = leaf.detach().clone()
        if dtype is not None and leaf.dtype is torch.float32:
            fresh = fresh.to(dtype)
        return fresh.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, value)


def _run(call: Any, sample: Any, train: bool, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Results, and gradients in training."""
    given = _copied((sample.input, sample.args, sample.kwargs), dtype)
    first, rest, named = given
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(train):
        results = [t for t in pytree.tree_leaves(call(first, *rest, **named)) if isinstance(t, torch.Tensor)]
    if not train:
        return results
    leaves = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [t for t in results if t.requires_grad]
    if not roots or not leaves:
        return results
    found = torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
    return [*[t.detach() for t in results], *[g for g in found if g is not None]]


def _wrong(ours: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor] | None) -> str:
    """What is wrong with results; empty if nothing is."""
    if len(ours) != len(eager):
        return f"{len(ours)} results instead of {len(eager)}"
    for at, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return f"result {at} is {a.dtype}{list(a.shape)}, eager's {b.dtype}{list(b.shape)}"
        if a.layout is not torch.strided or torch.equal(a, b):
            continue
        if not a.is_floating_point():
            return f"result {at} differs"
        c = exact[at].double() if exact is not None else b.double()
        odd = ~torch.isfinite(b)
        if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
            return f"result {at} has other infinities"
        mine, own = ((x.double() - c)[~odd].abs().max().item() for x in (a, b))
        scale = c[~odd].abs().max().item()
        if mine > 2 * own + 32 * torch.finfo(a.dtype).eps * max(scale, 1e-30):
            return f"result {at}: error {mine:.2e}, eager's {own:.2e}"
    return ""


def check_ops(device: str = "cuda") -> str:
    """The sample; what eager itself cannot do is left out."""
    done, failures = 0, []
    for op in _chosen(device):
        differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes(device)
        samples = list(op.sample_inputs(device, torch.float32, requires_grad=differentiable))[:SAMPLES]
        for sample in samples:
            for train in (False, True) if differentiable else (False,):
                torch._dynamo.reset()
                call = op.get_op()
                try:
                    eager = _run(call, sample, train)
                except Exception:
                    continue
                try:
                    exact = _run(call, sample, train, torch.float64)
                except Exception:
                    exact = None
                compiled = torch.compile(lambda *a, call=call, **k: call(*a, **k), backend="hypatia_checked")
                try:
                    with winning("plan"), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        said = _wrong(_run(compiled, sample, train), eager, exact)
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                done += 1
                if said:
                    failures.append(
                        f"{op.formatted_name}, {'training' if train else 'inference'}: {said}"[:300]
                    )
    assert not failures, "\n".join(failures)
    return f"{done} calls right"


def _register() -> None:
    from hypatia.frontend.dynamo import hypatia

    if "hypatia_checked" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(hypatia, name="hypatia_checked")


_register()
