"""Flat files of FunctionalNetworksSFT: every key of them leads to what to write here."""

import pytest

from narrowcast.config.foreign_keys import ADVICE, KEYS
from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe

FLAT = [
    "model_name_or_path", "torch_dtype", "attn_implementation", "trust_remote_code",
    "dataset_name_or_path", "dataset_config_name", "max_seq_length", "instruction_template",
    "validation_split", "use_existing_splits", "auto_detect_format", "template_format",
    "response_max_length", "instruction_max_length", "pretokenize", "pretokenize_cache_dir",
    "use_4bit", "use_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "no_peft", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "lora_bias", "output_dir",
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "per_device_eval_batch_size",
    "learning_rate", "weight_decay", "warmup_ratio",
    "lr_scheduler_type", "logging_steps", "save_steps", "eval_steps", "save_total_limit",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "max_grad_norm",
    "gradient_checkpointing", "resume_from_checkpoint", "use_wandb", "merge_adapter_with_base",
    "mask_mode", "ica_components", "ica_percentile", "ica_mask_layers", "ica_dtype",
    "ica_component_ids", "ica_template_path", "anti_drift_row_param", "anti_drift_apply_to",
]  # fmt: skip


@pytest.mark.parametrize("key", FLAT)
def test_key_of_the_flat_file_gets_a_pointer(key):
    with pytest.raises(ConfigError, match=r"Write [\w.]+=|Did you mean [\w.]+\?|Leave it out"):
        load_recipe("sft/tiny", [f"{key}=1"])


WRITTEN = [
    advice.removeprefix("Write ").partition("=")[0]
    for advice in ADVICE.values()
    if advice.startswith("Write")
]


@pytest.mark.parametrize("target", sorted({*KEYS.values(), *WRITTEN}))
def test_settings_that_are_pointed_to_exist(target):
    assert target in load_recipe("sft/tiny").resolved()


def test_flat_file_needs_a_workload_and_then_gets_pointers(tmp_path):
    file = tmp_path / "flat.yaml"
    file.write_text("model_name_or_path: gpt2\nlora_r: 16\n")
    with pytest.raises(ConfigError, match="workload: must name a workload, got none"):
        load_recipe(file)
    with pytest.raises(ConfigError) as raised:
        load_recipe(file, ["workload=sft"])
    assert "model_name_or_path: no such setting. Write path under model:" in str(raised.value)
    assert "lora_r: no such setting. Did you mean lora.lora_r?" in str(raised.value)
