"""Decompose: stochastic parameter decomposition of trained networks."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="decompose",
    about="decomposes the weights of a trained network into rank-one components",
    sections="narrowcast.workloads.decompose.settings:SECTIONS",
    task="narrowcast.workloads.decompose.task:build_task",
    report="narrowcast.workloads.decompose.report:sections",
    recipes=Path(__file__).parent / "recipes",
    commands=(
        Command(
            "decompose",
            "narrowcast.workloads.decompose.command:decompose",
            about="compares and explains finished decompositions",
        ),
    ),
)
