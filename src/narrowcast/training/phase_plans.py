"""The plan of every phase of a run, and phases as text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from narrowcast.config.common_sections import PrecisionSection
from narrowcast.config.limits import UNSETTLED
from narrowcast.config.phases import ConditionSection, PhaseSection, Until, last_step
from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError, NarrowcastError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import Memory
from narrowcast.precision.plan.plan import Plan, formats_text, make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.training.optimizers import moment_count

TASK_ROW = "task"
"""Key of the `precision.task` row in plan.json."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def get_phases(precision: PrecisionSection) -> tuple[PhaseSection, ...]:
    """Return the phases of a run with their policies; one if there is no schedule."""
    return tuple(
        phase.model_copy(
            update={
                "policy": phase.policy or precision.policy,
                "overrides": {**precision.overrides, **phase.overrides},
            }
        )
        for phase in precision.schedule or (PhaseSection(),)
    )


def plan_phases(
    recipe: Recipe, model: nn.Module, *, hardware: Hardware, gemm_rows: int
) -> tuple[Plan, ...]:
    """Plan every phase of a run; an error lists the problems of all phases."""

    def plan(phase: PhaseSection) -> Plan:
        return plan_recipe_model(
            recipe,
            model,
            policy=phase.policy,
            overrides=phase.overrides,
            hardware=hardware,
            gemm_rows=gemm_rows,
        )

    phases = get_phases(recipe.precision)
    return (plan(phases[0]),) if len(phases) == 1 else each_phase(phases, plan)


def plan_recipe_model(
    recipe: Recipe,
    model: nn.Module,
    *,
    hardware: Hardware,
    gemm_rows: int,
    policy: str | Policy | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Plan:
    """Plan a model with the settings of a recipe, or with a phase's policy and overrides."""
    precision = recipe.precision
    return make_plan(
        model,
        precision.policy if policy is None else policy,
        hardware=hardware,
        overrides=precision.overrides if overrides is None else overrides,
        emulate=precision.emulate,
        moments=moment_count(recipe.optimizer),
        gemm_rows=gemm_rows,
        skip_slow_fp8=precision.skip_slow_fp8,
        fuse=precision.fuse,
        memory=Memory(**recipe.memory.model_dump(exclude={"fit", "limit"})),
        execution=recipe_execution(recipe),
    )


def recipe_execution(recipe: Recipe) -> Execution:
    """Return how the steps of a recipe are executed on a GPU that can capture them."""
    captured = recipe.cuda_graph
    if captured is None:  # too large a model is not, but of its layers no device waits for the host
        saving = recipe.memory.activation_checkpointing != "none"
        captured = not (saving or recipe.deterministic or recipe.fault_injection)
    return "graphed" if captured else "compiled" if recipe.compile else "eager"


def each_phase(items: Iterable[_Item], ask: Callable[[_Item], _Answer]) -> tuple[_Answer, ...]:
    """Call `ask` for every phase; raise the errors of all phases at once."""
    answers, problems = list[_Answer](), list[NarrowcastError]()
    for number, item in enumerate(items, start=1):
        try:
            answers.append(ask(item))
        except (ConfigError, UnsupportedError) as error:
            text = f"phase {number} of precision.schedule: {error}"
            problems.append(type(error)(text))
    if problems:
        worst = next((p for p in problems if isinstance(p, ConfigError)), problems[0])
        raise type(worst)("\n".join(map(str, problems)))
    return tuple(answers)


def phases_json(
    recipe: Recipe, plans: Sequence[Plan], *, task_row: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the plan of a run as plain data, for `narrowcast plan --json` and plan.json."""
    info = plans[0].to_json()
    if task_row is not None:
        info[TASK_ROW] = dict(task_row)
    if len(plans) > 1:
        info["phases"] = [
            {
                "policy": phase_text(phase, plan),
                "until": end_text(phase.until, steps=recipe.steps),
                "bytes": dict(plan.bytes),
                "modules": [module.to_json() for module in plan.modules],
                "formats": {module.name: formats_text(module, plan) for module in plan.modules},
            }
            for phase, plan in zip(get_phases(recipe.precision), plans, strict=True)
        ]
    return info


def phase_text(phase: PhaseSection, plan: Plan) -> str:
    """Return a phase's policy as written; for `auto`, the policy that was chosen."""
    if phase.policy is None or phase.policy.startswith("auto"):
        return str(plan.policy)
    return "; ".join([phase.policy, *(f"{glob}: {text}" for glob, text in phase.overrides.items())])


def end_text(until: Until | None, *, steps: int) -> str:
    """Return when a phase ends, as text."""
    match until:
        case None:
            return "the end"
        case ConditionSection(calm=int(calm)):
            return f"{calm} calm steps in a row"
        case ConditionSection(loss_below=limit):
            return f"a mean loss below {limit:g}"
        case int():
            return f"step {until}"
        case _:
            share = until if isinstance(until, str) else f"{until:.6g} of the run"
            if steps == UNSETTLED:
                return f"{share.removesuffix(' of the run')} of the run"
            return f"step {last_step(until, steps=steps)} ({share})"
