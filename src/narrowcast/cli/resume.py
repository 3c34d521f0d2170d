"""`narrowcast resume`: a run that ended early, continued as if it had not."""

import click

from narrowcast.cli.options import overrides_argument, quiet_option, run_argument


@click.command()
@run_argument
@overrides_argument
@quiet_option
def resume(folder: str, overrides: tuple[str, ...], quiet: bool) -> None:
    """Continue the run in DIR, bit for bit.

    It goes on from its last checkpoint; without one it begins again, in the same folder.
    KEY=VALUE may set steps, device, checkpoint.*, eval.*, data.workers, data.prefetch and trackers.
    """
    from narrowcast.cli.view.screen import say, screen, working
    from narrowcast.runner.changes import continued, notices
    from narrowcast.runs import RunFolder

    console = screen(quiet=quiet)
    with RunFolder.open(folder) as run:
        before, loaded = continued(run, overrides)
        with working(console, "loading the run"):
            from narrowcast.cli.run_loop import run_loop
            from narrowcast.cli.view.summary import already_done, introduce
            from narrowcast.report.trackers import require_trackers
            from narrowcast.runner.assemble import assemble
            from narrowcast.runner.finished import finished_at
            from narrowcast.runs import describe_environment
            from narrowcast.training.checkpoints.resume import latest_state, rewind_to
            from narrowcast.training.phase_plans import phases_json
            from narrowcast.training.trainer import train as begin

            if finished_at(run, loaded.recipe.steps):
                already_done(console, run.path, steps=loaded.recipe.steps)
                return
            require_trackers(loaded.recipe.trackers)
            state = latest_state(run)
            assembled = assemble(loaded.recipe)
            environment = describe_environment()
        task, prepared = assembled.task, assembled.prepared
        records = begin(prepared, task, loaded.recipe, folder=run.path, resume=state)
        # From here on the folder changes; another process that writes to it is refused first.
        rewind_to(run, state)
        changes = notices(run, before.recipe, loaded.recipe, plan=prepared.plan)
        run.write_json("resolved.json", loaded.resolved())
        run.write_json("plan.json", phases_json(loaded.recipe, assembled.plans))
        run.add_session(environment)
        step = state["step"] if state else 0
        introduce(console, loaded.recipe, plan=prepared.plan, folder=str(run.path))
        say(console, "from", f"step {step}" if step else "the beginning: it has no checkpoint yet")
        for notice in changes:
            say(console, "note", notice, style="yellow")
        run_loop(run, records, console=console, loaded=loaded, plan=prepared.plan)
