"""Parameter groups of a task: checked, and in the form torch's optimizers take."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from narrowcast.config.common_sections import OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.training.task import ParameterGroup, Task

FROZEN_UNTIL = "frozen_until"
"""Key in a torch parameter group: share of the run during which the group is frozen."""
SHOWN = 3
"""Names that a message lists."""


def get_groups(task: Task) -> Sequence[ParameterGroup] | None:
    """Check the parameter groups of a task, and freeze those with `frozen`; None without groups."""
    if task.parameter_groups is None:
        return None
    groups = list(task.parameter_groups(task.model))
    if strange := [group for group in groups if not isinstance(group, ParameterGroup)]:
        raise ConfigError(
            "parameter_groups must return a list of narrowcast.ParameterGroup, got a "
            f"{type(strange[0]).__name__} in it. Write ParameterGroup(parameters=…)."
        )
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    grouped = [parameter for group in groups for parameter in group.parameters]
    if strangers := [p for p in grouped if p not in names]:
        shapes = [f"one of shape {tuple(p.shape)}" for p in strangers]
        raise ConfigError(
            f"Parameter groups must hold parameters of the model, got {_listed(shapes)}. Leave out "
            "parameters that the model does not have."
        )
    if twice := [names[p] for p, count in Counter(grouped).items() if count > 1]:
        raise ConfigError(
            f"A parameter must be in one parameter group, got {_listed(twice)} in two. Leave it "
            "out of one of them."
        )
    learning = set(grouped)
    if missing := [n for p, n in names.items() if p.requires_grad and p not in learning]:
        raise ConfigError(
            f"Every trainable parameter must be in a parameter group, got {_listed(missing)} in "
            "none. Add it to a group, or to one with frozen=True."
        )
    for group in groups:
        if group.frozen:
            for parameter in group.parameters:
                parameter.requires_grad_(False)
    return groups


def layerwise_decay(stages: Sequence[nn.Module], *, decay: float) -> list[ParameterGroup]:
    """Return one group per stage, from input to output, for layer-wise learning rate decay.

    The last stage has the full learning rate, each earlier one `decay` times that of the next. A
    weight shared by two stages belongs to the first.
    """
    groups, seen = list[ParameterGroup](), set[nn.Parameter]()
    for depth, stage in enumerate(stages):
        fresh = [p for p in stage.parameters() if p not in seen]
        seen.update(fresh)
        factor = decay ** (len(stages) - 1 - depth)
        groups.append(ParameterGroup(parameters=fresh, lr_factor=factor))
    return groups


def as_torch_groups(group: ParameterGroup, settings: OptimizerSection) -> list[dict[str, Any]]:
    """Return the torch parameter groups of one group.

    By default weight decay applies to parameters of two or more dimensions, not to biases and norm
    gains.
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
