"""What `doctor` prints: versions, a table of formats for each device, and a recommendation."""

from typing import Any

from rich.console import Console
from rich.text import Text

from narrowcast.cli.view.screen import new_table, say, say_command
from narrowcast.hardware import Hardware, Speeds
from narrowcast.report.phrases import size

MARKS = {
    "native": ("● native", "green"),
    "emulated": ("○ emulated", "yellow"),
    "impossible": ("× impossible", "red"),
}


def print_environment(console: Console, environment: dict[str, Any]) -> None:
    """Print the versions that matter and the machine."""
    versions = {name: environment[name] for name in ("narrowcast", "python", "torch", "cuda")}
    text = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    say(console, "versions", text)
    say(console, "system", str(environment["platform"]))
    console.print()


def print_device(console: Console, hardware: Hardware) -> None:
    """Print how products of every format run on one device, and why."""
    about = f"  {hardware.device}"
    if hardware.memory_bytes is not None:
        about += f", {size(hardware.memory_bytes)}"
    if hardware.capability:
        about += f", compute capability {hardware.capability[0]}.{hardware.capability[1]}"
    console.print(Text.assemble((hardware.name, "bold"), about))
    table = new_table()
    table.add_column("format", no_wrap=True)
    table.add_column("products", no_wrap=True)
    table.add_column("reason", style="dim")
    for name, support in hardware.products.items():
        mark, style = MARKS[support.how]
        table.add_row(name, Text(mark, style=style), support.reason)
    console.print(table)
    console.print()
    if hardware.speeds is not None:
        print_speeds(console, hardware.speeds)


def print_speeds(console: Console, speeds: Speeds) -> None:
    """Print how much faster than bf16 linear layers are in fp8, by their shape."""
    tokens = speeds.tokens[-1]
    about = (
        f"  {tokens} tokens, forward and backward, compared with bf16; {speeds.gpu}, {speeds.date}"
    )
    console.print(Text.assemble(("fp8 linear layers, delayed scaling", "bold"), about))
    table = new_table()
    table.add_column("in \\ out", no_wrap=True)
    for outputs in speeds.outputs:
        table.add_column(str(outputs), justify="right")
    for inputs in speeds.inputs:
        gains = [
            speeds.gain("delayed", tokens=tokens, inputs=inputs, outputs=outputs)
            for outputs in speeds.outputs
        ]
        table.add_row(str(inputs), *("–" if gain is None else f"{gain:.2f} ×" for gain in gains))
    console.print(table)
    console.print()


def print_recommendation(console: Console, policy: str, reason: str) -> None:
    """Print which policy to use here, and how."""
    text = Text.assemble((f"precision.policy={policy}", "bold green"), f"  {reason}")
    say(console, "use", text)
    say_command(console, "try", f"narrowcast train quickstart precision.policy={policy}")
