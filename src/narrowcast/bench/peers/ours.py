"""This library, by the path its own trainer takes: plan, prepare, and the trainer's own step."""

from itertools import islice

from torch import Tensor

from narrowcast.bench.measure.timing import Case, Trial
from narrowcast.bench.model import Workbench, in_policy
from narrowcast.hardware import probe
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.step.stepping import Stepper


def build(bench: Workbench, *, policy: str) -> Trial:
    """Return a step in a policy; compiled and captured if the recipe says so."""
    recipe = in_policy(bench.recipe, policy)
    hardware, gemm_rows = probe(str(bench.device)), bench.task.gemm_rows
    plan = plan_recipe_model(recipe, bench.model, hardware=hardware, gemm_rows=gemm_rows)
    prepared = prepare_recipe(recipe, bench.task, plan=plan)
    stepper = Stepper(prepared, bench.task, recipe)
    batches, latest = bench.stream(), list[Tensor]()

    def step() -> None:
        _, losses = stepper(list(islice(batches, bench.recipe.accumulate)))
        latest[:] = [losses]  # of the whole, and of its parts

    return Trial(
        cases={"step": Case(open=lambda: step, work=bench.work)},
        about={
            "parameters": sum(p.numel() for p in bench.model.parameters()),
            "compiled": bench.recipe.compile,
            "policy": str(plan.policy),
            "update_path": prepared.update_path,
        },
        loss=lambda: float(latest[0][0]) if latest else None,
        is_captured=lambda: stepper.captured,
    )
