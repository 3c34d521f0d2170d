"""The layer table: one row for each module of the plan, blocks that are alike folded into one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.precision.plan.folding import decibel_range, folded, groups_alike
from narrowcast.report.active_formats import Change, InForce

_NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A row: modules whose name differs only in an index, and which the plan treats alike."""

    label: str
    """The module's name, or the names folded: `blocks.{0–11}.mlp.up`."""
    names: tuple[str, ...]
    kind: str
    forward: str
    grad_input: str
    grad_weight: str
    params: str
    output: str
    how: str
    reason: str
    """Why, without the word that `how` already says."""
    parameters: int
    """Of all the modules in the row together."""
    ended: str
    """The format in force at the end; empty where it is the one that was asked for."""
    since: str
    """The step or steps at which that came into force; empty likewise."""


@dataclass(frozen=True, kw_only=True)
class FormatShare:
    """How much of the model multiplies in one format."""

    name: str
    width: str
    """The family a page colours by: `full`, `half`, `eight`, `four` or `other`."""
    parameters: int
    modules: int


def layers(modules: Sequence[Mapping[str, Any]], ended: InForce | None = None) -> list[Layer]:
    """Make the rows of the table, in the order of the plan, with what was in force at the end."""
    rows = groups_alike(
        modules,
        name=lambda module: _text(module, "name"),
        treatment=lambda module: (_ended(module, ended), *_treatment(module)),
    )
    return [_layer(row, [_change(module, ended) for module in row]) for row in rows]


def format_shares(modules: Sequence[Mapping[str, Any]]) -> list[FormatShare]:
    """Sum the parameters by the format of the forward product, the largest share first."""
    parameters: dict[str, int] = defaultdict(int)
    members: dict[str, int] = defaultdict(int)
    for module in modules:
        name = _text(module, "forward")
        parameters[name] += _whole(module, "parameters")
        members[name] += 1
    shares = [
        FormatShare(name=name, width=width(name), parameters=total, modules=members[name])
        for name, total in parameters.items()
    ]
    return sorted(shares, key=lambda share: (-share.parameters, share.name))


def width(name: str) -> str:
    """Name the family of a format by its bits."""
    families = {
        "full": ("fp32", "tf32"),
        "half": ("bf16", "fp16"),
        "eight": ("e4m3", "e5m2", "mxfp8"),
        "four": ("e2m1", "nvfp4"),
    }
    for family, names in families.items():
        if name.startswith(names):
            return family
    return "other"


def bare_reason(entry: Mapping[str, Any]) -> str:
    """Return the reason without the word that stands beside it as `how`."""
    return _text(entry, "reason").removeprefix(f"{_text(entry, 'how')}: ")


def _change(module: Mapping[str, Any], ended: InForce | None) -> Change | None:
    """Return the last change of a module that did not lead back to what was asked for."""
    if ended is None:
        return None
    change = ended.modules.get(_text(module, "name"))
    return None if change is None or change.returned else change


def _ended(module: Mapping[str, Any], ended: InForce | None) -> str:
    change = _change(module, ended)
    return change.format if change else ""


def _layer(alike: Sequence[Mapping[str, Any]], changes: Sequence[Change | None]) -> Layer:
    steps = sorted({change.step for change in changes if change is not None})
    first = alike[0]
    names = tuple(_text(module, "name") for module in alike)
    return Layer(
        label=folded(names),
        names=names,
        kind=_text(first, "kind"),
        forward=_text(first, "forward"),
        grad_input=_text(first, "grad_input"),
        grad_weight=_text(first, "grad_weight"),
        params=_text(first, "params"),
        output=_text(first, "output"),
        how=_text(first, "how"),
        reason="; ".join(filter(None, [bare_reason(first), _loss(alike)])),
        parameters=sum(_whole(module, "parameters") for module in alike),
        ended=next((change.format for change in changes if change is not None), ""),
        since=" – ".join(f"{step:,}" for step in dict.fromkeys([*steps[:1], *steps[-1:]])),
    )


def _loss(alike: Sequence[Mapping[str, Any]]) -> str:
    """Say what weights that are kept in fewer bits have lost, where that is known."""
    stored = [module.get("quantized") for module in alike]
    matches = [each.get("snr_db") for each in stored if isinstance(each, Mapping)]
    return decibel_range([value for value in matches if isinstance(value, float)])


def _treatment(module: Mapping[str, Any]) -> tuple[str, ...]:
    fields = ("kind", "forward", "grad_input", "grad_weight", "params", "output", "how", "reason")
    return (*(_text(module, field) for field in fields), str(_whole(module, "parameters")))


def _text(module: Mapping[str, Any], field: str) -> str:
    result = module.get(field)
    return _NONE if result is None else str(result)


def _whole(module: Mapping[str, Any], field: str) -> int:
    matched = module.get(field)
    return matched if isinstance(matched, int) else 0
