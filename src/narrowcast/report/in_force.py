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


@dataclass(frozen=True, kw_only=True)
class InForce:
    """The state at the end of the records."""

    policy: Change | None
    """Of the whole model; None where it never changed."""
    modules: Mapping[str, Change]
    """Of modules that were changed by name, after the last change of the whole model."""

    @property
    def changed(self) -> int:
        """Count the modules that ended in something else than was asked for."""
        return sum(not change.returned for change in self.modules.values())


def in_force(modules: Sequence[Mapping[str, Any]], changes: Iterable[PrecisionRecord]) -> InForce:
    """Apply the changes to the plan in the order they were made.

    A module may be named by a glob, and need not be in the plan. A change of the whole model
    overrules the changes of single modules before it.
    """
    names = [str(module.get("name", "")) for module in modules]
    began: dict[str, str] = {}
    policy: Change | None = None
    found: dict[str, Change] = {}
    for record in changes:
        if record.module in WHOLE:
            first = began.setdefault("", record.before)
            policy = Change(format=record.after, step=record.step, returned=record.after == first)
            found.clear()
            continue
        for name in [n for n in names if fnmatchcase(n, record.module)] or [record.module]:
            first = began.setdefault(name, record.before)
            back = record.after == first and policy is None
            found[name] = Change(format=record.after, step=record.step, returned=back)
    return InForce(policy=policy, modules=found)
