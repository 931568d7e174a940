"""Zeros that the user wrote, told from zeros that a round left. No processes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.gradients.tracking import WrittenZeros, heads_of, mark_heads


def marked(values: list[list[float]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Gradients as a round leaves them: views of one flat tensor, named by their place."""
    flat = torch.tensor([value for each in values for value in each], dtype=dtype)
    mark_heads(flat, heads_of([len(each) for each in values], flat.device))
    return {str(i): part for i, part in enumerate(flat.split([len(each) for each in values]))}


@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, float("nan"), float("inf")]), max_size=4), min_size=1))
def test_a_round_writes_no_zeros_of_the_user_and_changes_no_value(values: list[list[float]]) -> None:
    grads = marked(values)
    assert WrittenZeros(grads).names() == set()
    after = torch.cat(list(grads.values()))
    assert torch.equal(after.nan_to_num(7.0), torch.tensor([v for each in values for v in each]).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [Tensor.zero_, lambda g: g.fill_(0), lambda g: g.mul_(1.0).copy_(torch.zeros(()))])
def test_zeros_that_were_written_are_found(dtype: torch.dtype, write: Callable[[Tensor], Tensor]) -> None:
    grads = marked([[0.0, 0.0], [1.0, 2.0], [0.0], [0.0, 3.0], []], dtype)
    for name in "013":
        write(grads[name])
    assert WrittenZeros(grads).names() == {"0", "1", "3"}


@pytest.mark.parametrize(
    "work",
    [
        lambda g: g.mul_(0.1),
        lambda g: g.div_(65536.0),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.clone(),
        lambda g: g.bfloat16().float(),
        lambda g: torch.nn.utils.clip_grads_with_norm_([_holder(g)], 0.1, torch.tensor(2.0)),
        lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.full((1,), 0.25)),
    ],
)
def test_usual_work_on_a_gradient_is_no_zeroing(work: Callable[[Tensor], Tensor | None]) -> None:
    grads = marked([[0.0, 0.0, 0.0]])
    after = work(grads["0"])
    assert WrittenZeros({"0": grads["0"] if after is None else after}).names() == set()


def _holder(grad: Tensor) -> Tensor:
    holder = torch.zeros_like(grad)
    holder.grad = grad
    return holder


def test_a_masked_head_alone_is_no_zeroing() -> None:
    grads = marked([[1.0, 2.0, 3.0]])
    grads["0"][:2] = 0.0
    assert WrittenZeros(grads).names() == set()


def test_a_parameter_of_no_dimensions_or_in_channels_last() -> None:
    scalar, image = torch.zeros(()), torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    for each in (scalar, image):
        mark_heads(each.as_strided((each.numel(),), (1,)), torch.tensor([0]))
    assert WrittenZeros({"a": scalar, "b": image}).names() == set()
    assert WrittenZeros({"a": scalar.zero_(), "b": image.zero_()}).names() == {"a", "b"}
