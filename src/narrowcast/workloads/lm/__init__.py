"""Language models: a GPT, its tokenizers and its text."""

from pathlib import Path

from narrowcast.config.workload import Workload

WORKLOAD = Workload(
    name="lm",
    about="language models: a GPT on text or random tokens",
    sections="narrowcast.workloads.lm.settings:SECTIONS",
    task="narrowcast.workloads.lm.task:build_task",
    report="narrowcast.workloads.lm.report:sections",
    recipes=Path(__file__).parent / "recipes",
    extra="lm",
)
