"""Gradients zeroed by the user, told from zeros that a round left. No processes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse.gradients.tracking import Parameters, StepTracker


class Reduced:
    """Gradients as a round leaves them, and an optimizer that steps their parameters."""

    def __init__(self, values: list[list[float]], dtype: torch.dtype = torch.float32) -> None:
        self.module = nn.ParameterList([nn.Parameter(torch.ones(len(each), dtype=dtype)) for each in values])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        for parameter, each in zip(self.module, values, strict=True):
            parameter.grad = torch.tensor(each, dtype=dtype)
        self.tracker = StepTracker(Parameters(self.module), lambda: {str(i) for i in range(len(values))})
        self.tracker.watch([self.optimizer])
        self.tracker.reduced({name: grad for name, grad in self.grads().items() if grad.numel()})

    def grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def thrown_away(self) -> set[str]:
        """After a step."""
        self.optimizer.step()
        discarded, waiting = self.tracker.not_stepped()
        assert waiting <= self.grads().keys()
        return discarded


@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, float("nan"), float("inf")]), max_size=4), min_size=1))
def test_what_is_stepped_as_the_round_left_it_counts(values: list[list[float]]) -> None:
    assert Reduced(values).thrown_away() == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [Tensor.zero_, lambda g: g.fill_(0), lambda g: g.mul_(0.0), lambda g: g.mul_(-0.0)])
def test_a_zeroed_gradient_is_thrown_away(dtype: torch.dtype, write: Callable[[Tensor], Tensor]) -> None:
    round_ = Reduced([[0.0, 4.0], [1.0, 2.0], [0.0], [0.0, 3.0], []], dtype)
    for name in "013":
        write(round_.grads()[name])
    assert round_.thrown_away() == {"0", "1", "3"}


def test_the_entry_may_lie_anywhere() -> None:
    long = [0.0] * 100_000
    long[77_777] = 1e-30
    round_ = Reduced([long, long])
    round_.grads()["1"].zero_()
    assert round_.thrown_away() == {"1"}


@pytest.mark.parametrize(
    "work",
    [
        lambda g: g.mul_(0.1),
        lambda g: g.div_(65536.0),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.add_(0.0),
        lambda g: g.copy_(g + 0.0),
        lambda g: g.sub_(g.mean()),
        lambda g: g.copy_(g.bfloat16().float()),
        lambda g: torch.nn.utils.clip_grads_with_norm_([_holder(g)], 0.1, torch.tensor(2.0)),
        lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.full((1,), 0.25)),
    ],
)
def test_usual_work_on_a_gradient_is_no_zeroing(work: Callable[[Tensor], object]) -> None:
    """Also where nothing of a parameter was selected: then all its entries are zeros that the round left."""
    round_ = Reduced([[0.0, 0.0, 0.0], [0.0, -0.0], [0.0, 1.0, 0.0]])
    for grad in round_.grads().values():
        work(grad)
    assert round_.thrown_away() == set()


def _holder(grad: Tensor) -> Tensor:
    holder = torch.zeros_like(grad)
    holder.grad = grad
    return holder


def test_a_masked_head_alone_is_no_zeroing() -> None:
    round_ = Reduced([[1.0, 2.0, 3.0]])
    round_.grads()["0"][:2] = 0.0
    assert round_.thrown_away() == set()


def test_a_dropped_gradient_is_thrown_away_and_one_that_nobody_steps_waits() -> None:
    round_ = Reduced([[1.0], [2.0], [3.0]])
    round_.module[0].grad = None
    round_.optimizer.param_groups[0]["params"].pop()
    round_.optimizer.step()
    assert round_.tracker.not_stepped() == ({"0"}, {"2"})
    round_.grads()["2"].zero_()
    assert round_.tracker.not_stepped() == ({"0", "2"}, set())
