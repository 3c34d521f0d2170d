"""One side of `benchmarks/plugins.py` in a process of its own: a trainer, plain or with a plug-in.

It gets its task as JSON on the command line and prints its measurements as the last line.
"""

import contextlib
import json
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
import narrowcast as nc
from sft_contenders.clock import Clock
from sft_contenders.peers import (
    check_trl_version,
    common_arguments,
    package_version,
    tokenizer_for_tokens,
    with_timing,
)
from sft_contenders.settings import CLIP_NORM, LR, SHAPES

POLICY = "bf16, params=bf16, master=split"
WARM_UP, COUNTED = 8, 4
"""Steps before the timed ones, and steps after them in which host synchronisations are counted."""
OWN = "own loop"
PACKAGES = {
    OWN: ["transformers"],
    "Trainer": ["transformers", "accelerate"],
    "TRL": ["transformers", "trl", "datasets"],
    "Lightning": ["transformers", "lightning"],
    "accelerate": ["transformers", "accelerate"],
}


@dataclass(frozen=True)
class Model:
    """A causal language model without trained weights, and the size of its batches."""

    config: Any
    rows: int
    length: int


def _llama(name: str) -> Model:
    shape = SHAPES[name]
    return Model(shape.config(), shape.rows, shape.length)


def _qwen3(rows: int, length: int, **sizes: Any) -> Model:
    from transformers import Qwen3Config

    return Model(Qwen3Config(tie_word_embeddings=True, **sizes), rows, length)


