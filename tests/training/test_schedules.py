import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from narrowcast.config.sections import LrScheduleSection
from narrowcast.training.setup import lr_factor

RATE = 0.1


def rates(make, steps):
    """The learning rate of each step under a torch scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def ours(settings, steps):
    return rates(lambda o: LambdaLR(o, lr_factor(settings, steps)), steps)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_is_torch_cosine(final):
    settings = LrScheduleSection(name="cosine", min_lr_ratio=final)
    theirs = rates(lambda o: CosineAnnealingLR(o, T_max=50, eta_min=RATE * final), 50)
    assert ours(settings, 50) == pytest.approx(theirs)


def test_linear_is_torch_linear():
    settings = LrScheduleSection(name="linear", min_lr_ratio=0.25)
    theirs = rates(lambda o: LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=50), 50)
    assert ours(settings, 50) == pytest.approx(theirs)


def test_warmup_then_cosine_is_torch_linear_then_cosine():
    def theirs(optimizer):
        warmup = LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=9)
        fall = CosineAnnealingLR(optimizer, T_max=40)
        return SequentialLR(optimizer, [warmup, fall], milestones=[10])

    settings = LrScheduleSection(name="cosine", warmup=10)
    assert ours(settings, 50) == pytest.approx(rates(theirs, 50))


def test_constant_is_one_throughout():
    assert set(ours(LrScheduleSection(), 20)) == {RATE}


@given(
    name=sampled_from(["constant", "cosine", "linear"]),
    warmup=integers(0, 30),
    final=floats(0, 1),
    steps=integers(1, 60),
)
def test_the_factor_rises_to_one_and_never_rises_again(name, warmup, final, steps):
    settings = LrScheduleSection(
        name=name, warmup=warmup, min_lr_ratio=0.0 if name == "constant" else final
    )
    factor = lr_factor(settings, steps)
    course = [factor(k) for k in range(steps + warmup + 5)]
    top = max(warmup - 1, 0)
    assert course[: top + 1] == sorted(course[: top + 1])
    assert course[top] == 1.0
    assert course[top:] == sorted(course[top:], reverse=True)
    assert course[0] > 0.0
    assert all(0.0 <= value <= 1.0 for value in course)


@pytest.mark.parametrize(("steps", "warmup"), [(100, 3), (101, 4), (1, 1), (1000, 30)])
def test_a_warm_up_that_is_a_share_of_the_run_is_that_many_steps_rounded_up(steps, warmup):
    # As transformers counts its warmup_ratio.
    share = lr_factor(LrScheduleSection(name="cosine", warmup_ratio=0.03), steps)
    counted = lr_factor(LrScheduleSection(name="cosine", warmup=warmup), steps)
    assert [share(k) for k in range(steps + 1)] == [counted(k) for k in range(steps + 1)]
