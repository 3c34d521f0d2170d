"""Parts of a model with a loss scale of their own: their modules, and the weights inside."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.loss_scale import RunningScale
from narrowcast.precision.modules.wrappers import OwnLossScale
from narrowcast.precision.swap import swap


def group_index(name: str, globs: Sequence[str]) -> int:
    """Return which part a weight is in, counted from one; zero for none."""
    for i, glob in enumerate(globs, start=1):
        pieces = name.split(".")
        if any(fnmatchcase(".".join(pieces[: n + 1]), glob) for n in range(len(pieces))):
            return i
    return 0


def find_parts(model: nn.Module, globs: Sequence[str]) -> dict[str, list[nn.Module]]:
    """Return the modules each glob names, unless a weight would then be under two scales."""
    inside: set[nn.Module] = set()
    parts = {}
    for glob in globs:
        matches = [m for name, m in model.named_modules() if fnmatchcase(name, glob)]
        if not matches:
            raise ConfigError(
                f"loss_scale.scale_groups: {glob!r} matches no module. Print the plan to see the "
                "module names."
            )
        for module in matches:
            if inside & set(module.modules()):
                raise ConfigError(
                    f"loss_scale.scale_groups: {glob!r} overlaps with another group. Write globs "
                    "that share no module."
                )
            inside |= set(module.modules())
        parts[glob] = matches
    _check_shared_weights(model, inside)
    return parts


def scale_parts(
    parts: Mapping[str, Sequence[nn.Module]], scales: Mapping[str, RunningScale]
) -> None:
    """Let modules multiply the gradients inside them by the scale of their part."""
    for glob, modules in parts.items():
        for module in modules:
            swap(module, OwnLossScale, nc_scale=scales[glob])


def _check_shared_weights(model: nn.Module, inside: set[nn.Module]) -> None:
    within = {p for module in inside for p in module.parameters(recurse=False)}
    for name, module in model.named_modules():
        shared = module not in inside and within & set(module.parameters(recurse=False))
        if shared:
            raise ConfigError(
                f"loss_scale.scale_groups: {name} shares a weight with a module outside its "
                "group, so its gradients would have two scales. Write globs that match all "
                "modules with this weight, or none."
            )