MODELS = {
    "smollm2-135m": lambda: _llama("smollm2-135m"),
    "llama-1.3b": lambda: _llama("llama-1.3b"),
    "qwen3-0.6b": lambda: _qwen3(
        8, 2048, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, head_dim=128,
        num_key_value_heads=8, intermediate_size=3072, vocab_size=151936,
    ),
    "tiny-llama": lambda: _llama("tiny"),
    "tiny-qwen3": lambda: _qwen3(
        2, 64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=96, vocab_size=320,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to train."""

    trainer: str
    plugin: bool = False
    execution: str = "eager"
    liger: bool = False

    @property
    def name(self) -> str:
        parts = self.trainer + " plug-in" * self.plugin, self.execution, "Liger" * self.liger
        return ", ".join(filter(None, parts))

    def skip_reason(self, device: str) -> str | None:
        """Return why this side cannot run here."""
        needed = PACKAGES[self.trainer] + ["liger-kernel"] * self.liger
        if missing := [package for package in needed if package_version(package) is None]:
            return f"{' and '.join(missing)} not installed"
        if device == "cpu" and (self.liger or self.execution == "graphed"):
            return "needs a GPU"
        try:
            if self.trainer == "TRL":
                check_trl_version()
        except RuntimeError as error:
            return str(error)
        return None


class Meter(Clock):
    """Times steps after a warm-up, then counts host synchronisations in further steps."""

    def __init__(self, device: str, *, steps: int, gated: bool) -> None:
        super().__init__(device, warm_up=WARM_UP, gated=gated)
        self._last_timed, self._ended, self._device = WARM_UP + steps, 0, device
        self._recording = contextlib.ExitStack()
        self._places: Counter[str] = Counter()

    def step_ended(self) -> None:
        self._ended += 1
        if self._ended <= self._last_timed:
            super().step_ended()
        if self._device == "cpu":
            return
        if self._ended == self._last_timed:
            self._recording.enter_context(self._count_waits())
        elif self._ended == self._last_timed + COUNTED:
            self._recording.close()

    def result(self) -> dict[str, Any]:
        values = super().result()
        values["seconds"] = values.pop("ms") / 1e3
        if self._device == "cpu":
            values["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            values["waits_per_step"] = self._places.total() / COUNTED
            values["waits_by_line"] = dict(self._places.most_common(12))
        return values

    @contextlib.contextmanager
    def _count_waits(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if "synchronizing CUDA" in str(each.message)]
        self._places.update(f"{Path(w.filename).name}:{w.lineno}" for w in waits)


def backend(model: Any) -> str:
    """Return the compiler, which on a CPU only shows that a side runs."""
    return "aot_eager" if model.device.type == "cpu" else "inductor"


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


def train_own_loop(side: Side, model: Any, loader: Any, meter: Meter, policy: str) -> None:
    run = nc.prepare(
        model, adamw(model), policy=policy, clip_norm=CLIP_NORM, execution=side.execution
    )
    forward = (
        torch.compile(model, backend=backend(model)) if side.execution == "compiled" else model
    )
    graphed = run.graphed(lambda **batch: model(**batch).loss)
    for batch in loader:
        batch = {k: each.to(model.device, non_blocking=True) for k, each in batch.items()}
        if side.execution == "graphed":
            graphed(**batch)
            loss = graphed.loss
        else:
            with run.autocast():
                loss = forward(**batch).loss
            run.step(loss)
        meter.loss(loss)
        meter.step_ended()


def train_with_accelerate(side: Side, model: Any, loader: Any, meter: Meter, policy: str) -> None:
    import accelerate

    on_gpu = model.device.type != "cpu"
    settings: dict[str, Any] = {"cpu": not on_gpu}
    settings["dynamo_backend"] = backend(model) if side.execution == "compiled" else "no"
    if side.plugin:
        accelerator = nc.Accelerator(policy=policy, **settings)
    else:
        settings["mixed_precision"] = "bf16" if on_gpu else "no"
        accelerator = accelerate.Accelerator(**settings)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        meter.loss(loss)
        meter.step_ended()


def train_with_lightning(side: Side, model: Any, loader: Any, meter: Meter, policy: str) -> None:
    import lightning.pytorch as pl

    from narrowcast.integrations.lightning import NarrowcastPrecision

    on_gpu = model.device.type != "cpu"

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            meter.loss(loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            meter.step_ended()

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

    class Plain(Module):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # Lightning raises for gradient_clip_val with bf16-mixed and a fused optimizer.
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)

    if side.execution == "compiled":
        model.compile(backend=backend(model))
    settings: dict[str, Any] = {"precision": "bf16-mixed" if on_gpu else "32-true"}
    if side.plugin:
        plugin = NarrowcastPrecision(policy, execution=side.execution)
        settings = {"plugins": [plugin], "gradient_clip_val": CLIP_NORM}
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings |= {"accelerator": "gpu" if on_gpu else "cpu", **dict.fromkeys(off, False)}
    trainer = pl.Trainer(max_epochs=1, devices=1, **settings)
    trainer.fit(Module() if side.plugin else Plain(), loader)


def train_with_trainer(
    side: Side, model: Any, batches: dict[str, Tensor], meter: Meter, policy: str, *, size: Model
) -> None:
    import transformers

    device, steps = model.device.type, len(batches["input_ids"]) // size.rows
    with tempfile.TemporaryDirectory() as folder:
        settings = common_arguments(folder, rows=size.rows, steps=steps, device=device)
        settings |= {"bf16": device != "cpu" and not side.plugin, "use_liger_kernel": side.liger}
        settings |= {"torch_compile": side.execution == "compiled"}
        if side.execution == "compiled":
            settings |= {"torch_compile_backend": backend(model)}
        settings |= {"logging_nan_inf_filter": False}  # it waits for each loss
        if side.trainer == "TRL":
            import datasets
            import trl

            columns = {name: tensor.tolist() for name, tensor in batches.items()}
            trainer = with_timing(trl.SFTTrainer, meter)(
                model=model,
                args=trl.SFTConfig(
                    **settings,
                    gradient_checkpointing=False,
                    max_length=size.length,
                    dataset_kwargs={"skip_prepare_dataset": True},
                    dataloader_num_workers=0 if device == "cpu" else 2,  # its rows are lists
                ),
                train_dataset=datasets.Dataset.from_dict(columns),
                processing_class=tokenizer_for_tokens(),
            )
        else:
            arguments = transformers.TrainingArguments(**settings)
            trainer = with_timing(transformers.Trainer, meter)(
                model=model, args=arguments, train_dataset=token_rows(batches)
            )
        if side.plugin:
            nc.attach(trainer, policy=policy)
        trainer.train()


def token_rows(batches: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    pairs = zip(batches["input_ids"], batches["labels"], strict=True)
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs]


def work(task: dict[str, Any]) -> None:
    """Be one side: train, and print the measurements as a line of JSON."""
    from transformers import AutoModelForCausalLM

    side, size, device = Side(**task["side"]), MODELS[task["model"]](), task["device"]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(size.config, dtype=torch.float32).train()
    model.config.use_cache = False
    batches = torch.load(task["batches"])
    meter = Meter(device, steps=task["steps"], gated=task["gated"])
    policy = "fp32" if device == "cpu" else POLICY
    if side.trainer in ("Trainer", "TRL"):
        train_with_trainer(side, model, batches, meter, policy, size=size)
    else:
        if side.liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        loader = DataLoader(
            token_rows(batches),  # type: ignore[arg-type]
            batch_size=size.rows,
            pin_memory=device != "cpu",
        )
        train_loader = {
            OWN: train_own_loop,
            "accelerate": train_with_accelerate,
            "Lightning": train_with_lightning,
        }[side.trainer]
        train_loader(side, model, loader, meter, policy)
    print(json.dumps(meter.result()), flush=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
