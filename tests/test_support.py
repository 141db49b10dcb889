"""The comparison rule itself: what it lets pass and, above all, what it does not."""

from __future__ import annotations

import pytest
import torch

from support import MismatchError, Reference, assert_as_close_as_eager, copied

EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def product() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix product in float32 and in float64."""
    dice = torch.Generator().manual_seed(0)
    left, right = torch.randn(32, 64, generator=dice), torch.randn(64, 16, generator=dice)
    return left @ right, left.double() @ right.double()


def test_same_bits_pass(product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, exact = product
    assert_as_close_as_eager(eager.clone(), eager, exact)
    assert_as_close_as_eager(eager.clone(), eager)


def test_another_rounding_passes(product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, exact = product
    assert_as_close_as_eager(exact.float(), eager, exact)
    assert_as_close_as_eager(eager * (1 + EPS), eager, exact)


@pytest.mark.parametrize("referenced", [True, False])
@pytest.mark.parametrize("error", [1e-4, 1e-3, 1.0])
def test_a_small_error_everywhere_fails(
    product: tuple[torch.Tensor, torch.Tensor], error: float, referenced: bool
) -> None:
    eager, exact = product
    with pytest.raises(MismatchError, match="off by up to"):
        assert_as_close_as_eager(eager * (1 + error), eager, exact if referenced else None)


def test_one_wrong_value_fails(product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, exact = product
    wrong = eager.clone()
    wrong[3, 4] += 1e-3
    with pytest.raises(MismatchError, match="1 of 512 values"):
        assert_as_close_as_eager(wrong, eager, exact)


def test_many_errors_below_the_worst_of_eager_fail_by_their_mean() -> None:
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    eager = exact.float()
    eager[0] += 1e-4
    with pytest.raises(MismatchError, match="mean error"):
        assert_as_close_as_eager(exact.float() + 1e-4, eager, exact)


def test_the_rule_scales_with_small_values(product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, exact = product[0] * 1e-12, product[1] * 1e-12
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(torch.zeros_like(eager), eager, exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_fails(product: tuple[torch.Tensor, torch.Tensor], value: float) -> None:
    eager, exact = product
    wrong = eager.clone()
    wrong[0, 0] = value
    with pytest.raises(MismatchError, match="1 not finite"):
        assert_as_close_as_eager(wrong, eager, exact)
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(eager, wrong)
    assert_as_close_as_eager(wrong.clone(), wrong, exact)


def test_an_overflow_of_eager_need_not_be_copied() -> None:
    eager, exact = torch.tensor([float("inf"), 1.0]), torch.tensor([3e38, 1.0], dtype=torch.float64)
    assert_as_close_as_eager(exact.float(), eager, exact)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 3),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 4, requires_grad=True),
        0.0,
        [torch.zeros(3, 4), torch.zeros(3, 4)],
    ],
    ids=["shape", "dtype", "strides", "requires_grad", "number", "count"],
)
def test_another_kind_fails(wrong: object) -> None:
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(wrong, torch.zeros(3, 4))


def test_strides_of_single_and_absent_elements_do_not_matter() -> None:
    assert_as_close_as_eager(torch.zeros(3, 1).as_strided((3, 1), (1, 7)), torch.zeros(3, 1))
    assert_as_close_as_eager(torch.zeros(4, 0).t(), torch.zeros(0, 4))


def test_whole_numbers_must_be_equal() -> None:
    with pytest.raises(MismatchError, match="whole numbers"):
        assert_as_close_as_eager(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]))


def test_undefined_values_are_not_compared() -> None:
    assert_as_close_as_eager(torch.ones(3), torch.zeros(3), values=False)
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(torch.ones(4), torch.zeros(3), values=False)


def test_other_random_numbers_in_float64_do_not_excuse_a_wrong_result() -> None:
    eager, unrelated = torch.rand(100), torch.rand(100, dtype=torch.float64)
    with pytest.raises(MismatchError, match="against eager"):
        assert_as_close_as_eager(torch.rand(100), eager, unrelated)


def test_far_closer_to_float64_than_a_poor_eager_passes_and_nan_does_not() -> None:
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    eager = exact.float() * 1.5
    assert_as_close_as_eager(exact.float(), eager, exact)
    for wrong in (exact.float() * 1.1, torch.full((100,), float("nan"))):
        with pytest.raises(MismatchError):
            assert_as_close_as_eager(wrong, eager, exact)


def test_cancellation_is_judged_by_conditioning() -> None:
    terms = torch.tensor([1e4, -1e4, 1e-3])
    eager, ours = torch.tensor(1e-3), terms.sum() + 1e-4
    exact = Reference([terms.double().sum()])
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(ours, eager, exact)
    gentle = Reference([torch.tensor(1e-3).double()], lambda: [torch.tensor(1.000001e-3).double()])
    assert_as_close_as_eager(torch.tensor(1.0000015e-3), eager, gentle)
    with pytest.raises(MismatchError):
        assert_as_close_as_eager(torch.tensor(1.00001e-3), eager, gentle)


def test_what_rounding_leaves_of_zero_is_no_reference() -> None:
    """Of terms that cancel, beside results that are large: at most twice what eager leaves."""
    large = torch.ones(4)
    exact = Reference([large.double(), torch.zeros(4, dtype=torch.float64)])
    noise = torch.tensor([1e-7, -2e-7, 0.0, 1e-7])
    assert_as_close_as_eager([large, -noise], [large, noise], exact)
    assert_as_close_as_eager([large, noise * 0.1], [large, noise], exact)
    for wrong in (noise * 3, noise + 1e-4, noise * float("nan")):
        with pytest.raises(MismatchError):
            assert_as_close_as_eager([large, wrong], [large, noise], exact)
    # Other random numbers in float64 are no zero, and roundings of 16 bits are large.
    drawn = [torch.rand(100, generator=torch.Generator().manual_seed(i)).bfloat16() / 4 for i in range(3)]
    with pytest.raises(MismatchError, match="against eager"):
        assert_as_close_as_eager(
            [large.bfloat16(), drawn[0]],
            [large.bfloat16(), drawn[1]],
            Reference([large.double(), drawn[2].double()]),
        )
    # Eager's is no rounding there.
    with pytest.raises(MismatchError):
        assert_as_close_as_eager([large, torch.full((4,), 0.1)], [large, torch.full((4,), 0.2)], exact)


def test_copies_keep_layout_and_share_nothing() -> None:
    base = torch.randn(6, 8)
    given = (base.t()[1:4, ::2].requires_grad_(), {"dtype": torch.float32})
    tensor, named = copied(given)
    assert (tensor.stride(), tensor.storage_offset()) == (given[0].stride(), given[0].storage_offset())
    assert tensor.requires_grad
    assert torch.equal(tensor, given[0])
    assert tensor.data_ptr() != given[0].data_ptr()
    assert named == {"dtype": torch.float32}
    tensor, named = copied(given, double=True)
    assert (tensor.dtype, named["dtype"]) == (torch.float64, torch.float64)
    moved = copied(given, double=True, nudge=True)[0]
    assert 0 < (moved - tensor).abs().max() <= EPS * tensor.abs().max()
