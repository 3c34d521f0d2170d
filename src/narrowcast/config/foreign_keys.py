"""Keys of other trainers' flat files, and what to write for them in a recipe.

From FunctionalNetworksSFT, `transformers.TrainingArguments` and the mixed-precision trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from narrowcast.config.tree import Tree, leaves

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "model_name_or_path": "model.path",
        "dataset_name_or_path": "data.path",
        "auto_detect_format": "data.format",
        "num_train_epochs": "epochs",
        "max_steps": "steps",
        "per_device_train_batch_size": "batch_size",
        "per_device_eval_batch_size": "batch_size",
        "accumulate_grad_batches": "gradient_accumulation_steps",
        "learning_rate": "optimizer.lr",
        "optim": "optimizer.name",
        "adam_epsilon": "optimizer.eps",
        "lr_scheduler_type": "lr_schedule.name",
        "warmup_steps": "lr_schedule.warmup",
        "max_grad_norm": "clip_norm",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "eval_steps": "eval.every",
        "load_best_model_at_end": "eval.keep_best",
        "early_stopping_patience": "eval.patience",
        "torch_compile": "compile",
        "torch_dtype": "precision.policy",
        "bnb_4bit_compute_dtype": "precision.policy",
        "bnb_4bit_quant_type": "model.base_dtype",
        "lora_rank": "lora.lora_r",
        "ica_mask_path": "ica.ica_template_path",
        "initial_scale": "precision.loss_scale.init_scale",
        "scale_growth_factor": "precision.loss_scale.growth_factor",
        "scale_backoff_factor": "precision.loss_scale.backoff_factor",
        "dynamic_scaling": "precision.loss_scale.dynamic",
    }
)
"""Another name for a setting that takes the same kind of value."""

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "output_dir": "Leave it out, and write --out DIR on the command line",
        "resume_from_checkpoint": "Leave it out, and run narrowcast resume DIR",
        "logging_steps": "Leave it out: every step is recorded",
        "metric_for_best_model": "Leave it out: the first metric of the task decides",
        "greater_is_better": "Leave it out: the task sets it per metric",
        "use_wandb": "Write trackers=[wandb]",
        "report_to": "Write trackers=[wandb] or trackers=[tensorboard]",
        "fp16": "Write precision.policy=fp16",
        "bf16": "Write precision.policy=bf16",
        "tf32": "Write precision.policy=tf32",
        "check_finite": "Leave it out: gradients are always checked",
        "master_weights": 'Write precision.policy="bf16, params=bf16, master=fp32"',
        "use_4bit": "Write model.base_dtype=nf4",
        "load_in_4bit": "Write model.base_dtype=nf4",
        "use_8bit": "Write model.base_dtype=int8",
        "load_in_8bit": "Write model.base_dtype=int8",
        "no_peft": "Write model.tune=full",
        "use_peft": "Write model.tune=lora",
        "anti_drift_row_param": "Write ica.mask_mode=freeze",
        "anti_drift_apply_to": "Write ica.mask_mode=freeze",
    }
)
"""What to do for a key that no setting takes the value of."""


def pointer(key: str, tree: Tree, *, value: str | None) -> str:
    """Return what to write for a key of another trainer, if this workload has it; empty if not."""
    if key in ADVICE:
        advice = ADVICE[key]
        setting = advice.removeprefix("Write ").partition("=")[0]
        return advice if advice.startswith("Leave") or _is_known(setting, tree) else ""
    target = KEYS.get(key, "")
    if not target or not _is_known(target, tree):
        return ""
    if value is not None:
        return f"Write {target}={value}"
    section, _, name = target.rpartition(".")
    return f"Write {name} under {section}:" if section else f"Write {name}"


def _is_known(target: str, tree: Tree) -> bool:
    """Return whether a dotted key is a setting here."""
    return tuple(target.split(".")) in dict(leaves(tree))
