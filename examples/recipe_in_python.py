"""Plan and train a recipe from Python, as in a notebook.

Run: python examples/recipe_in_python.py [FOLDER] [KEY=VALUE ...]
"""

import sys

import narrowcast as nc
from narrowcast.runs import EvalRecord, StepRecord

out, *words = sys.argv[1:] or ["runs/recipe_in_python"]
recipe = nc.load_recipe("quickstart", ["precision.policy=fp16", "steps=200", *words])
plan = nc.plan_recipe(recipe)  # computed from shapes; allocates nothing
print(plan)

run = nc.train(recipe, out=out)  # raises if the recipe cannot run; iterate to train
for record in run:
    match record:
        case StepRecord(step=step, loss=loss, applied=applied) if step % 20 == 0 or not applied:
            print(
                f"step {step}: loss {loss:.3f}"
                + ("" if applied else f", skipped: {record.skip_reason}")
            )
        case EvalRecord(step=step, metrics=metrics):
            print(f"step {step}: evaluated", {name: round(x, 3) for name, x in metrics.items()})
run.close()

weights = run.prepared.fp32_state_dict()  # fp32 weights by name
print(f"{sum(w.numel() for w in weights.values()):,} parameters; the report is {out}/report.html")
