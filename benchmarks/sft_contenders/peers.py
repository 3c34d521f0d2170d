"""transformers' Trainer as it comes, and TRL's SFTTrainer with its own fused LM head.

TRL also gets Liger's kernels for norms, rotary positions and MLPs, where Liger is installed.

Rows come packed and in one order; neither packs or shuffles. TRL keeps documents apart only where
it lays a batch out as one row (`bfd`) and the attention knows lengths: without flash-attn that is
FlexAttention. Its other way (`wrapped`) gives rows to torch's fastest attention, across documents.
"""

import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.utils.data import SequentialSampler

from sft_contenders.clock import Clock
from sft_contenders.settings import CLIP_NORM, LR, Shape, adapted, adapters, built_model


@dataclass(frozen=True)
class Trl:
    """How TRL's trainer is set up."""

    attention: str = "sdpa"
    strategy: str = "wrapped"
    compiled: bool = False
    pure: bool = False
    """Whether weights are in bf16 with nothing beside them, which loses small updates."""


TRL = {
    "trl, wrapped": Trl(),
    "trl, flex": Trl(attention="flex_attention", strategy="bfd"),
    "trl, wrapped, compiled": Trl(compiled=True),
    "trl, flex, compiled": Trl(attention="flex_attention", strategy="bfd", compiled=True),
    "trl, sdpa": Trl(strategy="bfd"),
    "trl, wrapped, bf16 weights": Trl(pure=True),
}
TRAINER = "Trainer"
FUSED_HEAD_SINCE = "1.16"
"""TRL replaces the LM head and its loss by a fused kernel of its own since this version."""


def run_trainer(
    shape: Shape, tune: str, rows: dict[str, Tensor], clock: Clock, *, device: str, steps: int
) -> dict[str, Any]:
    """Train with what transformers gives who asks for bf16 and nothing else."""
    from transformers import Trainer, TrainingArguments

    model = built_model(shape, tune, device)
    model = adapted(model) if tune == "lora" else model
    plain = [
        {"input_ids": ids, "labels": labels}
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **common_arguments(folder, rows=shape.rows, steps=steps, device=device)
        )
        trainer = with_timing(Trainer, clock)(model=model, args=arguments, train_dataset=plain)
        trainer.train()
    return {"attention": str(model.config._attn_implementation), "optimizer": _optimizer(trainer)}


def run_trl(
    name: str,
    shape: Shape,
    tune: str,
    rows: dict[str, Tensor],
    clock: Clock,
    *,
    device: str,
    steps: int,
) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    check_trl_version()
    how = TRL[name]
    liger = device != "cpu" and find_spec("liger_kernel") is not None
    model = built_model(shape, tune, device)
    if how.pure:
        model.to(torch.bfloat16)
    model.set_attn_implementation(how.attention)
    columns = {"input_ids": rows["input_ids"].tolist(), "labels": rows["labels"].tolist()}
    if how.strategy == "bfd":
        columns["seq_lengths"] = [_lengths(row) for row in rows["position_ids"]]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **common_arguments(folder, rows=shape.rows, steps=steps, device=device),
            packing=True,
            packing_strategy=how.strategy,
            max_length=shape.length,
            dataset_kwargs={"skip_prepare_dataset": True},
            # It makes tensors of lists, which takes as long as a step of a small model.
            dataloader_num_workers=0 if device == "cpu" else 2,
            gradient_checkpointing=False,  # it is on unless told
            use_liger_kernel=liger,  # norms, rotary positions and MLPs; the LM head is TRL's
            torch_compile=how.compiled,
        )
        trainer = with_timing(SFTTrainer, clock)(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer_for_tokens(),
            peft_config=adapters() if tune == "lora" else None,
        )
        trainer.train()
    return {
        "attention": how.attention,
        "optimizer": _optimizer(trainer),
        "liger": liger,
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_trl_version() -> None:
    """Raise if TRL has no fused LM head of its own."""
    installed = version("trl")
    if Version(installed) < Version(FUSED_HEAD_SINCE):
        raise RuntimeError(
            f"The comparison needs TRL {FUSED_HEAD_SINCE} or newer, which has its own fused LM "
            f"head, got {installed}. Run: pip install 'trl>={FUSED_HEAD_SINCE}'"
        )


def common_arguments(folder: str, *, rows: int, steps: int, device: str) -> dict[str, Any]:
    """Return the arguments that transformers' Trainer and TRL's SFTTrainer share."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "bf16": True,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": device == "cpu",
    }


def with_timing(trainer: type, clock: Clock) -> type:
    """Return a trainer that takes rows in their order and tells when a step has been queued."""
    from transformers import TrainerCallback

    class Told(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step_ended()

    class Timed(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[Told()], **kwargs)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset or self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            clock.loss(loss)
            return loss

    return Timed


def _optimizer(trainer: Any) -> str:
    return str(trainer.args.optim).rpartition(".")[2]


def _lengths(positions: Tensor) -> list[int]:
    starts = (positions == 0).nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([len(positions)])])
    lengths: list[int] = (ends - starts).tolist()
    return lengths


def tokenizer_for_tokens() -> Any:
    """Rows are tokens already; TRL asks for one all the same."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="</s>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
