"""Tasks of lm-eval (the LM Evaluation Harness) on the model of a finished fine-tuning run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.config import from_resolved
from narrowcast.config.problems import shortened, shown_path
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs import RunFolder
from narrowcast.workloads.sft.models.base import base_to_merge
from narrowcast.workloads.sft.models.loading import load_model, quiet
from narrowcast.workloads.sft.models.saving import ADAPTER, weights_folder

RESOLVED = "resolved.json"
RESULTS = "lm_eval.json"


def load_trained(run: str, *, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model of a finished run, with its adapter merged, and its tokenizer."""
    import transformers

    from narrowcast.workloads import workload_sections

    path = expand_path(run)
    with RunFolder.open(path, needs=(RESOLVED,)) as folder:
        resolved = folder.read_json(RESOLVED)
    workload = resolved.get("workload", {}).get("value")
    if workload != "sft":
        raise ConfigError(f"{shown_path(path)} is a run of workload {workload}. Give a run of sft.")
    recipe = from_resolved(resolved, (), sections=workload_sections).recipe
    saved = path / weights_folder(recipe)
    if not saved.is_dir():
        raise ConfigError(
            f"{shown_path(saved)} does not exist because the run is not finished. Run narrowcast "
            f"resume {shown_path(path)}."
        )
    if saved.name != ADAPTER:
        model = load_model(str(saved), dtype=dtype, device=device)
    else:
        from peft import PeftModel

        base = base_to_merge(recipe)
        with quiet():
            model = PeftModel.from_pretrained(base, str(saved)).merge_and_unload()
        model = model.to(device, dtype)
    tokenizer: Any = transformers.AutoTokenizer
    return model.eval(), tokenizer.from_pretrained(str(saved))


def evaluate_with_lm_eval(
    run: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    include_path: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, dict[str, float]]:
    """Evaluate a finished run on tasks of lm-eval, and write lm_eval.json in its folder.

    Args:
        run: Folder of a finished fine-tuning run.
        tasks: Names of tasks that lm-eval knows, or finds in `include_path`.
        limit: Documents per task; None for all.
        num_fewshot: Examples in the prompt; None for the default of each task.
        batch_size: Requests per batch.
        include_path: Folder with your own tasks, as YAML.
        device: Where the model runs.
        dtype: The dtype of the weights.

    Returns:
        Metrics by task.

    Raises:
        UnsupportedError: lm-eval is not installed.
        ConfigError: The run is not finished, or lm-eval fails.
    """
    require_modules(["lm_eval"], of="narrowcast lm-eval", install="lm-eval")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = load_trained(run, device=device, dtype=dtype)
    try:
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device)
        output = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=TaskManager(include_path=include_path),
            log_samples=False,
        )
    except Exception as error:  # anything lm-eval raises for unknown tasks or missing data
        line = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
        raise ConfigError(
            f"lm-eval failed: {line}. Check the names with `lm-eval ls tasks`, or give the "
            "folder of your own tasks with --include-path."
        ) from error
    results = {task: _numbers(values) for task, values in output["results"].items()}
    RunFolder(expand_path(run)).write_json(
        RESULTS,
        {
            "lm_eval": lm_eval.__version__,
            "limit": limit,
            "num_fewshot": num_fewshot,
            "dtype": str(dtype).removeprefix("torch."),
            "results": results,
        },
    )
    return results


def results_path(run: str) -> Path:
    """Return where the results of a run are."""
    return expand_path(run) / RESULTS


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values of a task, without the name of the default filter."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name != "sample_len"
    }
