"""What every peer's training step has in common: micro-batches, a backward pass, an update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.bench.measure.timing import Case, Trial
from narrowcast.bench.model import Workbench
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.task import Batch


def optimizer_for(bench: Workbench, model: nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimizer: torch's own, one fused kernel where there is one."""
    return build_optimizer(bench.recipe.optimizer, model, device=bench.device)


def trial_of(
    bench: Workbench,
    *,
    loss_of: Callable[[Batch], Tensor],
    backward: Callable[[Tensor], object],
    update: Callable[[], object],
    **about: Any,
) -> Trial:
    """Return the step: `loss_of` and `backward` for each micro-batch, then `update`."""
    batches, count = bench.stream(), bench.recipe.accumulate
    latest: list[Tensor] = []

    def step() -> None:
        latest.clear()
        for _ in range(count):
            loss = loss_of(next(batches))
            backward(loss / count if count > 1 else loss)
            latest.append(loss.detach())
        update()

    return Trial(
        cases={"step": Case(open=lambda: step, work=bench.work)},
        about={"parameters": sum(p.numel() for p in bench.model.parameters()), **about},
        loss=lambda: float(torch.stack(latest).mean()) if latest else None,
    )


def clip(bench: Workbench, model: nn.Module) -> None:
    """Clip as torch does, in many kernels at once; nothing where the recipe does not clip."""
    if bench.recipe.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), bench.recipe.clip_norm)


def narrow_weights(model: nn.Module) -> None:
    """Keep the weights in bf16; buffers such as the rotary table stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
