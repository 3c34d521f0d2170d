"""torch alone: fp32, tf32, autocast with or without GradScaler, and weights in bf16."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import clip, narrow_weights, optimizer_for, trial_of
from narrowcast.training.task import Batch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(
    bench: Workbench,
    *,
    compute: Literal["fp32", "tf32", "bf16", "fp16"],
    compiled: bool,
    weights: Literal["fp32", "bf16"] = "fp32",
) -> Trial:
    """Return a training step as torch's documentation writes it."""
    if weights == "bf16":
        narrow_weights(bench.model)
    if compute == "tf32":
        torch.set_float32_matmul_precision("high")
    model = bench.model_with_loss()
    optimizer = optimizer_for(bench, model)
    forward = loss_function(model, compiled=compiled)
    scaler = torch.amp.GradScaler(bench.device.type, enabled=compute == "fp16")
    autocast = compute in DTYPES and weights == "fp32"

    def region() -> AbstractContextManager[Any]:
        if not autocast:
            return nullcontext()
        return torch.autocast(bench.device.type, dtype=DTYPES[compute])

    def loss_of(batch: Batch) -> Tensor:
        with region():
            return forward(batch)

    def update() -> None:
        scaler.unscale_(optimizer)
        clip(bench, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return trial_of(
        bench,
        loss_of=loss_of,
        backward=lambda loss: scaler.scale(loss).backward(),
        update=update,
        compiled=compiled,
    )


def loss_function(model: nn.Module, *, compiled: bool) -> Callable[[Batch], Tensor]:
    """Return the model with its loss, compiled as a whole if asked to."""
    chosen = torch.compile(model) if compiled else model
    return cast(Callable[[Batch], Tensor], chosen)
