"""What was in force at the end: the plan, and the changes of format that were made in the run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from narrowcast.runs.records import PrecisionRecord

WHOLE = ("", "*", "all")
"""In the place of a module: the change is of the whole model."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The last change that holds for a module."""

    format: str
    step: int
    returned: bool
    """Whether it led back to what was asked for."""
    by_name: bool = True
    """Whether it was made for this module; False: the policy of the whole model changed."""


@dataclass(frozen=True, kw_only=True)
class InForce:
    """The state at the end of the records."""

    policy: Change | None
    """Of the whole model; None where it never changed."""
    modules: Mapping[str, Change]
    """Of modules that the last change of the whole model changed, or one by name since then."""

    @property
    def changed(self) -> int:
        """Count the modules that ended in something else than the policy in force gives them."""
        return sum(each.by_name and not each.returned for each in self.modules.values())


def named(module: str) -> str:
    """Name the module of a change for a reader."""
    return "all" if module in WHOLE else module


def active_formats(
    modules: Sequence[Mapping[str, Any]],
    changes: Iterable[PrecisionRecord],
    *,
    phases: Sequence[Mapping[str, Any]] = (),
) -> InForce:
    """Apply the changes to the plan in the order they were made.

    A module may be named by a glob, and need not be in the plan. A change of the whole model
    overrules the changes of single modules before it; what it gives each is known from `phases`.
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
