"""Which modules another plan gives other formats, in words for records and people."""

from collections.abc import Iterator
from dataclasses import dataclass

from narrowcast.precision.plan.module_kinds import multiplies
from narrowcast.precision.plan.module_plan import ModulePlan
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import PRODUCTS


@dataclass(frozen=True, kw_only=True)
class PrecisionChange:
    """A module whose formats were changed in a run."""

    module: str
    before: str
    """What it had, as `bf16` or `e4m3/e5m2 delayed`."""
    after: str


def changes_between(before: Plan, after: Plan) -> list[PrecisionChange]:
    """Return the modules that two plans of a model treat differently, in its order."""
    had = {module.name: formats_text(module, before) for module in before.modules}
    has = {module.name: formats_text(module, after) for module in after.modules}
    names = dict.fromkeys([*had, *has])
    # A plan lists a module without weights only where an exception names it; else it is as around.
    pairs = (
        (n, had.get(n, before.policy.functional), has.get(n, after.policy.functional))
        for n in names
    )
    return [PrecisionChange(module=n, before=a, after=b) for n, a, b in pairs if a != b]


def formats_text(module: ModulePlan, plan: Plan) -> str:
    """Say what a module computes in, and what its weights are kept in where that is not fp32."""
    return ", ".join(_parts(module, plan))


def _parts(module: ModulePlan, plan: Plan) -> Iterator[str]:
    policy = module.policy
    if module.kind == "normalisation":
        yield policy.reduce
    elif multiplies(module.kind):
        formats = dict.fromkeys(getattr(policy, role) for role in PRODUCTS)
        scaling = "" if policy.scaling == "none" else f" {policy.scaling}"
        yield "/".join(formats) + scaling
    if policy.params != "fp32":
        master = "no master" if plan.policy.master == "none" else f"{plan.policy.master} master"
        yield f"weights {policy.params} with {master}"
    elif not multiplies(module.kind) and module.kind != "normalisation":
        yield "weights fp32"
