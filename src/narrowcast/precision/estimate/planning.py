"""The public `plan`: formats of every module, and the memory of a step if a batch is given."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.precision.estimate.dry_run import estimate_step, model_loss
from narrowcast.precision.plan.fusing import Fuse
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import Memory
from narrowcast.precision.plan.plan import Plan, make_plan, with_rows
from narrowcast.precision.plan.policy import AnyPolicy


def plan(
    model: nn.Module,
    policy: AnyPolicy,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, str] | None = None,
    emulate: bool | None = None,
    moments: int = 2,
    gemm_rows: int | None = None,
    skip_slow_fp8: bool = True,
    fuse: Fuse = "auto",
    memory: Memory | None = None,
    execution: Execution | None = None,
    batch: Any = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    gradient_accumulation_steps: int = 1,
) -> Plan:
    """Decide the number format of every module, without changing the model.

    With a `batch`, the plan also predicts the memory of a training step, from a dry run of two
    steps on tensors without memory. Nothing is allocated, and the planned device need not exist.

    Args:
        model: The model, not prepared if `batch` is passed. It may be on the meta device.
        policy: A preset name or policy text, a `Policy`, or a torch dtype.
        hardware: The device to plan for. None: the device of the model, or the best one here.
        overrides: Exceptions by module glob, for example `{"*.head": "bf16"}`.
        emulate: None: emulate where the hardware needs it. True: everywhere. False: never; a
            policy that needs emulation raises.
        moments: Number of moments that the optimizer stores per weight.
        gemm_rows: Number of rows that a linear layer multiplies at once. None: as in `batch`. With
            neither, 8,192 is assumed, until a prepared run learns the numbers from its first
            training batch.
        skip_slow_fp8: Keep a layer in the wider format if fp8 measured no faster for it.
        fuse: "auto" (fuse known pieces in 16 bits on a GPU), "none", or names of pieces. A named
            piece that cannot be fused raises.
        memory: What to recompute or offload to save device memory. None: nothing.
        execution: "eager", "compiled" or "graphed". In eager mode a layer stays wider if fp8 costs
            the host more time than it saves. None: detected from the model.
        batch: A batch of training, of which only shapes are used. It may be on the meta device.
        loss_fn: Returns the loss of the model on the batch. None: the model is called with the
            batch, and its `loss` or the mean of its output is trained.
        optimizer: Builds the optimizer of a model. None: AdamW.
        gradient_accumulation_steps: Number of such batches per step.

    Returns:
        The plan. Print it to see the format of every module and the reason. With a batch,
        `plan.memory.predicted` is the peak memory, and `plan.fits("24GiB")` compares it.

    Raises:
        ConfigError: The policy is invalid, or an exception matches no module.
        UnsupportedError: This hardware cannot run the policy as requested, or the memory cannot
            be predicted.

    Example:
        ```python
        plan = nc.plan(model, "bf16", batch=(x, y), loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1]))
        print(plan.fits("24GiB"), plan.memory.predicted.roles)
        ```
    """
    made = make_plan(
        model,
        policy,
        hardware=hardware,
        overrides=overrides,
        emulate=emulate,
        moments=moments,
        gemm_rows=gemm_rows,
        skip_slow_fp8=skip_slow_fp8,
        fuse=fuse,
        memory=memory,
        execution=execution,
    )
    if batch is None:
        if loss_fn is not None or optimizer is not None:
            raise ConfigError("loss_fn and optimizer of nc.plan() need batch=. Pass a batch too.")
        return made
    step = estimate_step(
        model,
        made,
        batch=batch,
        loss=loss_fn or model_loss,
        optimizer=optimizer,
        micro_batches=gradient_accumulation_steps,
    )
    if step.rows != made.rows:
        made = with_rows(made, model, step.rows)
    return replace(made, memory=replace(made.memory, predicted=step.memory))
