"""Weights of which something may be kept: every change of theirs is noticed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._torch import gathered_parameters


def are_steady(weights: Iterable[torch.Tensor]) -> bool:
    """Whether changes of these tensors are noticed by their version counters and addresses.

    Inference tensors have no version counter. Sharded models free and fill memory under a counter that
    they keep.
    """
    sharded = gathered_parameters()
    return not any(
        w.is_inference() or sharded is None or id(w) in sharded or getattr(w, "_fsdp_flattened", False)
        for w in weights
    )
