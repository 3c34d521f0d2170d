"""`narrowcast doctor`: what this machine can do, and what to use on it."""

import click

from narrowcast.cli.words import json_option


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what this machine runs natively, and what to use."""
    import json

    from narrowcast.cli.screen import screen, working

    console = screen()
    with working(console, "trying this machine"):
        from narrowcast.hardware import probe
        from narrowcast.precision.presets import recommended
        from narrowcast.runs import describe_environment

        best = probe()
        devices = [best] if best.device == "cpu" else [best, probe("cpu")]
        policy, reason = recommended(best)
        environment = describe_environment()
    if as_json:
        found = {
            "environment": environment,
            "devices": [device.to_json() for device in devices],
            "recommended": {"device": best.device, "policy": policy, "reason": reason},
        }
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    from narrowcast.cli.checkup import print_device, print_environment, print_recommendation

    print_environment(console, environment)
    for device in devices:
        print_device(console, device)
    print_recommendation(console, policy, reason)
