"""A command line with the two verbs that `verify_resume` uses, for the sine task.

    sine_program.py train [broken] KEY=VALUE … --out DIR
    sine_program.py resume DIR

A broken run ends with exit code 3.
"""

import sys
from pathlib import Path

import torch

from conftest import EMULATING, sine_recipe, sine_task
from narrowcast.precision.plan.plan import make_plan
from narrowcast.runs import RunFolder
from narrowcast.training.checkpoints.resume import latest_state, rewind_to
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.train_loop import train_loop

STEPS = 100


def main(verb, *words):
    torch.set_num_threads(1)
    if verb == "train":
        *words, _, out = words
        if "broken" in words:
            sys.stderr.write("this policy needs another machine\n")
            sys.exit(3)
        run = RunFolder.create(out, recipe_text=" ".join(words), resolved={}, environment={})
        state = None
    else:
        run = RunFolder.open(words[0])
        words = run.recipe_text.split()
        state = latest_state(run)
    settings = dict(word.split("=") for word in words if "=" in word)
    every = int(settings["checkpoint.every"])
    recipe = sine_recipe("fp16", steps=STEPS, checkpoint={"every": every}, ema={"decay": 0.9})
    task = sine_task()
    planned = make_plan(task.model, "fp16", hardware=EMULATING)
    prepared = prepare_recipe(recipe, task, plan=planned)
    records = train_loop(prepared, task, recipe, folder=Path(run.path), resume=state)
    with run:
        if verb == "resume":
            rewind_to(run, state)
        for record in records:
            run.write(record)


main(*sys.argv[1:])
