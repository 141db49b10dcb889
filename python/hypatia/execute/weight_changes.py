"""Weights of which something may be kept: every change of theirs is noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch


def are_steady(weights: Iterable[torch.Tensor]) -> bool:
    """Whether changes of these tensors are noticed by their version counters and addresses.

    Inference tensors have no version counter. Sharded models free and fill memory under a counter that
    they keep.
    """
    sharded = _sharded()
    return not any(
        w.is_inference() or sharded is None or id(w) in sharded or getattr(w, "_fsdp_flattened", False)
        for w in weights
    )


def _sharded() -> set[int] | None:
    """The parameters that ``fully_shard`` gathers before every call; none if nobody knows."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return set()
    try:
        known = [s for s in states._module_state_mapping.values() if hasattr(s, "_fsdp_param_group")]
        groups = [g for s in known for g in getattr(s, "_fsdp_param_groups", [s._fsdp_param_group]) if g]
        return {id(getattr(p, "_unsharded_param", None)) for g in groups for p in g.fsdp_params}
    except AttributeError:
        return None
