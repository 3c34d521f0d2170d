"""torch in eager mode, as it is and under the debuggers people reach for."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import clip, optimizer_for, trial_of
from narrowcast.training.task import Batch


def build(bench: Workbench, *, watch: Literal["nothing", "anomaly", "transformers"]) -> Trial:
    """Return an eager step: bf16 autocast on a GPU, fp32 elsewhere, watched as asked."""
    model = bench.model_with_loss()
    optimizer = optimizer_for(bench, model)
    watchers: list[Any] = []
    if watch == "transformers":
        library: Any = importlib.import_module("transformers.debug_utils")
        watchers.append(library.DebugUnderflowOverflow(model))
    if watch == "anomaly":
        torch.autograd.set_detect_anomaly(True)

    def region() -> AbstractContextManager[Any]:
        if bench.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def loss_of(batch: Batch) -> Tensor:
        with region():
            loss: Tensor = model(batch)
            return loss

    def update() -> None:
        clip(bench, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return trial_of(
        bench, loss_of=loss_of, backward=lambda loss: loss.backward(), update=update, compiled=False
    )
