"""Whether a compiled form of a model returns tensors that lie as the model's own do.

They have the same shapes, dtypes and strides, require gradients or not, and are in memory of their own, or in
that of the same input, weight or result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from .._torch import pytree
from ..capture.model_state import buffers_kept
from ..devices.table import random_devices
from ..execute.changes import RandomState


def has_same_layout(
    form: Callable[..., object],
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    changes: bool,
    training: bool = False,
    known: list[object] | None = None,
) -> bool:
    """Whether both return tensors that lie alike; if calls change inputs or buffers, none of it is left.

    ``known`` is how the model's own lie, where a call of it with the same arguments was seen (`layouts_of`).
    """
    random = RandomState(random_devices(pytree.tree_leaves((args, kwargs))))
    found = []
    with torch.set_grad_enabled(training):
        for call in (form, model) if known is None else (form,):
            given = pytree.tree_map(_copied, (args, dict(kwargs))) if changes else (args, kwargs)
            with buffers_kept(model) if changes else contextlib.nullcontext():
                found.append(layouts_of(call(*given[0], **given[1]), given, model))
            random.restore()
    return found[0] == (found[1] if known is None else known)


def layouts_of(results: object, given: object, model: nn.Module) -> list[object]:
    """For every result what it is, how it lies, and whose memory it is in, from where on."""
    owners: dict[int, tuple[object, int]] = {}
    for kind, tensors in (
        ("input", pytree.tree_leaves(given)),
        ("weight", [*model.parameters(), *model.buffers()]),
    ):
        for i, tensor in enumerate(tensors):
            if _is_plain(tensor):
                owners.setdefault(tensor.untyped_storage().data_ptr(), ((kind, i), tensor.storage_offset()))
    found: list[object] = []
    for i, result in enumerate(pytree.tree_leaves(results)):
        if not _is_plain(result):
            found.append(type(result))
            continue
        place = result.untyped_storage().data_ptr()
        owner, first = owners.setdefault(place, (("result", i), result.storage_offset()))
        strides = [s for n, s in zip(result.shape, result.stride(), strict=True) if n > 1]
        about = (result.shape, result.dtype, result.requires_grad, strides)
        found.append((*about, owner, result.storage_offset() - first))
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _copied(value: object) -> object:
    """A copy with the same strides and gaps."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    memory = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    with torch.no_grad():
        copy.set_(memory, value.storage_offset(), value.shape, value.stride())
    return copy.requires_grad_(value.requires_grad)
