"""`narrowcast doctor`: what this machine can do, and what to use on it."""

from typing import TYPE_CHECKING

import click

from narrowcast.cli.options import json_option

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@json_option
@click.option(
    "--measure",
    is_flag=True,
    help="Measure fp8 on this GPU first. Plans use the result from then on.",
)
def doctor(as_json: bool, measure: bool) -> None:
    """Show which formats this machine supports, and recommend one."""
    import json

    from narrowcast.cli.view.screen import screen, working

    console = screen(to_stderr=as_json)
    with working(screen(quiet=as_json, to_stderr=True), "checking this machine"):
        from narrowcast.hardware import detect_hardware
        from narrowcast.precision.plan.policy import recommended
        from narrowcast.runs import describe_environment

        if measure:
            _measure(console)
        best = detect_hardware()
        devices = [best] if best.device == "cpu" else [best, detect_hardware("cpu")]
        policy, reason = recommended(best)
        environment = describe_environment()
    if as_json:
        results = {
            "environment": environment,
            "devices": [device.to_json() for device in devices],
            "recommended": {"device": best.device, "policy": policy, "reason": reason},
        }
        click.echo(json.dumps(results, indent=2, ensure_ascii=False))
        return
    from narrowcast.cli.view.doctor_view import (
        print_device,
        print_environment,
        print_recommendation,
    )

    print_environment(console, environment)
    for device in devices:
        print_device(console, device)
    print_recommendation(console, policy, reason)


def _measure(console: "Console") -> None:
    """Time linear layers on the best device, and keep the table in this user's cache."""
    import torch

    from narrowcast.cli.view.screen import say
    from narrowcast.hardware import detect_hardware, keep_speeds
    from narrowcast.precision.fp8.measure import measure_speeds

    device = torch.device(detect_hardware().device)
    speeds = measure_speeds(device, tell=lambda what: say(console, "measuring", what))
    say(console, "kept in", str(keep_speeds(speeds)))
