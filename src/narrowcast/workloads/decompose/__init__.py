"""Decompose: stochastic parameter decomposition of trained networks."""

from pathlib import Path

from narrowcast.config.workload import Workload

WORKLOAD = Workload(
    name="decompose",
    about="takes the weights of a trained network apart into components that matter one by one",
    sections="narrowcast.workloads.decompose.settings:SECTIONS",
    task="narrowcast.workloads.decompose.task:build_task",
    recipes=Path(__file__).parent / "recipes",
)
