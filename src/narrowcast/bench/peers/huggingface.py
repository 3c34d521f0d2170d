"""Hugging Face accelerate, as its documentation writes a loop."""

import importlib
from typing import Any, Literal

from torch import Tensor

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import optimizer_for, trial_of
from narrowcast.training.task import Batch


def build(bench: Workbench, *, precision: Literal["bf16", "fp32"], compiled: bool) -> Trial:
    """Return a step through `Accelerator`: prepare, backward, clip_grad_norm_."""
    library: Any = importlib.import_module("accelerate")
    accelerator = library.Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        cpu=bench.device.type == "cpu",
        dynamo_backend="inductor" if compiled else "no",
    )
    with_loss = bench.model_with_loss()
    model, optimizer = accelerator.prepare(with_loss, optimizer_for(bench, with_loss))

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(batch)
        return loss

    def update() -> None:
        if bench.recipe.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), bench.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return trial_of(
        bench, loss_of=loss_of, backward=accelerator.backward, update=update, compiled=compiled
    )
