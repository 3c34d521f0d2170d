"""An example workload: predict the last digit of a Roman numeral."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="tutorial",
    about="reads Roman numerals; the workload of docs/workloads/your-own.md",
    sections="narrowcast.workloads.tutorial.settings:SECTIONS",
    task="narrowcast.workloads.tutorial.task:build_task",
    recipes=Path(__file__).parent / "recipes",
    commands=(Command("tutorial", "narrowcast.workloads.tutorial.command:tutorial"),),
    report="narrowcast.workloads.tutorial.report:sections",
)
