"""The formats of modules: the layer table of the plan, and what was active at the end."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from narrowcast.precision.plan.folding import decibel_range, folded, groups_alike
from narrowcast.runs.records import PrecisionRecord

WHOLE = ("", "*", "all")
"""In the place of a module: the change is of the whole model."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The last change that holds for a module."""

    format: str
    step: int
    returned: bool
    """Whether it led back to the requested format."""
    by_name: bool = True
    """Whether it was made for this module; False: the policy of the whole model changed."""


@dataclass(frozen=True, kw_only=True)
class InForce:
    """The state at the end of the records."""

    policy: Change | None
    """Of the whole model; None if it never changed."""
    modules: Mapping[str, Change]
    """Of modules that the last change of the whole model changed, or one by name since then."""

    @property
    def changed(self) -> int:
        """Count the modules that ended in something else than the policy in force gives them."""
        return sum(each.by_name and not each.returned for each in self.modules.values())


def named(module: str) -> str:
    """Return the module of a change as a page shows it."""
    return "all" if module in WHOLE else module


def active_formats(
    modules: Sequence[Mapping[str, Any]],
    changes: Iterable[PrecisionRecord],
    *,
    phases: Sequence[Mapping[str, Any]] = (),
) -> InForce:
    """Apply the changes, whose modules may be globs, to the plan in the order they were made.

    A change of the whole model overrules the changes of single modules before it.
    """
    names = [str(module.get("name", "")) for module in modules]
    began: dict[str, str] = {}
    policy: Change | None = None
    own: dict[str, Change] = {}  # what the policy in force gives modules, where it is another
    results: dict[str, Change] = {}
    for record in changes:
        if record.module in WHOLE:
            first = began.get("", record.before)
            began = {"": first}
            policy = Change(format=record.after, step=record.step, returned=record.after == first)
            own = _changed_modules(record, phases)
            results = dict(own)
            continue
        for name in [n for n in names if fnmatchcase(n, record.module)] or [record.module]:
            back = record.after == began.setdefault(name, record.before)
            known = policy is None or bool(phases)
            results[name] = Change(format=record.after, step=record.step, returned=back and known)
            if back and name in own:
                results[name] = own[name]
    return InForce(policy=policy, modules=results)


def _changed_modules(
    record: PrecisionRecord, phases: Sequence[Mapping[str, Any]]
) -> dict[str, Change]:
    """Return the modules to which a policy gives other formats than the first one did."""
    formats: Mapping[str, str] = next(
        (p.get("formats", {}) for p in phases if p.get("policy") == record.after), {}
    )
    requested = phases[0].get("formats", {}) if phases else {}
    return {
        name: Change(format=text, step=record.step, returned=False, by_name=False)
        for name, text in formats.items()
        if text != requested.get(name)
    }


_NONE = "–"
_FIELDS = ("kind", "forward", "grad_input", "grad_weight", "params", "output", "how")


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
    """The format in force at the end; empty if it is the requested one."""
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
    """Return the family of a format by its bits."""
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
    """Return the last change of a module that did not lead back to the requested format."""
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
        **{field: _text(first, field) for field in _FIELDS},
        reason="; ".join(filter(None, [bare_reason(first), _loss(alike)])),
        parameters=sum(_whole(module, "parameters") for module in alike),
        ended=next((change.format for change in changes if change is not None), ""),
        since=" – ".join(f"{step:,}" for step in dict.fromkeys([*steps[:1], *steps[-1:]])),
    )


def _loss(alike: Sequence[Mapping[str, Any]]) -> str:
    """Return the error of quantized weights, if known."""
    stored = [module.get("quantized") for module in alike]
    matches = [each.get("snr_db") for each in stored if isinstance(each, Mapping)]
    return decibel_range([value for value in matches if isinstance(value, float)])


def _treatment(module: Mapping[str, Any]) -> tuple[str, ...]:
    fields = (*_FIELDS, "reason")
    return (*(_text(module, field) for field in fields), str(_whole(module, "parameters")))


def _text(module: Mapping[str, Any], field: str) -> str:
    result = module.get(field)
    return _NONE if result is None else str(result)


def _whole(module: Mapping[str, Any], field: str) -> int:
    matched = module.get(field)
    return matched if isinstance(matched, int) else 0
