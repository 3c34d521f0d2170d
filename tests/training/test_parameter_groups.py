import pytest
import torch
from torch import nn

from narrowcast.config.common_sections import LrScheduleSection, OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.training.optimizers import build_optimizer, get_groups, layerwise_decay
from narrowcast.training.setup import lr_factors
from narrowcast.training.task import ParameterGroup, Task

CPU = torch.device("cpu")


def task_with(groups):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
    return Task(
        model=model,
        train_data=[],
        loss=lambda model, batch: model(batch).mean(),
        evaluate=lambda model: {"loss": 0.0},
        items=len,
        gemm_rows=1,
        parameter_groups=groups,
    )


def optimizer_of(task, **settings):
    section = OptimizerSection(**{"lr": 0.5, "weight_decay": 0.25, **settings})
    return build_optimizer(section, task.model, device=CPU, groups=get_groups(task))


def group(*layers, **settings):
    return ParameterGroup(parameters=[p for m in layers for p in m.parameters()], **settings)


def test_without_groups_every_parameter_learns_as_the_recipe_says():
    task = task_with(None)
    assert get_groups(task) is None
    rates = {(g["lr"], g["weight_decay"]) for g in optimizer_of(task).param_groups}
    assert rates == {(0.5, 0.25), (0.5, 0.0)}


def test_a_group_has_its_own_rate_and_decay():
    task = task_with(
        lambda model: [
            group(model[0], lr=0.125, weight_decay=0.75),
            group(model[1], lr_factor=0.5),
            group(model[2]),
        ]
    )
    found = {
        (tuple(p.shape), g["lr"], g["weight_decay"])
        for g in optimizer_of(task).param_groups
        for p in g["params"]
    }
    assert found == {
        ((3, 2), 0.125, 0.75),
        ((3,), 0.125, 0.75),  # a decay that is given is meant for all
        ((4, 3), 0.25, 0.25),
        ((4,), 0.25, 0.0),
        ((1, 4), 0.5, 0.25),
        ((1,), 0.5, 0.0),
    }


def test_a_frozen_group_takes_no_gradient_and_is_not_optimized():
    task = task_with(lambda m: [group(m[0], frozen=True), group(m[1], m[2])])
    held = {p for g in optimizer_of(task).param_groups for p in g["params"]}
    assert held == {*task.model[1].parameters(), *task.model[2].parameters()}
    assert [p.requires_grad for p in task.model.parameters()] == [False] * 2 + [True] * 4


def test_layerwise_decay_halves_the_rate_with_every_stage_from_the_end():
    groups = layerwise_decay(list(task_with(None).model), decay=0.5)
    assert [each.lr_factor for each in groups] == [0.25, 0.5, 1.0]


def test_a_weight_that_stages_share_learns_with_the_first():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    first, second = layerwise_decay([one, other], decay=0.5)
    assert (len(first.parameters), len(second.parameters)) == (2, 1)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda m: [group(m), group(m[1])], r"got 1\.weight, 1\.bias in two"),
        (lambda m: [group(m[0], m[1])], r"got 2\.weight, 2\.bias in none"),
        (lambda m: [group(m, nn.Linear(7, 5))], r"one of shape \(5, 7\), .*does not have"),
        (lambda m: [group(m, frozen=True)], "no trainable parameter"),
    ],
)
def test_what_cannot_be_is_refused_with_the_names(groups, said):
    task = task_with(groups)
    with pytest.raises(ConfigError, match=said):
        optimizer_of(task)


def test_parameters_that_can_be_gone_through_once_are_kept():
    task = task_with(lambda model: [ParameterGroup(parameters=model.parameters())])
    assert get_groups(task) is not None
    (first, *_) = get_groups(task)
    assert len(list(first.parameters)) == len(list(first.parameters)) == 6


def test_a_group_that_waits_keeps_its_bits_until_then_and_learns_afterwards():
    torch.manual_seed(0)
    task = task_with(lambda model: [group(*model[1:]), group(model[0], frozen_until=0.5)])
    optimizer = optimizer_of(task)
    shares = [each["frozen_until"] for each in optimizer.param_groups]
    factors = lr_factors(LrScheduleSection(), 4, frozen_until=shares)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    first, second = task.model[0].weight, task.model[1].weight
    moved = []
    for _ in range(4):
        before = first.detach().clone(), second.detach().clone()
        task.model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        moved.append((not torch.equal(first, before[0]), not torch.equal(second, before[1])))
    assert moved == [(False, True), (False, True), (True, True), (True, True)]


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_group_cannot_wait_for_ever(share):
    with pytest.raises(ConfigError, match="frozen=True"):
        ParameterGroup(parameters=[], frozen_until=share)
