"""Losses by the names that recipes have for them."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.losses.adversary import Adversarial
from narrowcast.workloads.decompose.losses.faithfulness import Faithfulness
from narrowcast.workloads.decompose.losses.minimality import Minimality, SmoothL0
from narrowcast.workloads.decompose.losses.persistent import PersistentPGD
from narrowcast.workloads.decompose.losses.pgd import PGD
from narrowcast.workloads.decompose.losses.reconstruction import (
    HiddenActivations,
    ImportanceMasked,
    Stochastic,
    Unmasked,
)
from narrowcast.workloads.decompose.losses.terms import Loss

KINDS: dict[str, type[Loss]] = {
    each.kind: each
    for each in (
        Faithfulness,
        Minimality,
        SmoothL0,
        Stochastic,
        ImportanceMasked,
        Unmasked,
        HiddenActivations,
        PGD,
        PersistentPGD,
    )
}


def build_loss(kind: str, settings: Mapping[str, Any]) -> Loss:
    """Build the loss of a kind, with its coefficient and whatever else it lets one choose."""
    if kind not in KINDS:
        raise ConfigError(f"There is no loss {kind!r}{_meant(kind, KINDS)}")
    chosen = KINDS[kind]
    takes = {name: hint for name, hint in _hints(chosen).items() if name in _names(chosen)}
    if "coefficient" not in settings:
        raise ConfigError(
            f"The loss {kind} needs a coefficient. Write e.g. {kind}: {{coefficient: 1.0}}."
        )
    for name, value in settings.items():
        if name not in takes:
            raise ConfigError(f"The loss {kind} has no setting {name!r}{_meant(name, takes)}")
        if not _fits(value, takes[name]):
            raise ConfigError(
                f"{kind}.{name} must be {_describe_hint(takes[name])}, got {value!r}."
            )
    return chosen(**settings)


def build_losses(requested: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Loss]:
    """Build the terms of a loss; two of one name would be one in the records, and are refused."""
    losses = [build_loss(kind, settings) for kind, settings in requested]
    if not losses:
        raise ConfigError("No loss is named. Write e.g. stochastic: {coefficient: 1.0}.")
    names = [loss.name for loss in losses]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"The loss {name} is named twice. Write it once, with one coefficient."
            )
    if all(isinstance(loss, Adversarial) and loss.every > 1 for loss in losses):
        raise ConfigError(
            "Some steps would have no loss. Leave `every` out of one loss, or add a loss without "
            "it."
        )
    return losses


def _names(kind: type[Loss]) -> set[str]:
    return {each.name for each in fields(kind)}


def _hints(kind: type[Loss]) -> dict[str, Any]:
    return get_type_hints(kind)


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f". Write one of {', '.join(known)}."


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _describe_hint(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if isinstance(hint, UnionType):
        return " or ".join(_describe_hint(each) for each in get_args(hint))
    return {float: "a number", int: "a whole number", bool: "true or false"}.get(hint, "nothing")
