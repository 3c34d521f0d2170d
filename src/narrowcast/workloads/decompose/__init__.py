"""Decompose: stochastic parameter decomposition of trained networks."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="decompose",
    about="takes the weights of a trained network apart into components that matter one by one",
    sections="narrowcast.workloads.decompose.settings:SECTIONS",
    task="narrowcast.workloads.decompose.task:build_task",
    report="narrowcast.workloads.decompose.report:sections",
    recipes=Path(__file__).parent / "recipes",
    commands=(
        Command(
            "decompose",
            "narrowcast.workloads.decompose.command:decompose",
            about="compares the components of finished decompositions",
        ),
    ),
)
