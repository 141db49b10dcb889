"""Weights that are computed once and again whenever one of their sources changes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import fx, nn

from .. import _native
from .._torch import FakeTensor
from ..capture.layout import storage_of
from .weight_changes import are_steady

_KEPT = 128
"""Sets of weights remembered: layers or models that share a compiled graph do not evict each other."""


def folded_bytes(gm: fx.GraphModule) -> int:
    """Memory that the folded weights of a graph take beyond their sources."""
    sources = {storage_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    folded = {storage_of(n): n for n in gm.graph.nodes if n.meta.get("folded")}
    values = [n.meta["val"] for storage, n in folded.items() if storage not in sources]
    tensors = (v for v in values if isinstance(v, torch.Tensor))
    return sum(v.numel() * v.element_size() for v in tensors if isinstance(v.numel(), int))


class _Forgetful(Protocol):
    def forget(self) -> None:
        """Drops what was made of weights."""


def watch(holder: _Forgetful, weights: Iterable[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
    """References that let weights go, and tell the holder when one is gone."""
    place = weakref.ref(holder)
    finalizing = sys.is_finalizing

    def gone(_: object) -> None:
        # At the end of the process modules are taken apart, and there is nothing left to save.
        known = None if finalizing() else place()
        if known is not None:
            known.forget()

    return [weakref.ref(w, gone) for w in weights]


_Source = tuple[weakref.ref[torch.Tensor], tuple[int, int, int], torch.Tensor]
"""A weight, the state that it was in, and its memory."""


class FoldedWeights(nn.Module):
    """Computes ``body(*sources)`` once for each state of the sources.

    A state is the identity, the memory and the version counter of every source, so a weight
    that an optimizer, ``load_state_dict`` or a user changed is folded again. Changes of few elements
    through ``.data`` do not move the version counter and are not seen.
    """

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body
        self._states: list[tuple[list[_Source], tuple[torch.Tensor, ...]]] = []

    def forward(self, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The folded weights."""
        for state, folded in self._states:
            pairs = zip(sources, state, strict=True)
            if all(ref() is t and _native.weight_state(t) == known for t, (ref, known, _) in pairs):
                return folded
        return self._fold(sources)

    def _fold(self, sources: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if any(isinstance(t, FakeTensor) or t.is_meta for t in sources) or not are_steady(sources):
            return self.body(*sources)
        with torch.inference_mode(False), torch.no_grad():
            folded = self.body(*sources)
            # As long as its memory is kept, no other memory can lie at the same address.
            memory = [t.detach() for t in sources]
        refs = watch(self, sources)
        state = list(zip(refs, map(_native.weight_state, sources), memory, strict=True))
        self.forget()
        self._states = [(state, folded), *self._states][:_KEPT]
        return folded

    def forget(self) -> None:
        """Drops what was folded of weights that are gone."""
        self._states = [s for s in self._states if all(ref() is not None for ref, _, _ in s[0])]

    def folded_bytes(self) -> int:
        """Memory that the folded weights hold beyond their sources."""
        seen = {}
        for state, folded in self._states:
            sources = [source for ref, _, _ in state if (source := ref()) is not None]
            known = {source.untyped_storage().data_ptr() for source in sources}
            for t in folded:
                storage = t.untyped_storage()
                if storage.data_ptr() not in known:
                    seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        state["_states"] = []
        return state
