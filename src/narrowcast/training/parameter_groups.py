"""Who learns how: the groups a task asks for, checked, and as torch's optimizers take them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from narrowcast.config.common_sections import OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.training.task import ParameterGroup, Task

FROZEN_UNTIL = "frozen_until"
"""Of a group of a torch optimizer: the share of the run after which it learns."""
SHOWN = 3
"""Parameters that a message names; the first ones tell the rest."""


def get_groups(task: Task) -> Sequence[ParameterGroup] | None:
    """Return the groups of a task, once they are whole, and freeze what they call frozen.

    None where it asks for none. Refuses a parameter in two groups, a trained one in none, and one
    that the model does not have.
    """
    if task.parameter_groups is None:
        return None
    groups = list(task.parameter_groups(task.model))
    if strange := [group for group in groups if not isinstance(group, ParameterGroup)]:
        raise ConfigError(
            f"the task's parameter_groups returned a {type(strange[0]).__name__} among its groups; "
            "return a list of narrowcast.ParameterGroup(parameters=…)"
        )
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    grouped = [parameter for group in groups for parameter in group.parameters]
    if strangers := [p for p in grouped if p not in names]:
        shapes = [f"one of shape {tuple(p.shape)}" for p in strangers]
        raise ConfigError(f"parameter groups hold {_listed(shapes)} that the model does not have")
    if twice := [names[p] for p, count in Counter(grouped).items() if count > 1]:
        raise ConfigError(
            f"{_listed(twice)}: in two parameter groups; a parameter learns in one way, so leave "
            "it out of one of them"
        )
    learning = set(grouped)
    if missing := [n for p, n in names.items() if p.requires_grad and p not in learning]:
        raise ConfigError(
            f"{_listed(missing)}: in no parameter group, so it would never learn; add it to one, "
            "or to a group with frozen=True"
        )
    for group in groups:
        if group.frozen:
            for parameter in group.parameters:
                parameter.requires_grad_(False)
    return groups


def layerwise_decay(stages: Sequence[nn.Module], *, decay: float) -> list[ParameterGroup]:
    """Return a group for each of `stages`, from input to output: the last learns at the full rate.

    Each before it has `decay` times the learning rate of the one after it. A weight that two stages
    share learns with the first of them.
    """
    groups, seen = list[ParameterGroup](), set[nn.Parameter]()
    for depth, stage in enumerate(stages):
        fresh = [p for p in stage.parameters() if p not in seen]
        seen.update(fresh)
        factor = decay ** (len(stages) - 1 - depth)
        groups.append(ParameterGroup(parameters=fresh, lr_factor=factor))
    return groups


def as_torch_groups(group: ParameterGroup, settings: OptimizerSection) -> list[dict[str, Any]]:
    """Return what a torch optimizer with these settings takes for one group.

    Weight decay that the group does not give acts on parameters of two or more dimensions: on a
    bias or the gain of a norm it would only pull the function towards nothing.
    """
    trained = [p for p in group.parameters if p.requires_grad]
    lr = settings.lr if group.lr is None else group.lr
    own = group.weight_decay
    halves = (
        ([p for p in trained if p.ndim >= 2], settings.weight_decay if own is None else own),
        ([p for p in trained if p.ndim < 2], 0.0 if own is None else own),
    )
    own_way = {"lr": lr * group.lr_factor, FROZEN_UNTIL: group.frozen_until}
    return [
        {"params": params, "weight_decay": decay, **own_way} for params, decay in halves if params
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
