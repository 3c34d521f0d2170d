"""The public `plan`: formats of every module, and the memory of a step if a batch is given."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.estimate.dry_run import estimate_step, model_loss
from narrowcast.precision.plan.fusing import Fuse
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import Memory, block_names, parse_bytes
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
        memory: What to recompute or offload to save device memory. None: nothing. With
            `Memory(activation_checkpointing="auto", budget="120GiB")` and a batch, as few blocks
            are recomputed as the budget needs.
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
    if batch is None and (loss_fn is not None or optimizer is not None):
        raise ConfigError("loss_fn and optimizer of nc.plan() need batch=. Pass a batch too.")

    def planned(memory: Memory | None) -> Plan:
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

    if memory is None or batch is None or memory.activation_checkpointing != "auto":
        return planned(memory)
    return recompute_fewest(planned, memory, block_names(model, memory.blocks))


MARGIN = 1.05
"""Room that is left in a budget: predictions were off by a few percent."""


def recompute_fewest(
    planned: Callable[[Memory], Plan], memory: Memory, names: Sequence[str]
) -> Plan:
    """Return the plan that recomputes as few of these blocks as a memory budget needs.

    Recomputes the first ones: by their backward pass the later ones have freed what they stored.

    Raises:
        UnsupportedError: A step does not fit even if all blocks are recomputed.
    """
    plans: dict[int, Plan] = {}

    def needed(count: int) -> int:
        if count not in plans:
            some = replace(
                memory,
                activation_checkpointing="blocks" if count else "none",
                blocks=tuple(names[:count]),
                budget=None,
            )
            plans[count] = planned(some)
        predicted = plans[count].memory.predicted
        assert predicted is not None
        return predicted.reserved + predicted.context

    most = len(names)
    least, hardware = needed(0), plans[0].hardware
    whole = hardware.memory_bytes if memory.budget is None else parse_bytes(memory.budget)
    if whole is None:
        raise ConfigError(
            "memory.activation_checkpointing=auto needs a budget, because the memory of "
            f"{hardware.name} is unknown. Write a budget such as 24GiB (in a recipe memory.limit)."
        )
    limit = int(whole / MARGIN)
    low, high = 0, 0 if least <= limit else most
    if needed(high) > limit:
        raise UnsupportedError(
            f"A step needs {_gib(needed(high))} with all {most} blocks recomputed, but the budget "
            f"is {_gib(whole)}, of which 5 % stay free. Use a smaller batch, 8-bit moments "
            "(moments=int8) or memory.offload=[optimizer]."
        )
    while high - low > 1:  # memory is nearly linear in the number of blocks
        share = (needed(low) - limit) / max(needed(low) - needed(high), 1)
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        low, high = (low, middle) if needed(middle) <= limit else (middle, high)
    text = f"{high} of {most} recomputed: a step needs {_gib(needed(high))} of {_gib(whole)}"
    if high:
        text += f", and {_gib(needed(high - 1))} with {high - 1}"
    result = plans[high]
    return replace(result, memory=replace(result.memory, chosen=text))


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
