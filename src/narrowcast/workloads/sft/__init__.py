"""Fine-tuning of language models, and functional networks found by ICA."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="sft",
    about="fine-tunes Hugging Face language models, fully or with LoRA",
    sections="narrowcast.workloads.sft.settings:SECTIONS",
    task="narrowcast.workloads.sft.task:build_task",
    report="narrowcast.workloads.sft.report:sections",
    recipes=Path(__file__).parent / "recipes",
    commands=(
        Command(
            "ica",
            "narrowcast.workloads.sft.command:ica",
            about="finds, shows and tests functional networks of a language model",
        ),
        Command(
            "lm-eval",
            "narrowcast.workloads.sft.command:lm_eval",
            about="evaluates a fine-tuned model on tasks of lm-eval",
        ),
    ),
    requires=("transformers", "peft"),
    extra="sft",
)
