"""Random numbers by which the verifier moves values."""

from __future__ import annotations

import torch

from hypatia.verifier.dice import Dice


def test_numbers_are_those_of_the_seed_in_the_values_dtype() -> None:
    value = torch.zeros(3, 5, dtype=torch.float64)
    once, again, other = (Dice(seed) for seed in (1, 1, 2))
    first, second = once.like(value), once.like(value)
    assert first.dtype == value.dtype
    assert first.shape == value.shape
    assert ((first >= 0) & (first < 1)).all()
    assert not torch.equal(first, second)
    assert torch.equal(again.like(value), first)
    assert torch.equal(again.like(value), second)
    assert not torch.equal(other.like(value), first)
