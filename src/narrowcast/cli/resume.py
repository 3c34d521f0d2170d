"""`narrowcast resume`: a run that ended early, continued as if it had not."""

from pathlib import Path

import click

from narrowcast.cli.options import overrides_argument, quiet_option, run_argument


@click.command()
@run_argument
@overrides_argument
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice(["data", "settings", "records"]),
    help="Go on in spite of a difference: with other data; with the checkpoint's settings where "
    "resolved.json has others; with records that lack steps. May be given more than once.",
)
@quiet_option
def resume(folder: str, overrides: tuple[str, ...], accept: tuple[str, ...], quiet: bool) -> None:
    """Continue the run in DIR, bit for bit.

    It goes on from its last checkpoint; without one it begins again, in the same folder.
    KEY=VALUE may set steps, device, checkpoint.*, eval.*, memory.*, data.workers, data.prefetch and
    trackers.
    Data, settings and records that are not those of the checkpoint are refused.
    """
    from narrowcast.cli.output import outlive_output
    from narrowcast.cli.view.screen import lasting_screen, say, working

    console = lasting_screen(quiet=quiet)
    with working(console, "loading the run"):
        from narrowcast.cli.run_loop import run_loop
        from narrowcast.cli.view.summary import already_done, introduce
        from narrowcast.runner.finished import finished
        from narrowcast.runner.run import resume as take_up

        if not accept and (end := finished(folder, overrides)):
            outlive_output(False)  # there is no run to keep alive, only an answer
            already_done(console, Path(folder), end=end)
            return
        ready = take_up(folder, overrides, accept=accept)
    with ready as run:
        introduce(console, run.recipe, plan=run.plan, notes=run.task.info.notes, folder=folder)
        step = run.resumed_from
        say(console, "from", f"step {step}" if step else "the beginning: it has no checkpoint yet")
        for notice in run.notices:
            say(console, "note", notice, style="yellow")
        run_loop(run, console=console)
