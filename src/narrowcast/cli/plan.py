"""`narrowcast plan`: which module would get which formats here, and why, before anything runs."""

from dataclasses import asdict

import click
from click.exceptions import Exit

from narrowcast.cli.options import json_option, overrides_argument, recipe_argument
from narrowcast.errors import UnsupportedError


@click.command()
@recipe_argument
@overrides_argument
@json_option
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Show one row per module instead of grouping similar modules.",
)
def plan(recipe: str, overrides: tuple[str, ...], as_json: bool, every: bool) -> None:
    """Show the number formats of every module, and why.

    The plan is made from the model's shapes. No weights are allocated and no data is read. With a
    precision.schedule, every phase is shown. With parallel.ranks, memory and traffic per rank are
    predicted. Memory and time of a step are predicted too, and exit code 3 says that it does not
    fit. hardware=h200 plans for a GPU that this machine does not have; a wrong name lists all.
    """
    from narrowcast.workloads import load_recipe

    gpus = [each.partition("=")[2] for each in overrides if each.startswith("hardware=")]
    loaded = load_recipe(recipe, [each for each in overrides if not each.startswith("hardware=")])

    from narrowcast.cli.view.screen import say, screen, working
    from narrowcast.report.phrases import count

    console = screen()
    with working(screen(quiet=as_json, to_stderr=True), "planning"):
        from narrowcast.hardware import detect_hardware
        from narrowcast.runner.by_task import decided
        from narrowcast.runner.fitting import (
            advise,
            budget,
            choose_recomputed,
            largest_batch,
            largest_model,
            predict,
            refusal,
        )

        if gpus:
            from narrowcast.hardware.catalog import named_hardware

            hardware = named_hardware(gpus[-1])
        else:
            hardware = detect_hardware(loaded.recipe.device)
        by_task = decided(loaded, hardware)
        loaded = choose_recomputed(by_task.loaded, hardware)
        prediction = predict(loaded.recipe, hardware)
        plans, limit = prediction.plans, budget(loaded.recipe, hardware)
        memory = prediction.memory
        too_large = memory is not None and limit is not None and memory.needed > limit
        advice = (
            list(advise(loaded, hardware, limit=limit))
            if too_large and limit and not as_json
            else []
        )
        most = largest_batch(loaded.recipe, hardware, prediction)
        model = largest_model(loaded.recipe, hardware, prediction)
    from narrowcast.cli.view.plan_view import (
        print_phases,
        print_plan,
        print_prediction,
        print_ranks,
        print_strategy,
        print_task_row,
        titles,
    )
    from narrowcast.runner.assemble import ranks_row, strategy_row

    if as_json:
        from narrowcast.runner.assemble import plan_json
        from narrowcast.runs import strict_json

        info = plan_json(loaded.recipe, plans, task_row=by_task.row)
        info |= {"predicted": {**prediction.to_json(), "budget": limit, "fits": not too_large}}
        info["predicted"] |= {
            "largest_batch": most,
            "largest_model": None if model is None else asdict(model),
        }
        click.echo(strict_json.dumps(info, indent=2))
        _check_fits(too_large)
        return
    if not loaded.recipe.is_settled:
        many = count(loaded.recipe.epochs or 0, "epoch")
        say(console, "steps", f"as many as {many} have; no data is read for a plan")
    if by_task.row is not None:
        print_task_row(console, by_task.row)
        console.print()
    print_strategy(console, strategy_row(loaded.recipe, plans[0]))
    print_phases(console, loaded.recipe, plans)
    for number, (title, plan) in enumerate(zip(titles(loaded.recipe), plans, strict=True)):
        if number:
            console.print()
        print_plan(console, plan, title=title, every=every)
    print_ranks(console, ranks_row(loaded.recipe, plans[0]))
    print_prediction(
        console, prediction, steps=loaded.recipe.steps, limit=limit, batch=most, model=model
    )
    if too_large and memory is not None and limit is not None:
        raise UnsupportedError(refusal(memory, hardware, advice, limit=limit))


def _check_fits(too_large: bool) -> None:
    if too_large:
        raise Exit(UnsupportedError.exit_code)
