"""Lightning Fabric, as its documentation writes a loop."""

import importlib
import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import optimizer_for, trial_of
from narrowcast.training.task import Batch


def build(bench: Workbench, *, precision: Literal["bf16", "fp32"], compiled: bool) -> Trial:
    """Return a step through `Fabric`: setup, backward, clip_gradients."""
    # Fabric comes alone, or inside the whole of Lightning.
    alone = importlib.util.find_spec("lightning_fabric") is not None
    library: Any = importlib.import_module("lightning_fabric" if alone else "lightning.fabric")
    fabric = library.Fabric(
        accelerator=bench.device.type,
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
    )
    with_loss = bench.model_with_loss()
    optimizer = optimizer_for(bench, with_loss)
    # Fabric compiles again around its own wrapper what is compiled when it gets it.
    model, optimizer = fabric.setup(torch.compile(with_loss) if compiled else with_loss, optimizer)

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(batch)
        return loss

    def update() -> None:
        if bench.recipe.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=bench.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return trial_of(
        bench, loss_of=loss_of, backward=fabric.backward, update=update, compiled=compiled
    )
