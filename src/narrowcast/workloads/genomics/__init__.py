"""Genomics: sequences of DNA, RNA and protein."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="genomics",
    about="DNA, RNA and protein: classification, pretraining, and fine-tuning for five tasks",
    sections="narrowcast.workloads.genomics.settings:SECTIONS",
    task="narrowcast.workloads.genomics.task:build_task",
    report="narrowcast.workloads.genomics.report.sections:sections",
    recipes=Path(__file__).parent / "recipes",
    commands=(
        Command(
            "genomics",
            "narrowcast.workloads.genomics.command:genomics",
            about="pretrains on genomes, predicts, scores variants",
        ),
    ),
    requires=("sklearn",),
    extra="genomics",
)
