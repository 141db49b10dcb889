"""Recordings of plans, on a machine without a GPU."""

from __future__ import annotations

import torch

from hypatia.execute.recorded_plan import _Recording


def test_a_recording_is_not_for_none() -> None:
    """A caller that asks all plans in turn may give None in the place of a tensor."""
    x = torch.empty(2, 3)
    recording = object.__new__(_Recording)
    recording._kinds = [(x.shape, x.dtype, x.device)]
    recording._like = [x.to("meta")]
    assert recording.accepts((x,))
    assert not recording.accepts((None,))  # type: ignore[arg-type]
    assert not recording.accepts((x.t(),))
